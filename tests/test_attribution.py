"""What a rank says carries its name: log records, warnings, and the traceback of its end."""

import _thread
import contextlib
import io
import logging
import sys
import warnings

import pytest
import torch.distributed as dist

from tpbed.tp import simulated, simulated_run
from tpbed.tp.rank import current
from tpbed.tp.simulated import SimulatedWorld


def hangs(rank):
    if rank:
        dist.barrier()


def raises(rank):
    raise ValueError("here")


def interrupted(rank):
    _thread.interrupt_main()


def killed(rank):
    current().die("kill", "on purpose")


@contextlib.contextmanager
def unattributed(run):
    """In the place of Attribution.in_place: the tests below fail with it."""
    yield


def logs(rank):
    dist.barrier()
    logging.getLogger("tpbed.test").error("from %s", rank)
    dist.barrier()


class Kept(logging.Handler):
    """Keeps the ranks of the records that it gets, and what they say."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append((getattr(record, "tp_rank", None), record.getMessage()))


def logged_ranks():
    kept, logger = Kept(), logging.getLogger("tpbed.test")
    logger.addHandler(kept)
    try:
        SimulatedWorld(3).run(logs)
        logger.error("from None")
    finally:
        logger.removeHandler(kept)
    return sorted(kept.records[:-1]) + kept.records[-1:]


def test_a_log_record_says_which_rank_it_is_from(monkeypatch):
    assert logged_ranks() == [(0, "from 0"), (1, "from 1"), (2, "from 2"), (None, "from None")]
    monkeypatch.setattr(simulated._ATTRIBUTION, "in_place", unattributed)
    assert {rank for rank, _ in logged_ranks()[:3]} == {None}


def test_a_rank_cannot_take_away_the_callers_log_records():
    factory = logging.getLogRecordFactory()
    SimulatedWorld(2).run(lambda rank: logging.setLogRecordFactory(print))
    assert logging.getLogRecordFactory() is factory


def warns(rank):
    warnings.warn(f"from {rank}", UserWarning, stacklevel=1)
    dist.barrier()
    warnings.warn(f"again from {rank}", UserWarning, stacklevel=1)


def warned_ranks():
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        SimulatedWorld(2).run(warns)
    return sorted((str(entry.message)[-1], getattr(entry, "tp_rank", None)) for entry in log)


def test_a_recorded_warning_says_which_rank_it_is_from(monkeypatch):
    assert warned_ranks() == [("0", 0), ("0", 0), ("1", 1), ("1", 1)]
    monkeypatch.setattr(simulated._ATTRIBUTION, "in_place", unattributed)
    assert {rank for _, rank in warned_ranks()} == {None}


def written_warnings(monkeypatch):
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("always")
        warnings._showwarnmsg_impl = show_on_stderr  # pytest records instead
        patch.setattr(sys, "stderr", io.StringIO())
        SimulatedWorld(2).run(warns)
        return [line for line in sys.stderr.getvalue().splitlines() if "UserWarning: " in line]


def show_on_stderr(message):
    sys.stderr.write(
        warnings.formatwarning(message.message, message.category, message.filename, message.lineno, message.line)
    )


def test_a_warning_that_is_written_begins_with_its_rank(monkeypatch):
    lines = written_warnings(monkeypatch)
    assert len(lines) == 4
    assert all(line.startswith(f"rank {line[-1]}: ") for line in lines)
    monkeypatch.setattr(simulated._ATTRIBUTION, "in_place", unattributed)
    assert not any(line.startswith("rank") for line in written_warnings(monkeypatch))


def test_what_makes_records_and_shows_warnings_is_the_callers_again_however_the_run_ends():
    def state():
        return logging.getLogRecordFactory(), warnings.formatwarning, warnings._showwarnmsg, warnings.showwarning

    before = state()
    for end in (hangs, raises, killed):
        SimulatedWorld(2).run(end)
        assert state() == before
    with pytest.raises(KeyboardInterrupt):
        SimulatedWorld(2).run(interrupted)
    assert state() == before


SHARED_ERROR = ValueError("shared")


def first_to_raise():
    try:
        raise KeyError("of the first rank alone")
    except KeyError:
        raise SHARED_ERROR  # noqa: B904 - what the test is about


def second_to_raise():
    raise SHARED_ERROR


def raises_what_others_raise(rank):
    [first_to_raise, second_to_raise][rank]()


def test_a_traceback_is_the_ranks_own_even_if_ranks_raise_the_same_object(monkeypatch):
    def tracebacks():
        SHARED_ERROR.__traceback__ = SHARED_ERROR.__context__ = None
        return [ledger.end.traceback for ledger in SimulatedWorld(2).run(raises_what_others_raise).ledgers]

    first, second = tracebacks()
    assert "in first_to_raise" in first and "KeyError" in first
    assert "in first_to_raise" not in second and "KeyError" not in second
    monkeypatch.setattr(simulated_run, "_forget_place", lambda error: None)
    assert "in first_to_raise" in tracebacks()[1]


def test_an_error_that_a_rank_is_handling_is_not_another_ranks_context():
    def program(rank):
        if rank == 0:
            try:
                raise KeyError("of rank 0")
            except KeyError:
                dist.barrier()
        else:
            assert sys.exc_info() == (None, None, None)
            dist.barrier()
        raise ValueError(rank)

    assert not any("KeyError" in ledger.end.traceback for ledger in SimulatedWorld(2).run(program).ledgers)


def test_an_interrupt_says_in_which_rank_it_came():
    def program(rank):
        if rank == 1:
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt) as caught:
        SimulatedWorld(2).run(program)
    assert caught.value.__notes__ == ["in rank 1 of a simulated world"]
