"""Time a worker's calls of user code: count them in its cells, and record long ones in its ring.

The wall clock is read for every call. The thread's CPU clock is read for long ones and for some of
the others (see :class:`CallClock`), and only long ones are kept one by one: after a decoder, which
leaves nothing in the processor's caches, reading that clock twice and writing a record takes 9 µs
(measured), on warm caches less than 1 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ...engine.counters import LONG_NS

if TYPE_CHECKING:
    from ...engine.counters import TaskCell
    from ...engine.rings import Ring

END = object()
"""The result of a call that had nothing to do: it is not counted."""

_LONG_PARTS = 5
"""The factor by which a part of a batch has to take longer than a batch to be recorded: the records
of a batch of 0.1 ms and its two parts would take 1.5 % of it (measured)."""
LONG_SAMPLES = 100
"""The factor by which a sample of many has to take longer than a batch to be recorded: from 10 ms
on, or always at item level."""


def timed(
    cell: TaskCell | None,
    call: Callable[..., Any],
    *args: Any,
    tasks: int = 1,
    into: Sized | None = None,
    recorded_from: int = _LONG_PARTS,
) -> Any:
    """Return ``call(*args)``, and count its wall and CPU time on this thread in ``cell``.

    tasks: the number of tasks that the call counts for. ``into``: an empty list that it fills; each
    entry counts as a task, also those before an error. ``recorded_from``: the factor.
    """
    if cell is None:
        return call(*args)
    clock, cpu, wall = cell.clock, -1, perf_counter_ns()
    if clock.num_unclocked < 1 or wall >= clock.due_ns:
        wall = clock.read()
    try:
        result = call(*args)
    except BaseException:
        took_ns = (now := perf_counter_ns()) - wall
        is_unclocked = took_ns < LONG_NS and clock.num_unclocked
        cell.add_failure(took_ns, -1 if is_unclocked else clock.cpu_of(wall, now))
        cell.num_tasks += 0 if into is None else len(into)
        raise
    if result is END:
        return result
    now = perf_counter_ns()
    took_ns = now - wall
    if took_ns < LONG_NS and clock.num_unclocked:
        clock.num_unclocked -= 1
    else:
        cpu = clock.cpu_of(wall, now)
    if into is not None:
        tasks = len(into)
    if tasks:
        cell.add(took_ns, cpu, tasks)
    ring = cell.ring
    if ring is not None and took_ns >= ring.shortest_ns * recorded_from:
        ring.add_part(cell.part, wall, now, cpu)
    return result


def record_parts(ring: Ring, cells: Iterable[TaskCell | None]) -> None:
    """Record the calls timed with the cells of fetching and collating in ``ring`` from now on."""
    for name, cell in zip(("fetch", "collate"), cells, strict=True):
        if cell is not None:
            cell.part, cell.ring = name, ring
