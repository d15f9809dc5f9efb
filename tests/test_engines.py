"""The shapes of engines: what each gets wrong, that its scenario shows it, and what changes with TP."""

from dataclasses import replace

import pytest

from tpbed.harness.checks import answers_by_step
from tpbed.harness.runner import run_scenario
from tpbed.harness.scenario import Scenario
from tpbed.scenarios.adapters import SCENARIOS, SGLANG, VLLM, VLLM_DRAFT
from tpbed.tp.simulated import SimulatedWorld

PLAIN = Scenario(name="engines/plain", claim="It passes.", kind=0, org_vocab_size=1000, steps=1)


def verdict_of(scenario, **fields):
    with SimulatedWorld(fields.get("world_size", scenario.world_size)) as world:
        return run_scenario(world, replace(scenario, **fields), seed=3)


def ids_of(selector, tp, **fields):
    """What rank 0 answers, the same weights at every TP."""
    record = verdict_of(PLAIN, selector=selector, world_size=tp, **fields).record
    return answers_by_step(record)[0][0].ids.tolist()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_a_scenario_shows_just_what_it_claims(scenario):
    verdict = verdict_of(scenario)
    assert verdict.status == "PASS", (verdict.unexpected, verdict.not_found, verdict.doubts)


@pytest.mark.parametrize("selector", [SGLANG, VLLM])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_distinct_logits_are_right_at_every_tp(selector, tp):
    assert verdict_of(PLAIN, selector=selector, world_size=tp).status == "PASS"


def test_ties_of_sglang_depend_on_tp_and_those_of_vllm_do_not():
    by_tp = {name: [ids_of(name, tp, logits="tied", k=14) for tp in (1, 2, 4, 8)] for name in (SGLANG, VLLM)}
    assert any(ids != by_tp[SGLANG][0] for ids in by_tp[SGLANG])
    assert all(ids == by_tp[VLLM][0] for ids in by_tp[VLLM])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_more_candidates_than_tokens_are_silent_garbage_of_a_masked_head_and_an_error_of_a_cropped_one(tp):
    quantized = verdict_of(PLAIN, selector=SGLANG, world_size=tp, org_vocab_size=10, head="fp8", logits="gaussian")
    assert [finding.kind for finding in quantized.findings] == ["wrong_ids"]
    dense = verdict_of(PLAIN, selector=SGLANG, world_size=tp, org_vocab_size=10)
    assert dense.findings and {finding.kind for finding in dense.findings} <= {"crash_one", "crash_all"}
    assert {rank for finding in dense.findings for rank in finding.ranks} == set(range(tp))  # nobody waits


@pytest.mark.parametrize("added", [0, 70])
def test_the_draft_token_is_right_unless_added_tokens_move_the_padding(added):
    kinds = [
        finding.kind
        for finding in verdict_of(PLAIN, selector=VLLM_DRAFT, k=1, logits="negative", added_vocab_size=added).findings
    ]
    assert kinds == (["wrong_ids"] if added else [])


def test_a_draft_token_is_one():
    (finding,) = verdict_of(PLAIN, selector=VLLM_DRAFT).findings
    assert finding.kind == "crash_all" and "k=16 were asked for" in finding.causes[0].text
