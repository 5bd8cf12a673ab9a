"""The iterator of a loader, wherever its workers are.

One thread owns an epoch, the loop's: it alone draws indices, gives out jobs, takes results and
hands batches over. A *job* is the work of one batch. Who makes it is the backend's matter: ``give``
a job, ``take`` the next result.

Whatever a sample, a batch or the sampler raises is a result, and the loop may go on after it. What
anything else raises, Ctrl-C or another signal's handler, ends the iterator: nobody has to know what
it cut off, as a state is written from what the loop has had.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import autograd
from torch.utils.data import IterableDataset

from ..engine import channel
from ..errors import PipelineFailure, PipelineStopped
from .backends.backend import LoadSpec
from .backends.jobs import Dealing, Exhausted, Failed, Loaded, NoBatch
from .checkpoint.epoch import Given, Told
from .epoch_iterator import EpochIterator
from .error_notes import add_thread_note, as_raised_in_loop, describe_batch, is_users
from .fetching.batch_maker import BatchRecipe
from .opening import open_backend, open_device_stage, pinned
from .sampling.sampler_chain import names_of, num_ranks
from .user_warnings import warn

if TYPE_CHECKING:
    from .dataloader import DataLoader
    from .stats.stats import EpochStats

_logger = logging.getLogger("spdl_torch.data")

_END = Told(StopIteration())

# Why an iterator gives no more batches.
_ENDED = ""
_CUT_SHORT = (
    "DataLoader: Ctrl-C, SystemExit or the like, or what a signal's handler raised, ended this "
    "iterator when a batch was asked for. Call iter(loader) for a new one; "
    "load_state_dict(state_dict()) goes on after the last batch that the loop has had."
)
_CLOSED = (
    "DataLoader: the loader of this iterator was closed, or the interpreter exits. Call "
    "iter(loader) for a new one, and end a thread that loads before the program ends."
)

_SHARED = (
    "DataLoader: next() of this iterator was called while another one is under way, on another "
    "thread or in code that a handler has interrupted. Hold a lock around next()."
)

_SHORT = (
    "DataLoader: this epoch of {0} has {1} items, just as many as were left of the epoch before, "
    "which was resumed in its middle. If {0} begins again at the state that it was given, as "
    "Hugging Face's streams do until another epoch is named, later epochs lack the items before "
    "that: call set_epoch(number) on the dataset before each epoch."
)

_autograd: Any = autograd
_is_profiled = _autograd._profiler_enabled


class _Ending:
    """Ends the workers as the iterator that holds it goes. Not a ``weakref.finalize``, whose
    registry would keep the workers for ever where Ctrl-C cuts it off."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.stop: Callable[[], None] | None = stop

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the thread groups stop the workers.
        if self.stop is not None and not is_exiting():
            self.stop()


class _Instead(Exception):
    """Carries what comes in place of a batch past torch's ``__next__``."""


