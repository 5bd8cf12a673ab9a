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
from .counts import DatasetCounts, Readings

if TYPE_CHECKING:
    from ...io._transfer.near import Near
    from ...observe.verdict.placement import Placement
    from ...observe.verdict.report import Report
    from ...pipeline.hooks.task_hooks import TaskStatsHook
    from ...pipeline.recorder.flight_recorder import FlightRecorder
    from ...pipeline.recorder.timeline import Timeline
    from ..fetching.bad_samples import SkippedSamples
    from .epoch import Epoch
    from .transfer_stage import DeviceStage

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


class Source(Protocol):
    """What counts the work of some workers; it outlives them."""

    has_own_gil: bool
    """Whether they live in processes of their own."""
    workers: ThreadCount
    """Their number."""

    def readings(self, *, run_delays: bool = True) -> Readings | None:
        """Return their counts in the running epoch; None = there is none, or nothing is known."""
        ...

    def remarks(self) -> tuple[str, ...]:
        """Return what a report has to say on them."""
        ...


class _Queues(NamedTuple):
    """Readings of the way of an epoch's batches from the workers to the loop."""

    results: QueueCounters
    outlet: QueueCounters
    transfer: TaskCounters

    def since(self, before: _Queues) -> _Queues:
        """Return what was counted after ``before``."""
        return _Queues(
            self.results.since(before.results),
            self.outlet.since(before.outlet),
            self.transfer.since(before.transfer),
        )


class _Spell:
    """The time in which the same workers got the jobs of an epoch.

    What they make is theirs, even if others have got the jobs meanwhile; the loop's waits are
    those of its time.
    """

    def __init__(self, source: Source, queues: _Queues, before: Readings | None = None) -> None:
        """``before``: what they had counted in this epoch; None = nothing."""
        self.source = source
        self.placements: tuple[Placement, ...] = ()
        """Where workers have lived in this epoch up to here."""
        # Of this process; where the workers are in it, they count from the epoch's beginning.
        self.probes_before = probe_counters() if source.has_own_gil else None
        self._before, self._queues_before = before, queues
        self._end: _Queues | None = None
        self._readings_at_end: Readings | None = None

    def end(self, queues: _Queues) -> None:
        """Note that others get the jobs from now on."""
        self._end = queues

    def settle(self) -> None:
        """Note that what the workers make from now on is of another spell of theirs."""
        self._readings_at_end = self._readings_at_end or self.source.readings()

    def queues(self, now: _Queues) -> _Queues:
        """Return the readings of the queues in this time."""
        return (self._end or now).since(self._queues_before)

    def readings(self, *, run_delays: bool = True) -> Readings:
        """Return the counts of the workers."""
        now = self._readings_at_end or self.source.readings(run_delays=run_delays)
        if now is None:
            nothing, probes = TaskCounters(), self.probes_before or probe_counters()
            return Readings(nothing, nothing, 0, probes, probes)
        return now if self._before is None else now.since(self._before)


