"""Who makes the batches of a loader's iterator: the loop's thread itself, threads, or processes;
and the part of the loader's configuration that they need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

from ..fetching.samples import is_read_at_once

if TYPE_CHECKING:
    from ...engine.rings import ConsumerRing
    from ..checkpoint.epoch import Given, Told
    from ..checkpoint.order import Order
    from ..checkpoint.user_state import WorkerState
    from ..fetching.batch_maker import BatchRecipe
    from ..fetching.collating import Memory
    from ..rng.keys import StreamKey
    from ..stats.stats import EpochStats
    from .jobs import Loaded, Result


class LoadSpec(NamedTuple):
    """The loader's configuration when iteration began."""

    recipe: BatchRecipe
    num_workers: int
    announced_workers: int
    """The number of workers in ``get_worker_info()``: constant, and above every worker's id, as
    tuning may start more of them."""
    max_outstanding: int
    """The limit of jobs given out and not yet received: ``prefetch_factor * num_workers``."""
    in_order: bool
    base_seed: int
    """The seed of the epoch's random streams when iteration began."""
    per_sample: bool
    """True: each sample has its own random stream. False: each worker has one stream for all its
    work, and makes whole batches."""
    worker_init_fn: Callable[[int], None] | None
    stats: bool
    finalize: Callable[[Any], Any] | None
    """The function that the thread which made a batch applies to it (pinning), or None."""
    pipeline_number: int
    """The loader's number in traces."""
    device_index: int | None
    """The accelerator that is current on the trainer's thread; None = none is in use."""
    timeout: float
    """Seconds that the loop waits for a batch, or for workers to start; 0 = as long as it takes."""
    memory: Memory | None = None
    """The memory in which batches are made: pinned if they go to a device, shared if they go to
    another process; None = ordinary memory."""

    @property
    def shares_jobs(self) -> bool:
        """Whether several threads can work on one batch."""
        recipe = self.recipe
        if not recipe.auto_collation or self.has_turns:
            return False
        return not is_read_at_once(recipe.dataset, recipe.collate_fn)

    @property
    def has_turns(self) -> bool:
        """Whether it matters which worker makes which batch: they take turns, as in torch."""
        return self.recipe.iterable or not self.per_sample


class Backend(ABC):
    """It gets jobs, and gives their results in order. The loop's thread calls the methods, but for
    ``request_stop``. It does not refer to the iterator, so dropping that ends the workers.
    """

    stats: EpochStats

    on_threads = False
    """Whether threads of this process make the batches, beside the loop's."""

    @property
    def is_here(self) -> bool:
        """Whether there are workers that belong to this process: a forked child has none of its
        parent's, and the end of the main thread has stopped those that were made for it."""
        return True

    @abstractmethod
    def begin(
        self, key: StreamKey, workers: Sequence[WorkerState], order: Order
    ) -> tuple[ConsumerRing, Sized]:
        """Begin an epoch, the first or another one; jobs of the last one are dropped. ``workers``:
        the states to which their iterables advance before their first batch; () = map-style.

        Return the ring in which the loop's waits are recorded, and the queue that it takes from.
        """

    @abstractmethod
    def give(self, job: Given) -> Exception | None:
        """Give out a job; never blocks. Jobs are numbered from 0 on in each epoch. Return the error
        for which its index cannot be sent, which will be its result; None = none."""

    @abstractmethod
    def take(self, seconds: float) -> Result | Told | None:
        """Return the next result, in order if the spec says so; None = the time is over."""

    def hand_over(self, result: Loaded) -> Result:
        """Return a result of ``take`` as the loop gets it: unpacked, on its device. Called when the
        jobs for which it makes room are given out, so that no worker waits for that."""
        return result

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Change the number of workers that get the jobs, and return the new number: the old one if
        it stays. Waits until those that join have started."""
        return 1

    def at_work(self, awaited: int | None) -> str:
        """Describe what the workers do; "" = what the loop's own thread does is on its stack.
        ``awaited``: the batch that the loop waits for. Blocks up to 2 s for the answer of a worker
        process."""
        return ""

    @abstractmethod
    def rest(self) -> None:
        """Keep the statistics of an epoch that is over; the workers stay for the next one."""

    @abstractmethod
    def request_stop(self) -> None:
        """End every wait and with it the workers. Never blocks; safe in a finalizer, on any thread,
        any number of times."""

    @abstractmethod
    def stop(self) -> None:
        """``request_stop``, and wait a moment for the workers, who have nothing left to do."""
