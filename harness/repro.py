"""write_repro: a plan in, one Python file out that shows the same under torchrun, with torch and nothing else.

The file is written for its case: the geometry and seeds as constants, the head that they give, the selector's own
source with all that it calls, and each fault as a statement. It compares with the whole head in float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from inspect import getmodule
from math import isinf, isnan
from textwrap import indent, wrap
from typing import Any, get_args

from tpbed.harness import repro_program
from tpbed.harness.bundle import Bundle, BundleError
from tpbed.harness.engine_head import ShardIndices
from tpbed.harness.faults import CollectiveFault, Fault, describe
from tpbed.harness.foreign import ForeignSelector
from tpbed.harness.inject import TOPKS
from tpbed.harness.inputs import DTYPES, LADDER, build_head, held_shard
from tpbed.harness.plan import Plan
from tpbed.harness.selectors import find_selector
from tpbed.harness.turn import Serving
from tpbed.selector.errors import SelectionError
from tpbed.selector.fp8 import pack_fp8_per_channel, pack_fp8_per_tensor
from tpbed.selector.quantized import FORMATS
from tpbed.selector.topk import canonical_topk
from tpbed.tp.errors import TestbedError
from tpbed.tp.ledger import WORLD

PARTS = repro_program.__name__
TIMEOUT_S = 20.0
PLAIN = {
    ("tpbed.selector.candidates", "Candidates"): (PARTS, "Candidates"),
    ("tpbed.selector.project", "project_candidate_logits"): (PARTS, "project_candidate_logits"),
    ("tpbed.selector.select", "check_shard"): (PARTS, "check_shard"),
    ("tpbed.selector.errors", "SelectionError"): (PARTS, "SelectionError"),
    ("tpbed.tp.rank", "current"): (PARTS, "current"),
}
OURS, SHORT = ("tpbed.selector.select", "compute_candidates"), (PARTS, "compute_candidates")
WEIGHTS = {  # by Logits: the whole head, from the rank of each token in each hidden unit
    "distinct": "ladder((ranks - max(TOKENS - {ladder}, 0)).clamp_min(0))",
    "negative": "-ladder((TOKENS - 1 - ranks).clamp_max({ladder} - 1))",
    "tied": "ladder(ranks // 4)",
    "equal": "torch.ones(TOKENS, HIDDEN_SIZE)",
}
PACKERS = {"fp8": pack_fp8_per_channel, "fp8-tensor": pack_fp8_per_tensor}  # the formats of one scale a row, or one
WIDTH = 100  # columns of its heading
RUNS_ON = "return issue(*arguments, **options)"


class ReproError(TestbedError):
    """A case that one file of plain torch cannot show."""


# By the kind of a fault: what its rank does as it issues a collective.
STRIKES: dict[str, Callable[[Any], str]] = {
    "raise": lambda fault: f"raise RuntimeError({fault.message!r})",
    "quit": lambda fault: f"sys.exit({fault.status})",
    "kill": lambda fault: "os.kill(os.getpid(), signal.SIGKILL)",
    "exit": lambda fault: "os._exit(1)",
    "crash": lambda fault: "ctypes.string_at(0)  # SIGSEGV",
    "exhaust": lambda fault: "torch.empty(1 << 60)  # more memory than there is",
    "stop": lambda fault: "os.kill(os.getpid(), signal.SIGSTOP)",
    "pause": lambda fault: f"time.sleep({fault.seconds})",
    "delay": lambda fault: f"time.sleep({fault.seconds})",
    "stall": lambda fault: "while True:\n    time.sleep(1)  # busy, and never done",
    "skip": lambda fault: "for part in arguments[0] if arguments else []:\n    part.zero_()\nreturn None  # not issued",
    "extra": lambda fault: (
        "issue([torch.empty_like(part) for part in arguments[0]], arguments[1].contiguous().clone(), **options)"
    ),
    "recast": lambda fault: f"arguments = contribute(arguments, lambda t: t.to(torch.{fault.dtype}))",
    "narrow": lambda fault: "arguments = contribute(arguments, lambda t: t[..., :-1].contiguous())",
    "strided": lambda fault: (
        "arguments = contribute(arguments, lambda t: "
        + ("t.t().contiguous().t())" if fault.transposed else "torch.cat([t, t], dim=-1)[..., : t.shape[-1]])")
    ),
    "corrupt": lambda fault: "arguments = contribute(arguments, torch.neg)",
}
METHODS = {"stale_method": "StaleMethod()", "packed_only": "None"}


def write_repro(plan: Plan, *, shows: str = "", name: str = "FILE") -> str:
    """The text of the file.

    shows: what tpbed has found, for the head of the file. name: how the file will be called.
    Raises ReproError or BundleError for a case that cannot be written so.
    """
    check_expressible(plan)
    writer = _Writer(plan)
    body = writer.body()
    return "\n".join([_heading(plan, shows, name), *writer.top(body), "", body, ""])


def check_expressible(plan: Plan) -> None:
    """Raise ReproError for a case that one file cannot show: a checkpoint, a schedule, no head, a fault of our own."""
    scenario = plan.scenario
    if scenario.logits == "smollm2":
        raise ReproError(f"{scenario.name} reads the checkpoint of SmolLM2, which no file can hold: take another head.")
    if plan.schedule:
        raise ReproError(
            f"{scenario.name} shows only when ranks take turns as {plan.schedule}, which torchrun cannot be told to do."
        )
    if isinstance(find_selector(scenario.selector), Serving):
        raise ReproError(f"selector {scenario.selector!r} is a whole program of tpbed's own, and no function alone.")
    for fault in scenario.faults:
        if fault.kind not in {*STRIKES, *METHODS, "leave", "rows", "nudge", "spin", "absent", "late", "linger"}:
            raise ReproError(f"{describe(fault)} cannot be written in plain torch.")
        if getattr(fault, "how", "stall") not in STRIKES:
            raise ReproError(f"{describe(fault)} is how tpbed's own rendezvous ends, and a file has torch's.")
        if getattr(fault, "group", WORLD) != WORLD:
            raise ReproError(f"{describe(fault)} strikes another group than {WORLD}, and a file has only that.")
    _check_heads(plan)


def _check_heads(plan: Plan) -> None:
    try:
        for rank in range(plan.scenario.world_size):
            build_head(plan, rank)
    except SelectionError as error:
        raise ReproError(f"{plan.scenario.name} has no head that selectors could be given: {error}") from error


def _heading(plan: Plan, shows: str, name: str) -> str:
    scenario = plan.scenario
    about = [scenario.claim, f"Source: {scenario.source}." * bool(scenario.source)]
    run = f"    torchrun --nproc-per-node {scenario.world_size} {name}"
    needs = f"It needs torch alone: NCCL with a GPU per rank, else gloo. What hangs ends after {TIMEOUT_S:.0f} s."
    faults = [f"Written out below: {describe(fault)}" for fault in scenario.faults]
    seen = ["", "Seen on simulated ranks:", "", indent(shows, "    ")] if shows else []
    told = [line for text in about for line in wrap(text, WIDTH)]
    lines = [f"{scenario.name} on {scenario.world_size} ranks.", "", *told, *faults, "", run, "", needs, *seen]
    return '"""' + "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''") + '\n"""'


class _Writer:
    """Collects what one file needs."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.scenario = plan, plan.scenario
        self.selector = find_selector(plan.scenario.selector)
        needs_whole = isinstance(self.selector, partial)  # it chooses among what only the whole source has
        written_out = frozenset((PARTS, name) for name in repro_program.WRITTEN_OUT)
        self.bundle = Bundle(
            substitutes={**PLAIN, **({SHORT: OURS} if needs_whole else {OURS: SHORT})}, given=written_out
        )
        self.main: list[str] = []
        self.told = 0  # definitions

    def body(self) -> str:
        """All definitions by what they are for, and the call of main."""
        select = self._select()
        self._head()
        parts = {
            "The selector": [*self._topk()],
            "What befalls ranks": [self._befall()],
            "The head and its inputs": [self._weights(), self._states()],
            "Each rank's steps; what they came to, beside the whole head": [self._main(select)],
        }
        return "\n\n\n".join([*(part for title, own in parts.items() for part in self._section(title, own)), "main()"])

    def _section(self, title: str, generated: list[str]) -> Iterator[str]:
        for text in generated:
            self.bundle.add_names_of(text, PARTS)
        copied = self.bundle.text(self.told)
        self.told = len(self.bundle.sources)
        first, *rest = [text for text in (copied, *generated) if text]
        yield f"# {title}.\n\n\n{first}"
        yield from rest

    def top(self, body: str) -> Iterator[str]:
        """Imports and constants; of what ranks hold, what the body reads."""
        constants = list(self._constants(set(re.findall(r"\w+", body))))
        self.bundle.add_names_of("\n".join(constants), PARTS)
        yield from ["", "from __future__ import annotations", "", *self.bundle.import_lines(), "", *constants]

    def _constants(self, read: set[str]) -> Iterator[str]:
        scenario = self.scenario
        packed = scenario.head in FORMATS
        exact = scenario.logits != "gaussian" and not packed
        tokens = scenario.org_vocab_size + scenario.added_vocab_size
        yield f'RANK, WORLD_SIZE = int(os.environ["RANK"]), {scenario.world_size}'
        yield 'DEVICE = torch.device(f"cuda:{RANK}" if torch.cuda.device_count() >= WORLD_SIZE else "cpu")'
        yield f'TIMEOUT_S = float(os.environ.get("REPRO_TIMEOUT_S", {TIMEOUT_S}))'
        yield f"K, ROWS, STEPS = {scenario.k}, {scenario.rows}, {scenario.steps}"
        yield f"ORG_VOCAB_SIZE, TOKENS, HIDDEN_SIZE = {scenario.org_vocab_size}, {tokens}, {scenario.hidden_size}"
        yield f"DTYPE = {DTYPES[scenario.head]}  # of the logits"
        yield f"PADDING = {_number(0.0 if packed else scenario.pad_fill)}  # in rows of the head that are no token"
        yield f"TOLERANCE = {0.0 if exact else 2.0**-6}  # of a logit, relative"
        yield f"SAME_TIES = {exact and scenario.ties == 'canonical'}  # the lowest id goes first among equals"
        planted = (f"({one.row}, {one.token_id}, {_number(one.value)})" for one in scenario.overwrites)
        yield f"OVERWRITES = [{', '.join(planted)}]  # row, token, logit"
        yield "SHARDS = ["
        yield from (f"    {_shard(self.plan, rank, read)}," for rank in range(scenario.world_size))
        yield "]"

    def _select(self) -> str:
        """The call of the selector, whose source is bundled."""
        if isinstance(self.selector, ForeignSelector):
            self._bundle(self.selector.function)
            given = {"hidden": "hidden", "hidden_states": "hidden", "lm_head": "head", "k": "K"}
            given |= {"group": "dist.group.WORLD"}
            arguments = ", ".join(f"{ask}={given.get(ask, ask)}" for ask in self.selector.asks)
            return f"{self.selector.function.__name__}({arguments})"
        return self._call(self.selector, "hidden, head, k=K, group=dist.group.WORLD, topk=topk, note=note")

    def _bundle(self, function: Callable[..., Any]) -> None:
        module, name = getmodule(function), getattr(function, "__qualname__", "")
        if module is None or not name.isidentifier():
            raise BundleError(f"{function!r} is no plain function of a module: define it at the top of one.")
        self.bundle.add(module.__name__, name)

    def _weights(self) -> str:
        """full_weight: as harness.inputs draws it."""
        scenario = self.scenario
        lines = ["def full_weight():", '    """The whole head, a row for each token."""']
        lines += [f"    draw = torch.Generator().manual_seed({self.plan.weight_seed})"]
        if scenario.logits == "gaussian":
            lines += ["    weight = torch.randn(TOKENS, HIDDEN_SIZE, generator=draw).to(DTYPE)"]
        else:
            if scenario.logits != "equal":
                self.bundle.add("tpbed.harness.inputs", "ladder")
            lines += [
                "    ranks = torch.stack([torch.randperm(TOKENS, generator=draw) for _ in range(HIDDEN_SIZE)], dim=1)",
                f"    weight = {WEIGHTS[scenario.logits].format(ladder=LADDER)}.to(DTYPE)",
            ]
        return "\n".join([*lines, *(f"    {line}" for line in self._as_packed())])

    def _as_packed(self) -> list[str]:
        """The weight, or what is left of it after packing: what the format stands for, in float32."""
        if self.scenario.head not in FORMATS:
            return ["return weight"]
        if self.scenario.head in PACKERS:
            pack = PACKERS[self.scenario.head]
            self._bundle(pack)
            return [f"packed, scale = {pack.__name__}(weight)", "return packed.float() * scale"]
        kind = FORMATS[self.scenario.head]
        return [f"return {self._call(kind.dequantise, self._call(kind.pack, 'weight'))}.float()"]

    def _call(self, function: Any, argument: str) -> str:
        """A call of a function, whose source is bundled, with the options that a partial one carries."""
        options = dict(function.keywords) if isinstance(function, partial) else {}
        function = function.func if isinstance(function, partial) else function
        self._bundle(function)
        return f"{function.__name__}({argument}{''.join(f', {key}={value!r}' for key, value in options.items())})"

    def _states(self) -> str:
        lines = ["def hidden_states(step, rows):", '    """What the head multiplies in a step."""']
        if self.scenario.logits == "gaussian":
            lines += [f"    draw = torch.Generator().manual_seed({list(self.plan.step_seeds)}[step])"]
            lines += ["    states = torch.randn(rows, HIDDEN_SIZE, generator=draw)"]
        else:
            lines += ["    states = torch.eye(HIDDEN_SIZE)[(torch.arange(rows) + step * ROWS) % HIDDEN_SIZE]"]
        order = list(self.plan.row_order)
        lines += [f"    states = states[{order}] if rows == ROWS else states"] * bool(order)
        return "\n".join([*lines, "    return states.to(DTYPE)"])

    def _head(self) -> None:
        """The head in main: its method as the format says, or as a fault has left it."""
        usual = "WeightOnlyMethod" if self.scenario.head in FORMATS else "UnquantizedEmbeddingMethod"
        self.main += [f"head = build_head({usual}(), full_weight())"]
        for fault in self._of(*METHODS):
            lost = ["head.weight = head.weight.to(torch.float8_e4m3fn)"] if fault.kind == "packed_only" else []
            self.main += _if(f"RANK == {fault.rank}", [f"head.quant_method = {METHODS[fault.kind]}", *lost], fault)

    def _befall(self) -> str:
        """befall: what its faults do to each rank, as it issues a collective."""
        lines = ["def befall(seq, issue, arguments, options):"]
        lines += ['    """What befalls this rank as it issues its collective number seq, from 1."""']
        for number, fault in enumerate(self.scenario.faults):
            if isinstance(fault, get_args(CollectiveFault)):
                once = f" and befallen({number}, {fault.times})" if fault.kind == "skip" else ""
                condition = f"RANK == {fault.rank} and seq == {fault.seq}{once}"
                lines += [f"    {line}" for line in _if(condition, STRIKES[fault.kind](fault).splitlines(), fault)]
        return "\n".join([*lines, f"    {RUNS_ON}"])

    def _topk(self) -> Iterator[str]:
        disturbed = self._is_disturbed()
        if disturbed:
            yield self._disturb()
        if isinstance(self.selector, ForeignSelector) and "topk" not in self.selector.asks:
            return
        given = TOPKS[self.scenario.topk] or canonical_topk
        self._bundle(given)
        lines = ["def topk(logits, k):", '    """The k best of this rank\'s logits: values and columns."""']
        lines += ["    disturb(logits)"] if disturbed else []
        yield "\n".join([*lines, f"    return {given.__name__}(logits, k)"])

    def _is_disturbed(self) -> bool:
        return bool(self.scenario.overwrites or self._of("nudge", "spin"))

    def _disturb(self) -> str:
        """disturb: what the case does to this rank's logits."""
        lines = ["def disturb(logits):"]
        lines += [
            '    """What befalls this rank\'s logits; those that were gathered, which are wider, are not its own."""'
        ]
        lines += ['    if logits.shape[-1] > SHARDS[RANK]["width"]:', "        return", "    plant(logits)"]
        for fault in self._of("nudge", "spin"):
            strikes = STRIKES["stall"](fault) if fault.kind == "spin" else _nudge(fault)
            condition = f"RANK == {fault.rank} and STEP[0] == {fault.step}"
            lines += [f"    {line}" for line in _if(condition, strikes.splitlines(), fault)]
        return "\n".join(lines)

    def _main(self, select: str) -> str:
        """main: the steps of this rank, and what befalls it between them."""
        if self._is_disturbed() and isinstance(self.selector, ForeignSelector):
            self.main += ["head.quant_method = disturbed(head.quant_method, disturb)"]
        steps = ["STEP[0], rows = step, ROWS", *self._at_step("leave", lambda fault: "break")]
        steps += self._at_step("rows", lambda fault: f"rows = {fault.rows}")
        steps += ["hidden = hidden_states(step, rows).to(DEVICE)", f"answers.append(answer_of({select}))"]
        tried = [
            *self.main,
            "for step in range(STEPS):",
            *(f"    {line}" for line in steps),
            *self._at(_linger, "linger"),
        ]
        lines = [*self._at(_arrival, "absent", "late"), "store, error, answers = start(), None, []"]
        lines += ["try:", *(f"    {line}" for line in tried)]
        lines += ["except BaseException as raised:  # whatever ends a rank: it is told", "    error = raised"]
        lines += ["finish(store, error, answers, [hidden_states(step, ROWS) for step in range(STEPS)])"]
        return "def main():\n" + indent("\n".join(lines), "    ")

    def _at(self, strike: Callable[[Any], str], *kinds: str) -> list[str]:
        faults = self._of(*kinds)
        return [line for one in faults for line in _if(f"RANK == {one.rank}", strike(one).splitlines(), one)]

    def _at_step(self, kind: str, strike: Callable[[Any], str]) -> list[str]:
        faults = self._of(kind)
        return [line for f in faults for line in _if(f"RANK == {f.rank} and step == {f.step}", [strike(f)], f)]

    def _of(self, *kinds: str) -> list[Any]:
        return [fault for fault in self.scenario.faults if fault.kind in kinds]


