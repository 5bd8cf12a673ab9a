"""The data of the plots, read from the statistics file: one run, some stages, a time span."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..store.interval_rows import begin_of, key_of, origin_of, pair_collections, rows_by_stage
from ..store.query import (
    choose_run,
    query_event_stats,
    query_queue_stats,
    query_task_stats,
    run_row,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from ..store.entries import EventLogEntry
    from ..store.interval_rows import Collection, Key, Row

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """The intervals of one stage, or of one queue, oldest first."""

    key: Key
    name: str
    """The name as logged last: a change of concurrency changes a stage's name."""
    index: int
    """The index of the stage in its run, in pipeline order, counting stages that are left out."""
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The part of a run to draw."""

    db_path: Path
    run: Mapping[str, Any]
    """The run's row in the table ``run``, as :func:`run_row` returns it."""
    origin: float
    """The moment from which elapsed time counts: seconds since 1970."""
    tasks: Sequence[Series]
    queues: Sequence[Series]
    everything: Sequence[Series]
    """The series of that time, also of stages left out: the bottleneck is found with them."""
    events: Sequence[EventLogEntry]
    """The events of that time, oldest first."""
    collections: Sequence[Collection]
    start: float
    """The start of the first drawn interval, seconds since 1970."""
    stop: float
    """The end of the last one."""

    @property
    def where(self) -> str:
        """The file and the run, for messages."""
        return _where(self.db_path, self.run["run_id"])


def load(
    db_path: str | os.PathLike[str],
    *,
    stages: Sequence[str] | None,
    start_time: float | str | None,
    end_time: float | str | None,
    run_id: int | None,
) -> Recording:
    """Read the part to draw; arguments as for :func:`spdl_torch.observe.plot_stats`.

    Raises: FileNotFoundError; ValueError: not a statistics file, or nothing in it matches.
    """
    run_id = choose_run(db_path, run_id)
    where = _where(db_path, run_id)
    tasks = rows_by_stage(reversed(query_task_stats(db_path, run_id=run_id)))
    queues = rows_by_stage(reversed(query_queue_stats(db_path, run_id=run_id)))
    keys = sorted(tasks.keys() | queues.keys())
    everything = [*tasks.values(), *queues.values()]
    run = run_row(db_path, run_id)
    origin = origin_of(run["started"], chain(*everything))
    first = _seconds_since_1970(start_time, "start_time", origin)
    last = _seconds_since_1970(end_time, "end_time", origin)
    chosen = set(keys) if stages is None else _choose_stages(stages, everything, where)

    def within(groups: Mapping[Key, Sequence[Row]]) -> list[Series]:
        cut = {key: [r for r in groups[key] if first <= r["timestamp"] <= last] for key in groups}
        return [
            Series(key=key, name=cut[key][-1]["name"], index=index, rows=cut[key])
            for index, key in enumerate(keys)
            if cut.get(key)
        ]

    all_tasks, all_queues = within(tasks), within(queues)
    drawn_tasks = [series for series in all_tasks if series.key in chosen]
    drawn_queues = [series for series in all_queues if series.key in chosen]
    rows = [row for series in (*drawn_tasks, *drawn_queues) for row in series.rows]
    if not rows:
        times = [row["timestamp"] - origin for rows in everything for row in rows]
        raise ValueError(
            f"{where}: no interval of the chosen stages ends between start_time and end_time. "
            f"Its intervals end from +{min(times):.3f} s to +{max(times):.3f} s after its start."
        )
    events = query_event_stats(db_path, run_id=run_id)
    return Recording(
        db_path=Path(db_path),
        run=run,
        origin=origin,
        tasks=drawn_tasks,
        queues=drawn_queues,
        everything=[*all_tasks, *all_queues],
        events=[event for event in events if first <= event.timestamp <= last],
        collections=pair_collections(events),
        start=max(min(begin_of(row) for row in rows), first),
        stop=max(row["timestamp"] for row in rows),
    )


def _where(db_path: str | os.PathLike[str], run_id: int) -> str:
    return f"{db_path}, run {run_id}"


def merge_spans(spans: Iterable[tuple[float, float]], *, gap: float) -> list[tuple[float, float]]:
    """Join spans, sorted by start, that are less than ``gap`` apart: ``[(0, 1), (2, 3), (9, 9)]``
    with a gap of 2 are ``[(0, 3), (9, 9)]``.
    """
    merged: list[tuple[float, float]] = []
    for start, stop in spans:
        if merged and start - merged[-1][1] < gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _choose_stages(
    stages: Sequence[str], everything: Sequence[Sequence[Row]], where: str
) -> set[Key]:
    """Return the stages meant, by their names as logged, those of their queues, or their labels."""
    by_name: dict[str, set[Key]] = defaultdict(set)
    for rows in everything:
        for row in rows:
            for name in (row["name"], row["name"].removesuffix("_queue"), row["label"]):
                by_name[name].add(key_of(row))
    for stage in stages:
        if stage not in by_name:
            labels = dict.fromkeys(key[2] for key in sorted(set().union(*by_name.values())))
            raise ValueError(f"{where}: no stage {stage!r}; it has {', '.join(labels)}.")
    return set().union(*(by_name[stage] for stage in stages))


def _seconds_since_1970(value: float | str | None, name: str, origin: float) -> float:
    """Return a bound of the time span in seconds since 1970; None = no bound."""
    if value is None:
        return float("-inf") if name == "start_time" else float("inf")
    if not isinstance(value, str):
        return float(value)
    try:
        if match := re.fullmatch(r"\+(\d+\.?\d*) *(s|min|h)?", value):
            return origin + float(match[1]) * _SECONDS[match[2] or "s"]
        if re.fullmatch(r"\d+\.?\d*(e\d+)?", value):
            return float(value)
        return datetime.fromisoformat(value).timestamp()
    except ValueError as error:
        raise ValueError(
            f"{name} must be seconds since 1970, a date and time like 2026-01-31 12:00:00, or time "
            f"after the run's start like +90 or +1.5min, got {value!r}."
        ) from error
