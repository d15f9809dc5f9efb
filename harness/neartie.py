"""Near ties: how often, and at which margins, a head, shards, batches, a dtype or a tie rule change the best token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor

from tpbed.harness.activations import EMULATED
from tpbed.harness.drafting import Drafts, draft
from tpbed.harness.flips import Bin, fit_sigma, flip_curve, in_ulps, mcnemar, near_tie_rates
from tpbed.harness.ranks import Ranks
from tpbed.selector import quantized
from tpbed.selector.candidates import Candidates
from tpbed.selector.head import DenseHead, LmHead
from tpbed.selector.packed import keyed_topk
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.reference import reference_logits, reference_topk
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import ShardError, VocabShard
from tpbed.selector.tiles import TiledMethod
from tpbed.selector.topk import TopK, torch_topk
from tpbed.tp.errors import TestbedError

K = 16  # candidates per row
BATCH = 56  # rows that a head sees at one time: 8 requests of 7 slots
BATCHES = (1, 8, 448)
MAX_CALLS = 16  # of a head where it sees fewer rows at one time: what bounds the rows of M=1 and M=8
EDGES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)  # margins between which flips are counted
ULPS = (0.5, 1, 2, 4, 8)
MARGINS = (0.01, 0.03, 0.1, 0.3, 1.0)
CONFIDENT, MEAN, DEVIATION, AMBIGUOUS = 0.7, 4.0, 1.0, 0.2
DAMPING = 0.01  # of the directions in which planted rows move
NEWTON_STEPS = 8

Select = Callable[..., Candidates]
Progress = Callable[[str], None]
Dtype = Literal["bf16", "fp32"]
Ties = Literal["canonical", "torch"]

PLAIN_FORMAT = "bf16"
FORMATS = (PLAIN_FORMAT, *quantized.FORMATS, *EMULATED)
RULES: Mapping[Ties, TopK] = {"canonical": keyed_topk, "torch": torch_topk}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class NearTieError(TestbedError):
    """What was asked for cannot be measured; or ranks did not choose alike, which no figure could say."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Hidden states to choose tokens for, (rows, hidden units) bfloat16, and where they come from.

    passages: rows of each, in sequence; empty: they are one.
    """

    name: str
    about: str
    hidden: Tensor
    passages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """What bfloat16 weights and hidden states say: products summed in float64, rounded once to float32.

    ids, values: (rows, K). tops, margins: (rows,) float64, the best value and its lead over the second.
    """

    ids: Tensor
    values: Tensor
    tops: Tensor
    margins: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """ids, values: (rows, K), best first. tied: (rows,), whether the K-th value equals the one after it."""

    ids: Tensor
    values: Tensor
    tied: Tensor

    def first(self, rows: int) -> Choice:
        """Of the first rows only."""
        return Choice(ids=self.ids[:rows], values=self.values[:rows], tied=self.tied[:rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a head is run; the defaults are the plain setting, from which one thing is changed at a time."""

    tp: int = 1
    batch: int = BATCH  # rows at one time
    logits: Dtype = "bf16"
    ties: Ties = "canonical"

    def __str__(self) -> str:
        """What is not plain."""
        told = {"tp": f"TP={self.tp}", "batch": f"M={self.batch}", "logits": f"{self.logits} logits"}
        told["ties"] = f"{self.ties} ties"
        changed = [word for name, word in told.items() if getattr(self, name) != getattr(PLAIN, name)]
        return ", ".join(changed) or "plain"


