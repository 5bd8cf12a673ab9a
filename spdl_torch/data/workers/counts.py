"""The counts of a crew's workers in an epoch, from which its statistics are made."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ...machine.probes import ProbeCounters, probe_counters
from ...named_tuples import NamedTuple
from ...pipeline.hooks.stage_info import StageInfo
from ...pipeline.hooks.task_hooks import TaskStatsHook
from ...pipeline.stats.thread_time import ThreadCount
from ..dataset_stats import counting_datasets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...pipeline.hooks.task_hooks import TaskCell
    from ...pipeline.stats.counters import TaskCounters
    from .epoch import Shift


class Readings(NamedTuple):
    """What workers have counted so far."""

    fetch: TaskCounters
    collate: TaskCounters
    jobs_wait_ns: int
    """The time that all workers together waited for a job."""
    probes_before: ProbeCounters
    """The probes' counters when the counting began."""
    probes_now: ProbeCounters
    parked_ns: int = 0
    """The time that all workers together left the work to one of them."""
    one_at_a_time: bool = False
    data: Mapping[str, int] = {}
    """The counts of the process's datasets."""

    def since(self, before: Readings) -> Readings:
        """Return what was counted after ``before``."""
        return self._replace(
            fetch=self.fetch.since(before.fetch),
            collate=self.collate.since(before.collate),
            jobs_wait_ns=self.jobs_wait_ns - before.jobs_wait_ns,
            parked_ns=self.parked_ns - before.parked_ns,
            probes_before=before.probes_now,
            data={name: count - before.data.get(name, 0) for name, count in self.data.items()},
        )


class DatasetCounts:
    """The counts since an epoch began of the datasets in a dataset, and of those in the copies that
    workers have of it.

    A forked process begins with the counts of its parent, and a copy with those of the original,
    so only differences count. What copies count in an object that they share is counted once: it
    never differs from what the original says. Workers join and leave on their own threads: lists
    and dicts change by one operation each, and are copied before they are gone through.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._copies: list[Any] = []
        self._left: list[Any] = []
        self._before: dict[int, tuple[Any, Mapping[str, int]]] = {}  # by id of the first
        self.begin()

    def begin(self) -> None:
        """Count from now on. What workers have counted who have left is forgotten."""
        left, self._left = self._left, []
        self._copies = [copy for copy in self._copies if not any(copy is each for each in left)]
        self._before = {}
        self._note(self._dataset, *self._copies)

    def join(self, copy: Any) -> None:
        """Count a worker's copy, too."""
        self._note(copy)
        self._copies.append(copy)

    def leave(self, copy: Any) -> None:
        """Count a copy no more when the epoch is over."""
        self._left.append(copy)

    def now(self) -> dict[str, int]:
        """Return the counts of the epoch."""
        counts: Counter[str] = Counter()
        copies = [list(counting_datasets(copy)) for copy in self._copies.copy()]
        for place, own in enumerate(counting_datasets(self._dataset)):
            twins = [each[place] for each in copies if place < len(each)]
            first = own.loading_counts()
            of_twins = [(twin, twin.loading_counts()) for twin in twins if twin is not own]
            last = own.loading_counts()
            for name, count in last.items():
                counts[name] += count - self._base(own, name)
                found = [(twin, each.get(name, 0)) for twin, each in of_twins]
                if not all(first.get(name, 0) <= each <= count for _, each in found):
                    counts[name] += sum(each - self._base(twin, name) for twin, each in found)
        return dict(counts)

    def forget_copies(self) -> None:
        """Let go of the workers' copies: all workers end."""
        self._copies, self._left, self._before = [], [], {}

    def _note(self, *roots: Any) -> None:
        for root in roots:
            for each in counting_datasets(root):
                self._before.setdefault(id(each), (each, each.loading_counts()))

    def _base(self, dataset: Any, name: str) -> int:
        _, before = self._before.get(id(dataset), (None, {}))
        return before.get(name, 0)


class WorkerCounts:
    """The counts of the workers of this process. One thread begins and ends epochs; any may read.

    It outlives its workers, so it refers to none of them, and to the queues only while an epoch
    runs.
    """

    has_own_gil = False
    """Whether the workers live in processes of their own."""

    def __init__(self, num_workers: int, dataset: Any) -> None:
        self.fetch = TaskStatsHook(StageInfo(0, 1, "fetch", num_workers))
        self.collate = TaskStatsHook(StageInfo(0, 2, "collate", num_workers))
        self.workers = ThreadCount(num_workers)
        self.shared = ""
        """The remark on what the workers share though samples may change it."""
        self.datasets = DatasetCounts(dataset)
        self._shift: Shift | None = None
        self._before: tuple[TaskCounters, TaskCounters, ProbeCounters] | None = None

    def new_cells(self, *, enabled: bool) -> tuple[TaskCell | None, ...]:
        """Return the cells in which a new worker counts its fetching and its collating."""
        return tuple(each.new_cell() if enabled else None for each in (self.fetch, self.collate))

    def begin(self, shift: Shift) -> None:
        """Count an epoch from now on."""
        self._before = self.fetch.counters(), self.collate.counters(), probe_counters()
        self.datasets.begin()
        self._shift = shift

    def end(self) -> None:
        """Let go of the epoch."""
        self._shift = None

    def close(self) -> None:
        """Let go of the epoch and of the workers' datasets: all workers end."""
        self.end()
        self.datasets.forget_copies()

    def readings(self, *, run_delays: bool = True) -> Readings | None:
        """Return the counts of the epoch; None = there is none. ``run_delays=False``: with the
        waits for a core as they were read last, which is quicker."""
        shift, before = self._shift, self._before
        if shift is None or before is None:
            return None
        fetch, collate, probes = before
        # Read the waits right after the clock of `fetch`, whose time they are part of: the probes'
        # counters take long to read where threads contend for the GIL.
        return Readings(
            fetch=self.fetch.counters().since(fetch),
            jobs_wait_ns=shift.idle_ns(),
            parked_ns=shift.parked_ns(),
            one_at_a_time=shift.is_one_alone,
            collate=self.collate.counters().since(collate),
            probes_before=probes,
            probes_now=probe_counters(run_delays=run_delays),
            data=self.datasets.now(),
        )

    def remarks(self) -> tuple[str, ...]:
        """Return what a report has to say on the workers."""
        return (self.shared,) if self.shared else ()
