"""tpbed bench gathers: real ranks over gloo, the same candidates by every merge, and ratios of one run."""

import json
from types import SimpleNamespace

import pytest
import torch

from tpbed.harness import cli, gathers
from tpbed.harness.gathers import GatherPlan, GathersError, measure_gathers

SMALL = GatherPlan(backend="gloo", world_size=2, rows=(3,), tokens=1024, rounds=3)


@pytest.fixture(scope="module")
def points():
    return measure_gathers(SMALL)


def test_every_merge_is_timed_by_parts_with_what_a_rank_contributes(points):
    contributed = {point.merge: point.bytes_per_rank for point in points if point.part == "gather"}
    assert contributed == {"two_gather": 3 * 16 * 12, "packed": 3 * 16 * 8, "full_gather": 3 * 512 * 2}
    assert [(point.part, point.mode) for point in points] == [("gather", "eager")] * 3 + [("merge", "eager")] * 3


def test_ratios_are_to_the_packed_gather_of_the_same_round(points):
    for point in points:
        assert 0 < point.least_us <= point.median_us <= point.greatest_us
        assert point.ratio_least <= point.ratio <= point.ratio_greatest
        assert point.merge != "packed" or point.ratio_least == point.ratio_greatest == 1.0


def test_merges_that_do_not_agree_are_not_timed():
    same, other = SimpleNamespace(ids=torch.tensor([[1, 2]])), SimpleNamespace(ids=torch.tensor([[2, 1]]))
    with pytest.raises(GathersError, match="full_gather chose other candidates than packed"):
        gathers._require_agreement({"packed": same, "two_gather": same, "full_gather": other})


def test_a_rank_that_fails_is_an_error_that_names_it():
    with pytest.raises(GathersError, match=r"rank \d failed: .*ShardError"):
        measure_gathers(GatherPlan(backend="gloo", world_size=3, rows=(1,), tokens=64, rounds=1))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--world", "nccl", "--tp", "2,99"), "NCCL needs a GPU per rank"),
        (("--world", "tpu"), "none of nccl, gloo"),
        (("--world", "gloo", "--tp", "1,2"), "1 rank gathers nothing"),
        (("--world", "gloo", "--rows", "8,x"), "--rows '8,x' is no list of numbers"),
    ],
)
def test_what_this_machine_has_not_is_refused_before_anything_is_started(arguments, says, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "gathers", *arguments])
    assert end.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_prints_every_figure(as_json, points, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(gathers, "measure_gathers", lambda plan, _progress: asked.append(plan) or points)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "gathers", "--world", "gloo", *["--json"] * as_json])
    out = capsys.readouterr().out
    assert end.value.code == 0 and [plan.world_size for plan in asked] == [2, 4, 8]
    assert asked[0].rows == (8, 32, 128)
    if as_json:
        assert [json.loads(line)["merge"] for line in out.splitlines()] == [point.merge for point in points] * 3
    else:
        assert "gloo, TP=2, 3 rows, eager merge" in out and "(1.00 to 1.00)" in out
