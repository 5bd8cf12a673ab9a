"""What the rows of a statistics file say: the stage of each, its time and its figures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .entries import EventLogEntry

Row: TypeAlias = Mapping[str, Any]
"""An interval of a stage or of a queue."""
Key: TypeAlias = tuple[int, int, str]
"""The pipeline, the number and the label, which a stage and the queue after it share."""

_NO_POSITION = -1  # names of another form come first, in alphabetical order
_OLDEST_GENERATION = 2
COLLECTION_EVENTS = ("gc_start", "gc_stop")


def key_of(row: Row) -> Key:
    """Return the key of a row's stage, whose name as logged changes with its concurrency."""
    if row["pipeline"] is None or row["stage_number"] is None:
        return _NO_POSITION, 0, row["name"].removesuffix("_queue")
    return row["pipeline"], row["stage_number"], row["label"]


def rows_by_stage(rows: Iterable[Row]) -> dict[Key, list[Row]]:
    """Return the rows of each stage, in their order."""
    groups: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key_of(row)].append(row)
    return groups


def begin_of(row: Row) -> float:
    """Return when an interval began, seconds since 1970."""
    return float(row["timestamp"] - row["elapsed"])


def origin_of(started: float, rows: Iterable[Row]) -> float:
    """Return the moment from which a run's time counts.

    Entries may be older than the run that logs them, if they were copied from elsewhere or the
    clock was set back. Elapsed time is never negative.
    """
    return min([float(started), *map(begin_of, rows)])


def total_of(rows: Iterable[Row], column: str) -> int:
    """Return the sum of a column."""
    return sum(int(row[column]) for row in rows)


def mean_of(rows: Iterable[Row], column: str, weight: Callable[[Row], float]) -> float:
    """Return the mean of a column, weighted by ``weight``; 0.0 if the weights are all 0."""
    weighted = [(float(row[column]), weight(row)) for row in rows]
    total = sum(w for _, w in weighted)
    return sum(value * w for value, w in weighted) / total if total else 0.0


def num_timed(row: Row) -> int:
    """Return how many calls or items the times of an interval are of: calls that fail have none."""
    return int(row["num_tasks"] - row["num_failures"] if "num_tasks" in row else row["num_items"])


def rate_of(column: str) -> Callable[[Row], float]:
    """Return the function of a count over the interval's length: intervals differ, and the last one
    is short. NaN where it has none.
    """
    return lambda row: float(row[column] / row["elapsed"]) if row["elapsed"] else math.nan


def milliseconds_of(column: str) -> Callable[[Row], float]:
    """Return the function of a time in ms; NaN where nothing was timed in the interval."""
    return lambda row: 1e3 * row[column] if num_timed(row) else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """A garbage collection; seconds since 1970."""

    start: float
    stop: float
    generation: int

    @property
    def is_full(self) -> bool:
        """Whether it looked at all objects."""
        return self.generation >= _OLDEST_GENERATION


def pair_collections(events: Iterable[EventLogEntry]) -> list[Collection]:
    """Pair each ``gc_start`` with the ``gc_stop`` of the same generation, oldest first.

    One whose start or stop is not in the file is left out. Without a generation, as other programs
    log them, collections count as full.
    """
    begun: dict[int, float] = {}
    found = []
    for event in events:
        if event.event_name not in COLLECTION_EVENTS:
            continue
        generation = int(event.details.get("generation", _OLDEST_GENERATION))
        if event.event_name == "gc_start":
            begun[generation] = event.timestamp
        elif generation in begun:
            start = begun.pop(generation)
            found.append(Collection(start=start, stop=event.timestamp, generation=generation))
    return found
