"""The backend of a loader without workers: the loop's thread makes each batch when asked for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ...engine.recorder import FlightRecorder
from ...errors import PipelineStopped
from ..error_notes import is_of_handler
from ..fetching.batch_maker import record_parts
from ..fetching.items import Items
from ..fetching.samples import maker_of
from ..rng.owned import OwnedGenerators
from ..rng.patches import of_thread
from ..rng.streams import SampleContexts, SampleStreams, borrowers_in, to_give_back
from ..stats.stats import InlineStats
from .backend import Backend
from .jobs import Failed, Loaded, recorded, result_of

if TYPE_CHECKING:
    from ...engine.rings import ConsumerRing
    from ..checkpoint.epoch import Given
    from ..checkpoint.order import Order
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from .backend import LoadSpec
    from .jobs import Result
    from .transfer_stage import DeviceStage

T = TypeVar("T")


class InlineWorker(Backend):
    """See ``Backend``. It has one job at a time."""

    def __init__(self, spec: LoadSpec, stage: DeviceStage | None) -> None:
        recipe = spec.recipe
        self._spec = spec
        self._stage = stage
        self._is_sent_as_made = stage is None and spec.finalize is None
        self._recorder = FlightRecorder("DataLoader", spec.pipeline_number, enabled=spec.stats)
        self.stats: InlineStats = InlineStats(self._recorder, recipe.dataset, stage)
        # Without streams, user code draws from the process's generators.
        self._streams: SampleStreams | None = None
        self._owned: OwnedGenerators | None = None
        self._borrowers = borrowers_in(recipe.dataset)
        if spec.per_sample:
            self._streams = SampleStreams(spec.base_seed)
            owned = OwnedGenerators(recipe.dataset, recipe.collate_fn)
            self._owned = owned or None
            self._streams.seed_owned(owned)
        self._job: Given | None = None  # that is under way
        self._is_stopped = False
        self._end: weakref.finalize[..., Any] | None = None

    def begin(
        self, key: StreamKey, workers: Sequence[WorkerState], order: Order
    ) -> tuple[ConsumerRing, Sized]:
        """Begin an epoch; see ``Backend``. Raises: what ``iter(dataset)`` raises."""
        cells = self.stats.counts.new_cells(enabled=self._spec.stats)
        record_parts(self.stats.consumer, cells)
        self._maker = self._within_streams(
            maker_of,
            self._spec.recipe,
            streams=self._streams,
            key=key,
            resume=next(iter(workers), None),
            # Two outstanding: the one that is being made, and the one that the loop has.
            memory=None if self._stage is None else self._stage.batch_memory(2),
            cells=cells,
        )
        if isinstance(self._maker, Items):
            self._keep_state_of(self._maker, order)
        return self.stats.consumer, ()

    def _keep_state_of(self, items: Items, order: Order) -> None:
        # Nothing is loaded ahead, so the iterable is asked for its state when the loader is. Keep
        # the state's owner only: what dropping the iterator has to end must not outlive it.
        beginning = items.progress(wanted=False)
        order.reached(0, beginning)
        if beginning.keeper is not None:
            order.own = items.own_state
        # A generator of the dataset's ends where what it draws as it ends belongs.
        end = items.end if self._streams is None else partial(_within, self._streams, items.end)
        self._end = weakref.finalize(self, end)
        self._end.atexit = False

    def give(self, job: Given) -> None:
        """Keep the job until its batch is taken."""
        self._job = job

    def take(self, _seconds: float) -> Result:
        """Make the batch."""
        job = self._job
        assert job is not None, "guaranteed by the iterator"
        if self._is_stopped:  # just now: from give() on, stop() leaves the rest to this
            self._job = None
            raise PipelineStopped("DataLoader: it was closed")  # the iterator says more
        maker = self._maker
        finalize = None if self._is_sent_as_made else partial(self._sent, job.number)
        try:
            # Nothing is drawn for a batch in which no code of the user's takes part.
            if maker.reads_rows and (plain := maker.make_plain(job.index)) is not None:
                return Loaded(job.number, plain if finalize is None else finalize(plain))
            # Not Ctrl-C: resuming after that makes the batch again. (No variable holds the result:
            # an error's traceback leads here, and a reference to it would be a cycle.)
            within = self._within_streams
            return recorded(self._recorder, within(result_of, maker, job, finalize, Exception))
        except Exception as error:
            if is_of_handler(error):
                raise
            return Failed(job.number, error)
        finally:
            self._job = None
            if self._is_stopped:  # meanwhile, by another thread or a handler
                self.stop()

    def _sent(self, number: int, batch: Any) -> Any:
        """Return a batch as the loop gets it, pinned or on its device."""
        if self._spec.finalize is not None:
            batch = self._spec.finalize(batch)
        return batch if self._stage is None else self._stage.transfer(batch, number)

    def _within_streams(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run user code with the sample streams; between batches the trainer's code keeps the
        process's generators.
        """
        streams = self._streams
        if streams is None:
            return call(*args, **kwargs)
        if self._borrowers or self._owned is not None:
            call = partial(self._with_owned, streams, call)
        return _within(streams, call, *args, **kwargs)

    def _with_owned(
        self, streams: SampleStreams, call: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> T:
        """Run it where the dataset's own generators follow the streams, too."""
        give_back = to_give_back(self._borrowers, self._owned)
        try:
            for dataset in self._borrowers:
                dataset.sample_context = SampleContexts(streams)
            result: T = call(*args, **kwargs)
            give_back()
        except BaseException:
            give_back()  # again, where Ctrl-C came as it began
            raise
        return result

    def request_stop(self) -> None:
        """End the epoch's clock."""
        self.stats.end()

    rest = request_stop

    def stop(self) -> None:
        """Call ``request_stop``, and let go of an iterable's iterator, which may have threads."""
        self.request_stop()
        self._is_stopped = True
        if self._end is not None and self._job is None:
            self._end()


def _within(streams: SampleStreams, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Run it within the streams, which the thread does not keep: Ctrl-C may come where their
    ``__exit__`` begins.
    """
    try:
        with streams:
            return call(*args, **kwargs)
    except BaseException:
        if of_thread.streams is streams:
            streams.__exit__(None, None, None)
        raise
