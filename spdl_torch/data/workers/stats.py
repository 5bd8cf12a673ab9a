"""A loader's statistics, computed from the counters of its threads and queues."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ...machine.probes import (
    ProbeCounters,
    Probes,
    helper_cores,
    probe_counters,
    probes_between,
)
from ...machine.thread_times import run_delay_ns
from ...named_tuples import NamedTuple
from ...objects.datasets import all_datasets
from ...observe.verdict.placement import PLACEMENT_EVENT
from ...pipeline.stats.counters import QueueCounters, TaskCounters
from ...pipeline.stats.perf_stats import (
    PipelineStats,
    QueuePerfStats,
    StageStats,
    queue_stats,
    task_stats,
)
from ...pipeline.stats.thread_time import ThreadCount
from ..dataset_stats import loading_counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...io._transfer.near import Near
    from ...observe.verdict.placement import Placement
    from ...observe.verdict.report import Report
    from ...pipeline.hooks.task_hooks import TaskCell, TaskStatsHook
    from ...pipeline.recorder.flight_recorder import FlightRecorder
    from ...pipeline.recorder.timeline import Timeline
    from ..fetching.bad_samples import SkippedSamples
    from .epoch import Epoch

_POOLED = ("fetch", "collate")

_VISIBLE_START = 0.05
"""The share of an epoch from which the start of its workers is worth a remark."""

_SHORT_SAMPLE_SECONDS = 50e-6
_ENOUGH_SAMPLES = 1_000


class EpochStats(Protocol):
    """A loader's statistics: of the running epoch or, after it, of the last one."""

    skipped: SkippedSamples | None
    """The samples left out; None = samples may not fail."""

    def snapshot(self) -> PipelineStats:
        """Return the statistics alone."""
        ...

    def report(self) -> Report:
        """Return the statistics with the probes' readings and the verdict, which cost more."""
        ...

    def timeline(self) -> Timeline | None:
        """Return what every thread did in the last seconds; None = nothing ran yet."""
        ...


class Readings(NamedTuple):
    """The counts of an epoch's workers so far."""

    fetch: TaskCounters
    collate: TaskCounters
    jobs_wait_ns: int
    """The time that all workers together waited for a job."""
    probes_before: ProbeCounters
    """The probes' counters when the epoch began."""
    probes_now: ProbeCounters
    parked_ns: int = 0
    """The time that all workers together left the work to one of them."""
    one_at_a_time: bool = False
    data: Mapping[str, int] = {}
    """The counts of this process's datasets in this epoch."""


