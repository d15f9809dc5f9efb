"""The public reports from which the catalogue was made: each is shown by a scenario, or is outside with its reason."""

from __future__ import annotations

import re

import pytest

from tpbed.scenarios import CATALOGUE
from tpbed.scenarios.field import FIELD, OUTSIDE

REPORTS = {  # issues and pull requests, by repository
    "1CatAI/1Cat-vLLM": (451,),
    "Atlas-Inf/atlas": (46,),
    "Blaizzy/mlx-vlm": (1805, 1917),
    "bo-ke/llm-internal-medicine": (45,),
    "dphnAI/sonar": (157,),
    "flagos-ai/vllm-plugin-FL": (318,),
    "flashinfer-ai/flashinfer": (
        1049,
        1866,
        1916,
        2325,
        2402,
        2604,
        2605,
        2937,
        3095,
        3186,
        3610,
        3615,
        4123,
        4295,
        4811,
        5345,
        5347,
    ),
    "GeeeekExplorer/nano-vllm": (259, 275),
    "ggml-org/llama.cpp": (27819, 27858),
    "huggingface/transformers": (37543,),
    "jundot/omlx": (2844,),
    "lightseekorg/tokenspeed": (297,),
    "local-inference-lab/vllm": (547, 618),
    "mirage-project/mirage": (751, 755),
    "NVIDIA-NeMo/RL": (237,),
    "NVIDIA/Megatron-LM": (52, 2370),
    "NVIDIA/nccl": (582, 1013, 1417, 1777),
    "NVIDIA/TensorRT-LLM": (98, 7128, 7507, 16352, 17380, 17723, 17728, 18155),
    "NVIDIA/TensorRT-Model-Connect": (792, 795),
    "openai/gpt-oss": (270, 285),
    "PaddlePaddle/FastDeploy": (7096,),
    "pegainfer-project/pegainfer": (496, 498),
    "pytorch/pytorch": (1810, 4935, 16762, 27542, 53773, 55010, 75097, 95455, 117617, 132696, 133542, 180611),
    "pytorch/torchtitan": (3336,),
    "radixark/miles": (3194,),
    "ray-project/ray": (26118, 26772, 29562, 31451, 59339),
    "RBLN-SW/vllm-rbln": (792,),
    "redai-studio/Relax": (265,),
    "sgl-project/mini-sglang": (100,),
    "sgl-project/sglang": (
        11275,
        13947,
        14102,
        16215,
        16845,
        18649,
        20287,
        23317,
        27164,
        27221,
        28130,
        28829,
        29151,
        31071,
        31799,
        32182,
        32196,
        33187,
        33289,
        33614,
        33627,
        34742,
        35228,
        35343,
        35354,
        35358,
        35423,
        35462,
        35496,
        35534,
        35580,
        36807,
        37143,
        37215,
        38392,
    ),
    "sgl-project/sglang-omni": (2156,),
    "sgl-project/SpecForge": (781,),
    "tenstorrent/tt-metal": (17195, 25359, 47021),
    "tenstorrent/vllm": (330,),
    "thu-ml/SageAttention": (371,),
    "verl-project/verl": (161, 1398, 1752, 6677, 6967, 7045, 7882),
    "vllm-project/vllm": (
        440,
        2147,
        12230,
        13175,
        15978,
        17929,
        20843,
        20860,
        23814,
        31154,
        31307,
        31474,
        39015,
        39593,
        40376,
        40589,
        40999,
        41189,
        43206,
        43547,
        44185,
        44954,
        45535,
        46994,
        48568,
        51593,
        52147,
        52543,
        52816,
        52883,
        53104,
        56869,
    ),
    "vllm-project/vllm-ascend": (14106, 16628),
    "ztxz16/fastllm": (725,),
}
KNOWN = {f"{repository}#{number}" for repository, numbers in REPORTS.items() for number in numbers}


@pytest.mark.parametrize("report", sorted(KNOWN))
def test_every_report_is_shown_by_a_scenario_or_is_outside(report):
    assert FIELD.get(report) or OUTSIDE.get(report)


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
