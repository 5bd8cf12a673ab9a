"""Calls the interval callbacks of a run: one thread, woken by its clock or by the end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from .threads import ThreadGroup

__all__ = ["Reporter"]


class Reports(Protocol):
    """A task hook or a queue."""

    interval: float | None

    def report_lap(self) -> None: ...


class Reporter:
    """Delivers every lap, the last and partial one included, before the run is closed.

    The thread exists from the first interval on, or, if nobody asked for intervals, only at the
    end.
    """

    def __init__(self, subjects: Sequence[Reports]) -> None:
        self._subjects = subjects
        self._ended = threading.Event()

    def start(self, threads: ThreadGroup) -> None:
        """Begin the first interval."""
        threads.spawn("stats", self._run)

    def request_stop(self) -> None:
        """Deliver the last laps and end. Never blocks."""
        self._ended.set()

    def _run(self) -> None:
        clock = monotonic()
        due = {id(s): clock + s.interval for s in self._subjects if s.interval}
        while due and not self._ended.wait(max(0.0, min(due.values()) - monotonic())):
            for subject in self._subjects:
                if subject.interval and monotonic() >= due[id(subject)]:
                    due[id(subject)] += subject.interval
                    subject.report_lap()
        self._ended.wait()
        for subject in self._subjects:
            subject.report_lap()