class DatasetCounts:
    """The counts of the datasets in a dataset since an epoch began.

    A forked process begins with those of its parent, so only differences count.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._before = loading_counts(dataset)

    def begin(self) -> None:
        """Count from now on."""
        self._before = loading_counts(self._dataset)

    def now(self) -> dict[str, int]:
        """Return the counts of the epoch."""
        counts = loading_counts(self._dataset)
        return {name: count - self._before.get(name, 0) for name, count in counts.items()}


class Figures(NamedTuple):
    """What a report is made of. Most epochs end without anybody asking for one: only then is it
    judged, and what judges and shows it is imported."""

    stats: PipelineStats
    probes: Probes
    placements: tuple[Placement, ...] = ()
    remarks: tuple[str, ...] = ()
    pooled: tuple[str, ...] = _POOLED

    def report(self) -> Report:
        """Return the report on these figures."""
        from ...observe.verdict.report import make_report

        report = make_report(self.stats, self.probes, pooled=self.pooled)
        return with_remarks(replace(report, placements=self.placements), *self.remarks)


class PoolStats:
    """The statistics of the epoch on a loader's threads or, once they have ended, of the last."""

    def __init__(
        self,
        fetch: TaskStatsHook,
        collate: TaskStatsHook,
        transfer: TaskStatsHook | None,
        dataset: Any = None,
    ) -> None:
        self._counts = DatasetCounts(dataset)
        self.fetch, self.collate = fetch, collate
        self._transfer = transfer
        self.skipped: SkippedSamples | None = None
        self.shared = ""
        """The remark on what worker threads share though samples may change it."""
        self.near: Near | None = None
        """The cores near the device of the batches; None = there is none, or all are alike."""
        self.placement: Placement | None = None
        """Where the workers live from the next epoch on, and why; None = somebody else says."""
        self._placements: tuple[Placement, ...] = ()  # where they have lived in this epoch
        self.workers = ThreadCount(fetch.info.concurrency)
        # One thread begins and ends epochs; any other may ask for statistics meanwhile. So each
        # method reads this once, and continues with what it found.
        self._epoch: Epoch | None = None
        nothing = PipelineStats(elapsed=0.0, consumer_wait_ratio=0.0, stages=())
        self._last = Figures(nothing, Probes())
        self._recorder: FlightRecorder | None = None

    def new_cells(self, *, enabled: bool) -> tuple[TaskCell | None, ...]:
        """Return the cells in which a new worker counts its fetching and its collating."""
        return tuple(each.new_cell() if enabled else None for each in (self.fetch, self.collate))

    @property
    def is_over(self) -> bool:
        """Whether no epoch runs."""
        return self._epoch is None

    @property
    def recorder(self) -> FlightRecorder | None:
        """The recorder of the last epoch that began."""
        return self._recorder

    def begin(self, epoch: Epoch) -> None:
        """Read the statistics of this epoch from now on."""
        self._epoch, self._recorder = epoch, epoch.recorder
        self._placements = ()
        self._counts.begin()
        if self.placement is not None:
            self.place(self.placement)

    def place(self, placement: Placement) -> None:
        """Report, and note in the trace, where the workers live from now on."""
        self.placement = replace(placement, since=time.time())
        self._placements += (self.placement,)  # a new tuple: report() may be reading the old one
        if self._recorder is not None:
            self._recorder.note(PLACEMENT_EVENT, placement.as_details())

    def leave(self) -> None:
        """Note that the trainer asks another pool for its next batch: its last step has ended."""
        epoch = self._epoch
        if epoch is not None:
            epoch.consumer.end()

    def end(self) -> None:
        """Keep the epoch's statistics as they are now, and let go of the epoch itself."""
        if self._epoch is not None:
            self._epoch.consumer.end()
            # In this order: a thread that finds no epoch finds the figures of the one that ended.
            self._last, self._epoch = self._figures_of(self._epoch), None

    def snapshot(self) -> PipelineStats:
        """As :class:`EpochStats` says."""
        epoch = self._epoch
        if epoch is None:
            return self._last.stats
        return self._stats_of(epoch, self._readings_of(epoch, run_delays=False))

    def report(self) -> Report:
        """As :class:`EpochStats` says."""
        return self.figures().report()

    def figures(self) -> Figures:
        """Return what a report would be made of, which costs less."""
        epoch = self._epoch
        return self._last if epoch is None else self._figures_of(epoch)

    def _figures_of(self, epoch: Epoch) -> Figures:
        """Return all that a report on the epoch needs, as it is now."""
        readings = self._readings_of(epoch)
        probes = probes_between(readings.probes_before, readings.probes_now)
        probes = replace(probes, one_at_a_time=readings.one_at_a_time)
        *before, now = self._placements or (None,)
        probes = self._of_all_processes(probes, epoch, readings)
        return Figures(
            stats=self._stats_of(epoch, readings),
            probes=probes,
            placements=() if now is None else (*before, _with_workers(now, self.workers.count)),
            remarks=(
                *_remarks_on(self.skipped),
                *filter(None, (self.shared,)),
                *_remarks_on_cores(self.near, self.workers.count),
                *self._remarks(),
            ),
        )

    def _remarks(self) -> tuple[str, ...]:
        """Return further remarks on the running epoch."""
        return ()

    def _of_all_processes(self, probes: Probes, epoch: Epoch, readings: Readings) -> Probes:
        """Return the probes' readings with those of all processes of the loader.

        Here there is only one.
        """
        return probes

    def timeline(self) -> Timeline | None:
        """As :class:`EpochStats` says."""
        return None if self._recorder is None else self._recorder.timeline()

    def readings(self) -> Readings | None:
        """Return the running epoch's counts, for a process that computes the statistics; None = no
        epoch runs."""
        epoch = self._epoch
        return None if epoch is None else self._readings_of(epoch)

    def _readings_of(self, epoch: Epoch, *, run_delays: bool = True) -> Readings:
        """Return the counts; ``run_delays=False``: of waits for a core as last read, which is
        quicker."""
        # Read the waits right after the clock of `fetch`, whose time they are part of: the probes'
        # counters take long to read where threads contend for the GIL.
        return Readings(
            fetch=self.fetch.counters().since(epoch.fetch_before),
            jobs_wait_ns=epoch.idle_ns(),
            parked_ns=epoch.parked_ns(),
            one_at_a_time=epoch.contention.alone is not None,
            collate=self.collate.counters().since(epoch.collate_before),
            probes_before=epoch.probes_before,
            probes_now=probe_counters(run_delays=run_delays),
            data=self._counts.now(),
        )

    def _stats_of(self, epoch: Epoch, readings: Readings) -> PipelineStats:
        results, outlet = epoch.results.counters(), epoch.outlet.counters()
        ready = queue_stats(results)
        fetch, waits_ns, parked_ns = readings.fetch, (readings.jobs_wait_ns, 0), readings.parked_ns
        stages = [
            _stage_stats(name, self.workers, tasks, ready, *waits_ns, parked_ns)
            for name, tasks in (("fetch", fetch), ("collate", readings.collate))
        ]
        if self._transfer is not None:
            tasks = self._transfer.counters().since(epoch.transfer_before)
            waits_ns = results.get_wait[0], outlet.put_wait[0]
            stages.append(
                _stage_stats("transfer", ThreadCount(1), tasks, queue_stats(outlet), *waits_ns)
            )
        return PipelineStats(
            elapsed=fetch.elapsed_ns / 1e9,
            consumer_wait_ratio=min(1.0, outlet.get_wait[0] / max(1, outlet.elapsed_ns)),
            stages=tuple(stages),
            data=readings.data,
        )


