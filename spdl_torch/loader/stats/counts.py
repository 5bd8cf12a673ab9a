"""What is counted in an epoch, from which its figures are computed: by workers, by the clocks
of the loop, and all of it as it is read at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ...engine.counters import ThreadCount
from ...engine.hooks import StageInfo, TaskStatsHook
from ...machine.probes import ProbeCounters, probe_counters
from ...objects.members import all_datasets

if TYPE_CHECKING:
    from ...engine.counters import QueueCounters, TaskCell, TaskCounters
    from ...observe.verdict.placement import Placement
    from ..backends.jobs import Epoch

T = TypeVar("T")


# The statistics that datasets keep of themselves, by name: {"cache/found": 20}. loading_counts() of
# their classes provides them: every worker counts for itself, and the sums over threads and
# processes are shown.


def counting_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the datasets in a dataset that count what they load, each once; in the same order in
    all copies of it."""
    seen: set[int] = set()
    for each in all_datasets(dataset):
        # Ask the class: an object that answers to any attribute name would seem to have it.
        if id(each) not in seen and hasattr(type(each), "loading_counts"):
            seen.add(id(each))
            yield each


class Readings(NamedTuple):
    """What workers have counted so far."""

    fetch: TaskCounters
    collate: TaskCounters
    jobs_wait_ns: int
    """The time that all workers together waited for a job."""
    probes_before: ProbeCounters
    """The probes' counters when the counting began."""
    probes_now: ProbeCounters
    data: Mapping[str, int] = {}
    """The counts of the process's datasets."""


class DatasetCounts:
    """The counts since an epoch began of the datasets in a dataset.

    A forked process begins with the counts of its parent, so only differences count. Any thread may
    read.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        found = counting_datasets(self._dataset)
        self._before = {id(each): (each, each.loading_counts()) for each in found}  # alive

    def now(self) -> dict[str, int]:
        """Return the counts of the epoch."""
        counts: Counter[str] = Counter()
        before = self._before
        for own in counting_datasets(self._dataset):
            for name, count in own.loading_counts().items():
                _, its = before.get(id(own), (own, {}))  # it may not have been there
                counts[name] += count - its.get(name, 0)
        return dict(counts)


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
        self.datasets = DatasetCounts(dataset)
        self._epoch: Epoch | None = None
        self._before: tuple[TaskCounters, TaskCounters, ProbeCounters] | None = None

    def new_cells(self, *, enabled: bool) -> tuple[TaskCell | None, ...]:
        """Return the cells in which a new worker counts its fetching and its collating."""
        if not enabled:
            return None, None
        fetch, collate = self.fetch.new_cell(), self.collate.new_cell()
        collate.clock = fetch.clock  # one thread's: what one has read serves the other
        return fetch, collate

    def begin(self, epoch: Epoch) -> None:
        """Count an epoch from now on."""
        self._before = self.fetch.counters(), self.collate.counters(), probe_counters()
        self.datasets.begin()
        self._epoch = epoch

    def end(self) -> None:
        """Let go of the epoch."""
        self._epoch = None

    def readings(self, *, run_delays: bool = True) -> Readings | None:
        """Return the counts of the epoch; None = there is none. ``run_delays=False``: with the
        waits for a core as they were read last, which is quicker."""
        epoch, before = self._epoch, self._before
        if epoch is None or before is None:
            return None
        fetch, collate, probes = before
        # Read the waits right after the clock of `fetch`, whose time they are part of: the probes'
        # counters take long to read where threads contend for the GIL.
        return Readings(
            fetch=self.fetch.counters().since(fetch),
            jobs_wait_ns=epoch.idle_ns(),
            collate=self.collate.counters().since(collate),
            probes_before=probes,
            probes_now=probe_counters(run_delays=run_delays),
            data=self.datasets.now(),
        )

    def besides_tasks(self) -> tuple[Any, ...] | None:
        """Return the same without the tasks, for which a worker with a process of its own has
        another way."""
        epoch, before = self._epoch, self._before
        if epoch is None or before is None:
            return None
        return epoch.idle_ns(), before[2], probe_counters(), self.datasets.now()

    def remarks(self) -> tuple[str, ...]:
        """Return what a report has to say on the workers."""
        return ()


class LoopClock:
    """Times calls of one kind that the loop makes before it can wait for a batch: drawing from the
    sampler, starting workers. It is no nearer to a batch in that time than where it waits. Only the
    loop's thread makes them; any may read.
    """

    __slots__ = ("_reading",)

    def __init__(self) -> None:
        # The time of the calls that have ended, and when the present one began; 0 = there is none.
        # One object: whoever reads meanwhile must not miss a call, or count it twice.
        self._reading = (0, 0)

    def time(self, call: Callable[..., T], *args: Any) -> T:
        """Return ``call(*args)``, and count its time."""
        total_ns, began_ns = self._reading[0], perf_counter_ns()
        self._reading = total_ns, began_ns
        try:
            return call(*args)
        finally:
            self._reading = total_ns + perf_counter_ns() - began_ns, 0

    def total_ns(self) -> int:
        """Return the time of all calls, with that of the present one so far."""
        total_ns, began_ns = self._reading
        return total_ns + (perf_counter_ns() - began_ns if began_ns else 0)


class Queues(NamedTuple):
    """Readings of the way of an epoch's batches from the workers to the loop."""

    results: QueueCounters
    outlet: QueueCounters
    transfer: TaskCounters
    sampling_ns: int
    """The time in which the loop drew from the sampler."""
    waited_ns: int
    """The time that the loop spent in the loader, for whatever reason: to begin the epoch, and
    until it had each batch."""

    def since(self, before: Queues) -> Queues:
        """Return what was counted after ``before``."""
        return Queues(
            self.results.since(before.results),
            self.outlet.since(before.outlet),
            self.transfer.since(before.transfer),
            self.sampling_ns - before.sampling_ns,
            self.waited_ns - before.waited_ns,
        )


class Measured(NamedTuple):
    """What the figures on some workers in an epoch are computed from, read at one moment."""

    readings: Readings
    queues: Queues
    """Without workers there is no queue: all zero, but for the transfer and the loop's times."""
    elapsed_ns: int
    has_transfer: bool
    own_probes: tuple[ProbeCounters, ProbeCounters] | None
    """This process's, at the begin and now; None = the workers, if any, are in this process."""
    num_workers: int
    thread_ns: int
    """The time that all workers together had."""
    placement: Placement | None
    remarks: tuple[str, ...]

    @property
    def of_workers(self) -> Measured:
        """The same where the loop waits in the queue alone: what it does itself for a batch, draws
        from the sampler and starts workers among it, gets no shorter with more of them."""
        waited_ns = self.queues.outlet.get_wait[0]
        return self._replace(queues=self.queues._replace(sampling_ns=0, waited_ns=waited_ns))
