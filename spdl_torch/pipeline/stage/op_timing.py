"""Calling an op and telling what it took, on the thread or in the process where it runs."""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "EXHAUSTED",
    "Measured",
    "Spent",
    "measure",
    "measure_list",
    "metered",
    "next_of",
    "unmeasured",
]

Measured = tuple[Any, int, int]
"""What an op returned, its wall time and its thread CPU time in ns, -1 where that was not read."""

_SHORT_NS = 20_000
_SKIPPED = 7
"""Reading a thread's CPU clock takes 0.2 µs, five times as long as the other clock. Of short tasks
it is read of one in eight, which says enough about all of them."""

EXHAUSTED = object()
"""What ``next_of`` returns behind the last output."""


def measure(op: Callable[[Any], Any], item: Any) -> Measured:
    """``op(item)`` with its times."""
    wall, cpu = perf_counter_ns(), thread_time_ns()
    result = op(item)
    return result, perf_counter_ns() - wall, thread_time_ns() - cpu


def metered(op: Callable[[Any], Any]) -> Callable[[Any], Measured]:
    """``measure`` of one op, for one thread, at less cost if its tasks are short."""
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
    """``op(item)`` for those who want no times."""
    return op(item), 0, -1


def measure_list(op: Callable[[Any], Any], item: Any) -> Measured:
    """All that a generator yields, as a list."""
    return measure(lambda item: list(op(item)), item)


def next_of(outputs: Any) -> Any:
    """A generator's next output as an op, so that it can be measured."""
    return next(outputs, EXHAUSTED)


class Spent:
    """What was spent inside a generator, and the number of the last item that it yielded."""

    __slots__ = ("cpu_ns", "output", "wall_ns")

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = 0
        self.output = -1
