"""The plugin in sessions of its own: bodies run on every rank; a hang fails one test, explained; the rest goes on."""

from __future__ import annotations

import pytest

import tpbed.harness.ranks
import tpbed.tp.simulated  # noqa: F401

MANY = """
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.tp(4)
    def test_sum(rank, world_size):
        total = torch.tensor([rank])
        dist.all_reduce(total)
        assert total.item() == 6 and world_size == 4 == dist.get_world_size()

    @pytest.mark.tp(4)
    def test_hang(rank):
        if rank == 2:
            raise RuntimeError("out of memory")
        dist.barrier()

    @pytest.mark.tp(4)
    def test_after_it(rank):
        dist.barrier()
"""


@pytest.fixture
def session(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
    return pytester


def run(session, source, *arguments):
    session.makepyfile(source)
    return session.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *arguments)


def test_a_hang_fails_its_test_with_the_explanation_and_the_next_one_runs(session):
    outcome = run(session, MANY)
    outcome.assert_outcomes(passed=2, failed=1)
    outcome.stdout.fnmatch_lines(
        ["*hang*barrier seq 1*waits for rank 2*", "*rank 2 raised RuntimeError*out of memory*"]
    )


def test_without_the_culprit_the_same_tests_pass(session):
    run(session, MANY.replace("raise RuntimeError", "print")).assert_outcomes(passed=3)


def test_an_assertion_that_fails_on_one_rank_is_shown_with_its_values(session):
    outcome = run(
        session,
        """
        import pytest

        @pytest.mark.tp(2)
        def test_it(rank):
            assert rank * 10 == 0
        """,
    )
    outcome.assert_outcomes(failed=1)
    outcome.stdout.fnmatch_lines(["*rank 1 raised AssertionError*", "*assert (1 [*] 10) == 0*"])


def test_a_list_of_world_sizes_is_one_test_each(session):
    outcome = run(
        session,
        """
        import pytest
        import torch.distributed as dist

        @pytest.mark.tp([1, 2, 8])
        def test_it(world_size):
            assert dist.get_world_size() == world_size
        """,
        "-v",
    )
    outcome.assert_outcomes(passed=3)
    outcome.stdout.fnmatch_lines(["*test_it?tp1?*", "*test_it?tp2?*", "*test_it?tp8?*"])


def test_a_list_of_world_sizes_needs_no_argument_for_them(session):
    outcome = run(
        session,
        """
        import pytest

        @pytest.mark.tp([1, 2])
        def test_it(rank):
            assert rank in (0, 1)
        """,
    )
    outcome.assert_outcomes(passed=2)


def test_a_coroutine_is_refused_and_does_not_pass_unrun(session):
    outcome = run(session, "import pytest\n\n@pytest.mark.tp(2)\nasync def test_it(rank):\n    assert 0\n")
    outcome.assert_outcomes(errors=1)
    outcome.stdout.fnmatch_lines(["*is a coroutine*"])


def test_fixtures_and_parameters_reach_every_rank(session):
    outcome = run(
        session,
        """
        import pytest

        @pytest.fixture
        def base():
            return 40

        @pytest.mark.parametrize("more", [2])
        @pytest.mark.tp(2)
        def test_it(rank, base, more):
            assert base + more == 42 and rank in (0, 1)
        """,
    )
    outcome.assert_outcomes(passed=1)


def test_a_test_that_every_rank_skips_is_skipped_and_one_that_one_rank_skips_fails(session):
    outcome = run(
        session,
        """
        import pytest

        @pytest.mark.tp(2)
        def test_all(rank):
            pytest.skip("not here")

        @pytest.mark.tp(2)
        def test_one(rank):
            if rank == 1:
                pytest.skip("not here")
        """,
    )
    outcome.assert_outcomes(skipped=1, failed=1)


