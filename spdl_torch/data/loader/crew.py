"""The workers of one iterator, wherever they sit, as the loop sees them: it gives out jobs, and
receives batches.

A *job* is the work of one batch. Whoever makes it, its batch comes through the one outlet of the
epoch, which puts batches in order.

Nothing here refers to the iterator that the trainer holds, so dropping it ends the workers.
"""

from __future__ import annotations

from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from ...engine.channel import Channel, ChannelClosed, WaitIsOver
from ...engine.recorder import FlightRecorder
from ...engine.shared import weakly
from ...engine.threads import ThreadGroup
from ...errors import PipelineStopped
from ..workers.activity import describe_activities
from ..workers.device import AHEAD
from ..workers.epoch import Epoch
from ..workers.jobs import NO_BATCHES, Over, Result
from ..workers.stats import CrewStats
from ..workers.worker_info import intra_op_threads_kept, use_one_intra_op_thread
from .backend import Backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.counts import Queues
    from ..workers.jobs import Failed, Given
    from ..workers.load_spec import LoadSpec
    from ..workers.seats import Seats
    from ..workers.transfer_stage import DeviceStage

_JOIN_SECONDS = 1.0

_MAX_EPOCHS_WAITING = 1_000  # epochs that a persistent loader may begin before the thread looks


