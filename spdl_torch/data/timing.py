"""What a worker's calls of user code take, counted in its cells and, if they take long, kept in its
ring.

A call of a whole batch is measured in full. Of the many calls for single samples the thread's CPU
clock is read of one in eight, which says enough about all of them, and only long ones are kept one
by one: behind a decoder, which leaves nothing in the processor's caches, reading that clock twice
and writing a record takes 9 µs (measured), on warm caches less than one.
"""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..pipeline.hooks.task_hooks import TaskCell
    from ..pipeline.recorder.rings import Ring

__all__ = ["END", "record_parts", "timed", "timed_sample"]

END = object()
"""What a call returns when there was nothing to do: it is not counted."""

_CLOCKED_MASK = 7
_LONG_SAMPLES = 100
"""A sample is kept from so many times the time on that a batch is: 10 ms, or any at item level."""


def timed(cell: TaskCell | None, call: Callable[..., Any], *args: Any, tasks: int = 1) -> Any:
    """``call(*args)``, its wall and CPU time on this thread counted in ``cell``."""
    if cell is None:
        return call(*args)
    wall, cpu = perf_counter_ns(), thread_time_ns()
    try:
        result = call(*args)
    except BaseException:
        cell.add_failure(perf_counter_ns() - wall, thread_time_ns() - cpu)
        raise
    now, cpu_ns, ring = perf_counter_ns(), thread_time_ns() - cpu, cell.ring
    cell.add_many(tasks, now - wall, cpu_ns)
    if ring is not None and now - wall >= ring.shortest_ns:
        ring.add_part(cell.part, wall, now, cpu_ns)
    return result


def timed_sample(cell: TaskCell | None, call: Callable[..., Any], *args: Any) -> Any:
    """The same for one sample of many, at less cost."""
    if cell is None:
        return call(*args)
    is_clocked = not cell.num_tasks & _CLOCKED_MASK
    cpu_ns, cpu, wall = -1, thread_time_ns() if is_clocked else 0, perf_counter_ns()
    try:
        result = call(*args)
    except BaseException:
        now = perf_counter_ns()
        cell.add_failure(now - wall, thread_time_ns() - cpu if is_clocked else -1)
        raise
    if result is END:
        return result
    now, ring = perf_counter_ns(), cell.ring
    if is_clocked:
        cpu_ns = thread_time_ns() - cpu
    cell.add(now - wall, cpu_ns)
    if ring is not None and now - wall >= ring.shortest_ns * _LONG_SAMPLES:
        ring.add_part(cell.part, wall, now, cpu_ns)
    return result


def record_parts(ring: Ring, **cells: TaskCell | None) -> None:
    """What is timed with these cells is from now on kept in ``ring``, under their names."""
    for name, cell in cells.items():
        if cell is not None:
            cell.part, cell.ring = name, ring
