"""The counts of workers in processes of their own, and what their threads did."""

from __future__ import annotations

import operator
import pickle
import weakref
from collections import Counter
from dataclasses import replace
from functools import reduce
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

from ....engine.counters import TaskCounters, ThreadCount
from ....engine.moments import Instant
from ....engine.recorder import FAILURE_EVENT, NO_ANSWER_EVENT
from ....engine.rings import read_row
from ....machine.probes import ProbeCounters
from ...stats.counts import Readings

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping, Sequence

    from ....engine.rings import RowCopy
    from ....engine.threads import ThreadGroup
    from ....engine.timeline import Timeline
    from ..epoch import Epoch
    from .worker_process import WorkerProcess

_ASK_SECONDS = 2.0
_ROW = "worker process"  # the name of the children's rows in a trace
_KEEP_SECONDS = 0.2  # at the end of an epoch, when the children have nothing left to do

_Counters = TypeVar("_Counters", TaskCounters, ProbeCounters)


class ProcessCounts:
    """The counts of the worker processes of a crew, as each has last written them.

    The probes' readings are the children's: their GIL, their cores. It outlives the processes.
    """

    has_own_gil = True

    def __init__(self, num_workers: int) -> None:
        self.workers = ThreadCount(num_workers)
        self.rows: ProcessRows | None = None
        """The rows of the epoch that began last."""
        # Replaced as a whole by the loop's thread, so that others may iterate over it.
        self._children: tuple[weakref.ref[WorkerProcess], ...] = ()
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
        self._children = (*self._children, weakref.ref(child))

    def replaced(self, child: WorkerProcess) -> None:
        """Keep what a child that was killed has counted."""
        self._lost.append(child.latest or b"")
        self._drop(child)

    def left(self, child: WorkerProcess) -> None:
        """Keep what a child that is about to end has counted and recorded."""
        if self.rows is not None:
            self.rows.keep_rows_of(child)
        self._left.append(child.latest or b"")
        self._drop(child)

    def _drop(self, child: WorkerProcess) -> None:
        self._children = tuple(each for each in self._children if each() not in (None, child))

    def begin(self, epoch: Epoch) -> None:
        """Count an epoch from now on."""
        self._lost, self._left = [], []
        if self.rows is not None:
            self.rows.let_go()
        self.rows = ProcessRows(self, enabled=epoch.recorder.enabled)
        epoch.recorder.completed_by(self.rows.completed)

    def keep_rows(self) -> None:
        """Keep the rows of the epoch, before the children are gone or begin another one."""
        if self.rows is not None:
            self.rows.keep()

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
        children = self.children
        latest = [*self._lost, *self._left, *(child.latest for child in children)]
        found: list[Readings] = [pickle.loads(each) for each in latest if each]
        if not found:
            return None
        return Readings(
            fetch=_sum([each.fetch for each in found]),
            collate=_sum([each.collate for each in found]),
            jobs_wait_ns=sum(each.jobs_wait_ns for each in found)
            + sum(child.waited_ns for child in children if child.latest),
            probes_before=_sum([each.probes_before for each in found]),
            probes_now=_sum([each.probes_now for each in found]),
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


_Recorded = tuple["tuple[RowCopy, ...]", "tuple[Instant, ...]"]
"""What one child has recorded."""


class ProcessRows:
    """What the threads of an epoch's children did: asked for as long as they live, kept before they
    end."""

    def __init__(self, counts: ProcessCounts, *, enabled: bool) -> None:
        self._counts = weakref.ref(counts)
        self._is_enabled = enabled
        self._kept: list[_Recorded] | None = None  # None = the children still have them
        self._left: list[_Recorded] = []  # of children that have left
        self._silent: dict[int, Instant] = {}  # by number: children that were asked in vain
        self._keeper: threading.Thread | None = None

    def keep(self) -> None:
        """Keep the children's rows, before they are gone. Blocks, usually for a millisecond
        each."""
        self._kept = self._of_all(_KEEP_SECONDS)

    def keep_before_the_end(self, children: Sequence[WorkerProcess], threads: ThreadGroup) -> None:
        """Have a thread keep the children's rows and then let them end, unless they are kept
        already. For a finalizer, which must not wait for answers.
        """
        if not self._is_enabled or self._kept is not None or self._keeper is not None:
            return

        def keep() -> None:
            try:
                self._kept = self._answers_of(children, _KEEP_SECONDS)
            finally:
                for child in children:
                    child.hang_up()

        self._keeper = threads.spawn("keeper", keep)

    @property
    def is_keeping(self) -> bool:
        """Whether a thread is about to let the children end."""
        return self._keeper is not None and self._keeper.is_alive()

    def let_go(self) -> None:
        """Note that another epoch begins: the children's rows will be of that one."""
        self._kept = self._kept or []

    def completed(self, own: Timeline) -> Timeline:
        """Return the timeline with the children's rows; asking one takes some milliseconds."""
        if self._keeper is not None:
            self._keeper.join(_ASK_SECONDS)
        rows, instants = list(own.rows), list(own.instants)
        kept = self._of_all(_ASK_SECONDS) if self._kept is None else self._kept
        instants += self._silent.values()
        for their_rows, their_instants in (*self._left, *kept):
            rows += [replace(read_row(*each), stage=_ROW) for each in their_rows]
            # The trainer has recorded the failures, before it got their batches; it still knows
            # them when the child is gone.
            instants += [each for each in their_instants if each.name != FAILURE_EVENT]
        return replace(
            own,
            rows=tuple(sorted(rows, key=lambda row: (row.stage_number, row.replica))),
            instants=tuple(instants),
        )

    def keep_rows_of(self, child: WorkerProcess) -> None:
        """Keep the rows of a child that is about to leave."""
        self._left += self._answers_of([child], _KEEP_SECONDS)

    def _of_all(self, seconds: float) -> list[_Recorded]:
        """Ask the live children; each has ``seconds`` to answer."""
        counts = self._counts()
        return self._answers_of(() if counts is None else counts.children, seconds)

    def _answers_of(self, children: Sequence[WorkerProcess], seconds: float) -> list[_Recorded]:
        if not self._is_enabled:
            return []
        answers = []
        for child in children:
            if child.is_over:
                continue
            answer = child.questions.ask("rows", timeout=seconds)
            self._silent.pop(child.number, None)
            if answer is not None:
                answers.append(answer)
            elif not child.is_over:
                details = {"worker": child.number, "pid": child.pid, "seconds": seconds}
                self._silent[child.number] = Instant(perf_counter_ns(), NO_ANSWER_EVENT, details)
        return answers
