"""The interval callbacks of users: whether one has any effect, how it is called, and the thread
that calls those of a run, woken by its clock or by the end."""

from __future__ import annotations

import inspect
import logging
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from .loop import LazyRunner
    from .threads import ThreadGroup

_logger = logging.getLogger("spdl_torch.pipeline")

_TAIL_SECONDS = 1.0  # the last interval's wait for running ops; then it is reported without them


def is_heard(callback: Callable[..., Any], default: Callable[..., Any]) -> bool:
    """Return whether a callback is not the default, which logs at INFO level, or that level is
    logged.
    """
    is_default = getattr(callback, "__func__", None) is default
    return not is_default or _logger.isEnabledFor(logging.INFO)


def call_back(
    callback: Callable[[Any], Awaitable[None] | None], stats: Any, who: object, runner: LazyRunner
) -> None:
    """Run a user's callback, awaiting it on the runner's loop if needed. Its error is logged, never
    fatal.
    """
    try:
        result = callback(stats)
        if inspect.isawaitable(result):
            runner.run(_await(result))
    except Exception:
        _logger.exception("%s: interval_stats_callback failed; the pipeline goes on.", who)


async def _await(result: Awaitable[None]) -> None:
    await result


def check_interval(interval: float | None, where: object) -> float | None:
    """Return the interval; SPDL's -1 means None, and stays -1 for subclasses that compare it.

    Raises: ValueError: 0, or a negative number other than -1.
    """
    if interval is not None and interval <= 0 and interval != -1:
        raise ValueError(f"{where} must be > 0 seconds or None, got {interval}.")
    return interval


class Reports(Protocol):
    """A task hook or a queue."""

    interval: float | None
    """The seconds of an interval; None or below 0 = only one, up to the end."""

    @property
    def is_heard(self) -> bool:
        """Whether somebody listens: else no thread is needed."""

    def report_interval(self, runner: LazyRunner) -> None:
        """Report the statistics since the last call; await on the runner's loop."""


class Reporter:
    """Report every interval, the last and partial one included, before the run is closed.

    One event loop, if any is needed, serves all asynchronous callbacks of the run: what they keep
    open, such as a connection, belongs to a loop.
    """

    def __init__(self, subjects: Sequence[Reports], join: Callable[[float | None], bool]) -> None:
        self._subjects: Sequence[Reports] = subjects
        self._join_workers = join
        # Held while the run goes on. A bare lock, not an Event: request_stop() may come from a
        # finalizer on the very thread that is inside the wait, where an Event's lock is held.
        self._going_on = threading.Lock()
        self._going_on.acquire()

    def start(self, threads: ThreadGroup) -> None:
        """Begin the first interval, if somebody listens."""
        self._subjects = [subject for subject in self._subjects if subject.is_heard]
        if self._subjects:
            threads.spawn("stats", self._run)

    def request_stop(self) -> None:
        """Report the last intervals and end. Never blocks."""
        try:
            self._going_on.release()
        except RuntimeError:
            pass  # it was asked before

    def _run(self) -> None:
        from .loop import LazyRunner  # asyncio, which a loader does without

        with LazyRunner() as runner:
            self._report_until_the_end(runner)

    def _report_until_the_end(self, runner: LazyRunner) -> None:
        clock = monotonic()
        # A hook made with SPDL's default has an interval of -1, which means none.
        regular = [(s, s.interval) for s in self._subjects if s.interval and s.interval > 0]
        due = {id(subject): clock + interval for subject, interval in regular}
        while not self._going_on.acquire(timeout=self._until(due)):
            for subject, interval in regular:
                if monotonic() >= due[id(subject)]:
                    due[id(subject)] += interval
                    subject.report_interval(runner)
        # A stop does not wait for running ops, but the last interval does, since it includes them.
        # If that takes too long, it is reported without them, and another when they have ended.
        if not self._join_workers(_TAIL_SECONDS):
            self._report_all(runner)
            self._join_workers(None)
        self._report_all(runner)

    def _until(self, due: dict[int, float]) -> float:
        return max(0.0, min(due.values()) - monotonic()) if due else -1

    def _report_all(self, runner: LazyRunner) -> None:
        for subject in self._subjects:
            subject.report_interval(runner)
