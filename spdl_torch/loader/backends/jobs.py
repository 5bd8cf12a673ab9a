"""The messages between the trainer's thread and the workers: jobs out, results back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from ..fetching.bad_samples import NoGoodSample
from ..fetching.items import EndOfIterable

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..checkpoint.user_state import WorkerState
    from ..fetching.bad_samples import BadSample, Tries
    from ..fetching.batch_maker import BatchMaker


class Given(NamedTuple):
    """A job, as it is given out."""

    number: int
    index: Any
    first: int
    """The position of its first sample in the epoch."""
    wants_state: bool
    """Whether an iterable that keeps a state is asked for it after this batch."""
    worker: int
    """The worker that gets it, where not any can make it."""


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


class Told(NamedTuple):
    """An error that the loop gets in place of no batch: the sampler's, or of a wait that took too
    long. The batches come at a later ``next()``."""

    error: Exception


class Over(NamedTuple):
    """The end of an epoch for its loop, by what it raises: StopIteration, or an error after which
    no batch comes."""

    error: BaseException


def result_of(
    maker: BatchMaker,
    job: Given | Job,
    finalize: Callable[[Any], Any] | None,
    catches: type[BaseException] = BaseException,
) -> Result:
    """Make the batch of a job, and return it or what comes in its place. ``finalize``: applied to
    it; None = nothing is. ``catches``: the errors that come in its place, others are raised."""
    number, wanted = job.number, job.wants_state
    try:
        batch, tries = maker.make(job.first, job.index, number)
        if finalize is not None:
            batch = finalize(batch)
        if maker.items is None and tries is None:  # most batches
            return Loaded(number, batch)
        return Loaded(number, batch, maker.progress(wanted=wanted), tries)
    except NoGoodSample as nothing:
        return NoBatch(number, nothing.args[0], maker.progress(wanted=wanted))
    except EndOfIterable:
        return Exhausted(number, maker.progress(wanted=wanted), maker.tries())
    except catches as error:
        return Failed(number, error, maker.progress(wanted=wanted), maker.tries())


NO_BATCHES = frozenset({Exhausted, NoBatch})
"""The results that bring the loop nothing; no statistic of a queue counts them."""


class Job:
    """One batch to make; if several workers share it, also which samples are taken and done."""

    __slots__ = (
        *(
            "_lock",
            "_num_done",
            "_num_taken",
            "bad",
            "errors",
            "first",
            "first_error",
            "index",
            "last_worker",
            "number",
            "samples",
        ),
        *("shared", "size", "wants_state"),
    )

    def __init__(
        self, number: int, index: Any, first: int, *, shared: bool, wants_state: bool = False
    ) -> None:
        self.number = number
        self.first = first  # the position of its first sample in the epoch
        self.index = index
        self.shared = shared
        self.wants_state = wants_state  # ask the worker's iterable for its state afterwards
        self.size = len(index) if isinstance(index, list | tuple) else 1
        self.samples: list[Any] = [None] * len(index) if shared else []
        self.errors: dict[int, BaseException] = {}
        self.bad: list[BadSample] = []  # failures that are tolerated
        # Workers race to lower it. Losing that race only costs fetches: _collate raises the
        # first of all the errors.
        self.first_error = len(index) if shared else 0
        # Guards the three below: workers take and finish samples at the same time.
        self._lock = threading.Lock()
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
