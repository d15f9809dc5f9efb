"""Strategies: hypothesis draws of everything that a plan can say; each draw is valid, and shrinks to the plainest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tpbed.harness.fault_oracle import calls_of
from tpbed.harness.faults import (
    Absent,
    ArrivalFault,
    CollectiveFault,
    Delay,
    Extra,
    Fault,
    Late,
    Linger,
    Nudge,
    PackedOnly,
    Pause,
    Recast,
    Rows,
    Skip,
    Spin,
    StaleMethod,
    StepFault,
    Strided,
    WrongScale,
)
from tpbed.harness.inputs import build_shard
from tpbed.harness.plan import Plan, make_plan
from tpbed.harness.scenario import EVERYWHERE, HeadFormat, Overwrite, Scenario, Ties, WorldName
from tpbed.selector.fp8 import BLOCK
from tpbed.selector.quantized import FORMATS

Fields = dict[str, Any]  # of a Scenario
NAME = "fuzz/case"
WORLD_SIZES = tuple(range(1, 9))
RIGHT = ("tpbed", "packed", "agreed", "full-gather")  # selectors that are right by contract
DENSE: tuple[HeadFormat, ...] = ("fp32", "bf16", "fp16")
PLANTED = ("distinct", "negative", "tied", "equal")
HIDDEN = 16  # units, the fewest that every format can pack; and so the most rows of planted logits
MOST_TOKENS = 300
ODD_SIZES = (1, 2, 3, 5, 17, 31, 63, 64, 65, 127, 128, 129, 255, 257)  # vocabularies about the widths of kernels
NEAR_TIES = (1.0, 1.0078125, 1.015625, -1.0, -1.0078125, 0.0, -0.0, 2.0)  # neighbours in bfloat16, exact in all dtypes
NOT_FINITE = (nan, inf, -inf)
TIES_OF_TOPK: dict[str, Ties] = {
    "canonical": "canonical",
    "default": "canonical",  # on the CPU
    "contract": "equivalent",
    "torch": "equivalent",
}


@st.composite
def geometries(draw: DrawFn, world_sizes: Sequence[int] = WORLD_SIZES) -> Fields:
    """How a vocabulary is shared: world_size, org_vocab_size, added_vocab_size, pad_to, or widths of uneven shards.

    Tiny and odd vocabularies are the usual ones; ranks that hold only padding, or nothing, are common.
    """
    world_size = draw(st.sampled_from(world_sizes))
    if draw(st.integers(0, 3)) == 3:
        return draw(_uneven(world_size))
    tokens = draw(_vocabularies())
    added = draw(st.one_of(st.just(0), st.integers(1, 9)))
    return {
        "world_size": world_size,
        "org_vocab_size": tokens,
        "added_vocab_size": added,
        "pad_to": world_size * draw(st.one_of(st.integers(1, 16), st.sampled_from([64, BLOCK]))),
        "widths": None,
    }


def _vocabularies() -> SearchStrategy[int]:
    return st.one_of(st.integers(1, 12), st.sampled_from(ODD_SIZES), st.integers(1, MOST_TOKENS))


@st.composite
def _uneven(draw: DrawFn, world_size: int) -> Fields:
    widths = draw(st.lists(st.integers(0, 20), min_size=world_size, max_size=world_size))
    if not any(widths):
        widths[draw(st.integers(0, world_size - 1))] = 1
    tokens = sum(widths)
    return {"world_size": world_size, "org_vocab_size": tokens, "added_vocab_size": 0, "widths": tuple(widths)}


@st.composite
def heads(draw: DrawFn, geometry: Fields) -> Fields:
    """A head format that this geometry can have, the logits that it computes, and what its padding holds."""
    packed = [name for name in FORMATS if name != "fp8-block" or _holds_blocks(geometry)]
    head = draw(st.sampled_from([*DENSE, *packed]))
    logits = draw(st.sampled_from([*PLANTED, "gaussian"]))
    pad_fill = draw(st.sampled_from([0.0, 64.0, inf, nan])) if head in DENSE else 0.0
    return {"head": head, "logits": logits, "pad_fill": pad_fill, "hidden_size": HIDDEN}


def _holds_blocks(geometry: Fields) -> bool:
    """Whether no block of rows that share a scale is cut between ranks."""
    scenario = Scenario(name=NAME, claim="", kind=0, **geometry)
    shard = build_shard(scenario, 0)
    whole = scenario.world_size == 1 or (shard.equal_widths and shard.num_org_padded % BLOCK == 0)
    return whole and not scenario.added_vocab_size


@st.composite
def overwrites(draw: DrawFn, rows: int, tokens: int) -> tuple[Overwrite, ...]:
    """Planted logits of single tokens: ties and near ties anywhere, and NaN and infinities; none where no row is."""
    if not rows:
        return ()
    values = st.one_of(st.sampled_from(NEAR_TIES), st.sampled_from(NOT_FINITE))
    places = st.tuples(st.integers(0, rows - 1), st.integers(0, tokens - 1))
    planted = draw(st.dictionaries(places, values, max_size=6))
    return tuple(Overwrite(row=row, token_id=token, value=value) for (row, token), value in sorted(planted.items()))


@st.composite
def scenarios(
    draw: DrawFn,
    selectors: Sequence[str] = RIGHT,
    world_sizes: Sequence[int] = WORLD_SIZES,
    topks: Sequence[str] = tuple(TIES_OF_TOPK),
) -> Scenario:
    """A case without faults: geometry, head, logits, rows, k, steps, selector, top-k, and the tie rule that holds.

    selectors, topks: names to draw from, as in Scenario. A full gather never calls the top-k, through which single
    logits are replaced, and it needs equal widths: it is drawn without overwrites, for padded vocabularies.
    """
    selector = draw(st.sampled_from(list(selectors)))
    geometry = draw(geometries(world_sizes))
    if selector == "full-gather" and geometry["widths"] is not None:
        geometry = {**geometry, "widths": None, "pad_to": geometry["world_size"]}
    head = draw(heads(geometry))
    rows, tokens = draw(st.integers(0, 5)), geometry["org_vocab_size"]
    topk = draw(st.sampled_from(list(topks)))
    full = selector == "full-gather"
    return Scenario(
        name=NAME,
        claim="A case that was drawn.",
        kind=0,
        worlds=EVERYWHERE,
        rows=rows,
        k=draw(st.one_of(st.integers(1, min(tokens, 8)), st.integers(1, tokens))),
        steps=draw(st.integers(1, 3)),
        selector=selector,
        topk=topk,
        ties="canonical" if full else TIES_OF_TOPK[topk],
        overwrites=() if full else draw(overwrites(rows, tokens)),
        **geometry,
        **head,
    )


def schedules() -> SearchStrategy[str]:
    """Who runs when, as harness.schedules reads it; empty for the world's own, which goes round."""
    return st.one_of(st.just(""), st.integers(0, 9999).map("seed:{}".format))


