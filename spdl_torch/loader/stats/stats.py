"""A loader's statistics: what is read of its threads and queues, and kept when an epoch ends; the
figures that are computed from it, and the remarks of its report on the dataset.

Most epochs end without anybody asking for figures. Only then are they computed, and is imported
what judges and shows them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch.utils.data import IterableDataset

from ...engine.counters import QueueCounters, TaskCounters
from ...engine.statistics import PipelineStats, StageStats
from ...machine.probes import probe_counters, probe_counters_of
from ...machine.readings import Probes, probes_between
from ...objects.members import all_datasets
from .counts import LoopClock, Measured, Queues, Readings, WorkerCounts

if TYPE_CHECKING:
    from ...engine.recorder import FlightRecorder
    from ...engine.timeline import Timeline
    from ...machine.probes import ProbeCounters
    from ...observe.verdict.advice import Trait
    from ...observe.verdict.placement import Placement
    from ...observe.verdict.report import Report
    from ..backends.jobs import Epoch
    from ..backends.processes.process_counts import ProcessCounts
    from ..backends.transfer_stage import DeviceStage
    from ..fetching.bad_samples import SkippedSamples

    # What counts the work of some workers; it outlives them.
    Source: TypeAlias = WorkerCounts | ProcessCounts


class _Begun(NamedTuple):
    """An epoch that has begun, and what was read then."""

    epoch: Epoch
    source: Source
    queues_before: Queues
    probes_before: ProbeCounters | None
    """This process's; None = the workers are in it."""
    placement: Placement


class EpochStats(ABC):
    """A loader's statistics: of the running epoch or, after it, of the last one."""

    def __init__(self, stage: DeviceStage | None = None) -> None:
        self._transfer = None if stage is None else stage.hook
        self.skipped: SkippedSamples | None = None
        """The samples left out; None = samples may not fail."""
        self.draws = LoopClock()
        """Of drawing from the sampler, in all epochs."""
        self.starts = LoopClock()
        """Of beginning epochs: starting workers, and giving out the first jobs."""
        self.recorder: FlightRecorder | None = None
        """The recorder of the last epoch that began."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether no epoch runs."""

    def snapshot(self, *, of_workers: bool = False) -> PipelineStats:
        """Return the statistics alone. ``of_workers``: for whoever changes the workers: the loop's
        waits are for these alone, not for the sampler."""
        measured = self._measured(run_delays=False)
        return stats_of(measured.of_workers if of_workers and measured else measured)

    def report(self) -> Report:
        """Return the statistics with the probes' readings and the verdict, which cost more."""
        return report_of(self._measured())

    def timeline(self) -> Timeline | None:
        """Return what every thread did in the last seconds; None = nothing ran yet."""
        return None if self.recorder is None else self.recorder.timeline()

    @abstractmethod
    def _measured(self, *, run_delays: bool = True) -> Measured | None:
        """Return what is known of the epoch; None = nothing has run yet."""

    def _transferred(self) -> TaskCounters:
        return TaskCounters() if self._transfer is None else self._transfer.counters()

    def _remarks(self, *own: str) -> tuple[str, ...]:
        """Return the remarks of a report, those on the workers among them."""
        return (*(() if self.skipped is None else self.skipped.remarks()), *own)