class _InlineReading(NamedTuple):
    probes: ProbeCounters
    run_delay_ns: int | None
    """The time that the loading thread had no core; None = unknown."""


class InlineStats:
    """The statistics of loading on the trainer's own thread, which waits all of that time."""

    def __init__(
        self, stages: list[TaskStatsHook], recorder: FlightRecorder, dataset: Any = None
    ) -> None:
        self.skipped: SkippedSamples | None = None
        self.near: Near | None = None
        """As in :class:`PoolStats`."""
        self._counts = DatasetCounts(dataset)
        self._stages = stages
        self._recorder = recorder
        recorder.belongs_to(self)
        self._thread = threading.get_native_id()
        self._before = self._reading()
        self._at_end: _InlineReading | None = None

    def end(self) -> None:
        """Stop the epoch's clock."""
        for stage in self._stages:
            stage.end()
        self._at_end = self._at_end or self._reading()

    def snapshot(self) -> PipelineStats:
        """As :class:`EpochStats` says."""
        readings = [stage.counters() for stage in self._stages]
        elapsed_ns = max(1, readings[0].elapsed_ns)
        rows = (
            _stage_stats(
                hook.info.stage_name, ThreadCount(1), tasks, queue_stats(QueueCounters()), 0
            )
            for hook, tasks in zip(self._stages, readings, strict=True)
        )
        waited_ns = sum(tasks.busy_ns for tasks in readings)
        return PipelineStats(
            elapsed=elapsed_ns / 1e9,
            consumer_wait_ratio=min(1.0, waited_ns / elapsed_ns),
            stages=tuple(rows),
            data=self._counts.now(),
        )

    def report(self) -> Report:
        """As :class:`EpochStats` says."""
        before, now = self._before, self._at_end or self._reading()
        delay: float | None = None
        if before.run_delay_ns is not None and now.run_delay_ns is not None:
            seconds_ns = now.probes.wall_ns - before.probes.wall_ns
            delay = min(1.0, (now.run_delay_ns - before.run_delay_ns) / max(1, seconds_ns))
        # Nobody probes for a loader without workers.
        probes = replace(
            probes_between(before.probes, now.probes),
            gil_seconds=None,
            gil_held_ratio=None,
            gc_ratio=None,
            run_delay_ratio=delay,
            helper_cores=None if delay is None else helper_cores(before.probes, now.probes),
        )
        remarks = *_remarks_on(self.skipped), *_remarks_on_cores(self.near, 0)
        return Figures(self.snapshot(), probes, remarks=remarks).report()

    def _reading(self) -> _InlineReading:
        return _InlineReading(probe_counters(), run_delay_ns(self._thread))

    def timeline(self) -> Timeline:
        """As :class:`EpochStats` says."""
        return self._recorder.timeline()


def _with_workers(placement: Placement, count: int) -> Placement:
    """Return the placement with the number of workers that tuning has come to."""
    num_processes = count if placement.num_processes else 0
    return replace(placement, num_workers=count, num_processes=num_processes)


