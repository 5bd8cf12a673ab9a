"""A loader's statistics when its workers run in other processes."""

from __future__ import annotations

import operator
import pickle
import threading
import weakref
from collections import Counter
from dataclasses import replace
from functools import reduce
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

from ...machine.probes import ProbeCounters, probe_counters, probes_between
from ...pipeline.recorder.flight_recorder import (
    FAILURE_EVENT,
    NO_ANSWER_EVENT,
    FlightRecorder,
)
from ...pipeline.recorder.moments import Instant
from ...pipeline.stats.counters import TaskCounters
from ..workers.stats import PoolStats, Readings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ...machine.probes import Probes
    from ...pipeline.recorder.timeline import Timeline
    from ...pipeline.threads.thread_group import ThreadGroup
    from ..workers.epoch import Epoch
    from .worker_process import WorkerProcess

_ASK_SECONDS = 2.0
_ROW = "worker process"  # the name of the children's rows in a trace
_KEEP_SECONDS = 0.2  # at the end of an epoch, when the children have nothing left to do

_Counters = TypeVar("_Counters", TaskCounters, ProbeCounters)


class ProcessStats(PoolStats):
    """The statistics of workers in child processes.

    The stages' statistics are as of the last batch received from each child; the trainer's are
    current. The probes' readings are the children's: their GIL, their cores.
    """

    def __init__(self, *stages: Any) -> None:
        super().__init__(*stages)
        # Changed under the lock, by the loop's thread and the receivers; replaced as a whole, so
        # that other threads may iterate over it without the lock.
        self._children: tuple[weakref.ref[WorkerProcess], ...] = ()
        self._changing = threading.RLock()
        self._lost: list[bytes] = []  # the last readings of children that were killed
        self._left: list[bytes] = []  # and of those that left

    @property
    def children(self) -> list[WorkerProcess]:
        """The children whose statistics count, without those that are gone."""
        return [child for each in self._children if (child := each()) is not None]

    @property
    def num_replaced(self) -> int:
        """The number of children that were killed in this epoch, and replaced."""
        return len(self._lost)

    def add(self, child: WorkerProcess) -> None:
        """Include a child's statistics."""
        with self._changing:
            self._children = (*self._children, weakref.ref(child))

    def replaced(self, child: WorkerProcess) -> None:
        """Keep what a child that was killed has counted."""
        self._lost.append(child.latest or b"")
        self._drop(child)

    def left(self, child: WorkerProcess) -> None:
        """Keep what a child that is about to end has counted and recorded."""
        if isinstance(self.recorder, ProcessRecorder):
            self.recorder.keep_rows_of(child)
        self._left.append(child.latest or b"")
        self._drop(child)

    def _drop(self, child: WorkerProcess) -> None:
        with self._changing:
            self._children = tuple(each for each in self._children if each() not in (None, child))

    def begin(self, epoch: Epoch) -> None:
        """Read the statistics of this epoch from now on."""
        self._lost, self._left = [], []
        if isinstance(self.recorder, ProcessRecorder):
            self.recorder.let_go()
        super().begin(epoch)

    def _remarks(self) -> tuple[str, ...]:
        """Return remarks if batches were copied, or children replaced."""
        remarks: list[str] = []
        copied = sum(child.mappings.num_copied for child in self.children)
        if copied:
            remarks.append(
                f"{copied} batches were copied out of shared memory, because the loop keeps many "
                "of them. If it only needs a part of each, keep a copy of that part."
            )
        if self.num_replaced:
            noun = "process was" if self.num_replaced == 1 else "processes were"
            remarks.append(
                f"{self.num_replaced} worker {noun} killed and replaced, and the batches made "
                "again. The log says by which signal."
            )
        return tuple(remarks)

    def _of_all_processes(self, probes: Probes, epoch: Epoch, readings: Readings) -> Probes:
        """Return the children's readings, with the cores of the trainer and theirs together."""
        own = probes_between(epoch.probes_before, probe_counters())
        wall_ns = max(1, readings.fetch.elapsed_ns)
        before, now = readings.probes_before, readings.probes_now
        theirs = (now.cpu_ns - before.cpu_ns) / wall_ns
        helpers = max(0, now.helpers_ns - before.helpers_ns) / wall_ns
        return replace(
            probes,
            own_gil=True,  # each worker has its process
            helper_cores=None if probes.helper_cores is None else helpers,
            cores_used=None if own.cores_used is None else own.cores_used + max(0.0, theirs),
        )

    def _readings_of(self, epoch: Epoch, *, run_delays: bool = True) -> Readings:
        elapsed_ns = epoch.outlet.counters().elapsed_ns
        latest = [*self._lost, *self._left, *(child.latest for child in self.children)]
        found: list[Readings] = [pickle.loads(each) for each in latest if each]
        if not found:
            nothing, probes = TaskCounters(elapsed_ns=elapsed_ns), epoch.probes_before
            return Readings(nothing, nothing, 0, probes, probes)
        return Readings(
            fetch=_sum([each.fetch for each in found])._replace(elapsed_ns=elapsed_ns),
            collate=_sum([each.collate for each in found])._replace(elapsed_ns=elapsed_ns),
            jobs_wait_ns=sum(each.jobs_wait_ns for each in found),
            probes_before=_sum([each.probes_before for each in found]),
            probes_now=_sum([each.probes_now for each in found]),
            parked_ns=sum(each.parked_ns for each in found),
            one_at_a_time=any(each.one_at_a_time for each in found),
            data=_sum_of_counts([each.data for each in found]),
        )


