"""The workers of one iterator as the loop sees them, threads or processes: it gives out jobs, and
takes batches.

A *job* is the work of one batch. Whoever makes it, its batch comes through the one outlet of the
epoch, which puts batches in order.

Nothing here refers to the iterator that the trainer holds, so dropping it ends the workers.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence, Sized
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from ...engine.channel import Channel, ChannelClosed, WaitIsOver
from ...engine.recorder import FlightRecorder
from ...engine.threads import ThreadGroup
from ...errors import PipelineStopped
from ...locks import weakly
from ..checkpoint.epoch import Told
from ..stats.stats import WorkersStats
from .activity import describe_activities
from .backend import Backend
from .jobs import NO_BATCHES, Epoch, Loaded, Result
from .transfer_stage import AHEAD, forward, forwarder_name
from .worker_thread import intra_op_threads_kept, use_one_intra_op_thread

if TYPE_CHECKING:
    from ...engine.rings import ConsumerRing
    from ...observe.verdict.placement import Placement
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from ..stats.stats import Source
    from .activity import Activity
    from .backend import LoadSpec
    from .transfer_stage import DeviceStage

_logger = logging.getLogger("spdl_torch.data")

JOIN_SECONDS = 1.0  # idle workers end at once; a longer wait would hide a hang
_UNDER_WAY_SECONDS = 5.0  # for the samples that threads are making, as close() says

MAX_EPOCHS_WAITING = 1_000  # that a persistent loader may begin before a thread looks


class Workers(Backend):
    """The workers of one iterator, and the epoch that they work on.

    ``break``, an exception and Ctrl-C call ``request_stop``: every wait ends at once; a worker that
    is fetching a sample finishes it and then ends.

    Owners of its state: the loop's thread. ``request_stop``, on any thread, in the middle of
    anything, sets ``_epoch`` to None, for good.
    """

    counts: Source
    """What the workers count."""
    failure: BaseException | None = None
    """The error for which no batch comes any more: of a worker that could not start or has ended,
    or of a thread that failed through no fault of the dataset. None = there is none, or it comes in
    place of a batch."""
    activities: Sequence[Activity] = ()
    """What those of them that are threads of this process do."""
    look_seconds = inf
    """The interval at which a waiting loop calls ``_tend``."""

    def __init__(self, spec: LoadSpec, stage: DeviceStage | None, placement: Placement) -> None:
        """``stage``: copies the batches to the device, on the thread that passes them on; None =
        they stay. ``placement``: where the workers are, and why."""
        self._spec = spec
        self._stage = stage
        self.forwards = stage is not None
        """Whether a thread passes the batches on; else the loop takes them from the workers."""
        self.placement = placement
        self.stats: WorkersStats = WorkersStats(stage)
        self._epoch: Epoch | None = None
        self.is_stopped = False
        self._is_whole = True  # False once the system had nothing for one more worker
        # A weak reference: with a strong one only a garbage collection would free the workers, and
        # the dataset with them.
        self._threads = ThreadGroup(weakly(self.request_stop))
        self._staged: Channel[Epoch] | None = None  # the epochs of the stage, once it has a thread

    # What threads and processes do each in their way:

    @abstractmethod
    def _new_results(self, recorder: FlightRecorder) -> Channel[Result]:
        """Return the queue in which an epoch's results come."""

    def _prepare(self, epoch: Epoch) -> None:
        """Have the workers there for an epoch that is about to begin; drop what is outstanding."""

    @abstractmethod
    def _begin(self, epoch: Epoch) -> None:
        """Deliver to this epoch from now on."""

    def _tend(self, epoch: Epoch) -> None:
        """Do what is due before the loop waits for a batch."""

    @abstractmethod
    def _end(self) -> None:
        """End the workers. Never blocks; safe in a finalizer; any number of times."""

    # As Backend says:

    def begin(
        self, key: StreamKey, workers: Sequence[WorkerState], _: object = None
    ) -> tuple[ConsumerRing, Sized]:
        """Begin an epoch; see ``Backend``. Workers that are there stay, and others start.

        This is not part of ``__init__``, so that the holder can register ``request_stop`` before
        there is anything to stop: Ctrl-C may come at any moment in here.

        Raises: RuntimeError: the system has no more threads or processes; those that were started
            end.
        """
        if self._epoch is not None or self.is_stopped:
            self._running().close()
        try:
            epoch = self._new_epoch(key, workers)
            before = self.stats.queues_of(epoch)
            self.stats.starts.time(partial(self._prepare, epoch))
            self.stats.begin(epoch, before, self.counts, self.placement)
            # Store the epoch before any worker gets it: Ctrl-C in between must not leave workers in
            # an epoch that request_stop cannot close.
            self._epoch = epoch
            self.stats.starts.time(partial(self._begin, epoch))
            if self.forwards:
                self._pass_on(epoch)
            return epoch.consumer, epoch.outlet
        except BaseException:  # Ctrl-C too
            self.request_stop()
            raise

    def _new_epoch(self, key: StreamKey, workers: Sequence[WorkerState]) -> Epoch:
        spec, stage = self._spec, self._stage
        recorder = FlightRecorder("DataLoader", spec.pipeline_number, enabled=spec.stats)
        results = outlet = self._new_results(recorder)
        recorder.add_queue(1, "batches", spec.max_outstanding)
        if self.forwards:
            most = spec.max_outstanding if stage is None else AHEAD
            outlet = Channel(most, marks=NO_BATCHES)
        if stage is not None:
            recorder.add_queue(2, "device batches", AHEAD)
        return Epoch(
            results=results,
            outlet=outlet,
            in_order=spec.in_order,
            key=key,
            workers=tuple(workers),
            recorder=recorder,
            consumer=recorder.new_consumer_ring(2 + self.forwards),
        )

    def take(self, seconds: float) -> Result | Told | None:
        """Return the next result; see ``Backend``."""
        deadline = monotonic() + seconds
        while True:
            if (failure := self.failure) is not None:
                return Told(failure)
            epoch, wait = self._epoch, None
            if epoch is None or not self._threads.is_here:
                return Told(PipelineStopped(self._gone()))
            if not epoch.outlet.has_next:  # a batch that is there comes first
                self._tend(epoch)
                wait = max(0.0, min(self.look_seconds, deadline - monotonic()))
            try:
                # No variable holds the result: an error's traceback may lead here.
                return epoch.outlet.get(wait)
            except WaitIsOver:
                if monotonic() >= deadline:
                    return None
            except ChannelClosed:
                return Told(self.failure or PipelineStopped(self._gone()))

    def hand_over(self, result: Loaded) -> Result:
        """Return a result as the loop gets it; see ``Backend``."""
        return result if self._stage is None else self._stage.hand_over(result)

    def at_work(self, awaited: int | None) -> str:
        """Describe what the threads do; see ``Backend``."""
        threads = self._threads.threads()
        return describe_activities(self.activities, threads, awaited) if threads else ""

    def rest(self) -> None:
        """Keep the statistics of an epoch that is over; the workers stay for the next one."""
        self.stats.end()

    @property
    def is_here(self) -> bool:
        """Whether there are workers that belong to this process: a forked child has none of its
        parent's, and the end of the main thread has stopped those that were made for it.
        """
        return self._threads.is_here and not self.is_stopped

    def request_stop(self) -> None:
        """End every wait and with it the workers; see ``Backend``."""
        if not self._threads.is_here:
            return  # a forked child has none of the threads, and locks may stay held for ever
        try:
            self._stop_all()
        except BaseException:  # Ctrl-C: in a finalizer nobody would try again, so do it here
            self._stop_all()
            raise

    def _stop_all(self) -> None:
        self.is_stopped = True
        epoch = self._epoch
        try:
            self.stats.end()
        finally:  # the workers end even if the statistics fail
            if epoch is not None:
                epoch.close()
            if self._staged is not None:
                self._staged.close()
            # Free the batches that nobody will take: a kept error's frames may hold the workers.
            self._epoch = self.failure = None
            self._end()

    def _stay(self, what: str, error: Exception) -> None:
        """Have as many workers as there are from now on: the system had no ``what`` for another."""
        self._is_whole = False
        _logger.warning(
            "DataLoader: no %s could be started for one more worker (%s); the others go on, and "
            "their number stays.",
            what,
            error,
        )

    def stop(self) -> None:
        """``request_stop``, and wait for the workers, who have nothing left to do but the samples
        under way."""
        self.stats.end()
        self.request_stop()
        self._threads.join(_UNDER_WAY_SECONDS)

    def _running(self) -> Epoch:
        epoch = self._epoch
        if epoch is None or not self._threads.is_here:
            raise PipelineStopped(self._gone())
        return epoch

    def _gone(self) -> str:
        new = "Call iter(loader) for new ones"
        if not self._threads.is_here:
            return f"DataLoader: its workers did not follow into a forked process. {new}."
        return (
            f"DataLoader: the workers of this iterator have ended. {new}, and end a thread that "
            "loads before the program ends."
        )

    def _pass_on(self, epoch: Epoch) -> None:
        """Let the thread that passes batches on have the epoch; start it before the first one."""
        if self._staged is not None:
            self._staged.put(epoch)
            return
        self._staged = epochs = Channel[Epoch](MAX_EPOCHS_WAITING)
        epochs.put(epoch)
        ready = Channel[None](1)
        with intra_op_threads_kept():
            run = partial(_forward, self._stage, epochs, ready, self._threads)
            self._threads.spawn(forwarder_name(self._stage), run)
            ready.get()


def _forward(
    stage: DeviceStage | None, epochs: Channel[Epoch], ready: Channel[None], group: ThreadGroup
) -> None:
    """Pass on the batches of each epoch. ``group`` stays alive meanwhile: the exit waits for it."""
    use_one_intra_op_thread()
    ready.put(None)
    forward(epochs, stage)
