"""`tpbed bench gpu`: what is compared computes the same thing, and figures are told beside what they are against."""

import json

import pytest
import torch
from triton_place import COMPILED, PLACE, quiet_interpreter

from tpbed.harness import bench_gpu, cli
from tpbed.harness.bench_gpu import FLOOR, PADDING, Asked, Case, Contender, Figure, Geometry, GpuReport, cases, judge
from tpbed.selector.topk import canonical_topk
from tpbed.selector.triton_topk import has_triton

TINY = Geometry(vocab=2048, hidden=64, slots=7, rank=16)


def values_of(answer):
    """What was chosen, as float32 values best first, whatever form it came in."""
    if isinstance(answer, torch.Tensor):
        if answer.dtype is not torch.int64:
            return answer.float()
        return bench_gpu.best_candidates(answer, answer.shape[1])[0]
    return answer[0].float()


@pytest.mark.parametrize(("part", "tps"), [("head", (1, 2)), ("topk", (1, 2)), ("merge", (2,)), ("sweep", (8,))])
@quiet_interpreter
def test_what_is_compared_finds_the_same_values(monkeypatch, part, tps):
    if not COMPILED:  # flashinfer's kernel has no other device
        monkeypatch.setattr(bench_gpu, "has_flashinfer", lambda: False)
    for case in cases(Asked(parts=(part,), tps=tps, rows=(7,), geometry=TINY), PLACE):
        found = {name: values_of(contender.call(0)).cpu() for name, contender in case.contenders.items()}
        if part == "head":
            found["the reference"] = canonical_topk(found.pop("head")[:, : case.columns - PADDING], TINY.k)[0]
        for name, values in found.items():
            assert torch.equal(values, next(iter(found.values()))), name


@pytest.mark.skipif(not COMPILED, reason="needs a CUDA device: FP8 products")
def test_fp8_products_of_every_kind_are_close_to_the_bf16_product():
    [case] = cases(Asked(parts=("fp8",), tps=(1,), rows=(7,), geometry=TINY), PLACE)
    wanted = case.contenders["bf16 product"].call(0).float()
    products = {name: one.call(0) for name, one in case.contenders.items() if "product" in name and "top-k" not in name}
    assert len(products) == 6
    for name, found in products.items():
        assert (found.float() - wanted).abs().max() < 0.12 * wanted.abs().max(), name


@pytest.mark.skipif(not has_triton(), reason="triton is not installed: pip install triton, for its interpreter")
@quiet_interpreter
def test_the_nvfp4_product_is_the_same_however_it_is_tiled_and_its_top_k_is_of_it():
    [case] = cases(Asked(parts=("tilings",), tps=(2,), rows=(7,), geometry=TINY), PLACE)
    [whole] = cases(Asked(parts=("nvfp4",), tps=(2,), rows=(7,), geometry=TINY), PLACE)
    wanted = whole.contenders["NVFP4 product"].call(0)
    assert wanted.shape == (7, 1024) and len(case.contenders) > 5
    for name, contender in case.contenders.items():
        # sums in another order may round to the next bfloat16
        assert torch.allclose(contender.call(0).float(), wanted.float(), rtol=2.0**-7, atol=2.0**-6), name
    best = whole.contenders["NVFP4 product, Triton top-k with the mask"].call(0)
    assert torch.equal(values_of(best).cpu(), canonical_topk(wanted[:, : 1024 - PADDING], TINY.k)[0].float().cpu())


def test_cases_are_those_asked_for_and_a_merge_needs_two_ranks():
    asked = Asked(parts=("topk", "merge", "draft"), tps=(1, 2), rows=(7, 14), geometry=TINY)
    found = [(case.part, case.tp, case.rows, case.columns) for case in cases(asked, torch.device("cpu"))]
    assert found == [
        ("topk", 1, 7, 2048), ("topk", 1, 14, 2048), ("topk", 2, 7, 1024), ("topk", 2, 14, 1024),
        ("merge", 2, 7, 32), ("merge", 2, 14, 32), ("draft", 1, 7, 2048), ("draft", 1, 14, 2048),
    ]  # fmt: skip


