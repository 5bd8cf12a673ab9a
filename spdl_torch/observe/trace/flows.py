"""The arrows in a trace: the path of an item from its first stage to the training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ...engine.timeline import Turn

MOST_FLOWS = 200
FLOWS_PER_PROCESS = 2**20
"""An id is the process id times this plus a number: unique in a merged file too."""

Stop = tuple["Turn", dict[str, Any]]
"""A turn and its ``Process`` slice."""


@dataclass
class Placed:
    """The slices of one timeline, by the number of their stage."""

    pid: int
    stage_numbers: Sequence[int]
    """The numbers of all stages, in order, with or without slices."""
    stops: dict[int, list[Stop]] = field(default_factory=dict)

    def add(self, stage_number: int, turn: Turn, event: dict[str, Any]) -> None:
        """Add a turn and the slice that shows its work."""
        self.stops.setdefault(stage_number, []).append((turn, event))

    def ways(self) -> Iterator[list[Stop]]:
        """Yield the paths of items, each over at least two stops; no stop lies on two of them.

        Where several items became one, as samples become a batch, the path is that of the last one,
        for which the others waited.
        """
        came_from: dict[int, Stop] = {}  # by the id() of the slice after it
        goes_on: set[int] = set()
        by_number = {
            stage_number: {stop[0].number: stop for stop in here if stop[0].number >= 0}
            for stage_number, here in self.stops.items()
        }
        for stage_number, next_number in pairwise(self.stage_numbers):
            for stop in self.stops.get(stage_number, []):
                after = by_number.get(next_number, {}).get(stop[0].output)
                if after is None or stop[0].ended_ns > after[0].started_ns:
                    continue
                goes_on.add(id(stop[1]))
                known = came_from.get(id(after[1]))
                if known is None or known[0].ended_ns < stop[0].ended_ns:
                    came_from[id(after[1])] = stop
        for here in self.stops.values():
            for stop in here:
                if id(stop[1]) not in goes_on and id(stop[1]) in came_from:
                    yield list(_back(stop, came_from))[::-1]


def _back(stop: Stop | None, came_from: Mapping[int, Stop]) -> Iterator[Stop]:
    while stop is not None:
        yield stop
        stop = came_from.get(id(stop[1]))


def add_flows(timelines: Iterable[Placed], most: int = MOST_FLOWS) -> None:
    """Mark the slices of every k-th item, so that there are at most ``most`` arrows.

    Where any item reached the consumer, only such items count, and those that a stage dropped or
    failed on: the others only seem to end there, since their next turn was too short to record.
    """
    ways = [(placed.pid, way) for placed in timelines for way in placed.ways()]
    if any(_is_step(way[-1]) for _, way in ways):
        ways = [pair for pair in ways if _is_step(pair[1][-1]) or pair[1][-1][0].outcome]
    ways.sort(key=lambda pair: pair[1][-1][1]["ts"])
    every = -(-len(ways) // most) or 1
    for number, (pid, way) in enumerate(ways[::every]):
        bind_id = f"{pid * FLOWS_PER_PROCESS + number:#x}"
        for place, (_, event) in enumerate(way):
            event["bind_id"] = bind_id
            if place > 0:
                event["flow_in"] = True
            if place < len(way) - 1:
                event["flow_out"] = True


def _is_step(stop: Stop) -> bool:
    return bool(stop[1]["cat"] == "consumer")
