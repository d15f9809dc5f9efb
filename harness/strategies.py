"""Strategies: hypothesis draws of everything that a plan can say; each draw is valid, and shrinks to the plainest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import inf, nan
from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tpbed.harness.fault_oracle import UNFORESEEN, calls_of
from tpbed.harness.faults import (
    Absent,
    ArrivalFault,
    CollectiveFault,
    Delay,
    Extra,
    Fault,
    HeadFault,
    Inflated,
    JunkScale,
    Late,
    Linger,
    Nudge,
    OtherTile,
    PackedOnly,
    Pause,
    Recast,
    Rows,
    Skip,
    Spin,
    StaleMethod,
    StepFault,
    Strided,
    Unmasked,
    Unpadded,
    WrongScale,
)
from tpbed.harness.inputs import build_shard
from tpbed.harness.plan import Plan, make_plan
from tpbed.harness.scenario import HeadFormat, Overwrite, Scenario, Ties, WorldName
from tpbed.harness.schedules import ROUND_ROBIN
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
TOPKS = tuple(TIES_OF_TOPK)


@st.composite
def geometries(draw: DrawFn, world_sizes: Sequence[int] = WORLD_SIZES) -> Fields:
    """How a vocabulary is shared: world_size, org_vocab_size, added_vocab_size, pad_to, or widths of uneven shards.

    Tiny and odd vocabularies are the usual ones; ranks that hold only padding, or nothing, are common.
    """
    return _geometry(draw, world_sizes, uneven=True)


def _geometry(draw: DrawFn, world_sizes: Sequence[int], *, uneven: bool) -> Fields:
    """Drawn piece by piece from strategies that are made once: making them costs more than a run."""
    world_size = draw(_one_of(tuple(world_sizes)))
    if draw(_A_QUARTER) and uneven:
        return _uneven(draw, world_size)
    return {
        "world_size": world_size,
        "org_vocab_size": draw(_VOCABULARIES),
        "added_vocab_size": draw(_ADDED),
        "pad_to": world_size * draw(_PADDING),
        "widths": None,
    }


def _uneven(draw: DrawFn, world_size: int) -> Fields:
    widths = [draw(_WIDTH) for _ in range(world_size)]
    if not any(widths):
        widths[0] = 1
    return {
        "world_size": world_size,
        "org_vocab_size": sum(widths),
        "added_vocab_size": 0,
        "pad_to": 1,
        "widths": tuple(widths),
    }


_one_of = cache(st.sampled_from)
_A_QUARTER = st.sampled_from((False, False, False, True))
_VOCABULARIES = st.one_of(st.integers(1, 12), st.sampled_from(ODD_SIZES), st.integers(1, MOST_TOKENS))
_ADDED = st.sampled_from((0, 0, 0, 1, 2, 9))
_PADDING = st.sampled_from((1, 2, 3, 4, 5, 8, 16, 64, BLOCK))
_WIDTH = st.integers(0, 20)


@st.composite
def heads(draw: DrawFn, geometry: Fields) -> Fields:
    """A head format that this geometry can have, the logits that it computes, and what its padding holds."""
    return _head(draw, geometry)


def _head(draw: DrawFn, geometry: Fields) -> Fields:
    head = draw(_one_of(_FORMATS if _holds_blocks(geometry) else _WITHOUT_BLOCKS))
    logits = draw(_one_of((*PLANTED, "gaussian")))
    fill = draw(_one_of((0.0, 64.0, inf, nan)))  # always: what needs fewer draws counts as plainer
    return {"head": head, "logits": logits, "pad_fill": fill if head in DENSE else 0.0, "hidden_size": HIDDEN}


_FORMATS = (*DENSE, *FORMATS)
_WITHOUT_BLOCKS = tuple(name for name in _FORMATS if name != "fp8-block")


def _holds_blocks(geometry: Fields) -> bool:
    """Whether no block of rows that share a scale is cut between ranks."""
    if geometry["added_vocab_size"] or geometry["world_size"] == 1:
        return not geometry["added_vocab_size"]
    shard = build_shard(Scenario(name=NAME, claim="", kind=0, **geometry), 0)
    return shard.equal_widths and shard.num_org_padded % BLOCK == 0


@st.composite
def overwrites(draw: DrawFn, rows: int, tokens: int) -> tuple[Overwrite, ...]:
    """Planted logits of single tokens: ties and near ties anywhere, and NaN and infinities; none where no row is."""
    return _overwrites(draw, rows, tokens)


def _overwrites(draw: DrawFn, rows: int, tokens: int) -> tuple[Overwrite, ...]:
    planted: dict[tuple[int, int], float] = {}
    plants = draw(_PLANTS)
    for _ in range(plants if rows else 0):
        place = draw(st.integers(0, rows - 1)), draw(st.integers(0, tokens - 1))
        planted[place] = draw(_VALUES)
    return tuple(Overwrite(row=row, token_id=token, value=value) for (row, token), value in sorted(planted.items()))


_PLANTS = st.integers(0, 6)
_VALUES = st.sampled_from((*NEAR_TIES, *NEAR_TIES, *NOT_FINITE))


@st.composite
def scenarios(
    draw: DrawFn,
    selectors: Sequence[str] = RIGHT,
    world_sizes: Sequence[int] = WORLD_SIZES,
    topks: Sequence[str] = TOPKS,
) -> Scenario:
    """A case without faults: geometry, head, logits, rows, k, steps, selector, top-k, and the tie rule that holds.

    selectors, topks: names to draw from, as in Scenario. A full gather never calls the top-k, through which single
    logits are replaced, and it needs equal widths: it is drawn without overwrites, for padded vocabularies.
    """
    selector, topk = draw(_one_of(tuple(selectors))), draw(_one_of(tuple(topks)))
    full = selector == "full-gather"
    geometry = _geometry(draw, world_sizes, uneven=not full)
    head, rows, tokens = _head(draw, geometry), draw(_ROWS), geometry["org_vocab_size"]
    planted = _overwrites(draw, rows, tokens)
    return Scenario(
        name=NAME,
        claim="A case that was drawn.",
        kind=0,
        rows=rows,
        k=draw(st.integers(1, min(tokens, 8) if draw(_OFTEN) else tokens)),
        steps=draw(_STEPS),
        selector=selector,
        topk=topk,
        ties="canonical" if full else TIES_OF_TOPK[topk],
        overwrites=() if full else planted,
        **geometry,
        **head,
    )


_ROWS = st.sampled_from((1, 2, 3, 4, 5, 0))
_STEPS = st.integers(1, 3)
_OFTEN = st.sampled_from((True, True, False))


def schedules() -> SearchStrategy[str]:
    """Who runs when, as harness.schedules reads it; empty: as the plan's seed says."""
    return _SCHEDULES