def test_every_contender_is_compared_with_one_of_its_own_case_or_with_its_bytes():
    parts = ("head", "topk", "nvfp4", "merge", "draft", "sweep", "tilings")
    asked = Asked(parts=parts, tps=(2,), rows=(7,), geometry=TINY)
    for case in cases(asked, torch.device("cpu")):
        for contender in case.contenders.values():
            assert contender.against in ("", FLOOR, *case.contenders)
            assert (contender.moved > 0) == (contender.against == FLOOR)


def test_a_ratio_is_to_the_contender_named_or_to_the_bytes():
    contenders = {
        "a": Contender(call=print, against=FLOOR, moved=4_000_000),
        "b": Contender(call=print, against="a"),
        "c": Contender(call=print),
    }
    case = Case(part="head", tp=2, rows=7, columns=9, contenders=contenders)
    figures = judge(case, "graph", {"a": 8.0, "b": 12.0, "c": 1.0}, bandwidth=1e12)
    assert [(figure.name, figure.us, figure.ratio) for figure in figures] == [
        ("a", 8.0, 2.0), ("b", 12.0, 1.5), ("c", 1.0, None),
    ]  # fmt: skip


@pytest.fixture
def tpbed(capsys, tmp_path, monkeypatch):
    """Runs a command line in an empty folder, with a measurement that takes no time; what was asked is kept."""
    monkeypatch.chdir(tmp_path)
    asked = []

    def measured(request, on_progress):
        asked.append(request)
        figure = {"part": "head", "tp": 8, "rows": 7, "columns": 9}
        figures = [
            Figure(name="head", mode="graph", us=80.0, against=FLOOR, ratio=1.05, **figure),
            Figure(name="head, top-k", mode="graph", us=88.0, against="head", ratio=1.1, **figure),
            Figure(name="head, top-k", mode="eager", us=1234.5, against="head", ratio=None, **figure),
        ]
        return GpuReport(
            card="a card",
            versions={"torch": "9"},
            command="tpbed bench gpu",
            copy_tb_per_s=4.3,
            figures=tuple(figures),
            notes=("flashinfer is not installed.",),
        )

    monkeypatch.setattr(bench_gpu, "bench_gpu", measured)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", "gpu", *arguments])
        return end.value.code, *capsys.readouterr(), asked

    return run


def test_figures_of_both_modes_stand_side_by_side_with_card_versions_and_command(tpbed):
    status, out, _, _ = tpbed()
    assert status == 0
    [line] = [line for line in out.splitlines() if "head, top-k" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        "head, top-k", "head", "8", "7", "88.0", "1.10", "1,234.5", "",
    ]  # fmt: skip
    for told in ("a card; torch 9", "4.30 TB/s", "flashinfer is not installed.", "again     tpbed bench gpu"):
        assert told in out


def test_json_goes_to_stdout_and_to_a_file(tpbed, tmp_path):
    status, out, _, _ = tpbed("--json", "--out", "found.json")
    assert status == 0
    assert json.loads(out) == json.loads((tmp_path / "found.json").read_text())
    assert json.loads(out)["figures"][1]["ratio"] == 1.1


def test_what_is_measured_can_be_chosen(tpbed):
    *_, asked = tpbed("--part", "head,sweep", "--tp", "8", "--rows", "7,56", "--mode", "graph", "--rounds", "3")
    assert (asked[0].parts, asked[0].tps, asked[0].rows) == (("head", "sweep"), (8,), (7, 56))
    assert (asked[0].modes, asked[0].rounds) == (("graph",), 3)
    assert not {"sweep", "tilings"} & set(Asked().parts)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--part", "heads"), "none of head"), (("--tp", "8,x"), "list of numbers"), (("--mode", "jit"), "graph, eager")],
)
def test_what_there_is_not_is_refused(tpbed, arguments, says):
    status, _, err, _ = tpbed(*arguments)
    assert status == 2 and says in err


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(bench_gpu.NoGpuError, match="tpbed doctor"):
        bench_gpu.bench_gpu(Asked())


def test_what_is_not_installed_is_said(monkeypatch):
    for name in ("has_triton", "has_flashinfer"):
        monkeypatch.setattr(bench_gpu, name, lambda: False)
    assert [note.split()[0] for note in bench_gpu.missing()] == ["triton", "flashinfer"]
    assert bench_gpu.versions()["torch"] == bench_gpu.metadata.version("torch")