class LoaderIterator(EpochIterator):
    """Yields the batches that the workers make, in torch's order.

    As in torch, the loop's thread advances the sampler: with workers by ``prefetch_factor *
    num_workers`` batches at ``iter()``, then by one at each ``next()``; without them by one when a
    batch is asked for.

    Workers know the backend, not this object, so dropping it ends them, which is Lightning's way to
    end a loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        # Attributes of a finished loader may be set to anything.
        if self._num_workers < 0:
            raise AssertionError(f"DataLoader: num_workers must be >= 0, got {self._num_workers}.")
        if self._num_workers and not loader.prefetch_factor:
            raise AssertionError(
                f"DataLoader: prefetch_factor must be >= 1 for num_workers={self._num_workers}, "
                f"got {loader.prefetch_factor}. Set loader.prefetch_factor, too."
            )
        if self._timeout > 0 and not self._num_workers:
            raise AssertionError(
                f"DataLoader: timeout must be 0 for num_workers=0, got {self._timeout}: there is "
                "no other thread to wait for."
            )
        self._in_order = loader.in_order
        self._iterable = isinstance(self._dataset, IterableDataset)
        self._over: str | None = None
        self._is_asked = False  # for a batch, by a next() that is under way
        self._tuner = self._gil = None
        stage = None if loader.device is None else open_device_stage(loader)
        self._backend = open_backend(loader, self._load_spec(loader), stage)
        # Before there is anything to end: Ctrl-C may come between. Twice: it may also cut the first
        # one off before it has done anything, and is swallowed there.
        stop = self._backend.request_stop
        self._endings = _Ending(stop), _Ending(stop)
        self.stats: EpochStats = self._backend.stats
        """This epoch's; they stay readable after its end and do not keep this iterator alive."""
        try:
            if loader._is_tuned:
                from .auto_workers import LoaderTuner  # brings the measuring and deciding

                self._tuner = LoaderTuner(loader, loader._tuning_state(), self._backend)
            self._begin_jobs(loader)
            if loader.stats and self._backend.on_threads:
                self._gil = loader._state.gil
        except BaseException:
            self._backend.request_stop()  # the error's frames may keep this object alive
            raise

    def _load_spec(self, loader: DataLoader[Any]) -> LoadSpec:
        pin = partial(pinned, device=self._pin_memory_device) if self._pin_memory else None
        announced_workers = self._num_workers
        if loader._is_tuned:
            announced_workers = max(loader._tuning_state().tuner.bounds.threads, loader.num_workers)
        return LoadSpec(
            recipe=BatchRecipe(
                self._dataset,
                self._collate_fn,
                self._auto_collation,
                self._drop_last,
                self._iterable,
                self._tolerance,
            ),
            num_workers=self._num_workers,
            announced_workers=announced_workers,
            max_outstanding=_max_outstanding(loader),
            in_order=loader.in_order,
            stats=loader.stats,
            base_seed=self._key.epoch_seed,
            per_sample=loader.rng == "sample",
            worker_init_fn=loader.worker_init_fn,
            finalize=pin,
            pipeline_number=loader._state.pipeline_number,
            device_index=torch.accelerator.current_device_index() if self._pin_memory else None,
            timeout=self._timeout,
        )

    @property
    def is_here(self) -> bool:
        """Whether it has workers, and they belong to this process."""
        return self._backend.is_here

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch of a persistent loader; outstanding jobs are dropped."""
        try:
            super()._reset(loader, first_iter)
            self._begin_jobs(loader)
        except BaseException:
            # Ctrl-C, or an error of the sampler: the workers are between two epochs, some in the
            # next. They end, and the loader's next epoch begins with new ones.
            loader._iterator = None
            self._backend.request_stop()
            raise

    def _begin_jobs(self, loader: DataLoader[Any]) -> None:
        """Begin an epoch in the backend, and give out its first jobs."""
        backend = self._backend
        self._ring, self._outlet = backend.begin(self._key, self._begun_from, self._order)
        self.stats.skipped = self._skipped
        if self._tuner is not None:
            self._tuner.begin()
        self._dealing = Dealing(
            max(1, self._num_workers),
            self._order.next_worker,
            max_outstanding=_max_outstanding(loader),
            evenly=not loader.in_order and (self._iterable or loader.rng == "worker"),
        )
        told = self.stats.starts.time(self._fill) if self._num_workers else None
        if told is not None:
            raise told.error
        self._over = None

    def __next__(self) -> Any:
        # torch's __next__ labels every batch for the profiler, which costs 4 µs even without one,
        # and counts the items of an iterable whose length was asked for. Skip both when idle.
        if _is_profiled() or self._IterableDataset_len_called is not None:
            try:
                return super().__next__().batch
            except _Instead as instead:
                result = instead.args[0]
        else:
            result = self._next_result()
            # From where the batch was noted to the loop there is no call, and so no place where
            # Python looks for Ctrl-C.
            if result.__class__ is Loaded:
                self._num_yielded += 1
                return result.batch
        if result is _END:
            raise StopIteration
        error = as_raised_in_loop(result.error)
        # The error's traceback holds this frame. Drop the iterator from it, which would keep the
        # threads alive, and the error itself, which would be a cycle.
        del self, result
        try:
            raise error
        finally:
            del error

    def _next_data(self) -> Any:
        """Return the next batch, for torch's ``__next__``. Raises: _Instead: what the loop gets
        instead, which torch is not to count."""
        result = self._next_result()
        if result.__class__ is Loaded:
            return result
        raise _Instead(result)

    def _next_result(self) -> Loaded | Failed | Told:
        """Return what the loop gets."""
        if self._over is not None:
            return Told(PipelineStopped(self._over)) if self._over else _END
        if self._is_asked:
            return Told(RuntimeError(_SHARED))
        result: Any = None
        handed: Any = None
        try:
            self._is_asked = True
            self._ring.ask(self._outlet)
            while True:
                handed = self._hold() if self._num_workers else self._make()
                if handed is not None:
                    return handed  # type: ignore[no-any-return]  # Told
                result, self._dealing.held = self._dealing.held, None
                if type(result) is Loaded:
                    result = self._backend.hand_over(result)
                if self._tuner is not None:
                    self._tuner.after(getattr(result, "batch", None))
                handed = result if type(result) is Loaded and self._skipped is None else None
                if handed is None:
                    handed = self._judged(result)
                if handed is not None:
                    self._ring.got(handed.number)
                # Last: a batch that Ctrl-C keeps from the loop has to come again after resuming.
                if self._iterable:
                    is_end = result.__class__ is Exhausted
                    self._order.handed_by(result.number, result.progress, is_end=is_end)
                else:
                    self._order.handed(result.number)
                if handed is not None:
                    return handed  # type: ignore[no-any-return]  # Loaded, Failed
        except BaseException as error:  # a handler's, or a bug of ours
            # By another thread or a handler, meanwhile: whatever it took away is its doing.
            if self._over == _CLOSED and is_users(error):
                return Told(PipelineStopped(_CLOSED))
            self._over = _CUT_SHORT
            self._backend.request_stop()
            raise
        finally:
            self._is_asked = False
            # An error's traceback may lead here, and a reference to it would be a cycle.
            result = handed = None

    def _hold(self) -> Told | None:
        """Receive a result, and give out the jobs for which that makes room. Return what comes
        before it: an error of the sampler, or the end."""
        instead: Told | None = None
        try:
            if self._dealing.held is None:
                if not self._dealing.num_out:
                    return self._end_epoch()
                if (instead := self._receive()) is not None:
                    return instead
            return self._fill()
        finally:
            instead = None  # as in _next_result: the traceback of a sampler's error leads here

    def _make(self) -> Told | None:
        """Without workers: make the next batch here, and hold it. Return as ``_hold``."""
        job = self.stats.draws.time(self._order.draw, self._sampler_iter, 0)
        if job is None:
            return self._end_epoch()
        if isinstance(job, Told):
            return job
        self._backend.give(job)
        dealing: Any = self._dealing
        dealing.held = self._backend.take(0.0)  # no variable holds it, as in _next_result
        if type(dealing.held) is Exhausted:
            self._sampler_iter = iter(())
        return None

    def _receive(self) -> Told | None:
        """Wait for a result, hold it, and count it. Return what comes in its place."""
        seconds = waited = self._timeout or channel.STALL_SECONDS
        while (result := self._backend.take(seconds)) is None:
            if self._timeout:
                text = f"DataLoader timed out after {self._timeout} seconds. {self._at_work()}"
                return Told(RuntimeError(text))
            _logger.warning(
                "DataLoader: the loop has waited %g s for a batch. %s", waited, self._at_work()
            )
            seconds, waited = waited, 2 * waited
        if isinstance(result, Told) or (isinstance(result, Failed) and result.ends):
            return self._lose(result.error)
        worker = self._order.worker_of(result.number)
        self._dealing.receive(worker, result, is_last=type(result) is Exhausted)
        if self._gil is not None:
            self._gil.look(self.stats)
        return None

    def _fill(self) -> Told | None:
        """Give out jobs up to the limit: one for each received batch, unless tuning moves the
        limit. Return the sampler's error, if it has one."""
        dealing = self._dealing
        if self._tuner is not None:
            dealing.max_outstanding = self._tuner.max_outstanding
        while dealing.num_out < dealing.max_outstanding:
            if (worker := dealing.next_worker()) is None:
                break
            job = self.stats.draws.time(self._order.draw, self._sampler_iter, worker)
            if job is None:
                break
            if isinstance(job, Told):
                return job
            self._give(job)
        return None

    def _give(self, job: Given) -> None:
        self._dealing.give(job.worker)
        error = self._backend.give(job)
        if error is not None:  # pickle's, or that of the index's own __reduce__
            where = f"in sending a worker what the sampler ({names_of(self._index_sampler)}) gave"
            add_thread_note(error, where, describe_batch(job.number, job.index))

    def _at_work(self) -> str:
        awaited = self._order.num_jobs - self._dealing.num_out if self._in_order else None
        which = "any batch" if awaited is None else f"batch {awaited}"
        return f"Waiting for {which}. {self._backend.at_work(awaited)}"

    def _judged(self, result: Any) -> Any:
        """Count the samples that a result leaves out; return what the loop gets for it, an error if
        they are too many. None = nothing.
        """
        is_empty = isinstance(result, NoBatch)
        failure = None if self._skipped is None else self._skipped.hand_out(result.tries)
        if failure is None and is_empty:
            failure = self._emptied(result)
        if failure is not None and not isinstance(result, Failed):
            return Failed(result.number, failure)
        return None if is_empty or isinstance(result, Exhausted) else result

    def _emptied(self, result: NoBatch) -> PipelineFailure | None:
        """Return the error in place of a batch without any good sample; None = it is left out."""
        if num_ranks(self._index_sampler) > 1:
            return PipelineFailure(
                f"DataLoader: batch {result.number} has no good sample, and the other ranks would "
                "wait for this one to load as many batches as they. Pass replace=True",
                [each.error for each in result.tries.bad],
            )
        _logger.warning(
            "DataLoader: batch %d has no good sample and is left out: the epoch has one batch "
            "less than len(loader). With replace=True it would be whole.",
            result.number,
        )
        return None

    def ask_ended(self, workers: Sequence[int]) -> None:
        """Ask these idle workers for the states of their datasets, after an epoch in which nobody
        had asked for states.
        """
        for worker in workers:
            # The iterable has ended: the worker only answers that, with its state.
            self._give(self._order.ask(worker))
        for _ in workers:
            if (instead := self._hold()) is not None:
                raise instead.error
            result: Any = self._dealing.held
            self._dealing.held = None
            self._order.handed_by(result.number, result.progress, is_end=True)

    def _lose(self, error: BaseException) -> Told:
        """End the epoch with an error, after which it is over; or as closed by another thread.
        Persistent workers end, too, and the next epoch begins with new ones."""
        error = as_raised_in_loop(error)
        if self._over == _CLOSED:  # by another thread or a handler, meanwhile
            error = PipelineStopped(_CLOSED)
        self._over = _CLOSED if isinstance(error, PipelineStopped) else _ENDED
        self._backend.request_stop()
        return Told(error)

    def _end_epoch(self) -> Told:
        """End the epoch: no batch is left. Let go of what has made the batches."""
        order = self._order
        if order.is_short:
            warn(_SHORT.format(type(self._dataset).__name__, sum(order.start.left_before)))
        if order.own is not None and order.workers[0].keeper != "dataset":
            order.own = None  # nothing of the iterator outlives the epoch
        if self._tuner is not None:
            self._tuner.end()
        if self._persistent_workers:
            self._backend.rest()
        else:
            self._backend.stop()
            # Nothing is left to end, and what they hold might refer to this object: the dataset.
            for ending in self._endings:
                ending.stop = None
        failure = None if self._skipped is None else self._skipped.end()
        end = _END if failure is None else Told(failure)
        # Last: the loop does not see an end that Ctrl-C cuts off, and a state has to say so. From
        # here to the loop there is no place where Python looks for it.
        self._over, order.finished = _ENDED, True
        return end

    def close(self) -> None:
        """End the epoch here, and the workers; ``next()`` raises ``PipelineStopped`` from now on,
        unless it is over. Blocks until the samples under way are made, for 5 seconds at most.
        """
        before = self._over
        if before != _ENDED:
            self._over = _CLOSED
        # In the middle of an epoch, but of no next(), stop() reads the last log lines of processes.
        if before is not None or self._is_asked:
            self._backend.request_stop()
        self._backend.stop()
        self._outlet = ()  # frees the batches that nobody has taken, though this object is kept


def _max_outstanding(loader: DataLoader[Any]) -> int:
    """The limit of jobs that are given out and not received: one without workers."""
    return max(1, int((loader.prefetch_factor or 1) * loader.num_workers))