PLAIN = Setting()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One head in one setting against the reference; shares of rows, unless said otherwise."""

    source: str  # of the rows
    head: str
    setting: str
    rows: int
    flips: int  # rows whose best token is another
    flip_rate: float
    largest_flipped: float | None  # margin; None without a flip
    sigma: float  # see fit_sigma
    best_recalled: float  # the reference's best token is among the K
    set_recalled: float  # share of the reference's K that are among the K
    boundary_ties: float
    changed_best: int  # rows whose best token is another than in the plain setting of this head
    changed_sets: int  # ... that have another set of K


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A comparison in which nothing may flip; changed counts rows with any other id or place among the K."""

    source: str
    head: str
    name: str
    rows: int
    flips: int
    changed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """A head against the first one on the same rows, both plain: how often each alone finds the reference's best."""

    source: str
    head: str
    against: str
    rows: int
    only_head: int
    only_against: int
    p: float  # of McNemar's exact test


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was measured on one kind of rows."""

    source: str
    about: str
    rows: int
    tps: tuple[int, ...]
    near_ties_ulps: dict[str, float]  # R(tau), tau in bfloat16 ulps of the top value
    near_ties: dict[str, float]  # R(tau), tau in logits
    curves: dict[str, tuple[Bin, ...]]  # by head, in the plain setting
    figures: tuple[Figures, ...]
    controls: tuple[Control, ...]
    drafts: tuple[Drafts, ...]  # in the plain setting
    paired: tuple[Paired, ...]


def measure(
    sources: Sequence[Rows],
    weight: Tensor,
    formats: Sequence[str],
    tps: Sequence[int],
    *,
    on_progress: Progress = lambda _: None,
) -> tuple[Report, ...]:
    """Measure heads of the same weight on each source of rows, in every setting; a report for each source.

    weight: (tokens, hidden units) bfloat16. formats: names of FORMATS; pairs are made with the first. tps: world sizes.
    Raises NearTieError for what cannot be measured, and where ranks differ.
    """
    check_request(formats, tps, len(weight))
    truths, parts = [], {}
    for rows in sources:
        on_progress(f"the reference of {len(rows.hidden)} {rows.name} rows")
        truths.append(refer(rows.hidden, weight))
    for name in formats:
        heads = Heads(name, weight)
        for rows, truth in zip(sources, truths, strict=True):
            parts[rows.name, name] = _Bench(rows, truth, heads, on_progress).measure(tps)
    return tuple(
        _report(rows, truth, {name: parts[rows.name, name] for name in formats}, tps)
        for rows, truth in zip(sources, truths, strict=True)
    )


def _report(rows: Rows, truth: Reference, parts: Mapping[str, _Part], tps: Sequence[int]) -> Report:
    first, *others = parts.items()
    return Report(
        source=rows.name,
        about=rows.about,
        rows=len(rows.hidden),
        tps=tuple(sorted({1, *tps})),
        near_ties_ulps=near_tie_rates(in_ulps(truth.margins, truth.tops), ULPS),
        near_ties=near_tie_rates(truth.margins, MARGINS),
        curves={name: flip_curve(truth.margins, flips(part.plain, truth), EDGES) for name, part in parts.items()},
        figures=tuple(one for part in parts.values() for one in part.figures),
        controls=tuple(one for part in parts.values() for one in part.controls),
        drafts=tuple(part.drafts for part in parts.values()),
        paired=tuple(
            pair((name, part.plain), (first[0], first[1].plain), truth, source=rows.name) for name, part in others
        ),
    )


def check_request(formats: Sequence[str], tps: Sequence[int], tokens: int) -> None:
    """Raises NearTieError for formats or world sizes that cannot be measured."""
    if not formats or not set(formats) <= set(FORMATS):
        raise NearTieError(f"formats {', '.join(formats) or 'none'}: give some of {', '.join(FORMATS)}.")
    if not tps or min(tps) < 1:
        raise NearTieError(f"world sizes {', '.join(map(str, tps)) or 'none'}: give numbers of ranks, 1 or more.")
    try:
        for tp in tps:
            VocabShard.even(0, tp, tokens)
    except ShardError as error:
        raise NearTieError(f"--tp {','.join(map(str, tps))}: {error}") from None


def settings(tps: Sequence[int], rows: int) -> Iterator[Setting]:
    """The plain setting, then what is changed, one thing at a time; batches as large as rows allow."""
    yield PLAIN
    yield from (Setting(tp=tp) for tp in tps if tp > 1)
    yield from (Setting(batch=batch) for batch in BATCHES if batch <= rows)
    yield Setting(logits="fp32")
    yield Setting(ties="torch")


def refer(hidden: Tensor, weight: Tensor) -> Reference:
    """The reference; in float64 the order of a sum cannot matter, so that rows go together."""
    logits = reference_logits(hidden, weight, logits_dtype=torch.float32)
    ids, values = reference_topk(logits, K)
    return Reference(ids=ids, values=values, tops=values[:, 0], margins=values[:, 0] - values[:, 1])


def choose(
    heads: Sequence[LmHead],
    hidden: Tensor,
    *,
    batch: int = BATCH,
    ties: Ties = "canonical",
    select: Select = compute_candidates,
) -> Choice:
    """What the selector chooses on simulated ranks that hold one head each.

    Asks for K + 1, so that a tie at the boundary is seen. Canonical candidates are the first K of these; another rule
    may keep others when it is asked for K, so that it is asked again.
    Raises NearTieError if ranks choose differently, RanksFailed if they do not come to an end.
    """
    more = _run(heads, torch.split(hidden, batch), K + 1, RULES[ties], select)
    kept = more if ties == "canonical" else _run(heads, torch.split(hidden, batch), K, RULES[ties], select)
    return Choice(ids=kept.ids[:, :K], values=kept.values[:, :K], tied=more.values[:, K - 1] == more.values[:, K])


def _run(heads: Sequence[LmHead], batches: Sequence[Tensor], k: int, topk: TopK, select: Select) -> Candidates:
    def program(rank: int) -> Candidates:
        found = [select(hidden, heads[rank], k=k, group=None, topk=topk) for hidden in batches]
        return Candidates(ids=torch.cat([one.ids for one in found]), values=torch.cat([one.values for one in found]))

    with Ranks() as ranks:
        results = ranks(program, world_size=len(heads))
    differing = [rank for rank, one in enumerate(results) if not torch.equal(one.ids, results[0].ids)]
    if differing:
        raise NearTieError(f"ranks {differing} chose other candidates than rank 0: look for why with `tpbed run`.")
    return cast(Candidates, results[0])


class Heads:
    """Heads of one format, all of the same whole weight, each packed once: packing takes longer than measuring."""

    def __init__(self, name: str, weight: Tensor) -> None:
        self.name, self._weight = name, weight
        self._built: dict[int, list[LmHead]] = {}

    def __call__(self, tp: int = 1, logits: Dtype = "bf16") -> list[LmHead]:
        """One for each of tp ranks."""
        if tp not in self._built:
            shards = [VocabShard.even(rank, tp, len(self._weight)) for rank in range(tp)]
            self._built[tp] = [self._build(shard) for shard in shards]
        return [_with_logits(head, _DTYPES[logits]) for head in self._built[tp]]

    def _build(self, shard: VocabShard) -> LmHead:
        if self.name == PLAIN_FORMAT:
            return DenseHead.from_full(self._weight, shard)
        packed, method = self._format
        head = quantized.FORMATS[packed].head(self._packed, shard)
        return replace(head, quant_method=method)

    @property
    def _format(self) -> tuple[str, Any]:
        return EMULATED[self.name] if self.name in EMULATED else (self.name, TiledMethod())  # one answer on any device

    @cached_property
    def _packed(self) -> dict[str, Tensor]:
        return quantized.FORMATS[self._format[0]].pack(self._weight)


def _with_logits(head: LmHead, dtype: torch.dtype) -> LmHead:
    """The same numbers, with logits of another dtype; a dense head has those of its weight."""
    if isinstance(head, DenseHead):
        return replace(head, weight=head.weight.to(dtype))
    return cast(LmHead, replace(cast(Any, head), logits_dtype=dtype))


def given_heads(logits: Tensor, tp: int) -> tuple[list[LmHead], Tensor]:
    """Heads that give exactly these logits, (rows, tokens), however many ranks share them; and their hidden states.

    Each hidden state has a single one, so that a logit is a product without a sum.
    """
    shards = [VocabShard.even(rank, tp, logits.shape[1]) for rank in range(tp)]
    return [DenseHead.from_full(logits.T, shard) for shard in shards], torch.eye(len(logits), dtype=logits.dtype)


def flips(choice: Choice, truth: Reference) -> Tensor:
    """(rows,) of bool: another best token than the reference's. The choice may be of the first rows only."""
    return choice.ids[:, 0] != truth.ids[: len(choice.ids), 0]


