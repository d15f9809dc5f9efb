"""The public reports from which the catalogue was made: each is shown by a scenario, or is outside with its reason."""

from __future__ import annotations

import re

import pytest

from tpbed.scenarios import CATALOGUE
from tpbed.scenarios.field import FIELD, OUTSIDE

TROUBLES = (  # 85 kinds of trouble, by the issues and pull requests that tell of each
    "sgl-project/sglang#35496, #35462",
    "sgl-project/sglang#31071",
    "sgl-project/sglang#33614",
    "sgl-project/sglang#27221, #27164, #37143",
    "sgl-project/sglang#35358, #28130",
    "mirage-project/mirage#751, #755",
    "tenstorrent/tt-metal#47021, #17195, NVIDIA/Megatron-LM#52",
    "vllm-project/vllm#13175, verl-project/verl#1398, #7882, NVIDIA-NeMo/RL#237",
    "sgl-project/sglang#34742, #35354, #35423",
    "sgl-project/sglang#35534",
    "vllm-project/vllm#52883, 1CatAI/1Cat-vLLM#451",
    "vllm-project/vllm#31307, #31154",
    "vllm-project/vllm#39015, #43206, verl-project/verl#6677, sgl-project/sglang#37215",
    "sgl-project/SpecForge#781, pytorch/pytorch#75097, #180611",
    "flashinfer-ai/flashinfer#3610, #3615",
    "pytorch/pytorch#27542, #133542, #4935, pytorch/torchtitan#3336",
    "vllm-project/vllm#43547",
    "vllm-project/vllm#40589, #44954, #44185, RBLN-SW/vllm-rbln#792",
    "sgl-project/sglang#31799, vllm-project/vllm#440, #31474, NVIDIA/TensorRT-LLM#98, sgl-project/mini-sglang#100",
    "flashinfer-ai/flashinfer#3186, sgl-project/sglang#23317, #35343",
    "verl-project/verl#161, #1752, dphnAI/sonar#157",
    "vllm-project/vllm#20860, ray-project/ray#26118, #31451",
    "GeeeekExplorer/nano-vllm#275, #259, NVIDIA/TensorRT-LLM#17380",
    "sgl-project/sglang#20287",
    "sgl-project/sglang#35580",
    "NVIDIA/TensorRT-LLM#18155",
    "vllm-project/vllm-ascend#16628",
    "flashinfer-ai/flashinfer#3095, #4295",
    "sgl-project/sglang#33627",
    "NVIDIA/TensorRT-Model-Connect#792, #795",
    "flashinfer-ai/flashinfer#1866, #1916",
    "flashinfer-ai/flashinfer#1049",
    "flashinfer-ai/flashinfer#4123",
    "flashinfer-ai/flashinfer#2325",
    "flashinfer-ai/flashinfer#2605, #2604",
    "sgl-project/sglang#36807",
    "flashinfer-ai/flashinfer#2402, vllm-project/vllm#40376, #23814, #39593",
    "pytorch/pytorch#16762, #117617, #1810",
    "sgl-project/sglang#33187, #28829",
    "pytorch/pytorch#95455, flashinfer-ai/flashinfer#2937",
    "openai/gpt-oss#270, #285, PaddlePaddle/FastDeploy#7096",
    "vllm-project/vllm#17929, flagos-ai/vllm-plugin-FL#318",
    "vllm-project/vllm#46994",
    "sgl-project/sglang#32196, #32182",
    "pegainfer-project/pegainfer#498, #496, vllm-project/vllm#56869",
    "sgl-project/sglang#11275",
    "local-inference-lab/vllm#618",
    "lightseekorg/tokenspeed#297",
    "sgl-project/sglang#33289",
    "NVIDIA/nccl#1417",
    "NVIDIA/nccl#1013, #1777, pytorch/pytorch#132696",
    "ray-project/ray#26772, #59339",
    "verl-project/verl#6967, #7045",
    "NVIDIA/TensorRT-LLM#16352",
    "NVIDIA/TensorRT-LLM#17728, #17723",
    "vllm-project/vllm#40999, sgl-project/sglang#35228",
    "vllm-project/vllm#53104, #52543",
    "vllm-project/vllm#52147, #45535",
    "sgl-project/sglang#29151, #14102",
    "vllm-project/vllm#20843",
    "vllm-project/vllm#15978, tenstorrent/vllm#330, Blaizzy/mlx-vlm#1805, #1917",
    "sgl-project/sglang#16215, #18649",
    "NVIDIA/TensorRT-LLM#7507",
    "bo-ke/llm-internal-medicine#45",
    "flashinfer-ai/flashinfer#5345",
    "radixark/miles#3194",
    "ztxz16/fastllm#725",
    "vllm-project/vllm#12230",
    "local-inference-lab/vllm#547, vllm-project/vllm#52816",
    "NVIDIA/Megatron-LM#2370",
    "flashinfer-ai/flashinfer#4811",
    "flashinfer-ai/flashinfer#5347",
    "tenstorrent/tt-metal#25359",
    "Atlas-Inf/atlas#46",
    "NVIDIA/TensorRT-LLM#7128",
    "vllm-project/vllm#2147, thu-ml/SageAttention#371",
    "jundot/omlx#2844, huggingface/transformers#37543",
    "vllm-project/vllm-ascend#14106, redai-studio/Relax#265",
    "vllm-project/vllm#48568",
    "NVIDIA/nccl#582",
    "ray-project/ray#29562, pytorch/pytorch#53773, #55010",
    "sgl-project/sglang-omni#2156",
    "ggml-org/llama.cpp#27858, #27819",
    "sgl-project/sglang#13947, #16845, #38392",
    "vllm-project/vllm#51593, #41189",
)


