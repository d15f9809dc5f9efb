"""Benchmarks of the selector on one GPU: every figure beside what it is measured against, in one run."""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbed.selector.fp8 import FP8_MAX, pack_fp8_per_channel, pack_fp8_per_tensor
from tpbed.selector.lattice import TransitionTables, lattice_scores
from tpbed.selector.merge import merge_gathered
from tpbed.selector.packed import best_candidates, pack_keys
from tpbed.selector.topk import flashinfer_topk, has_flashinfer, torch_topk
from tpbed.selector.triton_fp8 import quantise_rows, scale_logits
from tpbed.selector.triton_nvfp4 import Tiling, TritonNvfp4, triton_nvfp4
from tpbed.selector.triton_topk import TritonTopK, has_triton, triton_topk
from tpbed.selector.walk import DraftParams, Noise, draft_distribution, walk
from tpbed.tp.errors import TestbedError

Part = Literal["head", "topk", "fp8", "nvfp4", "merge", "draft", "sweep", "tilings"]
"""What can be measured.

head: a bf16 head, alone and with mask and top-k. topk: the top-k alone. fp8: FP8 heads. nvfp4: NVFP4 heads, weight
only. merge: what comes after the gather. draft: lattice and walk. sweep: how the Triton top-k is best tuned; tilings:
how the NVFP4 product is."""
Mode = Literal["graph", "eager"]
Call = Callable[[int], Any]
FLOOR = "bytes over copy bandwidth"
PADDING = 61  # columns of the shard that are no tokens, as on the rank that holds the tail


class NoGpuError(TestbedError):
    """A benchmark of the GPU on a machine, or with packages, that cannot run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The model that is measured: Qwen3.8-27B with its DFlash2 draft, unless said otherwise."""

    vocab: int = 248_320
    hidden: int = 5_120
    k: int = 16
    slots: int = 7
    rank: int = 256  # of the transition tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Something to time. call: given the number of the turn, by which weights rotate.

    against: the contender of the same case to compare with, or FLOOR; "" compares with nothing.
    moved: bytes that it must move at least, for FLOOR.
    """

    call: Call
    against: str = ""
    moved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A median in microseconds, and its ratio to another median of the same case and mode; None without one."""

    part: Part
    name: str
    tp: int
    rows: int
    columns: int
    mode: Mode
    us: float
    against: str
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """All figures of one run, with what it takes to repeat it."""

    card: str
    versions: dict[str, str]
    command: str
    copy_tb_per_s: float
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]  # what was not measured, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shard and a number of rows: the contenders are timed in turn, so that a ratio compares like with like."""

    part: Part
    tp: int
    rows: int
    columns: int
    contenders: dict[str, Contender]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to measure; sweep and tilings only if they are named, since they compile for a minute.

    repeats: calls in one graph. rounds: turns of all contenders, of which medians are taken.
    """

    parts: tuple[Part, ...] = ("head", "topk", "fp8", "nvfp4", "merge", "draft")
    tps: tuple[int, ...] = (1, 2, 4, 8)
    rows: tuple[int, ...] = (7, 56, 448)
    modes: tuple[Mode, ...] = get_args(Mode)
    geometry: Geometry = field(default_factory=Geometry)
    repeats: int = 10
    rounds: int = 15


def bench_gpu(asked: Asked, on_progress: Callable[[str], None] = lambda message: None) -> GpuReport:
    """Measure on the current CUDA device.

    Calls that are timed in a graph are timed as a part of one that holds `repeats` of them, so that what starts a graph
    counts little. Weights are larger than the L2 cache and rotate. Raises NoGpuError where it cannot be done.
    """
    if not torch.cuda.is_available():
        raise NoGpuError("tpbed bench gpu needs a CUDA device: `tpbed doctor` says what is missing.")
    on_progress("measuring the copy bandwidth")
    bandwidth = copy_bandwidth()
    figures: list[Figure] = []
    for case in cases(asked, torch.device("cuda")):
        on_progress(f"{case.part}: TP={case.tp}, {case.rows} rows of {case.columns:,} columns")
        for mode in asked.modes:
            figures += judge(case, mode, time_case(case, mode, asked), bandwidth)
    return GpuReport(
        card=torch.cuda.get_device_name(),
        versions=versions(),
        command=" ".join(["tpbed", *sys.argv[1:]]),
        copy_tb_per_s=bandwidth / 1e12,
        figures=tuple(figures),
        notes=tuple(missing()),
    )


def missing() -> Iterator[str]:
    """What this machine's packages leave out."""
    if not has_triton():
        yield "triton is not installed: its top-k, its NVFP4 product and the scaling of FP8 products are left out."
    if not has_flashinfer():
        yield "flashinfer is not installed: its top-k is left out."


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    packages = ("torch", "triton", "flashinfer-python", "tpbed")
    found = {name: _version(name) for name in packages}
    return {"python": platform.python_version(), "CUDA of torch": str(torch.version.cuda), **found}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def cases(asked: Asked, device: torch.device) -> Iterator[Case]:
    """All that is asked for, one at a time: each holds its weights, and lets them go."""
    for part in asked.parts:
        for tp in asked.tps if part != "draft" else asked.tps[:1]:
            if part == "merge" and tp == 1:
                continue
            for rows in asked.rows:
                yield _BUILDERS[part](asked.geometry, tp, rows, device)