def describe(choice: Choice, truth: Reference, plain: Choice, *, source: str, head: str, setting: Setting) -> Figures:
    """The figures of a choice, of the first rows or of all."""
    rows = len(choice.ids)
    flipped, margins, best = flips(choice, truth), truth.margins[:rows], truth.ids[:rows]
    shared = (choice.ids[:, :, None] == best[:, None, :]).any(dim=1)  # (rows, K): of the reference's
    same = choice.ids.sort(dim=1).values == plain.ids[:rows].sort(dim=1).values
    return Figures(
        source=source,
        head=head,
        setting=str(setting),
        rows=rows,
        flips=int(flipped.sum()),
        flip_rate=float(flipped.double().mean()),
        largest_flipped=float(margins[flipped].max()) if flipped.any() else None,
        sigma=fit_sigma(margins, flipped),
        best_recalled=float(shared[:, 0].double().mean()),
        set_recalled=float(shared.double().mean()),
        boundary_ties=float(choice.tied.double().mean()),
        changed_best=int((choice.ids[:, 0] != plain.ids[:rows, 0]).sum()),
        changed_sets=int((~same.all(dim=1)).sum()),
    )


def compare(one: Choice, other: Choice, *, source: str, head: str, name: str) -> Control:
    """How many rows differ."""
    differ = one.ids != other.ids
    flipped, changed = int(differ[:, 0].sum()), int(differ.any(dim=1).sum())
    return Control(source=source, head=head, name=name, rows=len(differ), flips=flipped, changed=changed)