class WorkersStats(EpochStats):
    """The statistics of the epoch on workers or, once they have ended, of the last one."""

    def __init__(self, stage: DeviceStage | None = None) -> None:
        super().__init__(stage)
        # One thread begins and ends epochs; any other may ask for statistics meanwhile. So these
        # are replaced and never changed, and each method reads them once.
        self._begun: _Begun | None = None
        self._last: Measured | None = None

    @property
    def is_over(self) -> bool:
        """As :class:`EpochStats` says."""
        return self._begun is None

    def begin(self, epoch: Epoch, before: Queues, source: Source, placement: Placement) -> None:
        """Report on this epoch, which began when ``before`` was read, and whose jobs go to these
        workers; note in the trace where they live."""
        self.recorder = epoch.recorder
        epoch.recorder.note("placement", asdict(placement))
        # Of this process; where the workers are in it, they count from the epoch's beginning.
        probes = probe_counters() if source.has_own_gil else None
        self._begun = _Begun(epoch, source, before, probes, placement)

    def end(self) -> None:
        """Keep what was counted in the epoch up to now, and let go of the epoch itself."""
        begun = self._begun
        if begun is not None:
            begun.epoch.consumer.end()
            # In this order: a thread that finds no epoch finds what was kept of the one that ended.
            self._last = self._measured_of(begun)
            self._begun = None

    def _measured(self, *, run_delays: bool = True) -> Measured | None:
        while (begun := self._begun) is not None:
            measured = self._measured_of(begun, run_delays=run_delays)
            if self._begun is begun:  # else it has ended meanwhile, and its counters are let go of
                return measured
        return self._last

    def _measured_of(self, begun: _Begun, *, run_delays: bool = True) -> Measured:
        """Read all that the figures on an epoch need."""
        source, before = begun.source, begun.probes_before
        # Their clock first: a reading that is later than the last one misses nothing that it has.
        queues = self.queues_of(begun.epoch).since(begun.queues_before)
        readings, workers = source.readings(run_delays=run_delays), source.workers
        if readings is None:  # nobody counts yet
            nothing, probes = TaskCounters(), before or probe_counters()
            readings = Readings(nothing, nothing, 0, probes, probes)
        return Measured(
            readings,
            queues,
            queues.outlet.elapsed_ns,
            has_transfer=self._transfer is not None,
            own_probes=None if before is None else (before, probe_counters(run_delays=run_delays)),
            num_workers=workers.count,
            thread_ns=workers.thread_ns(queues.outlet.elapsed_ns),
            placement=begun.placement,
            remarks=self._remarks(*source.remarks()),
        )

    def queues_of(self, epoch: Epoch) -> Queues:
        """Return what the loop and the queues have counted of this epoch up to now."""
        outlet = epoch.outlet.counters()
        # Batches that are only passed on wait in the outlet.
        results = outlet if self._transfer is None else epoch.results.counters()
        return Queues(
            results,
            outlet,
            self._transferred(),
            self.draws.total_ns(),
            self.starts.total_ns() + epoch.consumer.waited_ns,
        )


class InlineStats(EpochStats):
    """The statistics of loading on the trainer's own thread, which waits all of that time."""

    def __init__(
        self, recorder: FlightRecorder, dataset: Any, stage: DeviceStage | None = None
    ) -> None:
        super().__init__(stage)
        self.counts = WorkerCounts(1, dataset)
        self.recorder = recorder
        self.consumer = recorder.new_consumer_ring(0)
        """The ring in which the thread's waits are recorded."""
        self._thread = threading.get_native_id()
        self._probes_before = probe_counters_of(self._thread)
        self._at_end: tuple[ProbeCounters, int] | None = None

    def end(self) -> None:
        """Stop the epoch's clock."""
        for stage in filter(None, (self.counts.fetch, self.counts.collate, self._transfer)):
            stage.watch.stop()
        self.consumer.end()
        self._at_end = self._at_end or self._now()

    @property
    def is_over(self) -> bool:
        """As :class:`EpochStats` says."""
        return self._at_end is not None

    def _now(self, *, run_delays: bool = True) -> tuple[ProbeCounters, int]:
        probes = probe_counters_of(self._thread, run_delays=run_delays)
        return probes, self.draws.total_ns()

    def _measured(self, *, run_delays: bool = True) -> Measured:
        probes, sampling_ns = self._at_end or self._now(run_delays=run_delays)
        counts = self.counts
        fetch, collate = counts.fetch.counters(), counts.collate.counters()
        transfer = self._transferred()
        no_queue = QueueCounters(num_got=self.consumer.num_got)
        elapsed_ns = max(1, fetch.elapsed_ns)
        return Measured(
            Readings(fetch, collate, 0, self._probes_before, probes, data=counts.datasets.now()),
            Queues(no_queue, no_queue, transfer, sampling_ns, self.consumer.waited_ns),
            elapsed_ns,
            has_transfer=self._transfer is not None,
            own_probes=None,
            num_workers=1,
            thread_ns=elapsed_ns,
            placement=None,
            remarks=self._remarks(),
        )


