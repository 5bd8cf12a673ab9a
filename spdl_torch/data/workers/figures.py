"""The figures of an epoch, computed from what was counted in it once somebody asks for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ...engine.statistics import PipelineStats, StageStats, queue_stats, task_stats
from ...machine.readings import Probes, probes_between
from .remarks import with_remarks

if TYPE_CHECKING:
    from ...engine.counters import TaskCounters
    from ...engine.statistics import QueuePerfStats
    from ...observe.verdict.placement import Placement
    from ...observe.verdict.report import Report
    from .counts import Measured

_POOLED = ("fetch", "collate")


class Figures(NamedTuple):
    """What a report is made of."""

    stats: PipelineStats
    probes: Probes
    placements: tuple[Placement, ...] = ()
    remarks: tuple[str, ...] = ()
    pooled: tuple[str, ...] = _POOLED

    def report(self) -> Report:
        """Return the report on these figures."""
        from ...observe.verdict.report import make_report  # judges: statistics alone need none

        report = make_report(self.stats, self.probes, pooled=self.pooled)
        return with_remarks(replace(report, placements=self.placements), *self.remarks)


def figures_of(measured: Measured | None) -> Figures:
    """Return the figures on what was measured; None = nothing has run yet."""
    if measured is None:
        return Figures(PipelineStats(elapsed=0.0, consumer_wait_ratio=0.0, stages=()), Probes())
    placement = measured.placement
    return Figures(
        stats=stats_of(measured),
        probes=_probes_of(measured),
        placements=() if placement is None else (_with_workers(placement, measured.num_workers),),
        remarks=measured.remarks,
    )


def stats_of(measured: Measured) -> PipelineStats:
    """Return the statistics alone."""
    readings, queues = measured.readings, measured.queues
    results, outlet, transfer = queues.results, queues.outlet, queues.transfer
    elapsed_ns = measured.elapsed_ns
    stages = [
        _stage_stats(
            name,
            measured.num_workers,
            measured.thread_ns,
            tasks._replace(elapsed_ns=elapsed_ns),
            queue_stats(results),
            readings.jobs_wait_ns,
        )
        for name, tasks in (("fetch", readings.fetch), ("collate", readings.collate))
    ]
    if measured.has_transfer:
        waits_ns = results.get_wait[0], outlet.put_wait[0]
        ready = queue_stats(outlet)
        stages.append(_stage_stats("transfer", 1, transfer.elapsed_ns, transfer, ready, *waits_ns))
    return PipelineStats(
        elapsed=elapsed_ns / 1e9,
        consumer_wait_ratio=_share(queues.waited_ns, elapsed_ns),
        stages=tuple(stages),
        data=readings.data,
    )


def _probes_of(measured: Measured) -> Probes:
    """Return the probes' readings: of workers in processes of their own those are theirs, with the
    cores of the trainer and theirs together."""
    readings = measured.readings
    before, now = readings.probes_before, readings.probes_now
    probes = probes_between(before, now)
    elapsed_ns, sampling_ns = measured.elapsed_ns, measured.queues.sampling_ns
    probes = replace(
        probes,
        sampling_ratio=_share(sampling_ns, elapsed_ns),
    )
    if measured.own_probes is None:
        return probes
    own = probes_between(*measured.own_probes)
    wall_ns = max(1, elapsed_ns)
    theirs = (now.cpu_ns - before.cpu_ns) / wall_ns
    helpers = max(0, now.helpers_ns - before.helpers_ns) / wall_ns
    return replace(
        probes,
        own_gil=True,  # each worker has its process
        helper_cores=None if probes.helper_cores is None else helpers,
        cores_used=None if own.cores_used is None else own.cores_used + max(0.0, theirs),
    )


def _share(part_ns: int, elapsed_ns: int) -> float:
    return min(1.0, part_ns / max(1, elapsed_ns))


def _with_workers(placement: Placement, count: int) -> Placement:
    """Return the placement with the number of workers that tuning has come to."""
    num_processes = count if placement.num_processes else 0
    return replace(placement, num_workers=count, num_processes=num_processes)


def _stage_stats(
    name: str,
    num_threads: int,
    thread_ns: int,
    tasks: TaskCounters,
    queue: QueuePerfStats,
    wait_in_ns: int,
    wait_out_ns: int = 0,
) -> StageStats:
    """Return a stage's statistics. Its threads had ``thread_ns`` together."""
    thread_ns = max(1, thread_ns)
    return StageStats(
        name=name,
        concurrency=num_threads,
        tasks=task_stats(tasks),
        queue=queue,
        num_dropped=0,
        busy_ratio=min(1.0, tasks.busy_ns / thread_ns),
        wait_in_ratio=min(1.0, wait_in_ns / thread_ns),
        wait_out_ratio=min(1.0, wait_out_ns / thread_ns),
        thread_time=thread_ns / 1e9,
    )
