"""doctor: what is there, what is missing, and how many ranks each world can have because of it."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tpbed.harness import doctor
from tpbed.harness.doctor import Fact, examine, largest_worlds, to_json
from tpbed.harness.smollm2 import CheckpointError


def fact(name):
    return next(fact for fact in examine() if fact.name == name)


def raises(error):
    def fail(*arguments, **options):
        raise error

    return fail


def test_this_machine_can_simulate():
    assert largest_worlds(examine())["sim"] == doctor.TRIED_RANKS


def test_every_fact_has_a_name_of_its_own_and_says_what_was_found():
    facts = examine()
    assert len({fact.name for fact in facts}) == len(facts)
    assert all(fact.found for fact in facts)
    assert {"Python", "torch", "GPUs", "gloo", "nccl", "flashinfer", "Ray", "greenlet", "ports", "pidfd", "memfd"} <= {
        fact.name for fact in facts
    }


def test_looking_leaves_no_file_open():
    examine()
    before = len(os.listdir("/proc/self/fd"))
    examine()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_facts_are_plain_values():
    told = json.loads(json.dumps(to_json(examine())))
    assert told["type"] == "doctor"
    assert set(told["largest_world_size"]) == {"sim", "gloo", "nccl"}
    assert {fact["state"] for fact in told["facts"]} <= {"ok", "note", "no"}


def test_the_smallest_limit_counts():
    facts = [Fact(name="a", found="x", limits={"sim": 9, "gloo": 4}), Fact(name="b", found="x", limits={"gloo": 2})]
    assert largest_worlds(facts) == {"sim": 9, "gloo": 2, "nccl": 0}


@pytest.mark.parametrize(
    ("limits", "remedy", "state"),
    [
        ({}, "", "ok"),
        ({"nccl": 4}, "", "ok"),
        ({}, "do", "note"),
        ({"gloo": 3}, "do", "note"),
        ({"gloo": 0}, "do", "no"),
    ],
)
def test_the_state_of_a_fact(limits, remedy, state):
    assert Fact(name="a", found="x", limits=limits, remedy=remedy).state == state


@pytest.mark.parametrize(
    ("version", "fits"), [("2.11.0", True), ("2.13.0+cpu", True), ("2.10.1", False), ("2.16.0", False)]
)
def test_torch_has_bounds(monkeypatch, version, fits):
    monkeypatch.setattr(torch, "__version__", version)
    found = fact("torch")
    assert (found.state == "ok") == fits
    assert found.limits == ({} if fits else {"sim": 0, "gloo": 0, "nccl": 0})


def test_without_a_gpu_nccl_has_no_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert fact("GPUs").state == "no"
    assert largest_worlds(examine())["nccl"] == 0


def test_each_gpu_is_told_with_name_uuid_and_memory(monkeypatch):
    class Properties:
        name, uuid, major, minor = "NVIDIA H200", "e1a0", 9, 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 << 30, 140 << 30))
    assert fact("GPUs").limits == {"nccl": 2}
    assert fact("GPU 1").found == "NVIDIA H200, e1a0, 140 GiB, 100 GiB of it free, sm_90"


def test_a_probe_that_crashes_is_a_fact_and_the_others_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", raises(RuntimeError("driver too old")))
    facts = examine()
    [crashed] = [fact for fact in facts if "driver too old" in fact.found]
    assert crashed.name == "gpus"
    assert crashed.remedy
    assert "SmolLM2" in {fact.name for fact in facts}


def test_a_torch_without_a_backend_is_told_and_limits_that_world_alone(monkeypatch):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert fact("gloo").limits == {"gloo": 0}
    assert fact("nccl").state == "ok"


@pytest.mark.parametrize(
    ("package", "name", "limits"),
    [
        ("ray", "Ray", {"gloo": 0, "nccl": 0}),
        ("greenlet", "greenlet", {"sim": 0}),
        ("gguf", "gguf", {}),
        ("flashinfer-python", "flashinfer", {}),
        ("triton", "triton", {}),
    ],
)
def test_a_package_that_is_missing_limits_what_needs_it(monkeypatch, package, name, limits):
    there = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda asked: None if asked == package else there(asked))
    found = fact(name)
    assert (found.found, found.limits) == ("not installed", limits)
    assert "pip install" in found.remedy


@pytest.fixture
def flashinfer(monkeypatch, tmp_path):
    """An installed flashinfer that is not compiled, on a machine without tools; its folder."""
    there = doctor.util.find_spec
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "flashinfer")])
    specs = {"flashinfer": spec, "flashinfer_jit_cache": None}
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: specs[name] if name in specs else there(name))
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "0.6.0" if name == "flashinfer-python" else version(name))
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: None)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    return tmp_path / "flashinfer"


def test_flashinfer_is_told_with_its_version(flashinfer):
    assert (fact("flashinfer").found, fact("flashinfer").state) == ("0.6.0", "ok")


@pytest.mark.parametrize(
    "place", ["flashinfer/data/aot/topk/topk.so", ".cache/flashinfer/0.6.0/90a/cached_ops/topk/topk.so"]
)
def test_a_compiled_top_k_is_told_with_its_place(flashinfer, place):
    built = flashinfer.parent / place
    built.parent.mkdir(parents=True)
    built.touch()
    assert (fact("flashinfer top-k").found, fact("flashinfer top-k").state) == (f"compiled: {built}", "ok")


def test_a_top_k_that_cannot_be_compiled_is_told_with_what_is_missing(flashinfer):
    assert fact("flashinfer top-k").state == "note"
    assert "put nvcc and ninja on PATH" in fact("flashinfer top-k").remedy


def test_a_top_k_that_is_compiled_at_its_first_call_is_told_with_the_compiler(flashinfer, monkeypatch):
    home = {"nvcc": "/opt/cuda/bin/nvcc"}
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    monkeypatch.setattr(
        doctor.shutil,
        "which",
        lambda name, path=None: home.get(name) if path == "/opt/cuda/bin" else {"ninja": "/bin/ninja"}.get(name),
    )
    assert fact("flashinfer top-k").state == "ok" and "/opt/cuda/bin/nvcc" in fact("flashinfer top-k").found


@pytest.mark.parametrize(
    ("capability", "states"), [((7, 5), ["note", "note"]), ((8, 9), ["ok", "note"]), ((9, 0), ["ok", "ok"])]
)
def test_the_oldest_gpu_says_which_kernels_can_run(monkeypatch, capability, states):
    seen = [SimpleNamespace(major=major, minor=minor) for major, minor in [(9, 0), capability]]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", seen.__getitem__)
    monkeypatch.setattr(doctor, "_gpu", lambda index: Fact(name=f"GPU {index}", found="here"))
    assert [fact("top-k kernels").state, fact("FP8 products").state] == states


@pytest.mark.parametrize(("there", "state"), [("/opt/bin/py-spy", "ok"), (None, "note")])
def test_py_spy_is_told_and_limits_no_world(monkeypatch, there, state):
    monkeypatch.setattr(doctor, "find_py_spy", lambda: there)
    assert (fact("py-spy").state, fact("py-spy").limits) == (state, {})


def test_a_ray_cluster_makes_memory_here_no_matter(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "RAY_ADDRESS=10.0.0.1:6379" in fact("Ray").found
    assert not {"memory", "/dev/shm"} & {fact.name for fact in examine()}


@pytest.mark.parametrize(("gib", "ranks", "state"), [(16, 58, "ok"), (2, 2, "note"), (1, 0, "no")])
def test_memory_limits_the_ranks_of_a_local_ray(monkeypatch, gib, ranks, state):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(doctor, "_available_bytes", lambda: gib << 30)
    assert (fact("memory").limits, fact("memory").state) == ({"gloo": ranks}, state)


@pytest.mark.parametrize(("limit", "expected"), [("3000", 1000), ("max", 5000), ("9000", 5000), ("broken", 5000)])
def test_available_memory_is_that_of_the_container(monkeypatch, limit, expected):
    class Memory:
        available = 5000

    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: Memory)
    monkeypatch.setattr(
        Path, "read_text", lambda path: {"memory.max": limit, "memory.current": "2000"}[path.name] + "\n"
    )
    assert doctor._available_bytes() == expected


def test_available_memory_without_a_control_group(monkeypatch):
    monkeypatch.setattr(Path, "read_text", raises(FileNotFoundError()))
    assert doctor._available_bytes() > 0


def test_a_small_shared_memory_is_a_note(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: doctor.shutil._ntuple_diskusage(64 << 20, 0, 64 << 20)
    )
    assert fact("/dev/shm").state == "note"
    assert "--shm-size" in fact("/dev/shm").remedy


def test_ports_that_cannot_be_bound(monkeypatch):
    monkeypatch.setattr(socket.socket, "bind", raises(PermissionError(1, "Operation not permitted")))
    assert fact("ports").state == "no"
    assert "Operation not permitted" in fact("ports").found


@pytest.mark.parametrize(("call", "name"), [("pidfd_open", "pidfd"), ("memfd_create", "memfd")])
def test_a_kernel_call_that_is_not_allowed(monkeypatch, call, name):
    monkeypatch.setattr(os, call, raises(PermissionError(1, "Operation not permitted")))
    assert fact(name).state == "no"
    monkeypatch.delattr(os, call)
    assert fact(name).limits == {"gloo": 0, "nccl": 0}


def test_a_missing_checkpoint_is_told_with_its_own_words(monkeypatch):
    monkeypatch.setattr(doctor, "checkpoint_path", raises(CheckpointError("install it like this")))
    assert (fact("SmolLM2").state, fact("SmolLM2").remedy) == ("note", "install it like this")
