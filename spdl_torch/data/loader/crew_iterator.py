"""The iterator of a loader with workers, wherever they sit."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from ...engine.channel.waits import ChannelClosed
from ...engine.threads import stall
from ...errors import PipelineStopped
from ..error_notes import add_thread_note, as_raised_in_loop, describe_batch
from ..workers.jobs import Exhausted, Failed, Given, Loaded, NoBatch
from ..workers.load_spec import Draws, LoadSpec
from .crew_opening import open_crew
from .dealing import Dealing
from .delivery import open_device_stage, pinned
from .epoch_iterator import EpochIterator
from .epoch_states import EpochState
from .loader_state import WorkersStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...observe.verdict.placement import Placement
    from ..workers.stats import EpochStats
    from .base_loader import BaseLoader
    from .delivery import Device

_logger = logging.getLogger("spdl_torch.data")

_STOPPED = (
    "DataLoader: the workers of this iterator were ended: the interpreter exits, or another thread "
    "closed the loader or had the end of this epoch. Call iter(loader) for new ones, and end a "
    "thread that loads before the program ends."
)


class CrewIterator(EpochIterator):
    """Yields batches that workers, threads or processes, make ahead, in torch's order.

    As in torch, the trainer's thread advances the sampler: by ``prefetch_factor * num_workers``
    batches at ``iter()``, then by one at each ``next()``.

    All state belongs to that thread alone; workers know the crew, not this object. Only Ctrl-C can
    interrupt it, after which the loop may continue: without the batch that was being handed over,
    and to the end only if no job was being given out, which ``_is_cut_short`` records.
    """

    def __init__(
        self, loader: BaseLoader[Any], device: Device, *, stats: bool, pipeline_number: int
    ) -> None:
        self._start = loader._state.figures.start = WorkersStart()
        super().__init__(loader)
        if _max_outstanding(loader) < 1:
            raise AssertionError(
                f"DataLoader: prefetch_factor must be >= 1, got {loader.prefetch_factor}."
            )
        self._in_order = loader.in_order
        self._iterable = isinstance(self._dataset, IterableDataset)
        placement = loader._placement()  # once: it looks at every object of a list
        spec = self._load_spec(loader, placement, stats, pipeline_number)
        stage = open_device_stage(loader, device, stats=stats)
        self._crew = open_crew(loader, placement, spec, stage)
        self._crew.stats.skipped = self._skipped
        # The crew does not refer to this object, so dropping it (Lightning's way to end a loader)
        # stops the threads. Register that before the first one starts: Ctrl-C may come between.
        self._finalizer = weakref.finalize(self, self._crew.request_stop)
        # A second one: Ctrl-C may cut the first off before it has done anything, and is swallowed.
        self._again = weakref.finalize(self, self._crew.request_stop)
        for finalizer in (self._finalizer, self._again):
            finalizer.atexit = False  # at exit the thread groups of the crew stop them
        self._tuner = None
        # Of threads alone, and where there are statistics.
        self._gil = loader._state.gil if stats and not placement.num_processes else None
        try:
            self._start.have_begun()
            self._crew.begin(self._key, self._begun_from)
            if loader._is_tuned:
                from .auto_workers import LoaderTuner  # brings the measuring and deciding

                self._tuner = LoaderTuner(loader, loader._tuning_state(), self._crew)
            self._prime(loader)
        except BaseException:
            self._finalizer()  # the error's frames may keep this object alive: stop now
            raise

    def _load_spec(
        self, loader: BaseLoader[Any], placement: Placement, stats: bool, pipeline_number: int
    ) -> LoadSpec:
        pin = partial(pinned, device=self._pin_memory_device) if self._pin_memory else None
        return LoadSpec(
            recipe=self._recipe(loader),
            num_workers=self._num_workers,
            max_outstanding=_max_outstanding(loader),
            in_order=loader.in_order,
            stats=stats,
            draws=Draws(self._key.epoch_seed, loader.rng == "sample", loader.seed is not None),
            worker_init_fn=loader.worker_init_fn,
            finalize=pin,
            pipeline_number=pipeline_number,
            device_index=torch.accelerator.current_device_index() if self._pin_memory else None,
            most_workers=_most_workers(loader) if loader._is_tuned else None,
        )

    @property
    def is_here(self) -> bool:
        """Whether it has workers, and they belong to this process."""
        return self._crew.is_here

    def _reset(self, loader: BaseLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch of a persistent loader; outstanding jobs are dropped."""
        try:
            super()._reset(loader, first_iter)
            self._crew.begin(self._key, self._begun_from)
            self._crew.stats.skipped = self._skipped
            if self._tuner is not None:
                self._tuner.begin()
            self._prime(loader)
        except BaseException:
            # Ctrl-C, or an error of the sampler: the workers are between two epochs, some in the
            # next. They end, and the loader's next epoch begins with new ones.
            loader._iterator = None
            self._finalizer()
            raise

    def _prime(self, loader: BaseLoader[Any]) -> None:
        self._num_submitted, self._is_cut_short = 0, False
        # Received and not handed out: it waits here while the next jobs are given out, so that an
        # error of the sampler, which comes first, does not cost the loop this batch.
        self._held: Any = None
        self._dealing = Dealing(
            self._num_workers,
            self._begun_from,
            self._progress.next_worker,
            max_outstanding=_max_outstanding(loader),
            evenly=not loader.in_order and (self._iterable or loader.rng == "worker"),
        )
        self._crew.stats.starts.time(self._submit_more)
        self._advance(EpochState.RUNNING)

    def _submit_more(self) -> None:
        """Submit jobs up to the limit: one for each received batch, unless tuning moves the
        limit; none after one that Ctrl-C has cut short.
        """
        if self._tuner is not None:
            self._dealing.max_outstanding = self._tuner.max_outstanding
        most = self._dealing.max_outstanding
        taken = self._crew.num_taken  # meanwhile nobody takes any
        while self._num_submitted - taken < most and not self._is_cut_short:
            num_submitted = self._num_submitted
            # Ctrl-C may leave a job that the sampler has given and no worker has, or one that a
            # worker has and nobody has counted: another one would get its number.
            self._is_cut_short = True
            try:
                self._submit_next(self._num_submitted - taken)
            except Exception:  # the sampler's own, or an index that cannot be pickled
                self._is_cut_short = False
                raise
            self._is_cut_short = False
            if self._num_submitted == num_submitted:
                return

    def _submit_next(self, num_outstanding: int) -> None:
        held = None if self._held is None else self._held.number
        worker = self._dealing.next_worker(held, num_outstanding)
        if worker is None:
            return
        taken = self._crew.stats.draws.time(self._take_index)
        if taken is None:
            return
        index, first = taken
        try:
            self._submit(index, worker, first, wants_state=self._progress.is_wanted)
        except (PipelineStopped, ChannelClosed):
            raise
        except Exception as error:  # pickle's, or that of the index's own __reduce__
            where = f"in sending a worker what the sampler ({self._name_of_sampler()}) gave"
            add_thread_note(error, where, describe_batch(self._num_taken - 1, index))
            raise

    def _submit(self, index: Any, worker: int, first: int, *, wants_state: bool) -> None:
        self._dealing.given[self._num_submitted] = worker, self._num_taken - 1
        self._crew.submit(Given(self._num_submitted, index, first, wants_state, worker))
        self._num_submitted += 1

    def _next_data(self) -> Any:
        while self._state is not EpochState.OVER and self._state is not EpochState.LOST:
            self._crew.ask()
            if self._held is None:
                if self._crew.num_taken >= self._num_submitted:
                    self._submit_more()  # Ctrl-C may have lost the only one that was under way
                    if self._crew.num_taken >= self._num_submitted:
                        break
                self._held = self._receive()
                if self._tuner is not None:
                    self._tuner.after(getattr(self._held, "batch", None))
                if self._gil is not None:
                    self._gil.look(self._crew.stats)
            self._submit_more()
            result, self._held = self._held, None
            if not self._num_yielded and isinstance(result, Loaded | Failed):
                self._start.had_first()
            handed = result if type(result) is Loaded and self._skipped is None else None
            if handed is None:
                handed = self._judged(result)
            if handed is not None:
                self._crew.got(result.number)
            # Last: a batch that Ctrl-C keeps from the loop has to come again after resuming. From
            # here to the loop there is no call, and so no place where Python looks for Ctrl-C.
            self._note(result)
            if handed is not None:
                return handed
        if self._state is EpochState.LOST and not self._persistent_workers:
            self._finalizer()
        self._end_epoch()

    def _end(self) -> None:
        """As ``EpochIterator._end`` says."""
        self._advance(EpochState.OVER)
        if self._tuner is not None:
            self._tuner.end()
        if self._persistent_workers:
            self._crew.rest()
        else:
            self._crew.stop()
            # Nothing is left to end, and what they hold might refer to this object: crew, dataset.
            self._finalizer.detach()
            self._again.detach()

    def __next__(self) -> Any:
        try:
            result = super().__next__()
        except RuntimeError:
            # A loop that goes on after errors has this one once, and then the end, as with torch.
            if self._state is EpochState.RUNNING and self._crew.loss is not None:
                self._advance(EpochState.LOST)
            raise
        if result.__class__ is Failed:
            self._num_yielded -= 1
            error = as_raised_in_loop(result.error)
            # The error's traceback holds this frame. Drop the iterator from it, which would keep
            # the threads alive, and the error itself, which would be a cycle.
            del self, result
            try:
                raise error
            finally:
                del error
        return result.batch

    def close(self) -> None:
        """End the epoch here, and the workers; see ``EpochIterator.close``. Blocks until the
        samples under way are made, for 5 seconds at most.
        """
        super().close()
        self._finalizer()
        self._crew.stop()

    def _judged(self, result: Any) -> Any:
        """Count the samples that a result leaves out; return what the loop gets for it, an error if
        they are too many. None = nothing.
        """
        is_empty = isinstance(result, NoBatch)
        failure = self._failure_of(result.tries, result.number, empty=is_empty)
        if failure is not None and not isinstance(result, Failed):
            return Failed(result.number, failure)
        return None if is_empty or isinstance(result, Exhausted) else result

    def _receive(self) -> Any:
        """Return the next result."""
        try:
            try:
                result = self._crew.get(self._timeout or stall.STALL_SECONDS)
            except TimeoutError:
                result = None
            if result is None:
                result = self._receive_late()
        except ChannelClosed:  # by another thread: the interpreter's exit, or close()
            raise PipelineStopped(_STOPPED) from None
        if type(result) is Exhausted:
            self._dealing.has_ended(result.number)
        return result

    def _note(self, result: Any) -> None:
        """Record ``result`` as handed out, so a state taken now continues after it."""
        worker, number = self._dealing.given.pop(result.number)
        if not self._iterable:
            self._progress.handed(number)
        elif result.progress is not None:
            is_end = isinstance(result, Exhausted)
            note = self._progress.ended if is_end else self._progress.handed_by
            note(worker, result.progress)

    def ask_ended(self, workers: Sequence[int]) -> None:
        """Ask these idle workers for the states of their datasets, after an epoch in which nobody
        had asked for states.
        """
        for worker in workers:
            # The iterable has ended: the worker only answers that, with its state.
            self._submit([None], worker, 0, wants_state=True)
        for _ in workers:
            self._note(self._receive())

    def _receive_late(self) -> Any:
        if not self._timeout:
            return stall.warn_again(self._crew.get, self._log_stall, stall.STALL_SECONDS)
        at_work = self._at_work()
        raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds. {at_work}")

    def _log_stall(self, seconds: float) -> None:
        _logger.warning(
            "DataLoader: the loop has waited %g s for a batch. %s", seconds, self._at_work()
        )

    def _at_work(self) -> str:
        awaited = self._crew.num_taken if self._in_order else None
        which = "any batch" if awaited is None else f"batch {awaited}"
        return f"Waiting for {which}. {self._crew.at_work(awaited)}"

    def stats(self) -> EpochStats:
        """Return this epoch's statistics; they stay readable after its end and do not keep this
        iterator alive.
        """
        return self._crew.stats


def _max_outstanding(loader: BaseLoader[Any]) -> int:
    assert loader.prefetch_factor is not None, "set by torch for num_workers > 0"
    return int(loader.prefetch_factor * loader.num_workers)


def _most_workers(loader: BaseLoader[Any]) -> int:
    return max(loader._tuning_state().tuner().bounds.threads, loader.num_workers)