def reports_of(trouble: str) -> list[str]:
    repositories, found = [""], []
    for report in trouble.split(", "):
        repository, number = report.split("#")
        repositories.append(repository or repositories[-1])
        found.append(f"{repositories[-1]}#{number}")
    return found


@pytest.mark.parametrize("trouble", TROUBLES)
def test_every_report_of_a_trouble_is_shown_by_a_scenario_or_is_outside_with_its_reason(trouble):
    assert [report for report in reports_of(trouble) if not FIELD.get(report) and not OUTSIDE.get(report)] == []


def test_there_are_85_troubles_and_what_is_outside_is_of_one_of_them():
    reports = [report for trouble in TROUBLES for report in reports_of(trouble)]
    assert (len(TROUBLES), len(reports)) == (85, len(set(reports)))
    assert sorted(set(OUTSIDE) - set(reports)) == []


def test_a_trouble_is_shown_as_one_and_not_only_by_what_goes_right():
    shown = [[CATALOGUE[name] for report in reports_of(one) for name in FIELD.get(report, ())] for one in TROUBLES]
    quiet = [one for one, scenarios in zip(TROUBLES, shown, strict=True) if not any(s.expect for s in scenarios)]
    assert quiet == [TROUBLES[20]]  # two ranks on one GPU, which no scenario can be


def test_no_report_is_both_shown_and_outside():
    assert sorted(set(FIELD) & set(OUTSIDE)) == []


def test_every_source_names_reports_and_nothing_else():
    form = re.compile(r"[\w.-]+/[\w.-]+#\d+")
    assert [s.name for s in CATALOGUE.values() if not all(map(form.fullmatch, s.reports))] == []
    assert [s.name for s in CATALOGUE.values() if len(set(s.reports)) < len(s.reports)] == []


def test_a_report_leads_to_its_scenarios():
    assert {"hang/crop-tail-rank", "hang/mask-instead-of-crop"} <= set(FIELD["sgl-project/sglang#35496"])


def test_every_reason_is_one_sentence_that_says_what_holds_it_instead():
    assert [
        report for report, why in OUTSIDE.items() if not why.endswith(".") or "(" not in why and "tests/" not in why
    ] == []
