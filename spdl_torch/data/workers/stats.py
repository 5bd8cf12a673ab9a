"""A loader's figures, computed from the counters of its threads and queues."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...observe.verdict.probes import ProbeCounters, probe_counters, probes_between
from ...observe.verdict.report import make_report
from ...pipeline.stats.counters import QueueCounters, TaskCounters
from ...pipeline.stats.perf_stats import (
    PipelineStats,
    QueuePerfStats,
    StageStats,
    queue_stats,
    task_stats,
)
from ...pipeline.stats.thread_time import Headcount
from ..nested_datasets import nested_datasets

if TYPE_CHECKING:
    from ...observe.verdict.report import Report
    from ...pipeline.hooks.task_hooks import TaskStatsHook
    from ...pipeline.recorder.flight_recorder import FlightRecorder
    from ...pipeline.recorder.timeline import Timeline
    from ..fetching.bad_samples import SkippedSamples
    from .epoch import Epoch

__all__ = ["Figures", "InlineFigures", "PoolFigures", "Readings", "with_remarks_of"]

_POOLED = ("fetch", "collate")

_SHORT_SAMPLE_SECONDS = 50e-6
_ENOUGH_SAMPLES = 1_000


class Figures(Protocol):
    """A loader's figures: of the running epoch or, after it, of the last one."""

    skipped: SkippedSamples | None
    """The samples left out; None = samples may not fail."""

    def snapshot(self) -> PipelineStats:
        """Return the figures alone."""
        ...

    def report(self) -> Report:
        """Return the figures with the probes' readings and the verdict, which cost more."""
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


class PoolFigures:
    """The figures of the epoch on a loader's threads or, after they have ended, of the last one."""

    def __init__(
        self, fetch: TaskStatsHook, collate: TaskStatsHook, transfer: TaskStatsHook | None
    ) -> None:
        self._fetch = fetch
        self._collate = collate
        self._transfer = transfer
        self.skipped: SkippedSamples | None = None
        self.workers = Headcount(fetch.info.concurrency)
        self._epoch: Epoch | None = None
        self._last = make_report(PipelineStats(elapsed=0.0, consumer_wait_ratio=0.0, stages=()))
        self._recorder: FlightRecorder | None = None

    @property
    def recorder(self) -> FlightRecorder | None:
        """The recorder of the last epoch that began."""
        return self._recorder

    def begin(self, epoch: Epoch) -> None:
        """Read the figures of this epoch from now on."""
        self._epoch, self._recorder = epoch, epoch.recorder

    def end(self) -> None:
        """Keep the epoch's figures as they are now, and let go of the epoch itself."""
        if self._epoch is not None:
            self._epoch.consumer.end()
            self._last, self._epoch = self.report(), None

    def snapshot(self) -> PipelineStats:
        """As :class:`Figures` says."""
        epoch = self._epoch
        return self._last.stats if epoch is None else self._stats_of(epoch)

    def report(self) -> Report:
        """As :class:`Figures` says."""
        epoch = self._epoch
        if epoch is None:
            return self._last
        readings = self._readings_of(epoch)
        probes = probes_between(readings.probes_before, readings.probes_now)
        probes = replace(probes, one_at_a_time=readings.one_at_a_time)
        report = make_report(self._stats_of(epoch), probes, pooled=_POOLED)
        return _with_skipped(report, self.skipped)

    def timeline(self) -> Timeline | None:
        """As :class:`Figures` says."""
        return None if self._recorder is None else self._recorder.timeline()

    def readings(self) -> Readings | None:
        """Return the running epoch's counts, for a process that computes the figures; None = no
        epoch runs."""
        epoch = self._epoch
        return None if epoch is None else self._readings_of(epoch)

    def _readings_of(self, epoch: Epoch) -> Readings:
        return Readings(
            self._fetch.counters().since(epoch.fetch_before),
            self._collate.counters().since(epoch.collate_before),
            epoch.idle_ns(),
            epoch.probes_before,
            probe_counters(),
            epoch.parked_ns(),
            epoch.crowd.alone is not None,
        )

    def _stats_of(self, epoch: Epoch) -> PipelineStats:
        results, outlet = epoch.results.counters(), epoch.outlet.counters()
        ready = queue_stats(results)
        readings = self._readings_of(epoch)
        fetch, waits_ns, parked_ns = readings.fetch, (readings.jobs_wait_ns, 0), readings.parked_ns
        stages = [
            _stage_stats(name, self.workers, lap, ready, *waits_ns, parked_ns)
            for name, lap in (("fetch", fetch), ("collate", readings.collate))
        ]
        if self._transfer is not None:
            lap = self._transfer.counters().since(epoch.transfer_before)
            waits_ns = results.get_wait[0], outlet.put_wait[0]
            stages.append(
                _stage_stats("transfer", Headcount(1), lap, queue_stats(outlet), *waits_ns)
            )
        return PipelineStats(
            elapsed=fetch.elapsed_ns / 1e9,
            consumer_wait_ratio=min(1.0, outlet.get_wait[0] / max(1, outlet.elapsed_ns)),
            stages=tuple(stages),
        )


