"""The metrics of a report, under names that every logger accepts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...engine.statistics import StageStats
    from ..verdict.report import Report

# MLflow accepts no other characters; the name of a stage may have more ("aggregate(8)").
_ILLEGAL = re.compile(r"[^A-Za-z0-9_. -]+")


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
            place = f"{start}/{legal_name(stage.name)}"
            for key, value in _figures_of(stage).items():
                metrics[f"{place}/{key}"] = value
        if report.placement is not None:
            metrics[f"{start}/num_processes"] = float(report.placement.num_processes)
    return metrics


def _figures_of(stage: StageStats) -> dict[str, float]:
    tasks = stage.tasks
    return {
        "busy_ratio": stage.busy_ratio,
        "cpu_ratio": stage.cpu_ratio,
        "wait_in_ratio": stage.wait_in_ratio,
        "wait_out_ratio": stage.wait_out_ratio,
        "items_per_second": tasks.num_tasks / tasks.elapsed if tasks.elapsed else 0.0,
        "task_seconds_p50": tasks.p50_time,
        "task_seconds_p99": tasks.p99_time,
        "num_failures": float(tasks.num_failures),
        "num_dropped": float(stage.num_dropped),
        "concurrency": float(stage.concurrency),
    }
