"""The pytest plugin: `@pytest.mark.tp(4)` runs a test's body on every rank of a warm world, and explains what hangs.

Loads pytest alone; torch, Ray and the rest come in when a test first asks for ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from tpbed.harness.ranks import Ranks, RanksFailed

MARK = (
    "tp(world_size, world=None, stall_after_s=10.0, schedules=None, schedule=''): run the test's body on every rank of "
    "a world of that size - in all orders of turns if schedules='all', in 100 of them if 100 -, or of "
)
WORLDS = ("sim", "gloo", "nccl")
RANKS = pytest.StashKey["Ranks"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--tp-world: where ranks live for marks that do not say it."""
    group = parser.getgroup("tpbed", "tensor-parallel tests on the ranks of a world (tpbed)")
    group.addoption(
        "--tp-world",
        choices=WORLDS,
        default="sim",
        help="where the ranks of `@pytest.mark.tp` live unless the mark says it: sim (this process, the default), "
        "gloo (Ray actors, CPU), nccl (Ray actors, a GPU each)",
    )
    group.addoption(
        "--tp-schedule",
        metavar="WORD",
        default="",
        help="who runs when, of the simulated ranks of every test marked tp, as a failed search of schedules tells it: "
        "0,1,1,0 or seed:17",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", f"{MARK}each size of a list; the argument `rank` is then the rank")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A mark with a list of world sizes is one test per size."""
    mark = metafunc.definition.get_closest_marker("tp")
    if mark is not None and not isinstance(_size_of(mark), int):
        metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", list(_size_of(mark)), ids=lambda size: f"tp{size}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on Ray actors stay on one pytest-xdist worker under `--dist loadgroup`: they share their actors."""
    for item in items:
        mark = item.get_closest_marker("tp")
        if mark is not None and _world_of(mark, config) != "sim":
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank that runs the body of a test marked `tp`; -1 for fixtures, which run once and not on a rank."""
    if request.node.get_closest_marker("tp") is None:
        raise pytest.UsageError("`rank` is what a test marked with @pytest.mark.tp(world_size) is given on each rank.")
    return -1


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks that a test marked `tp` runs on."""
    mark = request.node.get_closest_marker("tp")
    if mark is None:
        raise pytest.UsageError("`world_size` needs the mark @pytest.mark.tp(world_size).")
    return int(_size_of(mark))


@pytest.fixture(scope="session")
def tp(pytestconfig: pytest.Config) -> Ranks:
    """Run programs on ranks from inside a test: `tp(program, world_size=4)` returns their results, by rank.

    For tests that draw with hypothesis, or run several programs. Raises RanksFailed, an AssertionError, with the
    explanation of what went wrong.
    """
    return _ranks(pytestconfig)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a marked coroutine, and a marked test that draws with hypothesis: each rank would draw for itself."""
    if item.get_closest_marker("tp") is not None and iscoroutinefunction(getattr(item, "obj", None)):
        pytest.fail(f"{item.nodeid} is marked tp and is a coroutine: give the mark a plain function.", pytrace=False)
    if item.get_closest_marker("tp") is not None and hasattr(getattr(item, "obj", None), "hypothesis"):
        pytest.fail(
            f"{item.nodeid} is marked tp and draws with hypothesis, so each rank would draw for itself: take the "
            "fixture `tp` instead of the mark, draw in the test, and call tp(program, world_size=...).",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body on the ranks instead of here."""
    mark = pyfuncitem.get_closest_marker("tp")
    if mark is None:
        return None
    failed = _failure(pyfuncitem, mark)
    if failed is not None:
        _fail(failed)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks of this session."""
    ranks = config.stash.get(RANKS, None)
    if ranks is not None:
        ranks.close()


def _failure(item: pytest.Function, mark: pytest.Mark) -> RanksFailed | None:
    from tpbed.harness.ranks import RanksFailed, UndecidedError

    schedule = item.config.getoption("--tp-schedule")
    try:
        _ranks(item.config)(
            _body(item),
            world_size=_world_size(item, mark),
            world=_world_of(mark, item.config),
            stall_after_s=mark.kwargs.get("stall_after_s", 10.0),
            schedule=schedule or mark.kwargs.get("schedule", ""),
            schedules=None if schedule else mark.kwargs.get("schedules"),
        )
    except UndecidedError as error:
        pytest.fail(str(error), pytrace=False)
    except RanksFailed as failed:
        if failed.schedule:
            failed.args = (f"{failed}, or pytest '{item.nodeid}' --tp-schedule {failed.schedule}",)
        return failed  # and not raised from here: pytest would show it twice, as a chain
    return None


def _fail(failed: RanksFailed) -> NoReturn:
    ends = [ledger.end for ledger in failed.run.ledgers]
    skipped = [end.message for end in ends if end is not None and end.error_type == "Skipped"]
    if len(skipped) == len(ends):
        pytest.skip(skipped[0])
    pytest.fail(str(failed), pytrace=False)


def _ranks(config: pytest.Config) -> Ranks:
    if RANKS not in config.stash:
        from tpbed.harness.ranks import Ranks

        config.stash[RANKS] = Ranks(default_world=config.getoption("--tp-world"))
    return config.stash[RANKS]


def _body(item: pytest.Function) -> Callable[[int], Any]:
    function = item.obj
    _pickle_by_value(sys.modules[function.__module__])
    names = item._fixtureinfo.argnames
    return partial(_call, function, {name: item.funcargs[name] for name in names if name != "rank"}, "rank" in names)


def _pickle_by_value(module: Any) -> None:
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)


def _call(function: Callable[..., Any], arguments: dict[str, Any], wants_rank: bool, rank: int) -> None:
    function(**arguments, **({"rank": rank} if wants_rank else {}))


def _size_of(mark: pytest.Mark) -> Any:
    size = mark.args[0] if mark.args else mark.kwargs.get("world_size")
    sizes: Sequence[Any] = [size] if isinstance(size, int) else list(size or ())
    if not sizes or not all(isinstance(one, int) and one >= 1 for one in sizes):
        raise pytest.UsageError(f"@pytest.mark.tp was given world_size={size!r}: give a number of ranks, or a list.")
    return size


def _world_size(item: pytest.Function, mark: pytest.Mark) -> int:
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    return int(parameters.get("world_size", _size_of(mark)))


def _world_of(mark: pytest.Mark, config: pytest.Config) -> str:
    searched = any(mark.kwargs.get(name) for name in ("schedules", "schedule")) or config.getoption("--tp-schedule")
    world = mark.kwargs.get("world") or ("sim" if searched else config.getoption("--tp-world"))
    if world not in WORLDS:
        raise pytest.UsageError(f"@pytest.mark.tp was given world={world!r}: give one of {', '.join(WORLDS)}.")
    return str(world)