class CrewStats:
    """The statistics of the epoch on a crew's workers or, once they have ended, of the last one.

    Where the workers move in an epoch, each spell of theirs has figures of its own; those of the
    present one are reported.
    """

    def __init__(self, stage: DeviceStage | None = None) -> None:
        self._transfer = None if stage is None else stage.hook
        self.skipped: SkippedSamples | None = None
        self.near: Near | None = None if stage is None else stage.near
        """The cores near the device of the batches; None = there is none, or all are alike."""
        # One thread begins and ends epochs; any other may ask for statistics meanwhile. So these
        # are replaced and never changed, and each method reads them once.
        self._epoch: Epoch | None = None
        self._spells: tuple[_Spell, ...] = ()
        nothing = PipelineStats(elapsed=0.0, consumer_wait_ratio=0.0, stages=())
        self._last: tuple[Figures, ...] = (Figures(nothing, Probes()),)
        self._recorder: FlightRecorder | None = None

    @property
    def is_over(self) -> bool:
        """Whether no epoch runs."""
        return self._epoch is None

    @property
    def recorder(self) -> FlightRecorder | None:
        """The recorder of the last epoch that began."""
        return self._recorder

    @property
    def spell(self) -> object:
        """The same object for as long as the same workers get the jobs; None between epochs."""
        return self._spells[-1] if self._spells else None

    def begin(self, epoch: Epoch, source: Source, placement: Placement | None) -> None:
        """Report on this epoch from now on, whose jobs go to these workers."""
        self._recorder = epoch.recorder
        first = _Spell(source, self._queues_of(epoch))
        # In this order: a thread that finds the epoch finds a spell.
        self._spells, self._epoch = (first,), epoch
        if placement is not None:
            self.place(placement)

    def lead(self, source: Source, placement: Placement | None) -> None:
        """Note that the jobs of this epoch go to these workers from now on."""
        epoch, last = self._epoch, self._spells[-1]
        assert epoch is not None, "guaranteed by the crew"
        queues = self._queues_of(epoch)
        last.end(queues)
        for each in self._spells:
            if each.source is source:
                each.settle()
        spell = _Spell(source, queues, source.readings())
        spell.placements = last.placements
        self._spells = (*self._spells, spell)
        if placement is not None:
            self.place(placement)

    def place(self, placement: Placement) -> None:
        """Report, and note in the trace, where the workers live from now on."""
        spell = self._spells[-1]
        spell.placements = (*spell.placements, replace(placement, since=time.time()))
        if self._recorder is not None:
            self._recorder.note(PLACEMENT_EVENT, placement.as_details())

    def end(self) -> None:
        """Keep the epoch's statistics as they are now, and let go of the epoch itself."""
        epoch = self._epoch
        if epoch is not None:
            epoch.consumer.end()
            # In this order: a thread that finds no epoch finds the figures of the one that ended.
            self._last = tuple(self._figures_of(epoch, each) for each in self._spells)
            self._epoch, self._spells = None, ()

    def snapshot(self) -> PipelineStats:
        """As :class:`EpochStats` says."""
        epoch, spells = self._epoch, self._spells
        if epoch is None or not spells:
            return self._last[-1].stats
        readings = spells[-1].readings(run_delays=False)
        return self._stats_of(spells[-1], readings, spells[-1].queues(self._queues_of(epoch)))

    def report(self) -> Report:
        """As :class:`EpochStats` says."""
        return self.figures().report()

    def reports_before(self) -> tuple[Report, ...]:
        """Return the reports on those who had the work before in this epoch, in order."""
        return tuple(figures.report() for figures in self._all_figures()[:-1])

    def figures(self) -> Figures:
        """Return what a report would be made of, which costs less."""
        epoch, spells = self._epoch, self._spells
        if epoch is None or not spells:
            return self._last[-1]
        return self._figures_of(epoch, spells[-1])

    def _all_figures(self) -> tuple[Figures, ...]:
        epoch, spells = self._epoch, self._spells
        if epoch is None or not spells:
            return self._last
        return tuple(self._figures_of(epoch, each) for each in spells)

    def timeline(self) -> Timeline | None:
        """As :class:`EpochStats` says."""
        return None if self._recorder is None else self._recorder.timeline()

    def _figures_of(self, epoch: Epoch, spell: _Spell) -> Figures:
        """Return all that a report on the spell needs, as it is now."""
        readings, source = spell.readings(), spell.source
        queues = spell.queues(self._queues_of(epoch))
        probes = probes_between(readings.probes_before, readings.probes_now)
        probes = replace(probes, one_at_a_time=readings.one_at_a_time)
        if source.has_own_gil:
            probes = _of_all_processes(probes, spell, readings, queues.outlet.elapsed_ns)
        *before, now = spell.placements or (None,)
        count = source.workers.count
        return Figures(
            stats=self._stats_of(spell, readings, queues),
            probes=probes,
            placements=() if now is None else (*before, _with_workers(now, count)),
            remarks=(
                *_remarks_on(self.skipped),
                *source.remarks(),
                *_remarks_on_cores(self.near, count),
            ),
        )

    def _queues_of(self, epoch: Epoch) -> _Queues:
        return _Queues(
            epoch.results.counters(),
            epoch.outlet.counters(),
            TaskCounters() if self._transfer is None else self._transfer.counters(),
        )

    def _stats_of(self, spell: _Spell, readings: Readings, queues: _Queues) -> PipelineStats:
        results, outlet, transfer = queues
        elapsed_ns, workers = outlet.elapsed_ns, spell.source.workers
        ready, wait_ns, parked_ns = queue_stats(results), readings.jobs_wait_ns, readings.parked_ns
        stages = [
            _stage_stats(
                name, workers, tasks._replace(elapsed_ns=elapsed_ns), ready, wait_ns, 0, parked_ns
            )
            for name, tasks in (("fetch", readings.fetch), ("collate", readings.collate))
        ]
        if self._transfer is not None:
            waits_ns = results.get_wait[0], outlet.put_wait[0]
            stages.append(
                _stage_stats("transfer", ThreadCount(1), transfer, queue_stats(outlet), *waits_ns)
            )
        return PipelineStats(
            elapsed=elapsed_ns / 1e9,
            consumer_wait_ratio=min(1.0, outlet.get_wait[0] / max(1, elapsed_ns)),
            stages=tuple(stages),
            data=readings.data,
        )


def _of_all_processes(probes: Probes, spell: _Spell, readings: Readings, elapsed_ns: int) -> Probes:
    """Return the probes' readings of workers in processes of their own, which are theirs, with the
    cores of the trainer and theirs together."""
    assert spell.probes_before is not None, "guaranteed by has_own_gil"
    own = probes_between(spell.probes_before, probe_counters())
    wall_ns = max(1, elapsed_ns)
    before, now = readings.probes_before, readings.probes_now
    theirs = (now.cpu_ns - before.cpu_ns) / wall_ns
    helpers = max(0, now.helpers_ns - before.helpers_ns) / wall_ns
    return replace(
        probes,
        own_gil=True,  # each worker has its process
        helper_cores=None if probes.helper_cores is None else helpers,
        cores_used=None if own.cores_used is None else own.cores_used + max(0.0, theirs),
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
        """As in :class:`CrewStats`."""
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
