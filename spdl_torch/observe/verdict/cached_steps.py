"""The speed of training without loading: the same steps over a few cached batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from statistics import median
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeVar

from ...checks import check_whole
from .report import make_report

if TYPE_CHECKING:
    from ...engine.timeline import Timeline
    from .report import Report

T = TypeVar("T")

_SHORTEST_STEP = 1e-4  # as recorded: of an empty step any loading is many times as much
_WARM_UP = 3  # uncounted steps: caches are cold, and threads of the loader are still ending


def cached_batches(
    batches: Iterable[T], num_batches: int, num_steps: int, report: Callable[[float], None]
) -> Iterator[T]:
    """Take ``num_batches`` and drop their source; then yield them over and over, for
    ``num_steps`` steps. At the end ``report`` is called with the median step in seconds, if there
    were more than three.
    """
    check_whole("headspace", num_batches=num_batches, num_steps=num_steps)

    def cached() -> Iterator[T]:
        iterator = iter(batches)
        kept = list(islice(iterator, num_batches))
        del iterator  # ends its threads
        steps: list[int] = []
        try:
            for batch in islice(cycle(kept), num_steps):
                began_ns = perf_counter_ns()
                yield batch
                steps.append(perf_counter_ns() - began_ns)
        finally:
            if len(steps) > _WARM_UP:
                report(median(steps[_WARM_UP:]) / 1e9)

    return cached()


def step_seconds(timeline: Timeline) -> float | None:
    """Return the median time from getting a batch to asking for the next; None = too few steps
    were recorded. Steps shorter than 0.1 ms are never recorded.
    """
    steps = [
        turn.ended_ns - turn.started_ns
        for row in timeline.rows
        if row.role == "consumer"
        for turn in row.turns
        if turn.number >= 0
    ]
    return median(steps[_WARM_UP:]) / 1e9 if len(steps) > _WARM_UP else None


def against_cached_steps(report: Report, step: float | None, cached: float | None) -> Report:
    """Return the report with the extra time of a step over cached batches, if both are known and
    the step does something."""
    if not step or not cached or cached < _SHORTEST_STEP:
        return report
    probes = replace(report.probes, step_slowdown=step / cached - 1)
    return make_report(report.stats, probes, pooled=report.pooled)