def pair(head: tuple[str, Choice], against: tuple[str, Choice], truth: Reference, *, source: str) -> Paired:
    """McNemar's test of a head against another, each with its name, on the same rows."""
    wrong, wrong_against = flips(head[1], truth), flips(against[1], truth)
    only_head, only_against = int((~wrong & wrong_against).sum()), int((wrong & ~wrong_against).sum())
    return Paired(
        source=source,
        head=head[0],
        against=against[0],
        rows=len(wrong),
        only_head=only_head,
        only_against=only_against,
        p=mcnemar(only_head, only_against),
    )


def same_setting_twice(
    once: Choice,
    heads: Sequence[LmHead],
    hidden: Tensor,
    *,
    source: str,
    head: str,
    select: Select = compute_candidates,
) -> Control:
    """Control: the heads and rows from which `once` was chosen give the same candidates again."""
    again = choose(heads, hidden, select=select)
    return compare(once, again, source=source, head=head, name=f"twice, TP={len(heads)}")


def same_logits_shared(
    logits: Tensor,
    plain: Choice,
    tp: int,
    *,
    source: str,
    head: str,
    ties: Ties = "canonical",
    select: Select = compute_candidates,
) -> Control:
    """Control: tp ranks that share the logits from which `plain` was chosen at TP=1 choose the same."""
    found = choose_of(logits, tp, ties=ties, select=select)
    return compare(plain, found, source=source, head=head, name=f"same logits, TP={tp}")


def choose_of(logits: Tensor, tp: int, *, ties: Ties = "canonical", select: Select = compute_candidates) -> Choice:
    """What tp ranks choose that share these logits, (rows, tokens)."""
    heads, hidden = given_heads(logits, tp)
    return choose(heads, hidden, batch=len(hidden), ties=ties, select=select)


def planted(base: Tensor, weight: Tensor, count: int, seed: int) -> Rows:
    """Rows with drawn margins: hidden states, moved until the lead of their best token is what the mixture says.

    base: (rows, hidden units) bfloat16, taken in turn; no text is behind blocks of them. The margins are exact up to
    the rounding of hidden states.
    """
    hidden = base[torch.arange(count) % len(base)]
    wanted = draw_margins(count, seed)
    logits, wide = reference_logits(hidden, weight, logits_dtype=torch.float32).float(), weight.float()
    best = logits.argmax(dim=1)
    moved = _move(hidden, logits, wide, best, wanted)
    about = (
        f"{CONFIDENT:.0%} of margins normal ({MEAN:g}, {DEVIATION:g}), the others exponential with mean {AMBIGUOUS:g}, "
        f"seed {seed}; real hidden states moved to them, up to the rounding of their bfloat16 entries"
    )
    return Rows(name="planted", about=about, hidden=moved)