class Crew(Backend):
    """The workers of one iterator, and the epoch that they work on.

    ``break``, an exception and Ctrl-C call ``request_stop``: every wait ends at once; a worker that
    is fetching a sample finishes it and then ends.

    Owners of its state: the loop's thread. ``request_stop``, on any thread, in the middle of
    anything, sets ``_epoch`` to None, for good.
    """

    def __init__(self, spec: LoadSpec, seats: Seats, stage: DeviceStage | None = None) -> None:
        self._spec = spec
        self.seats = seats
        """Where the workers sit."""
        self._stage = stage
        self.stats: CrewStats = CrewStats(stage)
        self._epoch: Epoch | None = None
        self._is_stopped = False
        # Of the transfer thread, which is started for the first epoch.
        self._threads = ThreadGroup(weakly(self.request_stop))
        self._epochs: Channel[Epoch] | None = None

    def begin(self, key: StreamKey, workers: Sequence[WorkerState], _: object = None) -> None:
        """Begin an epoch; see ``Backend``. Workers that are there stay, and others start.

        This is not part of ``__init__``, so that the holder can register ``request_stop`` before
        there is anything to stop: Ctrl-C may come at any moment in here.

        Raises: RuntimeError: the system has no more threads or processes; those that were started
            end.
        """
        if self._epoch is not None or self._is_stopped:
            self._running().close()
        try:
            epoch = self._new_epoch(key, workers)
            before = self.stats.queues_of(epoch)
            self.stats.starts.time(partial(self.seats.prepare, key, workers))
            self._enter(epoch, before)
            if self._stage is not None:
                self._transfer_for(self._stage)
        except BaseException:  # Ctrl-C too
            self.request_stop()
            raise

    def _enter(self, epoch: Epoch, before: Queues) -> None:
        """Begin the epoch, of which ``before`` was read when its workers were not there yet."""
        self.stats.begin(epoch, before, self.seats.counts, self.seats.placement)
        self.consumer = epoch.consumer, epoch.outlet
        # Store the epoch before any worker gets it: Ctrl-C in between must not leave workers in an
        # epoch that request_stop cannot close.
        self._epoch = epoch
        self.stats.starts.time(partial(self.seats.begin, epoch))

    def _new_epoch(self, key: StreamKey, workers: Sequence[WorkerState]) -> Epoch:
        spec, stage = self._spec, self._stage
        results = Channel[Result](spec.max_outstanding, marks=NO_BATCHES)
        outlet = results if stage is None else Channel[Result](AHEAD, marks=NO_BATCHES)
        recorder = FlightRecorder("DataLoader", spec.pipeline_number, enabled=spec.stats)
        recorder.belongs_to(self.stats)
        recorder.add_queue(1, "batches", results.capacity)
        if stage is not None:
            recorder.add_queue(2, "device batches", outlet.capacity)
        return Epoch(
            results=results,
            outlet=outlet,
            in_order=spec.in_order,
            key=key,
            workers=tuple(workers),
            recorder=recorder,
            consumer=recorder.new_consumer_ring(2 if stage is None else 3, outlet),
        )

    def give(self, job: Given) -> Exception | None:
        """Give out a job; see ``Backend``. One that finds the workers gone is lost: so is the
        epoch, as ``take`` says."""
        try:
            return self.seats.submit(job)
        except ChannelClosed:
            return None

    def answer(self, result: Failed) -> None:
        """Let this be the result of a job; see ``Backend``."""
        self._running().deliver(result)

    def take(self, seconds: float) -> Result | Over | None:
        """Return the next result; see ``Backend``."""
        deadline = monotonic() + seconds
        while True:
            if (failure := self.seats.failure) is not None:
                return Over(failure)
            epoch, wait = self._epoch, None
            if epoch is None or not self._threads.is_here:
                return Over(PipelineStopped(self._gone()))
            if not epoch.outlet.has_next:  # a batch that is there comes first
                wait = self._tend(epoch, deadline)
            try:
                result = epoch.outlet.get_numbered(wait)[1]
                break
            except WaitIsOver:
                if monotonic() >= deadline:
                    return None
            except ChannelClosed:
                return Over(self.seats.loss or PipelineStopped(self._gone()))
        return result if self._stage is None else self._stage.hand_over(result)

    def _tend(self, epoch: Epoch, deadline: float) -> float:
        """Do what is due before the loop waits; return for how long it may wait until it looks
        again."""
        self.seats.tend(epoch)
        return max(0.0, min(self.seats.look_seconds, deadline - monotonic()))

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Change the number of workers that get the jobs, and return the new number: the old one if
        it stays. Waits until those that join have started.
        """
        epoch, spec = self._running(), self._spec
        assert not spec.has_turns, "guaranteed by the iterator"
        if max_outstanding > 0:
            epoch.results.grow(max_outstanding)
            self._spec = spec._replace(max_outstanding=max_outstanding)
        return self.seats.resize(num_workers, max_outstanding)

    def at_work(self, awaited: int | None) -> str:
        """Describe what the workers do; ``awaited``: the batch that the loop waits for. Blocks up
        to 2 s for the answer of a worker process.
        """
        described = [text] if (text := self.seats.at_work(awaited)) else []
        if own := self._threads.threads():
            described.append(describe_activities([], own, None))
        return "\n".join(described)

    def rest(self) -> None:
        """Keep the statistics of an epoch that is over; the workers stay for the next one."""
        self.stats.end()
        self.seats.rest()

    @property
    def is_here(self) -> bool:
        """Whether there are workers that belong to this process: a forked child has none of its
        parent's, and the end of the main thread has stopped those that were made for it.
        """
        return self._threads.is_here and not self._is_stopped and not self.seats.is_stopped

    @property
    def num_processes(self) -> int:
        """The number of worker processes; see ``Backend``."""
        return 0 if self.seats.placement is None else self.seats.placement.num_processes

    def request_stop(self) -> None:
        """End every wait and with it the workers; see ``Backend``."""
        if not self._threads.is_here:
            return  # a forked child has none of the threads, and locks may stay held for ever
        try:
            self._end()
        except BaseException:  # Ctrl-C: in a finalizer nobody would try again, so do it here
            self._end()
            raise

    def _end(self) -> None:
        self._is_stopped = True
        epoch = self._epoch
        try:
            self.stats.end()
        finally:  # the workers end even if the statistics fail
            if epoch is not None:
                epoch.close()
            if self._epochs is not None:
                self._epochs.close()
            self._epoch = None
            self.seats.request_stop()

    def stop(self) -> None:
        """``request_stop``, and wait a moment for the workers, who have nothing left to do."""
        self.stats.end()
        self.seats.stop()
        self.request_stop()
        self._threads.join(_JOIN_SECONDS)

    def _running(self) -> Epoch:
        epoch = self._epoch
        if epoch is None or not self._threads.is_here:
            raise PipelineStopped(self._gone())
        return epoch

    def _gone(self) -> str:
        fork = "" if self._threads.is_here else "; they did not follow into a forked process"
        return (
            f"DataLoader: the workers of this iterator have ended{fork}. Call iter(loader) for new "
            "ones, and end a thread that loads before the program ends."
        )

    def _transfer_for(self, stage: DeviceStage) -> None:
        """Let the transfer thread have the epoch; start it before the first one."""
        if self._epochs is not None:
            self._epochs.put(self._running())
            return
        self._epochs = epochs = Channel[Epoch](_MAX_EPOCHS_WAITING)
        epochs.put(self._running())
        ready = Channel[None](1)
        with intra_op_threads_kept():
            self._threads.spawn("transfer", partial(_transfer, stage, epochs, ready, self._threads))
            ready.get()


def _transfer(
    stage: DeviceStage, epochs: Channel[Epoch], ready: Channel[None], group: ThreadGroup
) -> None:
    """Copy the batches of each epoch. ``group`` stays alive meanwhile: the exit waits for it."""
    use_one_intra_op_thread()
    ready.put(None)
    stage.run(epochs)
