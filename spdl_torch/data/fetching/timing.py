"""Time a worker's calls of user code: count them in its cells, and record long ones in its ring.

The wall clock is read for every call. The thread's CPU clock is read for one in eight of the many
calls for single samples and of the short ones for whole batches, which says enough about all of
them, and only long ones are kept one by one: after a decoder, which leaves nothing in the
processor's caches, reading that clock twice and writing a record takes 9 µs (measured), on warm
caches less than 1 µs.
"""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from ...pipeline.hooks.task_hooks import TaskCell
    from ...pipeline.recorder.rings import Ring

END = object()
"""The result of a call that had nothing to do: it is not counted."""

_CLOCKED_MASK = 7
_SHORT_NS = 200_000
"""The length of a batch's call below which reading the CPU clock twice, 0.9 µs, would take 0.4 % of
it or more."""
_LONG_PARTS = 5
"""The factor by which a part of a batch has to take longer than a batch to be recorded: the records
of a batch of 0.1 ms and its two parts would take 1.5 % of it (measured)."""
_LONG_SAMPLES = 100
"""The factor by which a sample has to take longer than a batch to be recorded: from 10 ms on, or
always at item level."""


def timed(
    cell: TaskCell | None,
    call: Callable[..., Any],
    *args: Any,
    tasks: int = 1,
    into: Sized | None = None,
) -> Any:
    """Return ``call(*args)``, and count its wall and CPU time on this thread in ``cell``.

    tasks: the number of tasks that the call counts for. ``into``: an empty list that it fills; each
    entry counts as a task, also those before an error.
    """
    if cell is None:
        return call(*args)
    is_clocked = not cell.num_unclocked
    cpu, wall = thread_time_ns() if is_clocked else 0, perf_counter_ns()
    try:
        result = call(*args)
    except BaseException:
        now = perf_counter_ns()
        cell.add_failure(now - wall, thread_time_ns() - cpu if is_clocked else -1)
        cell.num_tasks += 0 if into is None else len(into)
        raise
    now, ring = perf_counter_ns(), cell.ring
    if into is not None:
        tasks = len(into)
    cpu_ns, took_ns = thread_time_ns() - cpu if is_clocked else -1, now - wall
    if tasks:
        cell.add_many(tasks, took_ns, cpu_ns)
    if is_clocked and took_ns < _SHORT_NS:
        cell.num_unclocked = _CLOCKED_MASK  # calls that follow without the CPU clock
    elif not is_clocked:
        cell.num_unclocked -= 1
    if ring is not None and took_ns >= ring.shortest_ns * _LONG_PARTS:
        ring.add_part(cell.part, wall, now, cpu_ns)
    return result


def timed_sample(cell: TaskCell | None, call: Callable[..., Any], *args: Any) -> Any:
    """Return ``call(*args)`` like :func:`timed`, at less cost, for one sample of many."""
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
    """Record the calls timed with these cells in ``ring`` from now on, under their names."""
    for name, cell in cells.items():
        if cell is not None:
            cell.part, cell.ring = name, ring
