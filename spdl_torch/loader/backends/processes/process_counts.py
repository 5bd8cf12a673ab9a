"""The counts of workers in processes of their own, and what their threads did."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ....engine.counters import TaskCounters, ThreadCount
from ....engine.rings import read_row
from ....machine.probes import ProbeCounters
from ...stats.counts import Readings

if TYPE_CHECKING:
    from ....engine.rings import RingCopy
    from ....engine.timeline import Timeline
    from ..jobs import Epoch
    from .hearing import Hearing
    from .worker_process import WorkerProcess

_ROW = "worker process"  # the name of the children's rows in a trace

_Counters = TypeVar("_Counters", TaskCounters, ProbeCounters)


class ProcessCounts:
    """The counts of a loader's worker processes, as each has last written them.

    The probes' readings are the children's: their GIL, their cores. It outlives the processes.
    """

    has_own_gil = True

    def __init__(self, num_workers: int, hearing: Hearing) -> None:
        self.workers = ThreadCount(num_workers)
        self._hearing = weakref.ref(hearing)  # which has the children
        self._rows = ProcessRows(self)  # of the epoch that began last
        self.num_replaced = 0
        """The number of children that were killed in this epoch, and replaced."""
        self._gone: list[Readings] = []  # of these, and of those that left

    @property
    def children(self) -> list[WorkerProcess]:
        """The children that there are."""
        hearing = self._hearing()
        return [] if hearing is None else list(hearing.children.values())

    def replaced(self, child: WorkerProcess) -> None:
        """Keep what a child that was killed has counted."""
        self._keep(child)
        self.num_replaced += 1

    def left(self, child: WorkerProcess) -> None:
        """Keep what a child that is about to end has counted and recorded."""
        self._rows.keep(child)
        self._keep(child)

    def _keep(self, child: WorkerProcess) -> None:
        if (counted := child.readings) is not None:
            self._gone.append(counted)

    def begin(self, epoch: Epoch) -> None:
        """Count an epoch from now on."""
        self._gone, self.num_replaced = [], 0
        self._rows = ProcessRows(self)
        epoch.recorder.completed_by(self._rows.completed)

    def keep_rows(self) -> None:
        """Keep the rows of the epoch, before the children are gone or begin another one."""
        self._rows.keep()

    def remarks(self) -> tuple[str, ...]:
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

    def readings(self, *, run_delays: bool = True) -> Readings | None:
        """Return the sum of the children's counts in this epoch; None = there are none yet."""
        known = [(child, own) for child in self.children if (own := child.readings) is not None]
        found = [*self._gone, *(own for _, own in known)]
        if not found:
            return None
        return Readings(
            fetch=_sum([each.fetch for each in found]),
            collate=_sum([each.collate for each in found]),
            jobs_wait_ns=sum(each.jobs_wait_ns for each in found)
            + sum(child.waited_ns for child, _ in known),
            probes_before=_sum([each.probes_before for each in found]),
            probes_now=_sum([each.probes_now for each in found]),
            data=_sum_of_counts([each.data for each in found]),
        )


def _sum_of_counts(each: list[Mapping[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for own in each:
        counts.update(own)  # unlike +, keeps those that are 0
    return dict(counts)


def _sum(counters: list[_Counters]) -> _Counters:
    """Add up the counters of processes, field by field."""
    fields: Iterator[Any] = zip(*counters, strict=True)
    return type(counters[0])._make(
        tuple(map(sum, zip(*field, strict=True))) if isinstance(field[0], tuple) else sum(field)
        for field in fields
    )


class ProcessRows:
    """What the worker processes of an epoch did: read as long as they are in it, kept before they
    begin another one, or leave."""

    def __init__(self, counts: ProcessCounts) -> None:
        self._counts = weakref.ref(counts)
        # With the numbers of the children, and whether these are all: one object, so that whoever
        # reads meanwhile misses none, and has none twice.
        self._kept: tuple[list[tuple[int, RingCopy]], bool] = [], False

    def keep(self, *children: WorkerProcess) -> None:
        """Keep the rows of children that are about to leave; of all, at the end of the epoch."""
        rings, is_over = self._kept
        if not is_over:
            self._kept = [*rings, *self._read(children or self._children())], not children

    def completed(self, own: Timeline) -> Timeline:
        """Return the timeline with the children's rows."""
        rings, is_over = self._kept
        rings = rings if is_over else [*rings, *self._read(self._children())]
        theirs = [read_row(_ROW, 1, number, "stage", ring) for number, ring in rings]
        rows = sorted((*own.rows, *theirs), key=lambda row: (row.stage_number, row.replica))
        return own._replace(rows=tuple(rows))

    def _children(self) -> Sequence[WorkerProcess]:
        counts = self._counts()
        return () if counts is None else counts.children

    def _read(self, children: Sequence[WorkerProcess]) -> list[tuple[int, RingCopy]]:
        return [(each.number, each.page.ring.copied()) for each in children if each.has_recorded]
