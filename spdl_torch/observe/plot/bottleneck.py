"""The verdict on the drawn intervals, as a sentence above the pictures."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..store.stored_run import as_measured, begins_of_events, probes_of_events, stats_of_rows
from ..verdict.causes import Cause
from ..verdict.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .data import Recording


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence for people, and the label of the stage that it blames."""

    text: str
    label: str | None = None


def find_bottlenecks(recording: Recording) -> dict[int, Finding]:
    """Return a finding for each pipeline of a run; none for queues whose order is unknown."""
    pipelines: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for series in recording.everything:
        if series.rows[0]["stage_number"] is not None:
            pipelines[series.key[0]] += series.rows
    return {
        pipeline: finding
        for pipeline, rows in sorted(pipelines.items())
        if (finding := _find(recording, pipeline, rows)) is not None
    }


def _find(recording: Recording, pipeline: int, rows: Iterable[Mapping[str, Any]]) -> Finding | None:
    probes, pooled = probes_of_events(recording.events, pipeline)
    begins = begins_of_events(recording.events, pipeline)
    tasks = [row for row in rows if "num_tasks" in row]
    queues = [row for row in rows if "num_items" in row]
    if not queues:
        return None
    stats = as_measured(stats_of_rows(tasks, queues, begins), pooled)
    verdict = judge(stats, probes, pooled=pooled)
    if verdict.cause is Cause.SOURCE:
        source = min(queues, key=lambda row: row["stage_number"])
        return Finding(verdict.finding, source["label"])
    return Finding(verdict.finding, verdict.stage)