def draw_margins(count: int, seed: int) -> Tensor:
    """(count,) float32: confident rows and ambiguous ones, mixed."""
    draw = torch.Generator().manual_seed(seed)
    confident = torch.rand(count, generator=draw) < CONFIDENT
    lead = torch.normal(MEAN, DEVIATION, (count,), generator=draw).abs()
    return torch.where(confident, lead, torch.empty(count).exponential_(1 / AMBIGUOUS, generator=draw))


def _move(hidden: Tensor, logits: Tensor, weight: Tensor, best: Tensor, wanted: Tensor) -> Tensor:
    """Each row along a direction of its own, in which its best token gains much and the others little."""
    steps = _directions(weight, best)
    slopes = steps @ weight.T  # 1 for the best token
    return (hidden.float() + _distances(logits, slopes, best, wanted)[:, None] * steps).to(hidden.dtype)


def _directions(weight: Tensor, best: Tensor) -> Tensor:
    """(rows, hidden units): by each, the logit of that row's best token grows by one."""
    centred = weight - weight.mean(dim=0)
    spread = centred.T @ centred / len(centred)
    spread += DAMPING * spread.diagonal().mean() * torch.eye(len(spread))
    steps = torch.linalg.solve(spread, centred[best].T).T
    gains = (steps * weight[best]).sum(dim=1, keepdim=True)
    return cast(Tensor, steps / gains)


def _distances(logits: Tensor, slopes: Tensor, best: Tensor, wanted: Tensor) -> Tensor:
    """(rows,): how far to go. The lead over all others is concave in the distance, so that Newton's method ends."""
    distances = torch.zeros(len(logits))
    for _ in range(NEWTON_STEPS):
        moved = logits + distances[:, None] * slopes
        top = moved.gather(1, best[:, None])[:, 0]
        rival, ids = moved.scatter(1, best[:, None], -torch.inf).max(dim=1)
        distances += (wanted - (top - rival)) / (1 - slopes.gather(1, ids[:, None])[:, 0])
    return distances


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One head format on one source of rows."""

    plain: Choice
    figures: tuple[Figures, ...]
    controls: tuple[Control, ...]
    drafts: Drafts


class _Bench:
    """Measures a head format on one source of rows."""

    def __init__(self, rows: Rows, truth: Reference, heads: Heads, on_progress: Progress) -> None:
        self._hidden, self._truth, self._heads, self._on_progress = rows.hidden, truth, heads, on_progress
        self._source, self._head = rows.name, heads.name
        self._passages = rows.passages or (len(rows.hidden),)

    def measure(self, tps: Sequence[int]) -> _Part:
        chosen = {setting: self._choose(setting) for setting in settings(tps, len(self._hidden))}
        plain = chosen[PLAIN]
        figures = (
            describe(choice, self._truth, plain, source=self._source, head=self._head, setting=setting)
            for setting, choice in chosen.items()
        )
        return _Part(
            plain=plain,
            figures=tuple(figures),
            controls=tuple(self._controls(tps, chosen)),
            drafts=draft(
                (plain.ids, plain.values),
                (self._truth.ids, self._truth.values),
                self._passages,
                source=self._source,
                head=self._head,
            ),
        )

    def _say(self, doing: object) -> None:
        self._on_progress(f"{self._source} rows, {self._head} head: {doing}")

    def _choose(self, setting: Setting) -> Choice:
        self._say(setting)
        if setting.ties != "canonical":
            return choose_of(self._logits, setting.tp, ties=setting.ties)
        few = setting.batch < BATCH
        hidden = self._hidden[: setting.batch * MAX_CALLS] if few else self._hidden
        return choose(self._heads(setting.tp, setting.logits), hidden, batch=setting.batch)

    @cached_property
    def _logits(self) -> Tensor:
        """Of the plain setting: (rows, tokens) bfloat16."""
        (head,) = self._heads()
        return torch.cat([project_candidate_logits(part, head) for part in torch.split(self._hidden, BATCH)])

    def _controls(self, tps: Sequence[int], chosen: Mapping[Setting, Choice]) -> Iterator[Control]:
        self._say("controls")
        source, head, last = self._source, self._head, max(tps)
        once = chosen[Setting(tp=last)]
        yield same_setting_twice(once, self._heads(last), self._hidden, source=source, head=head)
        for tp in tps:
            if tp > 1:
                yield same_logits_shared(self._logits, chosen[PLAIN], tp, source=source, head=head)
