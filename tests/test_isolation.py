"""What a simulated rank sets is its own: peers do not see it, it finds it again, and the caller gets its own back."""

import _thread
import contextlib
import contextvars
import ctypes
import os
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tpbed.tp import isolation
from tpbed.tp.rank import NoWorldError, current
from tpbed.tp.registers import START_SEED
from tpbed.tp.simulated import SimulatedWorld

NAME = "TPBED_TEST_VARIABLE"


class Silent(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SilentDispatch(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def numpy_state():
    _, words, place, has_gauss, gauss = np.random.get_state()
    return words.tobytes(), place, has_gauss, gauss


def second_normal():
    np.random.seed(3)
    np.random.standard_normal()  # draws two and keeps one


def torch_state():
    return torch.get_rng_state().numpy().tobytes()


def entered(make):
    """Enter a context manager and leave it open, as a rank does that waits inside one."""

    def enter():
        manager = make()
        manager.__enter__()
        return manager

    return enter


def record_warnings():
    manager = warnings.catch_warnings(record=True)
    manager.__enter__().append("mine")
    return manager


LEAKS = {
    "grad mode": ("TorchModes", lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "no_grad": ("TorchModes", entered(torch.no_grad), torch.is_grad_enabled),
    "inference mode": ("TorchModes", entered(torch.inference_mode), torch.is_inference_mode_enabled),
    "autocast": ("TorchModes", entered(lambda: torch.autocast("cpu")), lambda: torch.is_autocast_enabled("cpu")),
    "default device": ("TorchModes", lambda: torch.set_default_device("meta"), torch.get_default_device),
    "device context": ("TorchModes", entered(lambda: torch.device("meta")), lambda: torch.empty(1).device),
    "function mode": ("TorchModes", entered(Silent), torch._C._len_torch_function_stack),
    "dispatch mode": ("TorchModes", entered(SilentDispatch), torch._C._len_torch_dispatch_stack),
    "autocast dtype": (
        "AutocastTypes",
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "autocast cache": (
        "AutocastTypes",
        lambda: torch.set_autocast_cache_enabled(False),
        torch.is_autocast_cache_enabled,
    ),
    "default dtype": ("DefaultType", lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "torch seed": ("TorchRandom", lambda: torch.manual_seed(5), torch_state),
    "torch draw": ("TorchRandom", lambda: torch.rand(3), torch_state),
    "numpy seed": ("NumpyRandom", lambda: np.random.seed(5), numpy_state),
    "numpy draw": ("NumpyRandom", lambda: np.random.random(), numpy_state),
    "numpy normal": ("NumpyRandom", second_normal, numpy_state),
    "numpy generator": (
        "NumpyRandom",
        lambda: np.random.set_bit_generator(np.random.MT19937(9)),
        lambda: np.random.get_bit_generator().state["state"]["key"].tobytes(),
    ),
    "random seed": ("PythonRandom", lambda: random.seed(5), random.getstate),
    "random draw": ("PythonRandom", random.random, random.getstate),
    "random gauss": ("PythonRandom", lambda: random.gauss(0, 1), random.getstate),
    "warning filters": (
        "WarningFilters",
        lambda: warnings.simplefilter("ignore", BytesWarning),
        lambda: [entry for entry in warnings.filters if entry[2] is BytesWarning and entry[0] == "ignore"],
    ),
    "caught warnings": (
        "WarningFilters",
        entered(lambda: warnings.catch_warnings(action="ignore", category=BytesWarning)),
        lambda: [entry for entry in warnings.filters if entry[2] is BytesWarning and entry[0] == "ignore"],
    ),
    "recorded warnings": (
        "WarningFilters",
        lambda: record_warnings(),
        lambda: "mine" in getattr(warnings._showwarnmsg_impl, "__self__", ()),
    ),
    "shown warnings": (
        "WarningFilters",
        lambda: setattr(warnings, "showwarning", print),
        lambda: warnings.showwarning is print,
    ),
    "variable": ("Environment", lambda: os.environ.update({NAME: "1"}), lambda: os.environ.get(NAME)),
    "variable in bytes": (
        "Environment",
        lambda: os.environb.update({NAME.encode(): b"1"}),
        lambda: os.environb.get(NAME.encode()),
    ),
    "removed variable": ("Environment", lambda: os.environ.pop("PATH"), lambda: "PATH" in os.environ),
    "group": ("Groups", lambda: dist.new_group([0, 1]), lambda: dist.get_pg_count()),
    "default group": ("Groups", lambda: None, lambda: dist.get_rank()),
    "context": ("Context", lambda: None, lambda: current().rank),
}


@pytest.fixture(autouse=True)
def clean_up():
    """The tests without a register leave in this process what the register would have kept out of it."""
    variables, generator, gauss = dict(os.environ), np.random.get_bit_generator(), np.random.get_state()
    filters, shows = list(warnings.filters), (warnings.showwarning, warnings._showwarnmsg_impl)
    guard = torch._C._InferenceMode(False)
    guard.__enter__()
    yield
    for _ in range(torch._C._len_torch_dispatch_stack()):
        torch._C._pop_torch_dispatch_stack(None)
    torch.set_default_device(None)
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    torch.utils._device.CURRENT_DEVICE = None
    guard.__exit__(None, None, None)
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_cache_enabled(True)
    torch.set_default_dtype(torch.float32)
    np.random.set_bit_generator(generator)
    np.random.set_state(gauss)
    warnings.filters[:] = filters
    warnings.showwarning, warnings._showwarnmsg_impl = shows
    os.environ.clear()
    os.environ.update(variables)


def program(set_it, read):
    def run(rank):
        before = read()
        if rank == 0:
            kept.append(set_it())  # a guard that is collected is undone
        dist.barrier()
        after = read()
        dist.barrier()
        return before, after

    kept = []
    return run


def kept_apart(set_it, read):
    """Whether rank 1 saw nothing of what rank 0 set before it, rank 0 found it again, and the caller saw nothing."""
    with contextlib.suppress(ValueError, NoWorldError):  # outside a world there is no rank, and no group
        caller = read()
    (first, mine), (unset, others) = (
        result or (None, None) for result in SimulatedWorld(2).run(program(set_it, read)).results
    )
    with contextlib.suppress(ValueError, NoWorldError):
        if read() != caller:
            return False
    if read in (LEAKS["default group"][2], LEAKS["context"][2]):
        return (first, mine, unset, others) == (0, 0, 1, 1)
    return first == unset == others != mine


@pytest.mark.parametrize("leak", LEAKS)
def test_what_a_rank_sets_is_its_own(leak):
    _, set_it, read = LEAKS[leak]
    assert kept_apart(set_it, read)


@pytest.mark.parametrize("leak", LEAKS)
def test_without_its_register_it_would_leak(leak, monkeypatch):
    name, set_it, read = LEAKS[leak]
    try:
        isolation.use(register for register in isolation.REGISTERS if type(register).__name__ != name)
        assert not kept_apart(set_it, read)
    finally:
        isolation.use(isolation.REGISTERS)


def test_every_register_has_a_leak_that_it_stops():
    assert {type(register).__name__ for register in isolation.REGISTERS} - {"Cuda"} == {
        leak[0] for leak in LEAKS.values()
    }


def test_context_variables_need_no_register():
    setting = contextvars.ContextVar("setting", default="unset")

    def program(rank):
        before = setting.get()
        setting.set(rank)
        with np.errstate(divide=["ignore", "raise"][rank]):
            dist.barrier()
            return before, setting.get(), np.geterr()["divide"]

    setting.set("the caller's")
    assert SimulatedWorld(2).run(program).results == (("unset", 0, "ignore"), ("unset", 1, "raise"))
    assert setting.get() == "the caller's"


def draws():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random(), np.random.standard_normal(3).tolist()


def test_ranks_draw_as_if_each_were_alone():
    def alone(rank):
        return draws(), draws()

    def together(rank):
        first = draws()
        dist.barrier()
        return first, draws()

    assert SimulatedWorld(3).run(together).results == SimulatedWorld(1).run(alone).results * 3


def test_all_ranks_start_with_the_stated_seed():
    torch.manual_seed(START_SEED)
    np.random.seed(START_SEED)
    random.seed(START_SEED)
    expected = draws()
    draws()
    assert SimulatedWorld(2).run(lambda rank: draws()).results == (expected, expected)


def test_a_normal_deviate_that_numpy_keeps_back_stays_with_its_rank():
    def normals(rank):
        np.random.seed(rank)
        drawn = []
        for _ in range(5):
            drawn.append(np.random.standard_normal())
            dist.barrier()
        return drawn

    assert SimulatedWorld(2).run(normals).results == tuple(
        np.random.RandomState(seed).standard_normal(5).tolist() for seed in (0, 1)
    )


def test_ranks_start_with_torchs_defaults_whatever_the_caller_set():
    def defaults(rank):
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            torch.get_default_device(),
        )

    torch.set_default_dtype(torch.float64)
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        results = SimulatedWorld(2).run(defaults).results
    assert results == ((True, False, False, torch.float32, torch.device("cpu")),) * 2


def test_a_default_device_can_be_unset_after_a_wait():
    def program(rank):
        torch.set_default_device("meta" if rank == 0 else "cpu")
        dist.barrier()
        torch.set_default_device(None)
        return torch.get_default_device().type

    assert SimulatedWorld(2).run(program).results == ("cpu", "cpu")


def test_a_launchers_variables_are_set_for_each_rank():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    results = SimulatedWorld(3).run(lambda rank: [os.environ[name] for name in names]).results
    assert results == tuple([str(rank), str(rank), "3", "3"] for rank in range(3))
    assert SimulatedWorld(1).run(lambda rank: {"MASTER_ADDR", "MASTER_PORT", "PATH"} <= set(os.environ)).results == (
        True,
    )
    assert not set(names) & set(os.environ)


def hangs(rank):
    if rank:
        dist.barrier()


def raises(rank):
    raise ValueError("here")


def interrupted(rank):
    _thread.interrupt_main()


def killed(rank):
    current().die("kill", "on purpose")


@pytest.mark.parametrize("end", [hangs, raises, interrupted, killed])
def test_the_caller_gets_its_own_state_back_however_the_run_ends(end):
    def disturb(rank):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float16)
        torch.set_default_device("meta")
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        os.environ[NAME] = str(rank)
        end(rank)

    def state():
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        return (*modes, torch.get_default_dtype(), torch.get_default_device(), torch_state(), numpy_state(),
                random.getstate(), dict(os.environ), dist.is_initialized())  # fmt: skip

    np.random.standard_normal()  # NumPy keeps one
    random.gauss(0, 1)  # and Python too
    with torch.inference_mode(), torch.autocast("cpu"):
        before = state()
        with contextlib.suppress(KeyboardInterrupt):
            SimulatedWorld(2).run(disturb)
        assert state() == before


def test_c_code_sees_the_callers_variables_after_the_run():
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    path = getenv(b"PATH")

    def disturb(rank):
        os.environ[NAME] = "1"
        del os.environ["PATH"]

    SimulatedWorld(2).run(disturb)
    assert (getenv(NAME.encode()), getenv(b"PATH")) == (None, path)


def test_modes_of_the_last_rank_to_arrive_do_not_see_the_data_move():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def gather(rank):
        given, got = torch.ones(3), [torch.empty(3) for _ in range(2)]
        with Count() as count:
            dist.all_gather(got, given)
        return count.calls, torch.stack(got).sum().item()

    assert SimulatedWorld(2).run(gather).results == ((0, 6.0), (0, 6.0))