_SCHEDULES = st.one_of(st.just(""), st.just(ROUND_ROBIN), st.integers(0, 9999).map("seed:{}".format))
_SEEDS = st.integers(0, 9999)


@st.composite
def plans(
    draw: DrawFn,
    selectors: Sequence[str] = RIGHT,
    world_sizes: Sequence[int] = WORLD_SIZES,
    topks: Sequence[str] = TOPKS,
) -> Plan:
    """A plan in which nothing goes wrong; a right selector answers it without a finding."""
    scenario = draw(scenarios(selectors, world_sizes, topks))
    return make_plan(scenario, seed=draw(_SEEDS), schedule=draw(_SCHEDULES))


@st.composite
def faulted_plans(
    draw: DrawFn,
    selectors: Sequence[str] = RIGHT,
    world_sizes: Sequence[int] = WORLD_SIZES,
    topks: Sequence[str] = TOPKS,
    world: WorldName = "sim",
) -> Plan:
    """A plan with one or two faults of any kind that the world can express, anywhere, some where they cannot fire."""
    plan = draw(plans(selectors, world_sizes, topks))
    struck = [_fault(draw, plan.scenario, world) for _ in range(draw(_FAULTS))]
    return with_faults(plan, tuple(struck))


_FAULTS = st.integers(1, 2)


def with_faults(plan: Plan, struck: tuple[Fault, ...]) -> Plan:
    """The same plan with these faults."""
    return replace(plan, scenario=replace(plan.scenario, faults=struck))


@st.composite
def faults(draw: DrawFn, scenario: Scenario, world: WorldName = "sim") -> Fault:
    """One fault that this scenario can have: any kind, rank and place; also one past the last collective."""
    return _fault(draw, scenario, world)