@st.composite
def plans(
    draw: DrawFn,
    selectors: Sequence[str] = RIGHT,
    world_sizes: Sequence[int] = WORLD_SIZES,
    topks: Sequence[str] = tuple(TIES_OF_TOPK),
) -> Plan:
    """A plan in which nothing goes wrong; a right selector answers it without a finding."""
    scenario = draw(scenarios(selectors, world_sizes, topks))
    return make_plan(scenario, seed=draw(st.integers(0, 9999)), schedule=draw(schedules()))


@st.composite
def faulted_plans(
    draw: DrawFn,
    selectors: Sequence[str] = RIGHT,
    world_sizes: Sequence[int] = WORLD_SIZES,
    topks: Sequence[str] = tuple(TIES_OF_TOPK),
    world: WorldName = "sim",
) -> Plan:
    """A plan with one or two faults of any kind that the world can express, anywhere, some where they cannot fire."""
    plan = draw(plans(selectors, world_sizes, topks))
    struck = draw(st.lists(faults(plan.scenario, world=world), min_size=1, max_size=2))
    return with_faults(plan, tuple(struck))


def with_faults(plan: Plan, struck: tuple[Fault, ...]) -> Plan:
    """The same plan with these faults."""
    return replace(plan, scenario=replace(plan.scenario, faults=struck))