def judge(case: Case, mode: Mode, medians: dict[str, float], bandwidth: float) -> list[Figure]:
    """Medians in microseconds, by contender, as figures with their ratios."""
    return [
        Figure(
            part=case.part,
            name=name,
            tp=case.tp,
            rows=case.rows,
            columns=case.columns,
            mode=mode,
            us=us,
            against=case.contenders[name].against,
            ratio=_ratio(case.contenders[name], us, medians, bandwidth),
        )
        for name, us in medians.items()
    ]


def _ratio(contender: Contender, us: float, medians: dict[str, float], bandwidth: float) -> float | None:
    if contender.against == FLOOR:
        return us / (contender.moved / bandwidth * 1e6)
    return us / medians[contender.against] if contender.against else None


def time_case(case: Case, mode: Mode, asked: Asked) -> dict[str, float]:
    """The median of each contender, in microseconds for one call."""
    clock = _graph_clock if mode == "graph" else _eager_clock
    clocks = {name: clock(contender.call, asked.repeats) for name, contender in case.contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(asked.rounds):
        for name, read in clocks.items():
            times[name].append(read())
    return {name: statistics.median(found) for name, found in times.items()}


def _graph_clock(call: Call, repeats: int) -> Callable[[], float]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for turn in range(3):
            call(turn)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        for turn in range(repeats):
            call(turn)
    return partial(_elapsed_us, graph.replay, repeats)


def _eager_clock(call: Call, repeats: int) -> Callable[[], float]:
    def calls() -> None:
        for turn in range(repeats):
            call(turn)

    calls()
    return partial(_elapsed_us, calls, repeats)


def _elapsed_us(run: Callable[[], Any], repeats: int) -> float:
    """Of one of the repeats, by the device's own clock, from idle to idle."""
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e3 / repeats


def copy_bandwidth(megabytes: int = 2048) -> float:
    """Bytes a second that a copy within the device's memory reads and writes, together."""
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    times = [_elapsed_us(lambda: target.copy_(source), 1) for _ in range(20)]
    return 2 * source.numel() / (statistics.median(times) / 1e6)


def _columns(geometry: Geometry, tp: int) -> tuple[int, int]:
    """The columns that a shard holds, and how many of them are real where it holds the tail."""
    return geometry.vocab // tp, geometry.vocab // tp - PADDING


def _draw(seed: int, *shape: int, device: torch.device) -> Tensor:
    draw = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)


