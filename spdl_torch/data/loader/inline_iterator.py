"""The iterator of a loader without workers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from ...engine.recorder.flight_recorder import FlightRecorder
from ..fetching.bad_samples import NoGoodSample, Tries, record_bad
from ..fetching.batch_maker import BatchMaker
from ..fetching.items import EndOfIterable, Items
from ..fetching.timing import record_parts
from ..rng.owned import OwnedGenerators
from ..rng.patches import of_thread
from ..rng.streams import Lending, SampleStreams, borrowers_in
from ..workers.stats import InlineStats
from .delivery import open_device_stage, pinned
from .epoch_iterator import EpochIterator
from .epoch_states import EpochState

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..workers.stats import EpochStats
    from .base_loader import BaseLoader
    from .delivery import Device

T = TypeVar("T")

_NO_BATCH = object()


class InlineIterator(EpochIterator):
    """``num_workers=0``: makes each batch on the trainer's thread when it is asked for."""

    def __init__(
        self, loader: BaseLoader[Any], device: Device, *, stats: bool, pipeline_number: int
    ) -> None:
        super().__init__(loader)
        if self._timeout > 0:
            raise AssertionError(
                f"DataLoader: timeout must be 0 for num_workers=0, got {self._timeout}: there is "
                "no other thread to wait for."
            )
        self._device_stage = open_device_stage(loader, device, stats=stats)
        recorder = FlightRecorder("DataLoader", pipeline_number, enabled=stats)
        self._recorder = recorder
        self._stats = InlineStats(recorder, loader.dataset, self._device_stage)
        self._stats.skipped = self._skipped
        weakref.finalize(self, self._stats.end).atexit = False
        self._ring = self._stats.consumer
        fetch_cell, collate_cell = self._stats.new_cells(enabled=stats)
        record_parts(self._ring, fetch=fetch_cell, collate=collate_cell)
        # Without streams, user code draws from the process's generators.
        self._streams = SampleStreams(self._key.epoch_seed) if loader.rng == "sample" else None
        self._borrowers = borrowers_in(self._dataset)
        self._owned: OwnedGenerators | None = None
        if self._streams is not None:
            owned = OwnedGenerators(self._dataset, self._collate_fn)
            self._owned = owned or None
            self._streams.seed_owned(owned)
        self._maker = self._within_streams(
            BatchMaker,
            self._recipe(loader),
            streams=self._streams,
            key=self._key,
            resume=next(iter(self._begun_from), None),
            # Two outstanding: the one that is being made, and the one that the loop has.
            memory=None if self._device_stage is None else self._device_stage.batch_memory(2),
            fetch_cell=fetch_cell,
            collate_cell=collate_cell,
        )
        # Keep the state's owner only: a reference to the maker, or to an iterator without a state,
        # would outlive this object, and dropping this object has to end them.
        items = self._maker.items
        if items is not None:
            self._progress.workers[0] = beginning = items.progress(wanted=False)
            if beginning.keeper is not None:
                self._progress.own = items.own_state
        if items is not None and self._streams is not None:
            weakref.finalize(self, _end_within, self._streams, items).atexit = False
        self._advance(EpochState.RUNNING)

    def _next_data(self) -> Any:
        self._ring.ask(())
        while True:
            batch, tries = self._make_next()
            is_empty = batch is _NO_BATCH
            failure = None
            if self._skipped is not None:
                record_bad(self._recorder, self._num_taken - 1, tries)
                failure = self._failure_of(tries, self._num_taken - 1, empty=is_empty)
            if failure is not None:
                self._note()  # an error in place of a batch counts as handed out
                self._ring.got(self._num_taken - 1)
                try:
                    raise failure
                finally:
                    del failure  # the error's traceback holds this frame: avoid the cycle
            if not is_empty:
                break
            self._note()
        if self._pin_memory:
            batch = pinned(batch, self._pin_memory_device)
        if self._device_stage is not None:
            batch = self._device_stage.transfer(batch, self._num_taken - 1)
        self._ring.got(self._num_taken - 1)
        # Last: a batch that Ctrl-C keeps from the loop has to come again after resuming.
        if self._maker.items is None:
            self._progress.handed(self._num_taken - 1)
        else:
            self._note()
        return batch

    def close(self) -> None:
        """End the epoch here; see ``EpochIterator.close``."""
        super().close()
        self._stats.end()

    def _make_next(self) -> tuple[Any, Tries | None]:
        # An iterable knows where it stands: of its indices, which say nothing, any may be lost.
        has_order = self._maker.items is None
        if self._state is EpochState.LOST or (self._is_cut_short and has_order):
            self._end_epoch()
        # Ctrl-C may leave an index that the sampler has given and nobody has recorded.
        self._is_cut_short = self._is_cut_short or has_order
        try:
            # Before the block below: only the maker's errors stand in place of a batch.
            taken = self._stats.draws.time(self._take_index)
        except Exception:  # the sampler's own
            self._is_cut_short = False
            raise
        self._is_cut_short = self._is_cut_short and taken is None and not has_order
        if taken is None:
            self._end_epoch()  # as cut short, where Ctrl-C has ended an iterable's sampler
        index, first = taken
        make = self._maker.make
        try:
            if (batch := self._maker.make_plain(index)) is not None:
                return batch, None
            batch, tries = self._within_streams(make, first, index, self._num_taken - 1)
        except EndOfIterable:
            self._is_cut_short = self._maker.items is not None and self._maker.items.is_cut_off
            self._end_epoch()
        except NoGoodSample as nothing:
            batch, tries = _NO_BATCH, nothing.args[0]
        except Exception as error:  # not Ctrl-C: resuming after that makes the batch again
            tries = self._maker.tries()
            record_bad(self._recorder, self._num_taken - 1, tries)
            self._recorder.failed("worker", self._num_taken - 1, error)
            self._failure_of(tries, self._num_taken, empty=False)  # logs what failed
            self._note()  # an error in place of a batch counts as handed out
            self._ring.got(self._num_taken - 1)
            raise
        return batch, tries

    def _end(self) -> Any:
        """As ``EpochIterator._end`` says."""
        state = self._maker.progress(wanted=self._progress.is_wanted)
        if state is not None:
            self._progress.ended(0, state)
            if state.keeper != "dataset":
                self._progress.own = None  # nothing of the iterator outlives the epoch
        self._advance(EpochState.OVER)
        self._stats.end()
        tries = self._maker.tries()
        record_bad(self._recorder, self._num_taken - 1, tries)
        return self._failure_of(tries, self._num_taken, empty=False)

    def _note(self) -> None:
        state = self._maker.progress(wanted=self._progress.is_wanted)
        if state is not None:
            self._progress.handed_by(0, state)
        else:
            self._progress.handed(self._num_taken - 1)

    def _within_streams(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run user code with the sample streams; between batches the trainer's code keeps the
        process's generators.
        """
        streams, before = self._streams, of_thread.streams
        if streams is None:
            return call(*args, **kwargs)
        lending = None
        try:
            with streams:
                if not self._borrowers and self._owned is None:
                    return call(*args, **kwargs)
                lending = Lending(streams, self._borrowers, self._owned)
                with lending:
                    return call(*args, **kwargs)
        finally:  # Ctrl-C may have come where an __exit__ began
            if lending is not None and lending.is_open:
                lending.__exit__()
            if of_thread.streams is not before:
                streams.__exit__(None, None, None)

    def stats(self) -> EpochStats:
        """Return the statistics; they stay readable after the end and do not keep this iterator
        alive.
        """
        return self._stats


def _end_within(streams: SampleStreams, items: Items) -> None:
    """Let a generator of the dataset's end where what it draws as it ends belongs."""
    with streams:
        items.end()
