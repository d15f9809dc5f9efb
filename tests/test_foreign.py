"""Any selector: it is given what it asks for, its answer is checked, and it travels to ranks that cannot import it."""

import json
import subprocess
import sys
from dataclasses import replace
from math import inf, nan

import cloudpickle
import pytest
import torch

from tpbed.harness import cli
from tpbed.harness.choice import Changes, choose_plans
from tpbed.harness.engine_head import EngineHead, ShardIndices
from tpbed.harness.faults import Nudge, Spin
from tpbed.harness.foreign import GIVEN, Chosen, ForeignError, ForeignSelector
from tpbed.harness.functions import FunctionError
from tpbed.harness.inputs import build_head, hidden_states
from tpbed.harness.kernels import KERNELS
from tpbed.harness.mutants import SELECTORS
from tpbed.harness.plan import make_plan
from tpbed.harness.runner import run_scenario
from tpbed.harness.scenario import Overwrite, Scenario
from tpbed.harness.selectors import SelectorError, find_selector
from tpbed.scenarios import CATALOGUE
from tpbed.selector.shard import VocabShard
from tpbed.tp.simulated import SimulatedWorld

PLAIN = Scenario(name="foreign/plain", claim="It passes.", kind=0, world_size=2, org_vocab_size=200, steps=2)
MINE = """
import torch
import torch.distributed as dist

def gather(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return torch.cat(parts, dim=-1)

def right(hidden_states, lm_head, *, k, group):
    logits = lm_head.quant_method.apply(lm_head, hidden_states)[:, : lm_head.shard_indices.num_org_elements]
    values, ids = logits.float().topk(k)
    ids = ids + lm_head.shard_indices.org_vocab_start_index
    values, ids = gather(values, group), gather(ids, group)
    best, slots = values.topk(k)
    return ids.gather(-1, slots), best

def no_offset(hidden_states, lm_head, *, k, group, all_gather):
    logits = lm_head.quant_method.apply(lm_head, hidden_states)[:, : lm_head.shard_indices.num_org_elements]
    values, ids = logits.float().topk(k)
    values, ids = all_gather(values), all_gather(ids)
    best, slots = values.topk(k)
    return ids.gather(-1, slots), best

constant = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The name of a module with selectors, in the working folder."""
    (tmp_path / "my_selectors.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_selectors"
    sys.modules.pop("my_selectors", None)


def judged(select, scenario=PLAIN, monkeypatch=None):
    """The verdict on a function, run as the selector of a scenario."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SELECTORS, "mine", ForeignSelector.of("mine", select))
        with SimulatedWorld(scenario.world_size) as world:
            return run_scenario(world, replace(scenario, selector="mine"), seed=1)


def right(hidden, lm_head, k, all_gather, topk):
    """Right for distinct logits."""
    indices = lm_head.shard_indices
    logits = lm_head.quant_method.apply(lm_head, hidden)
    logits[:, indices.num_org_elements :] = -inf
    values, ids = topk(logits, k)
    values, ids = all_gather(values.float()), all_gather(ids + indices.org_vocab_start_index)
    best, slots = values.topk(k)
    return ids.gather(-1, slots), best


# What it is given.


def test_a_function_is_given_what_its_parameters_name_and_nothing_else():
    seen = {}

    def select(hidden, hidden_states, lm_head, head, k, group, all_gather, topk, note, scale=2.0):
        seen.update(locals())
        return right(hidden, lm_head, k, all_gather, topk)

    assert judged(select).status == "PASS"
    assert set(GIVEN) <= set(seen) and seen["scale"] == 2.0
    assert (seen["hidden"] is seen["hidden_states"], seen["lm_head"] is seen["head"], seen["k"]) == (True, True, 16)


@pytest.mark.parametrize("select", [lambda hidden, lm_head, temperature: None, lambda hidden, /, lm_head: None])
def test_a_parameter_that_nobody_gives_is_refused_with_those_that_there_are(select):
    with pytest.raises(ForeignError, match=f"it can ask for {', '.join(GIVEN)}"):
        ForeignSelector.of("mine", select)


def test_a_head_has_the_attributes_of_engines_and_those_of_its_format():
    plan = make_plan(replace(PLAIN, head="fp8", logits="gaussian", added_vocab_size=10), seed=1)
    head = build_head(plan, 1)
    engine = EngineHead(head)
    assert (engine.org_vocab_size, engine.num_embeddings, engine.num_embeddings_per_partition) == (200, 210, 160)
    assert (engine.num_embeddings_padded, engine.tp_size, engine.tp_rank, engine.bias) == (320, 2, 1, None)
    assert engine.weight is head.weight and engine.weight_scale is head.weight_scale
    hidden = hidden_states(plan, 0)
    assert engine.quant_method.apply(engine, hidden).equal(head.quant_method.apply(head, hidden))
    assert not hasattr(engine, "no_such_thing")


def test_a_dense_head_has_the_method_that_engines_leave_there():
    head = build_head(make_plan(PLAIN, seed=1), 0)
    engine, hidden = EngineHead(head), torch.ones(2, 64, dtype=torch.bfloat16)
    assert type(engine.quant_method).__name__ == "UnquantizedEmbeddingMethod"
    assert engine.quant_method.apply(engine, hidden).equal(hidden @ head.weight.T)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("org", [130, 1000, 1024])
def test_shard_indices_cover_the_vocabulary_as_the_shards_do(rank, org):
    shard = VocabShard.even(rank, 4, org, 70, 64)
    indices = ShardIndices.of(shard)
    rows = torch.full((indices.num_elements_padded,), -1)
    rows[: indices.num_org_elements] = torch.arange(indices.org_vocab_start_index, indices.org_vocab_end_index)
    added = torch.arange(indices.added_vocab_start_index, indices.added_vocab_end_index)
    rows[indices.num_org_elements_padded :][: indices.num_added_elements] = added
    assert rows.tolist() == shard.token_ids().tolist()
    assert indices.num_org_vocab_padding == shard.num_org_padded - shard.num_org
    assert indices.padded_org_vocab_start_index == rank * shard.num_org_padded


def test_all_gather_lays_parts_side_by_side_along_any_dimension():
    def select(hidden, lm_head, k, all_gather, topk):
        mine = torch.full((2, 3), lm_head.tp_rank)
        assert all_gather(mine).tolist() == [[0, 0, 0, 1, 1, 1]] * 2
        assert all_gather(mine, dim=0).tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
        return right(hidden, lm_head, k, all_gather, topk)

    assert judged(select).status == "PASS"


def test_a_strided_tensor_is_gathered_as_it_is_and_found():
    def select(hidden, lm_head, k, all_gather, topk):
        all_gather(torch.zeros(4, 8)[:, :3])
        return right(hidden, lm_head, k, all_gather, topk)

    assert [finding.kind for finding in judged(select).findings] == ["mismatch"]


# What it returns.


def test_a_pair_in_either_order_an_object_and_ids_alone_are_answers():
    def shaped(shape):
        def select(hidden, lm_head, k, all_gather, topk):
            return shape(*right(hidden, lm_head, k, all_gather, topk))

        return judged(select).status

    assert shaped(lambda ids, values: (ids.int(), values.double())) == "PASS"
    assert shaped(lambda ids, values: [values, ids]) == "PASS"
    assert shaped(lambda ids, values: Chosen(ids=ids, values=values)) == "PASS"
    assert shaped(lambda ids, values: ids) == "PASS"
    assert shaped(lambda ids, values: (ids, None)) == "PASS"


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda ids, values: None, "returned nothing"),
        (lambda ids, values: (ids.float(), values), r"returned torch.float32 \(4, 16\), torch.float32 \(4, 16\)"),
        (lambda ids, values: (ids, ids), r"returned torch.int64 \(4, 16\), torch.int64 \(4, 16\)"),
        (lambda ids, values: (ids, values, values), "returned torch.int64"),
        (lambda ids, values: ids.tolist(), "returned a list"),
        (lambda ids, values: {"ids": ids}, "returned a dict"),
        (lambda ids, values: values, "returned torch.float32"),
        (lambda ids, values: ids[0], r"returned ids \(16,\)"),
        (lambda ids, values: (ids, values[:, :3]), r"returned ids \(4, 16\) and values \(4, 3\)"),
    ],
)
def test_what_is_no_answer_is_told_with_what_is_one(returned, told):
    def select(hidden, lm_head, k, all_gather, topk):
        return returned(*right(hidden, lm_head, k, all_gather, topk))

    (finding,) = judged(select).findings
    assert finding.kind == "crash_all"
    with pytest.raises(ForeignError, match=f"mine {told}.*: return ids"):
        raise ForeignError(finding.causes[0].text.partition("ForeignError after ")[2].partition(": ")[2])


def test_too_few_candidates_are_wrong_ids():
    def select(hidden, lm_head, k, all_gather, topk):
        return right(hidden, lm_head, k, all_gather, topk)[0][:, :3]

    (finding,) = judged(select).findings
    assert finding.kind == "wrong_ids" and "ids (4, 3), but 4 rows of k=16" in finding.text


# Ids without values.


def ids_alone(change, scenario=PLAIN):
    def select(hidden, lm_head, k, all_gather, topk):
        return change(right(hidden, lm_head, k, all_gather, topk)[0], lm_head)

    return [finding.kind for finding in judged(select, scenario).findings]


GAUSSIAN = replace(PLAIN, logits="gaussian", ties="equivalent")


@pytest.mark.parametrize("scenario", [PLAIN, GAUSSIAN, replace(GAUSSIAN, head="fp8"), replace(PLAIN, head="fp32")])
def test_right_ids_alone_pass_also_where_roundings_leave_their_order_open(scenario):
    assert ids_alone(lambda ids, head: ids, scenario) == []


@pytest.mark.parametrize("scenario", [PLAIN, GAUSSIAN])
@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (lambda ids, head: ids.flip(-1), ["order"]),
        (lambda ids, head: (ids + 1) % 200, ["wrong_ids"]),
        (lambda ids, head: ids + 1000, ["wrong_ids"]),
        (lambda ids, head: ids[:, :1].expand(-1, 16), ["wrong_ids"]),
        (lambda ids, head: torch.where(ids == ids[0, 3], -1, ids), ["wrong_ids"]),
        (lambda ids, head: ids if head.tp_rank else ids.flip(-1), ["diverge"]),
    ],
)
def test_wrong_ids_alone_are_found(change, kinds, scenario):
    assert [kind for kind in ids_alone(change, scenario) if kind in kinds] == kinds


def test_equal_values_need_rising_ids_without_values_too():
    tied = replace(PLAIN, logits="equal")
    first = torch.arange(16).expand(4, -1)
    assert ids_alone(lambda ids, head: first, tied) == []
    assert ids_alone(lambda ids, head: first.flip(-1), tied) == ["order"]
    assert ids_alone(lambda ids, head: first + 1, tied) == ["order"]
    assert ids_alone(lambda ids, head: first + 1, replace(tied, ties="equivalent")) == []


# What a plan does to logits.


PLANTED = replace(
    PLAIN, overwrites=(Overwrite(row=0, token_id=150, value=500.0), Overwrite(row=1, token_id=3, value=nan))
)


def test_planted_logits_reach_a_selector_that_takes_no_top_k():
    def select(hidden, lm_head, k, all_gather):
        ids, values = right(hidden, lm_head, k, all_gather, torch.topk)
        invalid = values.isnan().any(-1, keepdim=True)
        return ids.masked_fill(invalid, -1), values.masked_fill(invalid, nan)

    assert judged(select, PLANTED).status == "PASS"


def test_faults_of_the_top_k_strike_a_selector_that_takes_none_once_in_a_step():
    def select(hidden, lm_head, k, all_gather, topk):
        return right(hidden, lm_head, k, all_gather, topk)

    nudged = replace(PLAIN, faults=(Nudge(rank=1, step=0, row=0, column=3, value=900.0),))
    verdict = judged(select, nudged)
    assert [finding.kind for finding in verdict.findings] == ["wrong_ids"]
    assert [mark.name for mark in verdict.record.ledgers[1].marks].count("fault") == 1
    spun = judged(select, replace(PLAIN, faults=(Spin(rank=1, step=1),)))
    assert [(finding.kind, finding.ranks) for finding in spun.findings] == [("stall", (1,))]


# Names, and the way to the ranks.


def test_a_name_is_one_of_ours_or_imported():
    assert find_selector("no-offset") is SELECTORS["no-offset"]
    with pytest.raises(SelectorError, match="near: no-offset"):
        find_selector("no-ofset")


@pytest.mark.parametrize(
    ("name", "told"),
    [("gone", "ModuleNotFoundError"), ("my_selectors:gone", "AttributeError"), ("my_selectors:constant", "a int")],
)
def test_a_name_behind_which_there_is_nothing_is_told(mine, name, told):
    with pytest.raises(FunctionError if ":" in name else SelectorError):
        find_selector(name)
    if ":" in name:
        with pytest.raises(FunctionError, match=told):
            find_selector(name)


def test_it_travels_to_a_python_that_cannot_import_it(mine):
    pickled = cloudpickle.dumps(find_selector(f"{mine}:right"))
    code = "import sys, pickle; print(pickle.load(sys.stdin.buffer).function.__name__)"
    told = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True, cwd="/")
    assert told.stdout.strip() == b"right"


@pytest.fixture
def tpbed(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["run", "--world", "sim", *(str(argument) for argument in arguments)])
        return end.value.code, *capsys.readouterr()

    return run


def test_run_takes_a_selector_and_the_report_repeats_it(mine, tpbed):
    assert tpbed("healthy/tp4-padded-tail", "--selector", f"{mine}:right")[0] == 0
    status, out, _ = tpbed("geometry/no-offset", "--selector", f"{mine}:no_offset", "--json")
    told = json.loads(out.splitlines()[0])
    assert (status, told["findings"][0]["kind"]) == (1, "wrong_ids")
    assert told["again"] == "tpbed run geometry/no-offset --seed 0 --selector my_selectors:no_offset --world sim"


@pytest.mark.parametrize("name", ["my_selectors:gone", "no-ofset", "my_selectors:gather"])
def test_a_selector_that_cannot_serve_is_a_usage_error_in_one_line(mine, tpbed, name):
    status, out, error = tpbed("healthy/tp4-padded-tail", "--selector", name)
    assert (status, out) == (2, "") and error.splitlines()[-1].startswith("tpbed: ")


def test_a_selector_alone_is_run_in_all_that_a_right_one_passes():
    plans = choose_plans([], CATALOGUE, seed=0, changes=Changes(selector="packed"))
    assert len(plans) > 40 and {plan.scenario.selector for plan in plans} == {"packed"}
    assert not any(plan.scenario.faults or plan.scenario.expect or plan.scenario.topk in KERNELS for plan in plans)
    failed = []
    for plan in plans:
        if plan.scenario.logits != "smollm2" and "sim" in plan.scenario.worlds:
            with SimulatedWorld(plan.scenario.world_size) as world:
                scenario = replace(plan.scenario, topk="canonical")
                failed += [plan.scenario.name] * (run_scenario(world, scenario, seed=0).status != "PASS")
    assert failed == []