class InlineFigures:
    """The figures of loading on the trainer's own thread, which waits all of that time."""

    def __init__(self, stages: list[TaskStatsHook], recorder: FlightRecorder) -> None:
        self.skipped: SkippedSamples | None = None
        self._stages = stages
        self._recorder = recorder
        recorder.belongs_to(self)

    def end(self) -> None:
        """Stop the epoch's clock."""
        for stage in self._stages:
            stage.end()

    def snapshot(self) -> PipelineStats:
        """As :class:`Figures` says."""
        readings = [stage.counters() for stage in self._stages]
        elapsed_ns = max(1, readings[0].elapsed_ns)
        rows = (
            _stage_stats(hook.info.stage_name, Headcount(1), tasks, queue_stats(QueueCounters()), 0)
            for hook, tasks in zip(self._stages, readings, strict=True)
        )
        waited_ns = sum(tasks.busy_ns for tasks in readings)
        return PipelineStats(
            elapsed=elapsed_ns / 1e9,
            consumer_wait_ratio=min(1.0, waited_ns / elapsed_ns),
            stages=tuple(rows),
        )

    def report(self) -> Report:
        """As :class:`Figures` says."""
        return _with_skipped(make_report(self.snapshot(), pooled=_POOLED), self.skipped)

    def timeline(self) -> Timeline:
        """As :class:`Figures` says."""
        return self._recorder.timeline()


def _with_skipped(report: Report, skipped: SkippedSamples | None) -> Report:
    """Return the report with the skipped samples named."""
    return _with(report, () if skipped is None else skipped.remarks())


def with_remarks_of(dataset: object, report: Report, *, one_by_one: bool) -> Report:
    """Return the report with the remarks of ``loading_remarks()`` of the dataset, or of the dataset
    in a Subset, and a remark on short samples. ``one_by_one``: each sample takes its own call.
    """
    if one_by_one:
        report = _with(report, _remarks_on_short_samples(dataset, report))
    for each in nested_datasets(dataset):
        # Ask the class: an object that answers to any attribute name would seem to have it.
        if hasattr(type(each), "loading_remarks"):
            return _with(report, tuple(each.loading_remarks()))
    return report


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


def _with(report: Report, remarks: tuple[str, ...]) -> Report:
    if not remarks:
        return report
    verdict = replace(report.verdict, remarks=(*report.verdict.remarks, *remarks))
    return replace(report, verdict=verdict)


def _stage_stats(
    name: str,
    threads: Headcount,
    lap: TaskCounters,
    queue: QueuePerfStats,
    wait_in_ns: int,
    wait_out_ns: int = 0,
    parked_ns: int = 0,
) -> StageStats:
    """Return a stage's figures. Threads that were parked for ``parked_ns`` in all count as absent
    for that time."""
    all_ns = max(1, threads.thread_ns(lap.elapsed_ns))
    thread_ns = max(1, all_ns - parked_ns)
    return StageStats(
        name=name,
        concurrency=max(1, round(threads.count * thread_ns / all_ns)),
        tasks=task_stats(lap),
        queue=queue,
        num_dropped=0,
        busy_ratio=min(1.0, lap.busy_ns / thread_ns),
        wait_in_ratio=min(1.0, wait_in_ns / thread_ns),
        wait_out_ratio=min(1.0, wait_out_ns / thread_ns),
        thread_time=thread_ns / 1e9,
    )
