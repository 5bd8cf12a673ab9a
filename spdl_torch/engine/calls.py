"""How an op is called: its times, measured where it runs, and the user's executor, whose processes
are forked before a pipeline has threads."""

from __future__ import annotations

import sys
from contextlib import suppress
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from .counters import LONG_NS, CallClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

Measured = tuple[Any, int, int]
"""An op's result, its wall time and its thread CPU time in ns; -1 = CPU time was not read."""

EXHAUSTED = object()
"""The result of ``next_of`` after the last output."""


def measure(op: Callable[[Any], Any], item: Any) -> Measured:
    """Return the result of ``op(item)`` and its times."""
    wall, cpu = perf_counter_ns(), thread_time_ns()
    result = op(item)
    return result, perf_counter_ns() - wall, thread_time_ns() - cpu


def metered(op: Callable[[Any], Any]) -> Callable[[Any], Measured]:
    """Return ``measure`` of one op, for one thread; cheaper where tasks are short."""
    clock = CallClock()

    def call(item: Any) -> Measured:
        began = perf_counter_ns()
        if clock.num_unclocked < 1 or began >= clock.due_ns:
            began = clock.read()
        result = op(item)
        ended = perf_counter_ns()
        took = ended - began
        if took < LONG_NS and clock.num_unclocked:
            clock.num_unclocked -= 1
            return result, took, -1
        return result, took, clock.cpu_of(began, ended)

    return call


def unmeasured(op: Callable[[Any], Any], item: Any) -> Measured:
    """Return the result of ``op(item)`` without its times."""
    return op(item), 0, -1


def measure_list(op: Callable[[Any], Any], item: Any) -> Measured:
    """Return all outputs of a generator, as a list."""
    return measure(lambda item: list(op(item)), item)


def next_of(outputs: Any) -> Any:
    """Return a generator's next output: an op, so that it can be measured."""
    return next(outputs, EXHAUSTED)


class ExecutorCalls:
    """The calls of one stage that its executor has not finished."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self.are_refused = False
        """Whether the executor refused one: it is broken or shut down, and would refuse all."""
        self._is_stopped = is_stopped
        # Workers add and discard; cancel(), on any thread, goes through a copy of it.
        self._submitted: set[Future[Measured]] = set()

    def make(self, executor: Executor, measured: Callable[[Any], Measured], item: Any) -> Measured:
        """Make a call there, and wait for it. Raises: what the op raises; CancelledError."""
        try:
            future = executor.submit(measured, item)
        except Exception:
            self.are_refused = True
            raise
        self._submitted.add(future)
        try:
            # The race with a stop: the run closes the outlet before it has the calls cancelled. So
            # either that saw this future, or the outlet is seen closed here.
            if self._is_stopped():
                future.cancel()
            return future.result()
        finally:
            self._submitted.discard(future)

    def cancel(self) -> None:
        """Withdraw those that the executor has not begun. Never blocks."""
        for future in self._submitted.copy():
            future.cancel()


def fork_processes(executor: Executor | None) -> None:
    """Let the executor fork its processes now, on this thread, if that is what it does.

    A ``ProcessPoolExecutor`` forks them all at its first job, which would come from a stage's
    thread. Copies of that thread lack the caller's context and thread-local variables, and free the
    caller's in the child, where a library may wait for ever for threads that are not there.
    """
    module = sys.modules.get("concurrent.futures.process")  # not imported: no such executor
    if module is None or not isinstance(executor, module.ProcessPoolExecutor):
        return
    context: Any = getattr(executor, "_mp_context", None)  # private: without it, forked later
    if context is not None and context.get_start_method() == "fork":
        with suppress(RuntimeError):  # broken or shut down, which the stage reports
            executor.submit(int)