def _remarks_on(skipped: SkippedSamples | None) -> tuple[str, ...]:
    """Return the remarks that name the skipped samples."""
    return () if skipped is None else tuple(skipped.remarks())


def _remarks_on_cores(near: Near | None, num_workers: int) -> tuple[str, ...]:
    """Return the remark on what is near the device of the batches."""
    return () if near is None else (near.remark(num_workers),)


def with_remarks_of(
    dataset: object, report: Report, *, one_by_one: bool, given: tuple[int, int] | None = None
) -> Report:
    """Return the report with the remarks of ``loading_remarks()`` of the dataset and of those in
    it, and a remark on short samples. ``one_by_one``: each sample takes its own call. ``given``:
    the epoch, and the samples of it that the loop has had on all ranks, for ``progress_remarks()``
    of a dataset that has it; None = unknown.
    """
    if one_by_one:
        report = with_remarks(report, *_remarks_on_short_samples(dataset, report))
    if given is not None and hasattr(type(dataset), "progress_remarks"):
        asked: Any = dataset
        report = with_remarks(report, *asked.progress_remarks(*given))
    remarks: dict[str, None] = {}  # each once: several datasets may say the same
    for each in all_datasets(dataset):
        # Ask the class: an object that answers to any attribute name would seem to have it.
        if hasattr(type(each), "loading_remarks"):
            remarks.update(dict.fromkeys(each.loading_remarks()))
    return with_remarks(report, *remarks)


def _remarks_on_short_samples(dataset: object, report: Report) -> tuple[str, ...]:
    fetch = next((stage.tasks for stage in report.stats.stages if stage.name == "fetch"), None)
    if fetch is None or fetch.num_tasks < _ENOUGH_SAMPLES or report.verdict.stage != "fetch":
        return ()
    if fetch.ave_time >= _SHORT_SAMPLE_SECONDS:
        return ()
    return (
        f"A sample takes {fetch.ave_time * 1e6:.1f} µs, much of it for the calls that every sample "
        f"makes. If {type(dataset).__name__} has __getitems__(indices), which returns the list of "
        "a batch's samples, they are made in one call: index the data once with all of them.",
    )


def start_remark(report: Report, first_seconds: float, start_seconds: float) -> str:
    """Return the remark on worker processes that every epoch starts anew, "" if that takes little
    of it. ``report``: of the whole epoch. ``first_seconds``: the time to the first batch;
    ``start_seconds``: the part of it before the report begins."""
    placement, stages = report.placement, report.stats.stages
    if placement is None or not placement.num_processes or not stages:
        return ""
    # A batch takes its time whoever makes it.
    num_batches = max(1, stages[-1].queue.num_items)
    batch_seconds = sum(stage.tasks.busy_time for stage in stages) / num_batches
    seconds, of_epoch = first_seconds - batch_seconds, start_seconds + report.stats.elapsed
    if seconds < _VISIBLE_START * of_epoch:
        return ""
    return (
        f"Each epoch starts its worker processes anew: {seconds:.2g} s of the {of_epoch:.2g} s of "
        "the last one. persistent_workers=True keeps them, with the dataset as it was when they "
        "started."
    )


def with_remarks(report: Report, *remarks: str) -> Report:
    """Return the report with these remarks after its own."""
    if not remarks:
        return report
    verdict = replace(report.verdict, remarks=(*report.verdict.remarks, *remarks))
    return replace(report, verdict=verdict)


def _stage_stats(
    name: str,
    threads: ThreadCount,
    tasks: TaskCounters,
    queue: QueuePerfStats,
    wait_in_ns: int,
    wait_out_ns: int = 0,
    parked_ns: int = 0,
) -> StageStats:
    """Return a stage's statistics. Threads that were parked for ``parked_ns`` in all count as
    absent for that time."""
    all_ns = max(1, threads.thread_ns(tasks.elapsed_ns))
    thread_ns = max(1, all_ns - parked_ns)
    return StageStats(
        name=name,
        concurrency=max(1, round(threads.count * thread_ns / all_ns)),
        tasks=task_stats(tasks),
        queue=queue,
        num_dropped=0,
        busy_ratio=min(1.0, tasks.busy_ns / thread_ns),
        wait_in_ratio=min(1.0, wait_in_ns / thread_ns),
        wait_out_ratio=min(1.0, wait_out_ns / thread_ns),
        thread_time=thread_ns / 1e9,
    )
