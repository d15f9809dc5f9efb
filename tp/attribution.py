"""Attribution: log records and warnings say which simulated rank they come from.

A record that a rank logs has `record.tp_rank`, for formatters and filters; others have none, so give a formatter
`defaults={"tp_rank": "-"}`. A warning that is shown has `tp_rank` where it is recorded (warnings.catch_warnings,
pytest.warns), and begins with `rank N: ` where it is written.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from greenlet import getcurrent

from tpbed.tp.simulated_run import SimulatedRun

_SHOW, _WRITE = "_showwarnmsg", "formatwarning"  # of the warnings module: Python's and C's warnings pass here


class Attribution:
    """Stands in for what makes log records and shows warnings while a run lasts. One serves all runs."""

    def __init__(self) -> None:
        self._run: SimulatedRun | None = None
        self._make: Callable[..., logging.LogRecord] = logging.LogRecord
        self._real: dict[str, Any] = {}  # what was there
        self._served = {_SHOW: self._show, _WRITE: self._write}

    @contextmanager
    def in_place(self, run: SimulatedRun) -> Iterator[None]:
        """Meanwhile they add the rank; whatever happens, those that were there come back."""
        module = vars(warnings)
        self._real = {name: module[name] for name in self._served if name in module}
        self._make, self._run = logging.getLogRecordFactory(), run
        try:
            module.update((name, self._served[name]) for name in self._real)
            logging.setLogRecordFactory(self._make_and_tag)
            yield
        finally:
            logging.setLogRecordFactory(self._make)
            module.update(self._real)
            self._run = None

    def _rank(self) -> int | None:
        """The rank that asks; None where somebody else does."""
        rank = None if self._run is None else self._run.current
        return rank.index if rank is not None and rank.greenlet is getcurrent() else None

    def _make_and_tag(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record, rank = self._make(*args, **kwargs), self._rank()
        if rank is not None:
            record.tp_rank = rank
        return record

    def _show(self, message: Any) -> None:
        rank = self._rank()
        if rank is not None:
            message.tp_rank = rank
        self._real[_SHOW](message)

    def _write(self, *args: Any, **kwargs: Any) -> str:
        rank, text = self._rank(), self._real[_WRITE](*args, **kwargs)
        return str(text) if rank is None else f"rank {rank}: {text}"
