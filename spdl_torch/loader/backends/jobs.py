"""The messages between the trainer's thread and the workers: jobs out, results back; the queues of
one pass over the dataset, by which they go; and who gets which."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.failures import describe
from ...locks import RLock
from ..checkpoint.epoch import Given
from ..error_notes import is_of_handler
from ..fetching.bad_samples import EndOfIterable, NoGoodSample

if TYPE_CHECKING:
    from ...engine.channel import Channel
    from ...engine.recorder import FlightRecorder
    from ...engine.rings import ConsumerRing
    from ..checkpoint.user_state import WorkerState
    from ..fetching.bad_samples import BadSample, Tries
    from ..fetching.batch_maker import BatchMaker
    from ..rng.keys import StreamKey


class Loaded(NamedTuple):
    """A finished batch."""

    number: int
    batch: Any
    """The batch; on its way to a device, what receives it, until the hand-over."""
    progress: WorkerState | None = None
    """The state of the worker's iterable after this batch; None = map-style."""
    tries: Tries | None = None
    """The samples that were tried; None = no sample may fail."""


class NoBatch(NamedTuple):
    """A batch without any good sample."""

    number: int
    tries: Tries
    progress: WorkerState | None = None


class Failed(NamedTuple):
    """The user's own exception, in place of a batch."""

    number: int
    error: BaseException
    progress: WorkerState | None = None
    tries: Tries | None = None
    ends: bool = False
    """Whether nothing comes after it: of a worker that could not begin."""


class Exhausted(NamedTuple):
    """The end of this worker's iterable."""

    number: int
    progress: WorkerState | None = None
    tries: Tries | None = None


Result = Loaded | Failed | Exhausted | NoBatch


def result_of(
    maker: BatchMaker,
    job: Job,
    finalize: Callable[[Any], Any] | None,
    catches: type[BaseException] = BaseException,
) -> Result:
    """Make the batch of a job, and return it or what comes in its place. ``finalize``: applied to
    it; None = nothing is. ``catches``: the errors that come in its place, others are raised.

    The samples of a shared job are there.
    """
    number, wanted = job.number, job.wants_state
    try:
        samples = job.samples if isinstance(job, SharedJob) else None
        batch, tries = maker.make(job.first, job.index, number, samples)
        if finalize is not None:
            batch = finalize(batch)
        if tries is not None:
            maker.forget_bad()
        return Loaded(number, batch, maker.progress(wanted=wanted), tries)
    except NoGoodSample as nothing:
        maker.forget_bad()
        return NoBatch(number, nothing.args[0], maker.progress(wanted=wanted))
    except EndOfIterable:
        return Exhausted(number, maker.progress(wanted=wanted), maker.tries())
    except catches as error:
        if catches is not BaseException and is_of_handler(error):
            raise
        return Failed(number, error, maker.progress(wanted=wanted), maker.tries())


NO_BATCHES = frozenset({Exhausted, NoBatch})
"""The results that bring the loop nothing; no statistic of a queue counts them."""


class SharedJob:
    """A job that several workers share: which samples are taken and done."""

    wants_state = False
    __slots__ = (
        *("_lock", "_num_done", "_num_taken", "bad", "errors", "first", "first_error", "index"),
        *("last_worker", "number", "samples", "size"),
    )

    def __init__(self, job: Given) -> None:
        self.number, self.index, self.first, *_ = job
        self.size = len(self.index)
        self.samples: list[Any] = [None] * self.size
        self.errors: dict[int, BaseException] = {}
        self.bad: list[BadSample] = []  # failures that are tolerated
        # Workers race to lower it. Losing that race only costs fetches: the first of all the errors
        # is the batch's.
        self.first_error = self.size
        # Guards the three below: workers take and finish samples at the same time.
        self._lock = RLock()
        self._num_taken = self._num_done = 0
        self.last_worker: Any = None  # the one that finished the last sample, so it collates

    def take(self) -> int | None:
        """Take the next sample: return its number in the batch, or None if all are taken."""
        with self._lock:
            number = self._num_taken
            if number == self.size:
                return None
            self._num_taken = number + 1
            return number

    def take_after(self, worker: object) -> int | None:
        """Count a sample of this worker's as done, and take the next one."""
        with self._lock:
            self._num_done = num_done = self._num_done + 1
            number = self._num_taken
            if number == self.size:
                if num_done == number:
                    self.last_worker = worker
                return None
            self._num_taken = number + 1
            return number

    def failed(self, tries: Tries | None) -> Failed:
        """Return the first error of its samples, and let go of all."""
        error = self.errors[min(self.errors)]
        self.errors.clear()  # their frames refer to the job: break the cycle
        return Failed(self.number, error, tries=tries)


Job = Given | SharedJob


