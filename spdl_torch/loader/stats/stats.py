"""A loader's statistics: what is read of its threads and queues, and kept when an epoch ends.

Most epochs end without anybody asking for figures. Only then are they computed from what was read
(:mod:`.figures`), and is imported what judges and shows them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...engine.counters import QueueCounters, TaskCounters
from ...machine.probes import probe_counters, probe_counters_of
from .counts import LoopClock, Measured, Queues, Readings, WorkerCounts
from .figures import report_of, stats_of

if TYPE_CHECKING:
    from ...engine.recorder import FlightRecorder
    from ...engine.statistics import PipelineStats
    from ...engine.timeline import Timeline
    from ...machine.probes import ProbeCounters
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
