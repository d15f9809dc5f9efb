"""The pytest plugin: `@pytest.mark.tp(4)` runs a test's body on every rank of a warm world, and explains what hangs.

Loads pytest alone; torch, Ray and the rest come in when a test first asks for ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from tpbed.harness.pytest_cases import SUFFIX, CaseFile, CaseItem
from tpbed.harness.session_ranks import close_ranks, ranks_of
from tpbed.harness.tp_mark import SIGNATURE, WORLDS, TpMark, read_mark

if TYPE_CHECKING:
    from tpbed.harness.ranks import Ranks, RanksFailed

MARK = f"{SIGNATURE}: run the test's body on every rank of a world of that size, or of "


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
    mark = read_mark(metafunc.definition)
    if mark is not None and not isinstance(mark.world_size, int):
        metafunc.fixturenames.append("world_size")
        metafunc.parametrize("world_size", mark.sizes, ids=lambda size: f"tp{size}")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> CaseFile | None:
    """Case files are tests."""
    return CaseFile.from_parent(parent, path=file_path) if file_path.name.endswith(SUFFIX) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on Ray actors stay on one pytest-xdist worker under `--dist loadgroup`: they share their actors."""
    for item in items:
        mark = read_mark(item)
        world = _world_of(mark, config) if mark else config.getoption("--tp-world")
        if world != "sim" and (mark or isinstance(item, CaseItem)):
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The rank that runs the body of a test marked `tp`. Fixtures have none: they run once, and not on a rank."""
    if request.node.get_closest_marker("tp") is None:
        raise pytest.UsageError("`rank` is what a test marked with @pytest.mark.tp(world_size) is given on each rank.")
    if "rank" not in request.node._fixtureinfo.argnames:
        pytest.fail(_NO_RANK.format(request.node.nodeid, "a fixture asks"), pytrace=False)
    return -1  # which nobody sees: the body is given its own


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks that a test marked `tp` runs on."""
    mark = read_mark(request.node)
    if mark is None:
        raise pytest.UsageError("`world_size` needs the mark @pytest.mark.tp(world_size).")
    return mark.sizes[0]


@pytest.fixture(scope="session")
def tp(pytestconfig: pytest.Config) -> Ranks:
    """Run programs on ranks from inside a test: `tp(program, world_size=4)` returns their results, by rank.

    For tests that draw with hypothesis, or run several programs. Raises RanksFailed, an AssertionError, with the
    explanation of what went wrong.
    """
    return ranks_of(pytestconfig)


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
    if item.get_closest_marker("tp") is not None:
        _refuse_fixtures_with_ranks(item)


def _refuse_fixtures_with_ranks(item: Any) -> None:
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if "rank" in definitions[-1].argnames:
            pytest.fail(_NO_RANK.format(item.nodeid, f"the fixture {name!r} asks"), pytrace=False)


_NO_RANK = (
    "{}: {} for `rank`, but fixtures run once for all ranks, and on none: take `rank` in the test, and let the fixture "
    "return a function of it."
)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body on the ranks instead of here."""
    mark = read_mark(pyfuncitem)
    if mark is None:
        return None
    failed = _failure(pyfuncitem, mark)
    if failed is not None:
        _fail(failed)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks of this session."""
    close_ranks(config)


def _failure(item: pytest.Function, mark: TpMark) -> RanksFailed | None:
    from tpbed.harness.ranks import RanksFailed, UndecidedError

    schedule = item.config.getoption("--tp-schedule")
    try:
        ranks_of(item.config)(
            _body(item),
            world_size=_world_size(item, mark),
            world=_world_of(mark, item.config),
            stall_after_s=mark.stall_after_s,
            schedule=schedule or mark.schedule,
            schedules=None if schedule else mark.schedules,
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


def _world_size(item: pytest.Function, mark: TpMark) -> int:
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    return int(parameters.get("world_size", mark.sizes[0]))


def _world_of(mark: TpMark, config: pytest.Config) -> str:
    searched = mark.schedules or mark.schedule or config.getoption("--tp-schedule")
    return mark.world or ("sim" if searched else str(config.getoption("--tp-world")))