def test_hypothesis_on_a_marked_test_is_refused_and_the_fixture_serves_it(session):
    outcome = run(
        session,
        """
        import pytest
        import torch
        import torch.distributed as dist
        from hypothesis import given, settings, strategies as st

        @pytest.mark.tp(2)
        @given(st.integers())
        def test_refused(rank, value):
            pass

        def test_served(tp):
            @settings(max_examples=5, deadline=None, database=None)
            @given(st.integers(1, 5), st.integers(1, 4))
            def check(value, size):
                def program(rank):
                    total = torch.tensor([value])
                    dist.all_reduce(total)
                    return total.item()
                assert tp(program, world_size=size) == (value * size,) * size
            check()
        """,
    )
    outcome.assert_outcomes(passed=1, errors=1)
    outcome.stdout.fnmatch_lines(["*take the fixture `tp`*"])


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ("tp(0)", "world_size=0: give a number of ranks"),
        ("tp()", "was given no world_size"),
        ("tp(True)", "world_size=True"),
        ("tp(2.0)", "world_size=2.0"),
        ("tp('2')", "world_size='2'"),
        ("tp([])", "world_size=??:"),
        ("tp([2, 0])", "world_size=?2, 0?"),
        ("tp(2, world='mars')", "world='mars': give one of sim, gloo, nccl"),
        ("tp(2, word='gloo')", "word='gloo', which it does not know"),
        ("tp(2, 'gloo')", "2, 'gloo': give all but the world size by name"),
        ("tp(2, world_size=4)", "world_size twice"),
        ("tp(2, stall_after_s=0)", "stall_after_s=0: give seconds"),
        ("tp(2, stall_after_s='1')", "stall_after_s='1'"),
        ("tp(2, stall_after_s=float('inf'))", "stall_after_s=inf"),
    ],
)
def test_a_mark_that_says_nothing_sensible_stops_the_collection_with_file_and_test(session, mark, told):
    outcome = run(session, f"import pytest\n\n@pytest.mark.{mark}\ndef test_it(rank):\n    pass\n")
    assert outcome.ret == pytest.ExitCode.INTERRUPTED
    outcome.stdout.fnmatch_lines([f"*.py::test_it: @pytest.mark.tp *{told}*It takes tp(world_size, *"])
    outcome.stdout.no_fnmatch_line("*Traceback*")


@pytest.mark.parametrize("ask", ["rank", "request"])
def test_a_fixture_that_asks_for_the_rank_is_refused(session, ask):
    outcome = run(
        session,
        f"""
        import pytest

        @pytest.fixture
        def width({ask}):
            return {"rank" if ask == "rank" else "request.getfixturevalue('rank')"}

        @pytest.mark.tp(2)
        def test_it(width{", rank" if ask == "rank" else ""}):
            pass
        """,
    )
    outcome.assert_outcomes(errors=1)
    outcome.stdout.fnmatch_lines(["*::test_it: *asks for `rank`, but fixtures run once for all ranks*"])


@pytest.mark.parametrize("outcome", ["fail", "skip"])
def test_what_pytest_raises_on_a_rank_is_where_the_test_says_so(session, outcome):
    source = f"import pytest\n\n@pytest.mark.tp(2)\ndef test_it(rank):\n    if rank:\n        pytest.{outcome}('no')\n"
    session.makepyfile(test_a=source)
    failed = run(session, "")
    failed.stdout.fnmatch_lines(["*cause rank 1 raised * before any collective: no*", "  1 *.py:6 test_it"])


def test_the_short_summary_says_which_rank_did_what(session, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    outcome = run(session, MANY)
    outcome.stdout.fnmatch_lines(["FAILED *::test_hang - Failed: hang: rank 2 raised*"])


def test_rank_without_the_mark_is_refused(session):
    outcome = run(session, "def test_it(rank):\n    pass\n")
    outcome.assert_outcomes(errors=1)
    outcome.stdout.fnmatch_lines(["*@pytest.mark.tp(world_size)*"])


def test_loading_the_plugin_loads_neither_torch_nor_ray(session):
    outcome = session.runpython_c(
        "import sys, tpbed.harness.pytest_plugin; print(sorted({'torch', 'ray', 'greenlet'} & set(sys.modules)))"
    )
    outcome.stdout.fnmatch_lines(["[[][]]"])


@pytest.mark.tp([2, 4])
def test_this_session_runs_on_ranks_too(rank, world_size):
    import torch
    import torch.distributed as dist

    parts = [torch.empty(1) for _ in range(world_size)]
    dist.all_gather(parts, torch.full((1,), float(rank)))
    assert [part.item() for part in parts] == list(range(world_size))


TIMED = """
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.tp(2{})
    def test_it(rank):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if work.is_completed():
            dist.barrier()
"""


@pytest.mark.parametrize(
    ("asked", "arguments", "told"),
    [
        (
            ", schedules='all'",
            [],
            "*schedule=\"0,0\" instead of *, or pytest '*::test_it' --tp-schedule 0,0",
        ),
        (", schedules=50", [], "*--tp-schedule seed:*"),
        (", schedule='0,0'", [], "*barrier seq 2*waits for rank 0*"),
        ("", ["--tp-schedule", "0,0"], "*barrier seq 2*waits for rank 0*"),
        (", schedules='all'", ["--tp-schedule", "0,0"], "*barrier seq 2*waits for rank 0*"),
        (", schedules='all'", ["--tp-world", "gloo"], "*--tp-schedule 0,0"),
    ],
)
def test_what_only_some_schedules_show_fails_with_the_one_that_does(session, asked, arguments, told):
    outcome = run(session, TIMED.format(asked), *arguments)
    outcome.assert_outcomes(failed=1)
    outcome.stdout.fnmatch_lines([told])


def test_a_search_that_finds_nothing_passes_and_so_does_the_usual_order(session):
    run(session, TIMED.format("")).assert_outcomes(passed=1)
    quiet = TIMED.format(", schedules='all'").replace("if work.is_completed():", "if work.wait():")
    run(session, quiet).assert_outcomes(passed=1)