def _weights(geometry: Geometry, tp: int, device: torch.device) -> list[Tensor]:
    """Two, so that a head never finds its weight in the cache where one of the last turn is left."""
    return [_draw(seed, geometry.vocab // tp, geometry.hidden, device=device) for seed in range(2)]


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def head_case(geometry: Geometry, tp: int, rows: int, device: torch.device) -> Case:
    """A bf16 head alone, against its bytes; with mask and top-k, against the head alone."""
    columns, real = _columns(geometry, tp)
    hidden, weights = _draw(9, rows, geometry.hidden, device=device), _weights(geometry, tp, device)
    moved = _bytes(hidden, weights[0]) + rows * columns * 2

    def head(turn: int) -> Tensor:
        return F.linear(hidden, weights[turn % 2])

    def masked(turn: int) -> Tensor:
        logits = head(turn)
        logits[:, real:].fill_(float("-inf"))
        return logits

    found = {"head": Contender(call=head, against=FLOOR, moved=moved)}
    if has_triton():
        keys = partial(triton_topk.keys, k=geometry.k, num_org=real)
        found["head, Triton top-k with the mask"] = Contender(call=lambda turn: keys(head(turn)), against="head")
    for name, topk in _topks().items():
        call = partial(lambda turn, topk: topk(masked(turn), geometry.k), topk=topk)
        found[f"head, mask, {name}"] = Contender(call=call, against="head")
    return Case(part="head", tp=tp, rows=rows, columns=columns, contenders=found)


def _topks() -> dict[str, Any]:
    return {**({"flashinfer": flashinfer_topk} if has_flashinfer() else {}), "torch.topk": torch_topk}


def _flashinfer_smallest(logits: Tensor, k: int) -> Any:
    """Its only setting whose answer no sharding changes."""
    from flashinfer import top_k

    return top_k(logits, k, sorted=True, deterministic=True, tie_break=1)


def topk_case(geometry: Geometry, tp: int, rows: int, device: torch.device) -> Case:
    """The top-k alone, each on the same logits, against torch.topk."""
    columns, k = geometry.vocab // tp, geometry.k
    logits = _draw(10, rows, columns, device=device)
    kernels: dict[str, Any] = _topks()
    if has_flashinfer():
        kernels["flashinfer, tie_break=1"] = _flashinfer_smallest
    if has_triton():
        kernels["Triton, two tensors"] = triton_topk
        kernels["Triton, packed keys"] = partial(triton_topk.keys, num_org=columns)
    found = {
        name: Contender(call=partial(lambda _, kernel: kernel(logits, k=k), kernel=kernel), against="torch.topk")
        for name, kernel in kernels.items()
    }
    return Case(part="topk", tp=tp, rows=rows, columns=columns, contenders=found)


def sweep_case(geometry: Geometry, tp: int, rows: int, device: torch.device) -> Case:
    """The Triton top-k, tuned in every way, against the way that it is tuned by itself."""
    columns, itself = geometry.vocab // tp, "by itself"
    logits = _draw(10, rows, columns, device=device)
    ways = {f"group {group}, {warps} warps": TritonTopK(group=group, warps=warps) for group, warps in _WAYS}
    ways["launches one after the other"] = TritonTopK(overlap=False)
    found = {
        name: Contender(
            call=partial(lambda _, kernel: kernel.keys(logits, geometry.k, num_org=columns), kernel=kernel),
            against=itself,
        )
        for name, kernel in ({itself: triton_topk} | ways if has_triton() else {}).items()
    }
    return Case(part="sweep", tp=tp, rows=rows, columns=columns, contenders=found)


_WAYS = [(group, warps) for group in (32, 64, 128) for warps in (4, 8)]


def fp8_case(geometry: Geometry, tp: int, rows: int, device: torch.device) -> Case:
    """FP8 heads, W8A8: products of activations that are packed already, and whole heads that pack them."""
    columns, real = _columns(geometry, tp)
    hidden, weights = _draw(9, rows, geometry.hidden, device=device), _weights(geometry, tp, device)
    by_tensor = [pack_fp8_per_tensor(weight) for weight in weights]
    by_channel = [pack_fp8_per_channel(weight) for weight in weights]
    x, x_scales = pack_fp8_per_channel(hidden)
    x_one, x_scale = pack_fp8_per_tensor(hidden)
    one = torch.ones(1, device=device)

    def product(packed: Tensor, weight: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch._scaled_mm(packed, weight.t(), scale_a=a, scale_b=b, out_dtype=dtype)

    def per_tensor(turn: int) -> Tensor:
        weight, scale = by_tensor[turn % 2]
        return product(x_one, weight, x_scale, scale)

    def per_channel(turn: int) -> Tensor:
        weight, scale = by_channel[turn % 2]
        return product(x, weight, x_scales, scale.t())

    def unscaled(turn: int, dtype: torch.dtype) -> Tensor:
        return product(x, by_channel[turn % 2][0], one, one, dtype)

    tensor, moved = "FP8 product, per tensor", _bytes(x, by_tensor[0][0]) + rows * columns * 2
    found = {
        "bf16 product": Contender(call=lambda turn: F.linear(hidden, weights[turn % 2])),
        tensor: Contender(call=per_tensor, against="bf16 product"),
        "FP8 product, per tensor, beside its bytes": Contender(call=per_tensor, against=FLOOR, moved=moved),
        "FP8 product, per channel, torch's own": Contender(call=per_channel, against=tensor),
    }
    if has_triton():
        rows_of = x_scales.flatten()
        columns_of = [scale.flatten() for _, scale in by_channel]

        def scaled_after(turn: int, dtype: torch.dtype) -> Tensor:
            return scale_logits(unscaled(turn, dtype), rows_of, columns_of[turn % 2], torch.bfloat16)

        def scaled_in_topk(turn: int, dtype: torch.dtype) -> Tensor:
            scales = rows_of, columns_of[turn % 2]
            raw = unscaled(turn, dtype)
            return triton_topk.keys(raw, geometry.k, num_org=real, scales=scales, dtype=torch.bfloat16)

        tensor_topk = "FP8 product, per tensor, then top-k"
        found |= {
            "FP8 product, per channel, scaled after, float32 between": Contender(
                call=partial(scaled_after, dtype=torch.float32), against=tensor
            ),
            "FP8 product, per channel, scaled after, bf16 between": Contender(
                call=partial(scaled_after, dtype=torch.bfloat16), against=tensor
            ),
            tensor_topk: Contender(call=lambda turn: triton_topk.keys(per_tensor(turn), geometry.k, num_org=real)),
            "FP8 product, per channel, scaled in the top-k, float32 between": Contender(
                call=partial(scaled_in_topk, dtype=torch.float32), against=tensor_topk
            ),
            "FP8 product, per channel, scaled in the top-k, bf16 between": Contender(
                call=partial(scaled_in_topk, dtype=torch.bfloat16), against=tensor_topk
            ),
            "activations per row, Triton": Contender(
                call=lambda _: quantise_rows(hidden, largest=FP8_MAX), against="activations per row, torch"
            ),
        }
    found["activations per row, torch"] = Contender(call=lambda _: pack_fp8_per_channel(hidden))
    return Case(part="fp8", tp=tp, rows=rows, columns=columns, contenders=found)


def merge_case(geometry: Geometry, tp: int, rows: int, device: torch.device) -> Case:
    """What a rank does with the candidates that were gathered: one packed key each, or a value and an id."""
    count, k = tp * geometry.k, geometry.k
    values = _draw(11, rows, count, device=device).float()
    ids = torch.randperm(geometry.vocab, device=device)[:count].expand(rows, count).contiguous()
    keys = pack_keys(values, ids)
    two = "values and ids"
    found = {
        two: Contender(call=lambda _: merge_gathered(values, ids, k)),
        "packed keys": Contender(call=lambda _: best_candidates(keys, k), against=two),
    }
    if has_triton():
        found["packed keys, Triton"] = Contender(call=lambda _: triton_topk.best_candidates(keys, k), against=two)
    return Case(part="merge", tp=tp, rows=rows, columns=count, contenders=found)


def draft_case(geometry: Geometry, tp: int, rows: int, device: torch.device) -> Case:
    """Lattice and walk, greedy and sampled requests in turn, against the lattice alone."""
    requests, slots, k = max(1, rows // geometry.slots), geometry.slots, geometry.k
    tables = TransitionTables(
        projection=_draw(1, geometry.rank, geometry.hidden, device=device),
        predecessor=_draw(2, geometry.vocab, geometry.rank, device=device),
        successor=_draw(3, geometry.vocab, geometry.rank, device=device),
    )
    hidden = _draw(4, requests, slots, geometry.hidden, device=device)
    ids = torch.randint(geometry.vocab, (requests, slots, k), device=device)
    unary = _draw(5, requests, slots, k, device=device).float()
    every = torch.arange(requests, device=device)
    params = DraftParams(
        temperature=every.remainder(2).float(), top_k=torch.zeros_like(every), top_p=torch.ones_like(every).float()
    )
    noise = Noise(rule="gumbel", seeds=every, positions=every)

    def lattice(_: int) -> Tensor:
        return lattice_scores(ids, unary, hidden, every, tables)

    found = {
        "lattice": Contender(call=lattice),
        "lattice and walk": Contender(
            call=lambda turn: walk(ids, draft_distribution(lattice(turn), params), params, noise), against="lattice"
        ),
    }
    return Case(part="draft", tp=tp, rows=requests * slots, columns=geometry.vocab, contenders=found)


def nvfp4_case(geometry: Geometry, tp: int, rows: int, device: torch.device) -> Case:
    """An NVFP4 head of 16-bit activations, against its bytes and against the bf16 product; then with mask and top-k."""
    columns, real = _columns(geometry, tp)
    hidden, weights = _draw(9, rows, geometry.hidden, device=device), _weights(geometry, tp, device)
    found = {"bf16 product": Contender(call=lambda turn: F.linear(hidden, weights[turn % 2]))}
    if has_triton():
        product, moved = _nvfp4_product(geometry, tp, hidden, triton_nvfp4)
        keys = partial(triton_topk.keys, k=geometry.k, num_org=real)
        found["NVFP4 product"] = Contender(call=product, against="bf16 product")
        found["NVFP4 product, beside its bytes"] = Contender(call=product, against=FLOOR, moved=moved)
        found["NVFP4 product, Triton top-k with the mask"] = Contender(
            call=lambda turn: keys(product(turn)), against="NVFP4 product"
        )
    return Case(part="nvfp4", tp=tp, rows=rows, columns=columns, contenders=found)


def tilings_case(geometry: Geometry, tp: int, rows: int, device: torch.device) -> Case:
    """The NVFP4 product, tiled in every way, against the way that it is tiled by itself."""
    hidden, itself = _draw(9, rows, geometry.hidden, device=device), "by itself"
    kernels = {itself: triton_nvfp4} | {_told(tiling): TritonNvfp4(tiling=tiling) for tiling in _TILINGS}
    found = {
        name: Contender(call=_nvfp4_product(geometry, tp, hidden, kernel)[0], against=itself)
        for name, kernel in (kernels if has_triton() else {}).items()
    }
    return Case(part="tilings", tp=tp, rows=rows, columns=geometry.vocab // tp, contenders=found)


def _told(tiling: Tiling) -> str:
    return f"{tiling.columns} columns, {tiling.units} units, {tiling.warps} warps, {tiling.stages} stages"


_TILINGS = [
    Tiling(columns=columns, units=units, warps=warps, stages=stages)
    for columns, units, warps, stages in (
        (64, 128, 4, 5), (64, 256, 4, 3), (64, 256, 4, 4), (128, 128, 4, 3), (128, 128, 4, 4), (128, 128, 8, 3),
        (128, 128, 8, 4), (128, 256, 8, 3), (256, 128, 8, 3),
    )
]  # fmt: skip


def _nvfp4_product(geometry: Geometry, tp: int, hidden: Tensor, kernel: TritonNvfp4) -> tuple[Call, int]:
    """The product with two weights of random codes, in turn, and the bytes that it must move."""
    columns, units, device = geometry.vocab // tp, geometry.hidden, hidden.device
    draw = torch.Generator(device).manual_seed(11)
    packed = [
        torch.randint(256, (columns, units // 2), generator=draw, device=device, dtype=torch.uint8) for _ in range(2)
    ]
    scale = (torch.rand(columns, units // 16, generator=draw, device=device) + 0.5).to(torch.float8_e4m3fn)
    scales = [scale, scale.clone()]
    overall = torch.full((1,), 0.01, device=device)

    def product(turn: int) -> Tensor:
        return kernel(hidden, packed[turn % 2], scales[turn % 2], overall, divides=False, dtype=torch.bfloat16)

    return product, _bytes(hidden, packed[0], scale) + len(hidden) * columns * 2


_BUILDERS: dict[Part, Callable[[Geometry, int, int, torch.device], Case]] = {
    "head": head_case,
    "topk": topk_case,
    "fp8": fp8_case,
    "nvfp4": nvfp4_case,
    "merge": merge_case,
    "draft": draft_case,
    "sweep": sweep_case,
    "tilings": tilings_case,
}


def by_case(figures: Sequence[Figure]) -> dict[tuple[Part, str, int, int], dict[Mode, Figure]]:
    """Figures side by side: by part, name, TP and rows, those of each mode."""
    found: dict[tuple[Part, str, int, int], dict[Mode, Figure]] = {}
    for figure in figures:
        found.setdefault((figure.part, figure.name, figure.tp, figure.rows), {})[figure.mode] = figure
    return found
