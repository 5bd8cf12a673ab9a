"""The metrics of a report, under names that every logger accepts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..verdict.figures import figures_of

if TYPE_CHECKING:
    from ..verdict.report import Report

# MLflow accepts no other characters; the name of a stage may have more ("aggregate(8)").
_ILLEGAL = re.compile(r"[^A-Za-z0-9_. -]+")


_KEYS = (
    *("busy_ratio", "cpu_ratio", "wait_in_ratio", "wait_out_ratio", "items_per_second"),
    *("task_seconds_p50", "task_seconds_p99", "num_failures", "num_dropped", "concurrency"),
)


def legal_name(name: str) -> str:
    """Return the name with ``_`` for characters that some logger does not accept."""
    return _ILLEGAL.sub("_", name)


def metrics_of(report: Report, start: str, *, stages: bool = True) -> dict[str, float]:
    """Return ``<start>/wait_ratio`` and the metrics of every stage, ``<start>/<stage>/...``.

    stages: False = ``wait_ratio`` alone.
    """
    stats = report.stats
    metrics = {f"{start}/wait_ratio": stats.consumer_wait_ratio}
    if stages:
        for stage in stats.stages:
            figures = figures_of(stage, stage.tasks.elapsed)
            place = f"{start}/{legal_name(stage.name)}"
            metrics |= {f"{place}/{key}": float(figures[key]) for key in _KEYS}
        if report.placement is not None:
            metrics[f"{start}/num_processes"] = float(report.placement.num_processes)
    return metrics
