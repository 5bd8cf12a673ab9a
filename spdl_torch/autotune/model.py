"""The formula for the threads and room that fit into a share of cores and memory. Pure functions.

It is modelled on Scanner's ``PerfParams.estimate``: buffers as large as a share of the memory
allows for the largest element. Added are the share of the cores, which SPDL's guide gives as 40 %
(beyond that loading slows the training step), and a stop where more room gains nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..machine.limits import Limits

_CHEAP_ROOM_BYTES = 16 * 2**20
"""The total size up to which more elements may wait than the threads need: where they come
quickly, waking a thread for each one costs more than their memory."""

_CHEAP_ROOM = 64
"""The room from which more gains nothing; see ``python examples/bench engine``."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The resources that one rank's loading may use."""

    threads: int
    memory_bytes: int | None
    """The memory limit in bytes; None = unknown, so no bound."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a fit."""

    threads: int
    rooms: tuple[int, ...]
    """The batches per worker of a loader, or the items after each stage of a pipeline."""
    in_flight_bytes: int | None
    """The most bytes in flight, with all room taken; None = the element size is unknown."""

    def is_within(self, budget: Budget) -> bool:
        """Return False if even the smallest settings exceed the budget."""
        used, limit = self.in_flight_bytes, budget.memory_bytes
        return used is None or limit is None or used <= limit


@dataclass(frozen=True, slots=True)
class StageShape:
    """The properties of a stage that the formula needs."""

    elements: int = 1
    """The number of elements in one of its items: 32 after ``aggregate(32)``."""
    concurrency: int | None = None
    """None = to be found."""
    room: int | None = None
    """The items that may wait after it; None = to be found."""


def budget_of(limits: Limits, cpu_util: float, memory_util: float) -> Budget:
    """Return a rank's part of the given shares of cores and memory, at least one thread."""
    return Budget(
        # The tiny term makes up for 0.29 * 100 being a little less than 29.
        max(1, int(limits.own_cores * cpu_util + 1e-9)),
        limits.own_memory(memory_util),
    )


def fit_loader(
    budget: Budget, element_bytes: int | None, *, batch_size: int, prefetch_factor: int
) -> Fit:
    """Return the workers of a DataLoader, and the batches that each makes ahead.

    Bytes in flight = ``element_bytes * batch_size * (workers * prefetch_factor + workers + 1)``:
    what was requested and not yet taken; the samples of batches that are being collated, besides
    those batches; the one that the training step works on.
    """

    def bytes_of(workers: int, room: int) -> int:
        return (element_bytes or 0) * batch_size * (workers * room + workers + 1)

    workers, room, total = _fit(budget, bytes_of, prefetch_factor)
    return Fit(workers, (room,), None if element_bytes is None else total)


def fit_stages(
    budget: Budget, element_bytes: int | None, stages: Sequence[StageShape], sink_room: int
) -> Fit:
    """Return the threads and the room of each stage for which they are not given.

    Bytes in flight = the sum over stages of ``element_bytes * elements * (2 * concurrency +
    room)``, for an op has its item and its result in hand, and of the sink's room and the item that
    the consumer works on. What waits between source and first stage (paths, indices) is not
    counted.
    """

    def rooms_of(threads: int, most: int) -> list[int]:
        widths = [stage.concurrency or threads for stage in stages]
        wanted = [
            max(2, 2 * width, 2 * after, _cheap_room(element_bytes, stage.elements))
            for stage, width, after in zip(stages, widths, [*widths, 1][1:], strict=True)
        ]
        return [stage.room or min(want, most) for stage, want in zip(stages, wanted, strict=True)]

    def bytes_of(threads: int, most: int) -> int:
        elements = (stages[-1].elements if stages else 1) * (sink_room + 1)
        for stage, room in zip(stages, rooms_of(threads, most), strict=True):
            elements += stage.elements * (2 * (stage.concurrency or threads) + room)
        return (element_bytes or 0) * elements

    most = max(2 * budget.threads, *(2 * (s.concurrency or 1) for s in stages), _CHEAP_ROOM)
    threads, room, total = _fit(budget, bytes_of, most)
    rooms = tuple(rooms_of(threads, room))
    return Fit(threads, rooms, None if element_bytes is None else total)


def _fit(
    budget: Budget, bytes_of: Callable[[int, int], int], most_room: int
) -> tuple[int, int, int]:
    """Return the most threads that fit with room for one, then the most room; at least 1 each."""
    limit = math.inf if budget.memory_bytes is None else budget.memory_bytes

    def fits(threads: int, room: int) -> bool:
        return bytes_of(threads, room) <= limit

    threads = _largest(budget.threads, lambda threads: fits(threads, 1))
    room = _largest(most_room, lambda room: fits(threads, room))
    return threads, room, bytes_of(threads, room)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to ``most`` that fits, or 1; all below it must fit as well."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _cheap_room(element_bytes: int | None, elements: int) -> int:
    if element_bytes is None:
        return 0
    return min(_CHEAP_ROOM, _CHEAP_ROOM_BYTES // max(1, element_bytes * elements))