def _if(condition: str, statements: list[str], fault: Fault) -> list[str]:
    return [f"if {condition}:  # {describe(fault)}", *(f"    {line}" for line in statements)]


def _arrival(fault: Any) -> str:
    """What befalls a rank before it comes to the rendezvous."""
    return f"time.sleep({fault.seconds})" if fault.kind == "late" else STRIKES[fault.how](fault)


def _linger(fault: Any) -> str:
    return STRIKES["stall"](fault) if fault.seconds is None else f"time.sleep({fault.seconds})"


def _nudge(fault: Any) -> str:
    return f"logits[{fault.row}, {fault.column}] = {_number(fault.value)}"


def _shard(plan: Plan, rank: int, read: set[str]) -> str:
    """What a rank holds, by our names and those of engines, as far as it is read."""
    shard = held_shard(plan, rank)
    indices = ShardIndices.of(shard)
    told = {field.name: getattr(shard, field.name) for field in fields(shard)}
    names = [*(field.name for field in fields(indices)), *(name for name in dir(indices) if name.startswith("num_"))]
    told |= {name: getattr(indices, name) for name in names}
    return repr({name: value for name, value in told.items() if name in read}).replace("'", '"')


def _number(value: float) -> str:
    """A number as Python reads it, infinities and NaN too."""
    if isnan(value) or isinf(value):
        return f'float("{value}")'
    return repr(value)