@st.composite
def faults(draw: DrawFn, scenario: Scenario, world: WorldName = "sim") -> Fault:
    """One fault that this scenario can have: any kind, rank and place; also one past the last collective."""
    kind = draw(st.sampled_from(kinds_of(scenario, world)))
    rank = draw(st.integers(0, scenario.world_size - 1))
    where = draw(_place(kind, scenario))
    fault: Fault = kind(rank=rank, **where, **draw(_details(kind, scenario, rank)))
    return fault


def kinds_of(scenario: Scenario, world: WorldName) -> list[type[Any]]:
    """The kinds of faults that make sense in a scenario and that a world can express."""
    return [kind for kind in get_args(Fault) if _suits(kind, scenario) and (world != "sim" or not _arrives(kind))]


def _arrives(kind: type[Any]) -> bool:
    return kind in get_args(ArrivalFault)  # simulated ranks are in their group from the start


def _suits(kind: type[Any], scenario: Scenario) -> bool:
    dense = scenario.head in DENSE
    if kind in (Nudge, Spin) and scenario.selector == "full-gather":
        return False  # it calls no top-k
    if kind is Nudge:
        return scenario.rows > 0
    if kind is WrongScale:
        return not dense and scenario.head != "fp8-tensor" and scenario.widths is None and scenario.world_size > 1
    return {StaleMethod: dense, PackedOnly: not dense}.get(kind, True)


def _place(kind: type[Any], scenario: Scenario) -> SearchStrategy[Fields]:
    if kind in get_args(CollectiveFault):
        last = len(calls_of(scenario)) or 2
        return st.fixed_dictionaries({"seq": st.integers(1, last + 1)})
    if kind in get_args(StepFault):
        return st.fixed_dictionaries({"step": st.integers(0, scenario.steps - 1)})
    return st.just({})


def _details(kind: type[Any], scenario: Scenario, rank: int) -> SearchStrategy[Fields]:
    make = _DETAILS.get(kind)
    return st.just({}) if make is None else st.fixed_dictionaries(make(scenario, rank))


_SECONDS = st.sampled_from([0.001, 0.05])
_TIMES = st.sampled_from([1, 1, 2])
_DETAILS: dict[type[Any], Callable[[Scenario, int], dict[str, SearchStrategy[Any]]]] = {
    Delay: lambda scenario, rank: {"seconds": _SECONDS},
    Pause: lambda scenario, rank: {"seconds": _SECONDS},
    Late: lambda scenario, rank: {"seconds": _SECONDS},
    Skip: lambda scenario, rank: {"times": _TIMES},
    Extra: lambda scenario, rank: {"times": _TIMES},
    Recast: lambda scenario, rank: {"dtype": st.sampled_from(["bfloat16", "int32", "float64", "float16", "int8"])},
    Strided: lambda scenario, rank: {"transposed": st.booleans()},
    Rows: lambda scenario, rank: {"rows": st.integers(0, scenario.rows + 2)},
    Nudge: lambda scenario, rank: {
        "row": st.integers(0, scenario.rows - 1),
        "column": st.integers(0, max(build_shard(scenario, rank).width - 1, 0)),
        "value": st.sampled_from([*NEAR_TIES, *NOT_FINITE, 512.0]),
    },
    WrongScale: lambda scenario, rank: {
        "scale_of": st.integers(0, scenario.world_size - 2).map(lambda other: other + (other >= rank))
    },
    Absent: lambda scenario, rank: {"how": st.sampled_from(["stall", "stop", "exit", "kill", "crash"])},
    Linger: lambda scenario, rank: {"seconds": st.sampled_from([None, 0.05])},
}
