"""One worker thread of a loader: its own view of the dataset, and the batches that it makes.

On a shared job, each worker takes samples until none is left; the one that finishes the last
sample collates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data._utils import worker as torch_worker

from ...engine.timeline import Outcome
from ...scopes import scope
from ..error_notes import Reason, add_thread_note
from ..fetching.batch_maker import record_parts
from ..fetching.samples import maker_of
from ..rng.owned import OwnedGenerators
from ..rng.patches import install_functions, of_thread
from ..rng.streams import SampleContexts, SampleStreams, borrowers_in
from .activity import activities, begin_job
from .dataset_copies import own_copies
from .jobs import Exhausted, Failed, Loaded, Result, SharedJob, result_of

if TYPE_CHECKING:
    from ...engine.counters import TaskCell
    from ...engine.rings import Ring
    from ...locks import RLock
    from ..fetching.batch_maker import BatchMaker, BatchRecipe
    from ..fetching.samples import Samples
    from .activity import Activity
    from .backend import LoadSpec
    from .jobs import Epoch, Job

_NOTHING_LEFT = Exhausted(-1)  # the other workers have taken all samples of a shared job


class Worker:
    """A worker, owned by the thread on which it has ``begun``."""

    def __init__(
        self,
        number: int,
        spec: LoadSpec,
        activity: Activity,
        cells: Sequence[TaskCell | None],
        copying: RLock | None = None,
    ) -> None:
        """``cells``: the counters of fetching and collating. ``copying``: held while it copies the
        dataset; None = it has a process to itself, where nothing is copied."""
        self._number = number
        self._spec = spec
        self._activity = activity
        self._cells = cells
        self._copying = copying
        self._recipe = spec.recipe
        self._init_fn = spec.worker_init_fn
        self._streams = SampleStreams(spec.base_seed, number)
        self._has_begun = False
        self._records_turns = True
        """Whether the last one was long enough for that."""
        self.broken: Reason | None = None
        """Why it could not start: it answers its jobs with that, which ends the epoch."""

    @scope
    def begun(self) -> Iterator[None]:
        """Be the worker in the block: with its own dataset and streams, after ``worker_init_fn``,
        or ``broken``."""
        activity = self._activity
        activity.thread = threading.current_thread()
        own = self._tried("copying the dataset", self._own_recipe)
        if isinstance(own, Reason):
            self.broken = own
        else:
            self._recipe = own
        activities.add(activity)
        with self._described_to_torch(), self._streams:
            if self.broken is None:
                self.broken = self._tried(f"worker_init_fn({self._number})", self._initialize)
            yield

    def _own_recipe(self) -> BatchRecipe:
        """Return the recipe with the worker's own dataset and functions."""
        recipe = self._recipe
        dataset, collate_fn, init_fn = recipe.dataset, recipe.collate_fn, self._init_fn
        if self._copying is not None:
            parts = own_copies(dataset, collate_fn, init_fn, self._copying)
            dataset, collate_fn, self._init_fn = parts
        if self._spec.per_sample:
            for each in borrowers_in(dataset):
                each.sample_context = SampleContexts(self._streams)
            self._streams.seed_owned(OwnedGenerators(dataset, collate_fn))
        return recipe._replace(dataset=dataset, collate_fn=collate_fn)

    def _initialize(self) -> None:
        spec = self._spec
        if spec.device_index is not None:
            torch.accelerator.set_device_index(spec.device_index)
        if self._init_fn is not None:
            self._init_fn(self._number)

    @scope
    def _described_to_torch(self) -> Iterator[None]:
        """Let ``get_worker_info()`` describe the worker: on this thread alone or, in a process of
        its own, also on threads that the dataset starts, as in torch's workers.

        The field ``rng`` stays empty, as in torch's workers, which are processes. A generator in it
        would be that of a worker: ``torch.thread_safe_generator()`` returns it on threads and None
        elsewhere, so draws would depend on which thread makes a sample. None are the thread's
        streams.
        """
        install_functions()
        spec, is_process = self._spec, self._copying is None
        of_thread.worker_info = info = torch_worker.WorkerInfo(
            id=self._number,
            num_workers=spec.announced_workers,
            seed=spec.base_seed + self._number,
            dataset=self._recipe.dataset,
            worker_method="multiprocessing" if is_process else "thread",
        )
        if is_process:
            torch_worker._worker_info = info
        try:
            yield
        finally:
            of_thread.worker_info = None
            if is_process:
                torch_worker._worker_info = None  # it would keep the dataset

    def _tried(self, step: str, call: Callable[[], Any]) -> Any:
        """Take a step of the worker's or its epoch's beginning. Return what it returns or, if it
        fails, the ``Reason``."""
        self._activity.beginning = step
        try:
            return call()
        except BaseException as error:
            add_thread_note(error, f"in {step}")
            return Reason(error)
        finally:
            self._activity.beginning = ""

    def work(self, epoch: Epoch, is_surplus: Callable[[], bool] | None = None) -> None:
        """Work on one epoch until this worker is one too many. Raises: ChannelClosed: it ends.

        ``is_surplus``: called before each job; True if the worker is to leave.
        """
        number, spec, recipe = self._number, self._spec, self._recipe
        if self._has_begun and epoch.key.is_seeded:
            self._streams.begin_worker(epoch.key.epoch_seed)
        self._has_begun = True
        if epoch.key.number_of_pass is not None:
            recipe.dataset.set_epoch(epoch.key.number_of_pass)
        ring = epoch.recorder.new_ring("worker", 1, number)
        record_parts(ring, self._cells)
        make = partial(
            maker_of,
            recipe,
            streams=self._streams,
            worker=number,
            memory=spec.memory,
            cells=self._cells,
            key=epoch.key_of(number) if spec.per_sample else None,
            resume=epoch.workers[number] if recipe.iterable else None,
        )
        maker = self.broken or self._tried(f"iter({type(spec.recipe.dataset).__name__})", make)
        self._activity.maker = None if isinstance(maker, Reason) else maker
        jobs, since_ns = epoch.jobs_of(number), ring.begin()
        try:
            while is_surplus is None or not is_surplus():
                since_ns = self._do(jobs.get(), maker, epoch, ring, since_ns)
        finally:
            # An undelivered error keeps its frames alive, this one among them. Drop what leads
            # from here back to the error, or the cycle would keep both. And a generator of the
            # dataset's that ends here may draw as it ends, which belongs to this worker's streams.
            self._activity.maker = None
            del epoch, jobs, maker, make

    def _do(
        self, job: Job, maker: BatchMaker | Reason, epoch: Epoch, ring: Ring, since_ns: int
    ) -> int:
        """Do a job and deliver its result. ``since_ns``: when this worker finished the previous
        one; returns when it finished this one.
        """
        result: Result | None = None
        try:
            started_ns, number = perf_counter_ns(), job.number
            # That clock takes up to 2 µs to read: not where turns are too short to be recorded.
            cpu_ns = thread_time_ns() if self._records_turns else -1
            self._activity.since_ns = started_ns
            begin_job(self._activity, job)  # waits here while the process is forked
            if isinstance(maker, Reason):
                # What others help with they make: the loop has the reason before their batch.
                failed = Failed(number, maker.taken(), ends=True)
                result, taken = _NOTHING_LEFT if isinstance(job, SharedJob) else failed, 0
            elif isinstance(job, SharedJob):
                result, taken = self._help(cast("Samples", maker), job)
            else:
                # SystemExit too is in its place: the trainer waits for an answer.
                result = result_of(maker, job, self._spec.finalize)
                taken = job.size if isinstance(result, Loaded) else 0  # do not time failures
            if taken and epoch.sharing is not None:
                epoch.sharing.sample_ns = (perf_counter_ns() - started_ns) / taken
            self._activity.job = None  # from here on a fork need not wait for this worker
            if result is _NOTHING_LEFT:
                return since_ns
            ended_ns = perf_counter_ns()
            cpu_ns = thread_time_ns() - cpu_ns if cpu_ns >= 0 else -1
            output, outcome = (-1 if result is None else number), Outcome.PASSED
            if result is not None:  # None: the worker that finishes the last sample delivers
                epoch.deliver(result)
            if isinstance(result, Failed):
                outcome = Outcome.FAILED
            done_ns = perf_counter_ns()
            self._records_turns = done_ns - since_ns >= ring.shortest_ns
            if self._records_turns:
                times = since_ns, started_ns, ended_ns, done_ns, cpu_ns
                ring.add(times, number, output, epoch.jobs_of(self._number), epoch.results, outcome)
            return done_ns
        finally:
            del job, maker, epoch, result  # as in work

    def _help(self, maker: Samples, job: SharedJob) -> tuple[Result | None, int]:
        """Fetch samples of a shared job until none is left.

        Returns: the result, if this worker finished the last sample; the number of samples taken.
        """
        maker.begin(job.first, job.bad)
        taken, number = 0, job.take()
        sample_at, index = maker.fetch_at, job.index
        while number is not None:
            # torch fetches nothing after a batch's first error. No lock: see Job.first_error.
            if number < job.first_error:
                try:
                    job.samples[number] = sample_at(number, index[number])
                except BaseException as error:
                    job.errors[number] = error
                    job.first_error = min(job.first_error, number)
            taken += 1
            # Counted after its sample is in place: who counts the last one finds all of them.
            number = job.take_after(self)
        if not taken or job.last_worker is not self:
            maker.forget_bad()
            return (None if taken else _NOTHING_LEFT), taken
        if job.errors:
            return job.failed(maker.tries()), taken  # no variable here, where an error's frames are
        return result_of(maker, job, self._spec.finalize), taken


def use_one_intra_op_thread() -> None:
    """Limit this thread to one intra-op thread, so that workers do not each start a team."""
    torch.set_num_threads(1)
    # torch copies its process-wide setting to a thread when the thread first reads it: read it
    # now, before intra_op_threads_kept() restores the trainer's setting.
    torch.get_num_threads()


@scope
def intra_op_threads_kept() -> Iterator[None]:
    """Keep this thread's setting while the block has others use one intra-op thread: that changes
    the default of later threads, too, and this one's own if it was never read.
    """
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