# If a whole batch takes less than this, waking other threads costs more than they gain (a wake-up
# takes 10 to 50 µs, measured), so one thread makes the batch alone.
_SHARE_ABOVE_NS = 1_000_000


class Sharing:
    """How many workers share a job. Workers write the time of a sample, and the loop's thread reads
    it: a stale value costs a batch a little time."""

    def __init__(self, *, may_share: bool) -> None:
        self._may_share = may_share
        self.sample_ns = 0.0
        """The time of a sample in the last job; 0.0 = none was made yet."""

    def hands(self, index: Any, num_workers: int) -> int:
        """Return how many workers share a batch: all, or one if it is too small to share."""
        if not self._may_share or not isinstance(index, list | tuple):
            return 1
        if 0 < self.sample_ns * len(index) < _SHARE_ABOVE_NS:
            return 1
        return max(1, min(num_workers, len(index)))


class Epoch(NamedTuple):
    """The queues of a pass, whoever its workers are. Another pass gets new ones, so nothing stale
    can reach it."""

    results: Channel[Result]
    """The results of the workers."""
    outlet: Channel[Result]
    """The queue that the trainer takes from: ``results``, or that of batches on its device."""
    in_order: bool
    key: StreamKey
    workers: Sequence[WorkerState]
    """The state to which each worker's iterable advances before its first batch; () = map-style."""
    recorder: FlightRecorder
    consumer: ConsumerRing
    """The ring in which the trainer's waits are recorded."""
    jobs: tuple[Channel[Job], ...] = ()
    """The jobs of this process's workers: one queue for all, or one each where they take turns."""
    sharing: Sharing | None = None
    """How many workers share a job; None = each has its own jobs, or the process to itself."""

    def key_of(self, worker: int) -> StreamKey:
        """Return the worker's stream key. Workers with their own iterables number their items
        separately, as ranks do."""
        if not self.workers:
            return self.key
        return self.key._replace(num_replicas=len(self.workers), rank=worker)

    def jobs_of(self, worker: int) -> Channel[Job]:
        """Return the queue from which a worker takes its jobs."""
        return self.jobs[worker % len(self.jobs)]

    def idle_ns(self) -> int:
        """Return the time that all workers together had no job."""
        return sum(jobs.counters().get_wait[0] for jobs in self.jobs)

    def deliver(self, result: Result) -> None:
        """Hand a result to the trainer. Never blocks: the queue has room for all outstanding
        jobs.
        """
        recorded(self.recorder, result)
        if self.in_order:
            self.results.put_at(result.number, result)
        else:
            self.results.put(result)

    def close(self) -> None:
        """End every wait, for a batch or a job."""
        self.consumer.end()
        self.results.close()
        self.outlet.close()
        for jobs in self.jobs:
            jobs.close()


def recorded(recorder: FlightRecorder, result: Result) -> Result:
    """Record what failed, before anybody has the result: then all of it is in the trace. Return
    the result."""
    if result.tries is not None:
        for each in result.tries.bad:
            recorder.failed("fetch", result.number, each.error, key=describe(each.key))
    if isinstance(result, Failed):
        recorder.failed("worker", result.number, result.error)
    return result


class Dealing:
    """The jobs of an epoch as its workers get them, in turns, from ``first`` on.

    A worker whose iterable has ended loses its turn, as in torch, once it has said so.

    evenly: no worker has more than its share of ``max_outstanding`` jobs.
    """

    def __init__(
        self,
        num_workers: int,
        first: int,
        *,
        max_outstanding: int,
        evenly: bool,
    ) -> None:
        self._turns = deque([*range(first, num_workers), *range(first)])
        self._evenly = evenly
        self._jobs = [0] * num_workers  # that each of them has
        self.max_outstanding = max_outstanding
        """The most jobs that may be given out and not yet received; tuning may change it."""
        self.num_out = 0
        """The number of those jobs."""
        self.held: Result | None = None
        """What was received and not handed out: it waits here while the next jobs are given out, so
        that an error of the sampler, which comes first, does not cost the loop this batch."""

    def next_worker(self) -> int | None:
        """Return the worker that gets the next job; None = no one has room for another one.

        Where order does not matter, a worker with its full share of jobs is passed over:
        otherwise one that is stuck would in the end have every job.
        """
        turns = self._turns
        for _ in range(len(turns)):
            worker: int = turns[0]
            turns.rotate(-1)
            if not self._evenly or self._jobs[worker] < max(1, self.max_outstanding // len(turns)):
                return worker
        return None

    def give(self, worker: int) -> None:
        """Count a job that is given out."""
        self._jobs[worker] += 1
        self.num_out += 1

    def receive(self, worker: int, result: Result, *, is_last: bool) -> None:
        """Hold the result of a worker's job. ``is_last``: of its last one."""
        self.held = result
        self._jobs[worker] -= 1
        self.num_out -= 1
        if is_last and worker in self._turns:
            self._turns.remove(worker)