def _sum(counters: list[_Counters]) -> _Counters:
    """Add up the counters of several processes, field by field."""
    return reduce(_added, counters)


def _sum_of_counts(each: list[Mapping[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for own in each:
        counts.update(own)  # unlike +, keeps those that are 0
    return dict(counts)


def _added(one: _Counters, other: _Counters) -> _Counters:
    pairs: Iterator[tuple[Any, Any]] = zip(one, other, strict=True)
    sums: list[Any] = [
        tuple(map(operator.add, mine, theirs)) if isinstance(mine, tuple) else mine + theirs
        for mine, theirs in pairs
    ]
    return type(one)(*sums)


class ProcessRecorder(FlightRecorder):
    """A recorder that adds the children's rows to the trainer's, as long as they live."""

    def __init__(self, stats: ProcessStats, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stats = weakref.ref(stats)
        self._kept: list[Timeline] | None = None  # None = the children still have them
        self._left: list[Timeline] = []  # of children that have left
        self._silent: dict[int, Instant] = {}  # by place: children that were asked in vain
        self._keeper: threading.Thread | None = None

    def keep(self) -> None:
        """Keep the children's rows, before they are gone. Blocks, usually for a millisecond
        each."""
        self._kept = self._timelines(_KEEP_SECONDS)

    def keep_before_the_end(self, children: Sequence[WorkerProcess], threads: ThreadGroup) -> None:
        """Have a thread keep the children's rows and then let them end, unless they are kept
        already. For a finalizer, which must not wait for answers.
        """
        if not self.enabled or self._kept is not None or self._keeper is not None:
            return

        def keep() -> None:
            try:
                self._kept = self._answers_of(children, _KEEP_SECONDS)
            finally:
                for child in children:
                    child.connection.hang_up()

        self._keeper = threads.spawn("keeper", keep)

    @property
    def is_keeping(self) -> bool:
        """Whether a thread is about to let the children end."""
        return self._keeper is not None and self._keeper.is_alive()

    def let_go(self) -> None:
        """Note that another epoch begins: the children's rows will be of that one."""
        self._kept = self._kept or []

    def timeline(self, since_ns: int = 0) -> Timeline:
        """Return the timeline with the children's rows; asking one takes some milliseconds."""
        own = super().timeline(since_ns)
        if self._keeper is not None:
            self._keeper.join(_ASK_SECONDS)
        rows, instants = list(own.rows), list(own.instants)
        kept = self._timelines(_ASK_SECONDS) if self._kept is None else self._kept
        instants += self._silent.values()
        for theirs in (*self._left, *kept):
            rows += [replace(row, stage=_ROW) for row in theirs.rows if row.role == "stage"]
            # The trainer has recorded the failures, before it got their batches; it still knows
            # them when the child is gone.
            instants += [each for each in theirs.instants if each.name != FAILURE_EVENT]
        return replace(
            own,
            rows=tuple(sorted(rows, key=lambda row: (row.stage_number, row.replica))),
            instants=tuple(instants),
        )

    def keep_rows_of(self, child: WorkerProcess) -> None:
        """Keep the rows of a child that is about to leave."""
        self._left += self._answers_of([child], _KEEP_SECONDS)

    def _timelines(self, seconds: float) -> list[Timeline]:
        """Ask the live children; each has ``seconds`` to answer."""
        stats = self._stats()
        return self._answers_of(() if stats is None else stats.children, seconds)

    def _answers_of(self, children: Sequence[WorkerProcess], seconds: float) -> list[Timeline]:
        if not self.enabled:
            return []
        answers = []
        for child in children:
            connection = child.connection
            if connection.is_over:
                continue
            answer = connection.line.questions.ask("timeline", timeout=seconds)
            self._silent.pop(child.place, None)
            if answer is not None:
                answers.append(answer)
            elif not connection.is_over:
                details = {"worker": child.place, "pid": connection.pid, "seconds": seconds}
                self._silent[child.place] = Instant(perf_counter_ns(), NO_ANSWER_EVENT, details)
        return answers
