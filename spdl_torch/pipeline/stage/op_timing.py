"""Call an op and measure its time, on the thread or in the process where it runs."""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Measured = tuple[Any, int, int]
"""An op's result, its wall time and its thread CPU time in ns; -1 = CPU time was not read."""

_SHORT_NS = 20_000
_SKIPPED = 7
"""Reading a thread's CPU clock takes 0.2 µs, five times as long as the other clock. Of short tasks
one in eight is measured, which is enough to know about all of them."""

EXHAUSTED = object()
"""The result of ``next_of`` after the last output."""


def measure(op: Callable[[Any], Any], item: Any) -> Measured:
    """Return the result of ``op(item)`` and its times."""
    wall, cpu = perf_counter_ns(), thread_time_ns()
    result = op(item)
    return result, perf_counter_ns() - wall, thread_time_ns() - cpu


def metered(op: Callable[[Any], Any]) -> Callable[[Any], Measured]:
    """Return ``measure`` of one op, for one thread; cheaper where tasks are short."""
    skip = 0

    def call(item: Any) -> Measured:
        nonlocal skip
        if skip:
            wall = perf_counter_ns()
            result = op(item)
            wall = perf_counter_ns() - wall
            skip = skip - 1 if wall < _SHORT_NS else 0
            return result, wall, -1
        result, wall, cpu = measure(op, item)
        if wall < _SHORT_NS:
            skip = _SKIPPED
        return result, wall, cpu

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