def _fault(draw: DrawFn, scenario: Scenario, world: WorldName) -> Fault:
    kinds = kinds_of(scenario, world)
    kind = draw(_one_of((*kinds, *[kind for kind in kinds if kind in _RARE] * 8)))
    rank = draw(st.integers(0, scenario.world_size - 1))
    details = {name: draw(drawn) for name, drawn in _details(kind, scenario, rank).items()}
    fault: Fault = kind(rank=rank, **details)
    return fault


_RARE = (JunkScale,)  # of one format of head alone, and so drawn more often there


def kinds_of(scenario: Scenario, world: WorldName) -> tuple[type[Any], ...]:
    """The kinds of faults that make sense in a scenario, that a world can express and an oracle can foresee."""
    return tuple(kind for kind in get_args(Fault) if _suits(kind, scenario) and (world != "sim" or not _arrives(kind)))


def _arrives(kind: type[Any]) -> bool:
    return kind in get_args(ArrivalFault)  # simulated ranks are in their group from the start


def _suits(kind: type[Any], scenario: Scenario) -> bool:
    """What a fault in the head, the top-k or the rows comes to is known of selectors that are right by contract."""
    if kind in UNFORESEEN:
        return False
    if kind in (*get_args(HeadFault), Rows, Nudge, Spin, Unmasked) and scenario.selector not in RIGHT:
        return False
    if kind in (Nudge, Spin):
        return scenario.selector != "full-gather" and scenario.rows > 0
    return _fits_head(kind, scenario) and (kind is not Unmasked or bool(scenario.overwrites))


def _fits_head(kind: type[Any], scenario: Scenario) -> bool:
    dense = scenario.head in DENSE
    if kind is WrongScale:
        return not dense and scenario.head != "fp8-tensor" and scenario.widths is None and scenario.world_size > 1
    return {
        StaleMethod: dense,
        Unpadded: dense,
        PackedOnly: not dense,
        OtherTile: not dense,
        JunkScale: scenario.head == "fp8-tensor",
        Inflated: scenario.head.startswith("nvfp4"),
    }.get(kind, True)


def _details(kind: type[Any], scenario: Scenario, rank: int) -> dict[str, SearchStrategy[Any]]:
    details: dict[str, SearchStrategy[Any]] = {}
    if kind in get_args(CollectiveFault):
        details["seq"] = st.integers(1, (len(calls_of(scenario)) or 2 * scenario.steps) + 1)
    if kind in get_args(StepFault):
        details["step"] = st.integers(0, scenario.steps - 1)
    return details | (_DETAILS[kind](scenario, rank) if kind in _DETAILS else {})


_SECONDS = st.sampled_from((0.001, 0.05))
_TIMES = st.sampled_from((1, 1, 2))
_DETAILS: dict[type[Any], Callable[[Scenario, int], dict[str, SearchStrategy[Any]]]] = {
    Delay: lambda scenario, rank: {"seconds": _SECONDS},
    Pause: lambda scenario, rank: {"seconds": _SECONDS},
    Late: lambda scenario, rank: {"seconds": _SECONDS},
    Skip: lambda scenario, rank: {"times": _TIMES},
    Extra: lambda scenario, rank: {"times": _TIMES},
    Recast: lambda scenario, rank: {"dtype": st.sampled_from(("bfloat16", "int32", "float64", "float16", "int8"))},
    Strided: lambda scenario, rank: {"transposed": st.booleans()},
    Rows: lambda scenario, rank: {"rows": st.integers(0, scenario.rows + 2)},
    Nudge: lambda scenario, rank: {
        "row": st.integers(0, scenario.rows - 1),
        "column": st.integers(0, max(build_shard(scenario, rank).width - 1, 0)),
        "value": st.sampled_from((*NEAR_TIES, *NOT_FINITE, 512.0)),
    },
    WrongScale: lambda scenario, rank: {
        "scale_of": st.integers(0, scenario.world_size - 2).map(lambda other: other + (other >= rank))
    },
    JunkScale: lambda scenario, rank: {"junk": st.sampled_from((0.0, 1.0, 448.0, inf, nan))},
    StaleMethod: lambda scenario, rank: {
        "method": st.sampled_from(("PackedMethod", "ModelOptFp8LinearMethod", "UnquantizedLinearMethod"))
    },
    Absent: lambda scenario, rank: {
        "how": st.sampled_from(("stall", "stop", "exit", "kill", "crash", "exhaust", "port"))
    },
    Linger: lambda scenario, rank: {"seconds": st.sampled_from((None, 0.05))},
}