_POOLED = ("fetch", "collate")


def report_of(measured: Measured | None) -> Report:
    """Return the report on what was measured; None = nothing has run yet."""
    # Statistics alone need none.
    from ...observe.verdict.report import make_report

    probes = Probes() if measured is None else _probes_of(measured)
    report = make_report(stats_of(measured), probes, pooled=_POOLED)
    if measured is None:
        return report
    if (placement := measured.placement) is not None:
        report = replace(report, placement=_with_workers(placement, measured.num_workers))
    return replace(report, notes=tuple(measured.remarks))


def stats_of(measured: Measured | None) -> PipelineStats:
    """Return the statistics alone."""
    if measured is None:
        return PipelineStats(0, 0, ())
    readings, queues = measured.readings, measured.queues
    elapsed_ns, thread_ns = measured.elapsed_ns, max(1, measured.thread_ns)
    stages = [
        StageStats.of(
            name,
            measured.num_workers,
            tasks._replace(elapsed_ns=elapsed_ns),
            queues.results,
            thread_ns=thread_ns,
            wait_in_ns=readings.jobs_wait_ns,
        )
        for name, tasks in (("fetch", readings.fetch), ("collate", readings.collate))
    ]
    if measured.has_transfer:
        transfer = StageStats.of(
            "transfer",
            1,
            queues.transfer,
            queues.outlet,
            thread_ns=max(1, queues.transfer.elapsed_ns),
            wait_in_ns=queues.results.get_wait[0],
            wait_out_ns=queues.outlet.put_wait[0],
        )
        stages.append(transfer)
    return PipelineStats(elapsed_ns, queues.waited_ns, tuple(stages), counts=readings.data)


def _probes_of(measured: Measured) -> Probes:
    """Return the probes' readings: of workers in processes of their own those are theirs, with the
    cores of the trainer and theirs together."""
    readings = measured.readings
    before, now = readings.probes_before, readings.probes_now
    probes = probes_between(before, now)
    elapsed_ns, sampling_ns = measured.elapsed_ns, measured.queues.sampling_ns
    probes = replace(probes, sampling_ratio=min(1.0, sampling_ns / max(1, elapsed_ns)))
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


def _with_workers(placement: Placement, count: int) -> Placement:
    """Return the placement with the number of workers that tuning has come to."""
    num_processes = count if placement.num_processes else 0
    return replace(placement, num_workers=count, num_processes=num_processes)


def with_remarks_of(
    dataset: object, report: Report, own: Iterable[Trait] = (), others: Iterable[str] = ()
) -> Report:
    """Return the report with what depends on the traits of the dataset, and on a loader's own; and
    with the remarks of ``loading_remarks()`` of the dataset and of those in it, and others."""
    remarks: dict[str, None] = {}  # each once: several datasets may say the same
    for each in all_datasets(dataset):
        # Ask the class: an object that answers to any attribute name would seem to have it.
        if hasattr(type(each), "loading_remarks"):
            remarks.update(dict.fromkeys(each.loading_remarks()))
    traits = *_traits_of(dataset), *own
    return replace(report, traits=traits, notes=(*report.notes, *remarks, *others))


def _traits_of(dataset: object) -> Iterator[Trait]:
    """Yield those on which advice depends."""
    if isinstance(dataset, IterableDataset):
        yield "a stream"
    if not hasattr(dataset, "__len__"):
        yield "no length"
    if _is_torchvisions_folder(dataset):
        yield "torchvision's folder"


def _is_torchvisions_folder(dataset: object) -> bool:
    """Return whether it reads images as ours does, one by one and with Pillow."""
    kind, loader = type(dataset), getattr(dataset, "loader", None)
    name = f"{kind.__module__}.{kind.__qualname__}"
    is_default = getattr(loader, "__qualname__", "") == "default_loader"
    return is_default and name == "torchvision.datasets.folder.ImageFolder"
