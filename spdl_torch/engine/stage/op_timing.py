"""Call an op and measure its time, on the thread or in the process where it runs."""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from ..hooks.call_clock import LONG_NS, CallClock

if TYPE_CHECKING:
    from collections.abc import Callable

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
        cpu, began = -1, perf_counter_ns()
        if clock.num_unclocked < 1 or began >= clock.due_ns:
            cpu, began = thread_time_ns(), perf_counter_ns()
        result = op(item)
        ended = perf_counter_ns()
        took = ended - began
        if cpu < 0 and took < LONG_NS:
            clock.num_unclocked -= 1
            return result, took, -1
        return result, took, clock.cpu_of(cpu, began, ended)

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


class Spent:
    """The time spent inside a generator, and the number of its last output."""

    __slots__ = ("cpu_ns", "output", "wall_ns")

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = 0
        self.output = -1
