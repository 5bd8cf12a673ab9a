"""Workers on threads of this process.

For a map-style dataset without ``__getitems__`` all threads work on the same job, one sample each,
so N threads deliver the first batch N times sooner; the thread that finishes the last sample
collates. Handing a sample to a thread is one step of a counter, not a queue operation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, cast

from ...engine.channel import Channel, ChannelClosed, WaitIsOver, warn_when_stalled
from ...engine.failures import text_of
from ...locks import RLock
from ...machine.probes import join_probing, start_probing, stop_probing
from ...objects.generator_states import generators_kept
from ..stats.counts import WorkerCounts
from .activity import Activity
from .jobs import NO_BATCHES, Epoch, Job, Result, SharedJob, Sharing
from .transfer_stage import most_pieces
from .worker_thread import Worker, intra_op_threads_kept, use_one_intra_op_thread
from .workers import JOIN_SECONDS, MAX_EPOCHS_WAITING, Workers

if TYPE_CHECKING:
    from ...engine.recorder import FlightRecorder
    from ...io._transfer.region import BatchMemory
    from ...observe.verdict.placement import Placement
    from ..checkpoint.epoch import Given
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from .backend import LoadSpec
    from .transfer_stage import DeviceStage

_logger = logging.getLogger("spdl_torch.data")

_LEAST_START_SECONDS = 10.0
"""A timeout is meant for a batch; a start may take longer where the machine is busy."""

_MOST_WORKERS = 1_000_000


class Threads(Workers):
    """Worker threads; see ``Workers``.

    A thread that is fetching a sample as they are stopped finishes it and then ends. Only the
    interpreter's exit waits for that, for a bounded time.

    Owners of its state: the loop's thread writes ``_spec`` and who is resting. A worker removes
    itself from ``_epochs`` as it leaves. It writes ``failure`` before it says that it is ready, for
    which the loop's thread waits in ``_start_threads``.
    """

    on_threads = True

    def __init__(self, spec: LoadSpec, stage: DeviceStage | None, placement: Placement) -> None:
        if stage is not None:
            spec = spec._replace(memory=stage.batch_memory(spec.max_outstanding))
        super().__init__(spec, stage, placement)
        self.activities: list[Activity] = [Activity() for _ in range(spec.announced_workers)]
        # A queue of epochs for each running worker. Workers remove their own when they leave, so
        # iterate over a copy.
        self._epochs = {n: Channel[Epoch](MAX_EPOCHS_WAITING) for n in range(spec.num_workers)}
        self.counts: WorkerCounts = WorkerCounts(spec.num_workers, spec.recipe.dataset)
        self._leaving = RLock()  # held, for moments, by a worker that is to leave and by resize()
        self._copying = RLock()  # held by a worker that copies the dataset
        self._has_begun = False

    def _new_results(self, recorder: FlightRecorder) -> Channel[Result]:
        return Channel[Result](self._spec.max_outstanding, marks=NO_BATCHES)

    def _new_epoch(self, key: StreamKey, workers: Sequence[WorkerState]) -> Epoch:
        epoch, spec = super()._new_epoch(key, workers), self._spec
        # A shared job is queued once for every worker that helps with it.
        capacity = spec.max_outstanding * spec.num_workers
        num_queues = spec.num_workers if spec.has_turns else 1
        epoch.recorder.add_queue(0, "jobs", capacity)
        return epoch._replace(
            jobs=tuple(Channel[Job](capacity) for _ in range(num_queues)),
            sharing=None if spec.has_turns else Sharing(may_share=spec.shares_jobs),
        )

    def _begin(self, epoch: Epoch) -> None:
        """Deliver to this epoch from now on. The threads start with the first.

        Raises: RuntimeError: the system has no more threads; those that were started end.
        """
        is_first, self._has_begun = not self._has_begun, True
        if is_first and self._spec.stats:
            start_probing(self)
        self.counts.begin(epoch)
        for epochs in list(self._epochs.values()):
            epochs.put(epoch)
        if is_first:
            self._start_threads(list(self._epochs))

    def give(self, job: Given) -> None:
        """Give out a job; see ``Backend``. One that finds the workers gone is lost: so is the
        epoch, as ``take`` says."""
        if (epoch := self._epoch) is None:
            return
        sharing, hands, jobs = epoch.sharing, 1, epoch.jobs[0]
        if sharing is None:
            jobs = epoch.jobs_of(job.worker)
        else:
            hands = sharing.hands(job.index, self._spec.num_workers)
        made = SharedJob(job) if hands > 1 else job
        with suppress(ChannelClosed):
            for _ in range(hands):
                jobs.put(made)

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Change the number of workers that share one queue; see ``Backend``.

        Each surplus worker, one whose number is too high, leaves after the job that it works on or
        waits for. If the system has no more threads, the log says so, and the number no longer
        changes.
        """
        epoch = self._running()
        epoch.results.grow(max_outstanding)
        if not self._is_whole or max_outstanding < 1:
            return self._spec.num_workers
        epoch.jobs[0].grow(max_outstanding * num_workers)
        with self._leaving:
            self._set_size(num_workers, max_outstanding)
            joining = [n for n in range(num_workers) if n not in self._epochs]
            for number in joining:
                self.activities[number] = Activity()  # who had the number may yet write its own
                self._epochs[number] = Channel(MAX_EPOCHS_WAITING)
                self._epochs[number].put(epoch)
        if joining and (num_started := self._start_threads(joining, may_lack=True)) < len(joining):
            self._set_size(joining[num_started], max_outstanding)
        return self._spec.num_workers

    def _set_size(self, num_workers: int, max_outstanding: int) -> None:
        spec = self._spec
        self._spec = spec._replace(num_workers=num_workers, max_outstanding=max_outstanding)
        if spec.memory is not None:
            cast("BatchMemory", spec.memory).grow(most_pieces(max_outstanding))
        self.counts.workers.change(num_workers)

    def rest(self) -> None:
        """Note that an epoch is over; see ``Backend``."""
        super().rest()
        self.counts.end()

    def _end(self) -> None:
        for epochs in list(self._epochs.values()):
            epochs.close()
        self.counts.end()
        stop_probing(self)

    def stop(self) -> None:
        """``request_stop`` and wait for the threads, which have nothing left to do."""
        super().stop()
        join_probing(JOIN_SECONDS)

    def _start_threads(self, numbers: Sequence[int], *, may_lack: bool = False) -> int:
        """Start these workers, and wait until they are ready. Return how many there are.
        ``may_lack``: if the system has no more threads, the others begin."""
        # Not a Semaphore: Ctrl-C during its wait may leave its lock held, and the threads that
        # release it would wait for ever.
        ready, num_started = Channel[None](_MOST_WORKERS), 0
        # In a worker process, worker_init_fn may seed the global generators (Lightning's does). A
        # call in it that the patches do not reach would seed the trainer's.
        generators = generators_kept() if self._spec.worker_init_fn else nullcontext()
        with intra_op_threads_kept(), generators:
            try:
                for number in numbers:
                    self._threads.spawn(f"loader-{number}", partial(self._run, number, ready))
                    num_started += 1
            except RuntimeError as error:  # the system has no more threads
                if not may_lack:
                    raise
                for number in numbers[num_started:]:
                    self._epochs.pop(number)
                self._stay("thread", error)
            for _ in range(num_started):
                self._await(ready)
        return num_started

    def _await(self, ready: Channel[None]) -> None:
        """Wait for a thread to be ready. Raises: RuntimeError: the loader's timeout is over."""
        if not self._spec.timeout:
            return warn_when_stalled(ready.get, self._log_slow_start)
        timeout = max(self._spec.timeout, _LEAST_START_SECONDS)
        try:
            ready.get(timeout)
        except WaitIsOver:
            text = f"DataLoader timed out after {timeout} seconds in iter(). {self.at_work(None)}"
            raise RuntimeError(text) from None

    def _log_slow_start(self, seconds: float) -> None:
        _logger.warning(
            "DataLoader: iter() has waited %g s for the workers to start. %s",
            seconds,
            self.at_work(None),
        )

    # Called on the workers' threads:

    def _run(self, number: int, ready: Channel[None]) -> None:
        """Run a worker from start to end.

        Whatever goes wrong, nobody waits for ever: ``say_ready`` releases the trainer in
        ``_start_threads``, and closing the epoch releases it in ``get``.
        """
        say_ready = cache(partial(ready.put, None))  # is said once
        try:
            use_one_intra_op_thread()
            cells = self.counts.new_cells(enabled=self._spec.stats)
            activity, epochs = self.activities[number], self._epochs[number]
            worker = Worker(number, self._spec, activity, cells, self._copying)
            with worker.begun():
                if worker.broken is not None:
                    self.failure = self.failure or worker.broken.taken()
                say_ready()
                leave = False
                while not leave:
                    try:  # no variable holds the epoch while waiting, for the reason in work()
                        worker.work(epochs.get(), partial(self._is_surplus, number))
                        leave = True
                    except ChannelClosed:
                        leave = epochs.closed
        except BaseException as error:
            _logger.exception("DataLoader: a thread of the loader has failed")
            self.failure = RuntimeError(
                "DataLoader: a thread of the loader has failed, through no fault of the dataset: "
                f"{text_of(error)}. The log has its traceback; please report it."
            )
            self.failure.__cause__ = error.with_traceback(None)
            if (epoch := self._epoch) is not None:
                epoch.close()
        finally:
            say_ready()

    def _is_surplus(self, number: int) -> bool:
        """Return whether the calling worker, between two jobs, is one too many; it then leaves."""
        if number < self._spec.num_workers:
            return False
        with self._leaving:
            is_surplus = number >= self._spec.num_workers
            if is_surplus:
                self._epochs.pop(number)  # from here on resize() may give the number again
        return is_surplus
