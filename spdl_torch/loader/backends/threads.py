"""Workers on threads of this process.

For a map-style dataset without ``__getitems__`` all threads work on the same job, one sample each,
so N threads deliver the first batch N times sooner; the thread that finishes the last sample
collates. Handing a sample to a thread is one step of a counter, not a queue operation.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, cast

from ...engine.channel import Channel, ChannelClosed, warn_when_stalled
from ...engine.failures import text_of
from ...engine.shared import Once
from ...locks import RLock
from ...machine.probes import join_probing, start_probing, stop_probing
from ...objects.generator_states import generators_kept
from ..stats.counts import WorkerCounts
from .activity import Activity
from .crew import JOIN_SECONDS, Crew
from .jobs import NO_BATCHES, Epoch, Job, Result, SharedJob, Sharing, Shift
from .transfer_stage import most_pieces
from .worker_thread import Worker, intra_op_threads_kept, use_one_intra_op_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.recorder import FlightRecorder
    from ...io._transfer.batch_memory import BatchMemory
    from ...observe.verdict.placement import Placement
    from ..checkpoint.user_state import WorkerState
    from ..dealing import Given
    from ..error_notes import Reason
    from ..rng.keys import StreamKey
    from .backend import LoadSpec
    from .transfer_stage import DeviceStage

_logger = logging.getLogger("spdl_torch.data")

_MOST_WORKERS = 1_000_000

_MAX_SHIFTS_WAITING = 1_000  # epochs that a persistent loader may begin before a worker looks


class Threads(Crew):
    """Worker threads; see ``Crew``.

    A thread that is fetching a sample as they are stopped finishes it and then ends. Only the
    interpreter's exit waits for that, for a bounded time.

    Owners of its state: the loop's thread writes ``_shift``, ``_spec`` and who is resting;
    ``request_stop``, on any thread, sets ``_shift`` to None, for good. A worker removes itself from
    ``_shifts`` as it leaves. It writes ``failure`` before it says that it is
    ready, for which the loop's thread waits in ``_start_threads``.
    """

    def __init__(
        self, spec: LoadSpec, stage: DeviceStage | None, placement: Placement | None
    ) -> None:
        if stage is not None:
            spec = spec._replace(memory=stage.batch_memory(spec.max_outstanding))
        super().__init__(spec, stage, placement)
        self.activities = [Activity() for _ in range(spec.announced_workers)]
        self._death: BaseException | None = None  # of a thread, through no fault of the dataset
        self._is_whole = True  # False once the system had no thread for a worker
        # A queue of epochs for each running worker. Workers remove their own when they leave, so
        # iterate over a copy.
        self._shifts = {n: Channel[Shift](_MAX_SHIFTS_WAITING) for n in range(spec.num_workers)}
        self.counts: WorkerCounts = WorkerCounts(spec.num_workers, spec.recipe.dataset)
        self._num_surplus = 0  # workers that are to leave
        self._leaving = RLock()  # guards it, for moments
        self._copying = RLock()  # held by a worker that copies the dataset
        self._shift: Shift | None = None

    def _new_results(self, recorder: FlightRecorder) -> Channel[Result]:
        return Channel[Result](self._spec.max_outstanding, marks=NO_BATCHES)

    def _prepare(self, key: StreamKey, workers: Sequence[WorkerState]) -> None:
        """Do nothing: threads start with their first epoch, and drop their jobs with the next."""

    def _begin(self, epoch: Epoch) -> None:
        """Deliver to this epoch from now on. The threads start with the first.

        Raises: RuntimeError: the system has no more threads; those that were started end.
        """
        last = self._shift
        if last is None:
            if self._spec.stats:
                start_probing(self)
            self._begin_shift(epoch)
            self._start_threads()
        else:
            last.close()
            self._begin_shift(epoch)

    def give(self, job: Given) -> None:
        """Give out a job; see ``Backend``. One that finds the workers gone is lost: so is the
        epoch, as ``take`` says."""
        shift = self._shift
        if shift is None:
            return
        sharing, hands, jobs = shift.sharing, 1, shift.jobs[0]
        if sharing is None:
            jobs = shift.jobs_of(job.worker)
        else:
            hands = sharing.hands(job.index, self._spec.num_workers)
        made = SharedJob(job) if hands > 1 else job
        with suppress(ChannelClosed):
            for _ in range(hands):
                jobs.put(made)

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Change the number of workers that share one queue; see ``Backend``.

        Each surplus worker leaves after the job that it works on or waits for. If the system has no
        more threads, the log says so, and the number no longer changes.
        """
        self._running().results.grow(max_outstanding)
        shift, more = self._shift, num_workers - self._spec.num_workers
        if shift is None:
            raise ChannelClosed
        if not self._is_whole or max_outstanding < 1:
            return self._spec.num_workers
        jobs = shift.jobs[0]
        jobs.grow(max_outstanding * num_workers)
        self._set_size(num_workers, max_outstanding)
        free = (n for n in range(self._spec.announced_workers) if n not in self._shifts)
        with self._leaving:
            self._num_surplus, more = max(0, self._num_surplus - more), more - self._num_surplus
        joining = tuple(itertools.islice(free, max(0, more)))
        for number in joining:
            self._shifts[number] = Channel(_MAX_SHIFTS_WAITING)
            self._shifts[number].put(shift)
        if missing := self._start_threads(joining) if joining else 0:
            self._is_whole = False
            self._set_size(num_workers - missing, max_outstanding)
        return self._spec.num_workers

    def _set_size(self, num_workers: int, max_outstanding: int) -> None:
        spec = self._spec
        self._spec = spec._replace(num_workers=num_workers, max_outstanding=max_outstanding)
        if spec.memory is not None:
            cast("BatchMemory", spec.memory).grow(most_pieces(max_outstanding))
        self.counts.workers.change(num_workers)

    @property
    def loss(self) -> BaseException | None:
        """The failure of a thread, through no fault of the dataset; see ``Crew.loss``."""
        if self._death is None:
            return None
        error = RuntimeError(
            "DataLoader: a thread of the loader has failed, through no fault of the dataset: "
            f"{text_of(self._death)}. The log has its traceback; please report it."
        )
        error.__cause__ = self._death
        return error

    def rest(self) -> None:
        """Note that an epoch is over; see ``Backend``."""
        super().rest()
        self.counts.end()

    def _end(self) -> None:
        shift = self._shift
        for shifts in list(self._shifts.values()):
            shifts.close()
        if shift is not None:
            shift.close()
            shift.epoch.close()
        # Free the batches that nobody will take: the frames of a kept error may hold the workers.
        self._shift = None
        self.counts.end()
        self.failure = None
        stop_probing(self)

    def stop(self) -> None:
        """``request_stop`` and wait for the threads, which have nothing left to do."""
        super().stop()
        join_probing(JOIN_SECONDS)

    def _begin_shift(self, epoch: Epoch) -> None:
        spec = self._spec
        shift = Shift(
            epoch,
            # A shared job is queued once for every worker that helps with it.
            jobs=tuple(
                Channel[Job](spec.max_outstanding * spec.num_workers)
                for _ in range(spec.num_workers if spec.has_turns else 1)
            ),
            sharing=None if spec.has_turns else Sharing(may_share=spec.shares_jobs),
        )
        epoch.recorder.add_queue(0, "jobs", shift.jobs[0].capacity)
        # Store it before any worker gets it: Ctrl-C in between must not leave workers with jobs
        # that request_stop cannot close.
        self._shift = shift
        self.counts.begin(shift)
        for shifts in list(self._shifts.values()):
            shifts.put(shift)

    def _start_threads(self, more: Sequence[int] = ()) -> int:
        """Start all threads, or ``more`` workers, and wait until they are ready. Return how many of
        those the system had no thread for."""
        # Not a Semaphore: Ctrl-C during its wait may leave its lock held, and the threads that
        # release it would wait for ever.
        ready, num_started, missing = Channel[None](_MOST_WORKERS), 0, 0
        # In a worker process, worker_init_fn may seed the global generators (Lightning's does). A
        # call in it that the patches do not reach would seed the trainer's.
        generators = generators_kept() if self._spec.worker_init_fn else nullcontext()
        with intra_op_threads_kept(), generators:
            for number in more or list(self._shifts):
                try:
                    run = partial(self._run, number, ready)
                    self._threads.spawn(f"loader-{number}", run)
                except RuntimeError as error:  # the system has no more threads
                    if not more:
                        raise
                    self._shifts.pop(number)
                    missing += 1
                    _logger.warning(
                        "DataLoader: no thread could be started for one more worker (%s); the "
                        "others go on, and their number stays.",
                        error,
                    )
                else:
                    num_started += 1
            for _ in range(num_started):
                warn_when_stalled(ready.get, self._log_slow_start)
        return missing

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
        say_ready = Once(partial(ready.put, None))
        try:
            use_one_intra_op_thread()
            Worker(
                number,
                self._spec,
                self._shifts[number],
                self.activities[number],
                copying=self._copying,
                cells=self.counts.new_cells(enabled=self._spec.stats),
                could_not_start=self._could_not_start,
            ).serve(say_ready, self._is_surplus)
            self._shifts.pop(number, None)  # last: from here on resize() may give the number again
        except BaseException as error:
            _logger.exception("DataLoader: a thread of the loader has failed")
            self._death = error.with_traceback(None)
            shift = self._shift
            if shift is not None:
                shift.close()
                shift.epoch.close()
        finally:
            say_ready()

    def _is_surplus(self) -> bool:
        """Return whether the calling worker, between two jobs, is one too many; it then leaves."""
        if not self._num_surplus:
            return False
        with self._leaving:
            is_surplus = self._num_surplus > 0
            self._num_surplus -= is_surplus
        return is_surplus

    def _could_not_start(self, reason: Reason) -> None:
        """Keep the first such error for the loop."""
        self.failure = self.failure or reason.taken()
