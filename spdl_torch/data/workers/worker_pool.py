"""The loader's worker threads, as the trainer sees them: it submits jobs and receives batches.

A *job* is the work of one batch. For a map-style dataset without ``__getitems__`` all threads work
on the same job, one sample each, so N threads deliver the first batch N times sooner; the thread
that finishes the last sample collates. Handing a sample to a thread is one step of a counter, not
a queue operation.

Nothing here refers to the iterator that the trainer holds, so dropping it ends the threads.
"""

from __future__ import annotations

import itertools
import logging
import os
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...errors import PipelineStopped
from ...machine.probes import join_probing, probe_counters, start_probing, stop_probing
from ...pipeline.channel.channel import Channel
from ...pipeline.channel.waits import ChannelClosed
from ...pipeline.hooks.stage_info import StageInfo
from ...pipeline.hooks.task_hooks import TaskStatsHook
from ...pipeline.recorder.flight_recorder import FlightRecorder
from ...pipeline.stats.counters import TaskCounters
from ...pipeline.threads import stall
from ...pipeline.threads.once import Once
from ...pipeline.threads.thread_group import ThreadGroup
from ...pipeline.threads.weakly import weakly
from ..rng.patches import process_generators_kept
from .activity import Activity, Turns, describe_activities
from .budget import budget
from .contention import Contention
from .dataset_copies import Copying
from .device import AHEAD, most_pieces
from .epoch import Epoch
from .jobs import Failed, Job, Result
from .private_state import shared_remark
from .resting import Rest
from .stats import PoolStats
from .thread_failures import ThreadFailures
from .worker_info import use_one_intra_op_thread
from .worker_thread import Worker

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from ...io._transfer.batch_memory import BatchMemory
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from .load_spec import LoadSpec
    from .pool import TunedPool
    from .transfer_stage import DeviceStage

_logger = logging.getLogger("spdl_torch.data")

_JOIN_SECONDS = 1.0  # idle threads end at once; a longer wait would hide a hang

_TRANSFER = -1  # the transfer thread's key, among the workers' numbers

_MOST_WORKERS = 1_000_000

_MOST_LOGGED = 1_000
_logged: set[str] = set()  # what is shared is logged once, and not in every epoch

_MAX_EPOCHS_WAITING = 1_000  # epochs that a persistent loader may begin before a worker looks


class WorkerPool:
    """The threads of one iterator, and the epoch that they work on.

    ``break``, an exception and Ctrl-C call ``request_stop``: every wait ends at once; a thread
    that is fetching a sample finishes it and then ends. Only the interpreter's exit waits for
    that, for a bounded time.

    Owners of its state: the loop's thread writes ``_epoch``, ``_spec`` and who is resting;
    ``request_stop``, on any thread, sets ``_epoch`` to None, for good. A worker removes itself from
    ``_epochs`` and ``_workers`` as it leaves. It writes ``_failures`` before it says that it is
    ready, for which the loop's thread waits in ``_start_threads``: nobody goes through the errors
    meanwhile.
    """

    def __init__(self, spec: LoadSpec, device_stage: DeviceStage | None = None) -> None:
        self._memory: BatchMemory | None = None
        if device_stage is not None:
            self._memory = device_stage.batch_memory(spec.max_outstanding)
            spec = spec._replace(memory=self._memory)
        self._spec = spec
        self._device_stage = device_stage
        self._pid = os.getpid()
        # A weak reference: with a strong one only a garbage collection would free the pool, and
        # the dataset with it.
        self._threads = ThreadGroup(weakly(self.request_stop))
        turns = Turns()
        self._activities = [Activity(turns) for _ in range(spec.announced_workers)]
        self._copying = Copying(is_private=not spec.is_vouched_for)
        self._failures = ThreadFailures()
        # A queue of epochs for each running worker, and one for the transfer thread. Workers
        # remove their own when they leave, so iterate over a copy.
        self._epochs = {n: Channel[Epoch](_MAX_EPOCHS_WAITING) for n in range(spec.num_workers)}
        if device_stage is not None:
            self._epochs[_TRANSFER] = Channel(_MAX_EPOCHS_WAITING)
        self.stats = PoolStats(
            TaskStatsHook(StageInfo(0, 1, "fetch", spec.num_workers)),
            TaskStatsHook(StageInfo(0, 2, "collate", spec.num_workers)),
            None if device_stage is None else device_stage.hook,
            spec.recipe.dataset,
        )
        self.stats.near = None if device_stage is None else device_stage.near
        self._epoch: Epoch | None = None
        self._workers: dict[int, Worker] = {}
        self._threads_of: dict[int, threading.Thread] = {}
        self._rest = Rest()

    def start(self, key: StreamKey, workers: Sequence[WorkerState] = (), *, first: int = 0) -> None:
        """Start the threads, and the first epoch on them.

        This is not part of ``__init__``, so that the holder can register ``request_stop`` before
        there is anything to stop: Ctrl-C may come at any moment in here.

        Raises: RuntimeError: the system has no more threads; those that were started end.
        """
        if self._spec.stats:
            start_probing(self)
        self._begin_epoch(key, workers, first)
        self._start_threads()

    def submit(
        self, number: int, index: Any, worker: int, first: int, *, wants_state: bool = False
    ) -> None:
        """Submit a job to ``worker`` or, where all share one queue, to any free one.

        ``first`` is the position of its first sample in the epoch. ``wants_state``: ask an
        iterable that keeps a state for it after this batch.
        """
        epoch = self._running()
        hands = epoch.contention.hands(index, self._spec.num_workers)
        job = Job(number, index, first, shared=hands > 1, wants_state=wants_state)
        try:
            jobs = epoch.jobs[worker % len(epoch.jobs)]
            for _ in range(hands):
                jobs.put(job)
        except ChannelClosed:
            self._failures.raise_death()
            raise

    def get(self, timeout: float | None) -> Result:
        """Return the next result, in order if the spec says so. Raises: TimeoutError."""
        epoch = self._running()
        if budget.is_scarce:
            budget.lend()
        epoch.consumer.ask(epoch.outlet)
        try:
            result = epoch.outlet.get_numbered(timeout)[1]
        except ChannelClosed:
            self._failures.raise_death()
            raise
        epoch.consumer.got(result.number)
        if self._failures.of_workers:
            # Another thread may have made the batch that torch would give to this worker first.
            error = self._failures.of_workers.pop(result.number, None)
            if error is not None:
                return Failed(result.number, error)
        return result if self._device_stage is None else self._device_stage.hand_over(result)

    @property
    def num_taken(self) -> int:
        """The number of results that ``get`` has taken in this epoch, including one that Ctrl-C
        kept it from returning.
        """
        epoch = self._epoch
        return 0 if epoch is None else epoch.outlet.num_got

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Change the number of workers that share one queue, and return the new number.

        Waits until added workers have started; surplus workers leave before their next job. If
        ``worker_init_fn`` fails on an added worker, that worker stops, the log says so, and the
        number no longer changes.
        """
        epoch, more = self._running(), num_workers - self._spec.num_workers
        assert not self._spec.has_turns, "guaranteed by the iterator"
        if not self._failures.is_whole or max_outstanding < 1:
            return self._spec.num_workers
        jobs = epoch.jobs[0]
        # Parked workers see no dismissal: wake them first.
        epoch.contention.gone(epoch.contention.alone)
        jobs.grow(max_outstanding * num_workers)
        epoch.results.grow(max_outstanding)
        self._set_size(num_workers, max_outstanding)
        if more < 0:
            jobs.dismiss(-more)
            return num_workers
        free = (n for n in range(self._spec.announced_workers) if n not in self._epochs)
        joining = tuple(itertools.islice(free, more - jobs.recall(more)))
        for number in joining:
            self._epochs[number] = Channel(_MAX_EPOCHS_WAITING)
            self._epochs[number].put(epoch)
        if joining:
            self._start_threads(joining)
        if not self._failures.is_whole:
            left = self._failures.of_workers
            errors = [left.pop(n) for n in joining if n in left]
            _logger.warning(
                "DataLoader: %d of %d new workers could not start; the others go on, and their "
                "number stays",
                len(errors),
                len(joining),
                exc_info=errors[0],
            )
            self._set_size(num_workers - len(errors), max_outstanding)
        return self._spec.num_workers

    @property
    def loss(self) -> BaseException | None:
        """The failure of a thread, through no fault of the dataset; see ``Pool.loss``."""
        return self._failures.death

    @property
    def max_outstanding(self) -> int:
        """The most jobs that may be outstanding."""
        return self._spec.max_outstanding

    def _set_size(self, num_workers: int, max_outstanding: int) -> None:
        spec = self._spec
        self._spec = spec._replace(num_workers=num_workers, max_outstanding=max_outstanding)
        if self._memory is not None:
            self._memory.grow(most_pieces(max_outstanding))
        self.stats.workers.change(num_workers)
        budget.begin(self, num_workers)

    def at_work(self, awaited: int | None) -> str:
        """Describe what the threads do; ``awaited``: the batch that the trainer waits for."""
        return describe_activities(self._activities, self._threads.threads(), awaited)

    def restart(
        self, key: StreamKey, workers: Sequence[WorkerState] = (), *, first: int = 0
    ) -> None:
        """Begin another epoch on the same threads, and drop outstanding jobs."""
        again = self._wake()
        # Dismissed workers that have not left yet would miss it: their queue is about to close.
        leaving = self._running().jobs[0].recall(self._spec.announced_workers)
        self._running().close()
        epoch = self._begin_epoch(key, workers, first)
        epoch.jobs[0].dismiss(leaving)
        if again:
            self._start_threads(again)

    @property
    def tuned(self) -> TunedPool:
        """This pool; see ``Pool.tuned``."""
        return self

    def rest(self) -> None:
        """Keep the statistics of an epoch that is over; see ``Pool.rest``."""
        spec = self._spec
        self.stats.end()
        # The threads may be let go while the workers stay, where these share the dataset and keep
        # nothing of their own.
        if not spec.is_vouched_for or spec.has_turns or spec.worker_init_fn:
            budget.end(self)
            return
        self._rest.begin()
        budget.rest(self, len(self._threads_of))

    def retire(self) -> None:
        """Let the threads of an epoch that is over go; the workers stay, and get new threads with
        the next epoch. Any thread may call this; never blocks.
        """
        self._rest.retire(self._let_threads_go)

    def _let_threads_go(self) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        for number, epochs in list(self._epochs.items()):
            if number != _TRANSFER:
                epochs.dismiss(1)
        epoch.close()

    def _wake(self) -> list[int]:
        """Keep the threads from now on; return the workers whose threads have gone."""
        if not self._rest.end():
            return []
        numbers = [number for number in list(self._epochs) if number != _TRANSFER]
        gone = [number for number in numbers if not self._epochs[number].recall(1)]
        for number in gone:
            self._threads_of[number].join()  # it was dismissed, and has nothing left to do
        self._threads.forget_ended()
        return gone

    @property
    def activities(self) -> Sequence[Activity]:
        """The job that each worker has now."""
        return self._activities

    def request_stop(self) -> None:
        """End every wait and with it the threads. Never blocks; safe in a finalizer."""
        if not self.in_this_process:
            return  # a forked child has none of the threads, and locks may stay held for ever
        epoch = self._epoch
        try:
            self.stats.end()
        finally:  # the threads end even if the statistics fail
            try:
                self._end_waits(epoch)
            except BaseException:  # Ctrl-C: in a finalizer nobody would try again, so do it here
                self._end_waits(epoch)
                raise

    def _end_waits(self, epoch: Epoch | None) -> None:
        for channel in list(self._epochs.values()):
            channel.close()
        if epoch is not None:
            epoch.close()
        # Free the batches that nobody will take: the frames of a kept error may hold the pool.
        self._epoch = None
        self._failures.of_workers.clear()
        self._workers.clear()  # they refer to this object
        budget.end(self)
        stop_probing(self)

    def stop(self) -> None:
        """``request_stop`` and wait for the threads, which have nothing left to do."""
        self.request_stop()
        self._threads.join(_JOIN_SECONDS)
        join_probing(_JOIN_SECONDS)

    def _running(self) -> Epoch:
        epoch = self._epoch
        if epoch is None or os.getpid() != self._pid:
            raise PipelineStopped(
                "DataLoader: the worker threads of this iterator have ended"
                + ("." if self.in_this_process else "; they did not follow into a forked process.")
                + " Call iter(loader) for new ones."
            )
        return epoch

    @property
    def in_this_process(self) -> bool:
        """False in a forked child: the threads stayed in the parent."""
        return os.getpid() == self._pid

    def _begin_epoch(self, key: StreamKey, workers: Sequence[WorkerState], first: int) -> Epoch:
        spec = self._spec
        results = Channel[Result](spec.max_outstanding)
        stage = self._device_stage
        recorder = FlightRecorder("DataLoader", spec.pipeline_number, enabled=spec.stats)
        recorder.belongs_to(self.stats)
        outlet = results if stage is None else Channel[Result](AHEAD)
        epoch = Epoch(
            # A shared job is queued once for every worker that helps with it.
            jobs=tuple(
                Channel[Job](spec.max_outstanding * spec.num_workers)
                for _ in range(spec.num_workers if spec.has_turns else 1)
            ),
            results=results,
            outlet=outlet,
            in_order=spec.in_order,
            key=key,
            workers=tuple(workers),
            fetch_before=self.stats.fetch.counters(),
            collate_before=self.stats.collate.counters(),
            transfer_before=TaskCounters() if stage is None else stage.hook.counters(),
            probes_before=probe_counters(),
            contention=Contention(
                self._activities, shares_jobs=spec.shares_jobs, adapts=not spec.has_turns
            ),
            recorder=recorder,
            first=first,
            consumer=recorder.new_consumer_ring(2 if stage is None else 3, outlet),
        )
        self.stats.begin(epoch)
        recorder.add_queue(0, "jobs", epoch.jobs[0].capacity)
        recorder.add_queue(1, "batches", results.capacity)
        if stage is not None:
            recorder.add_queue(2, "device batches", epoch.outlet.capacity)
        # Store the epoch before any worker gets it: Ctrl-C in between must not leave workers in an
        # epoch that request_stop cannot close.
        self._epoch = epoch
        budget.begin(self, spec.num_workers)
        for epochs in list(self._epochs.values()):
            epochs.put(epoch)
        return epoch

    def _start_threads(self, more: Sequence[int] = ()) -> None:
        """Start all threads, or ``more`` workers, and wait until they are ready."""
        # set_num_threads(1) in a worker also changes the default of later threads, and the
        # trainer's own setting if that was never read: read it first, restore it at the end.
        intra_op = torch.get_num_threads()
        # Not a Semaphore: Ctrl-C during its wait may leave its lock held, and the threads that
        # release it would wait for ever.
        ready, num_started = Channel[None](_MOST_WORKERS), 0
        try:
            with process_generators_kept() if self._spec.worker_init_fn else nullcontext():
                for number in more or list(self._epochs):
                    try:
                        self._start_thread(number, ready)
                    except RuntimeError as error:  # the system has no more threads
                        if not more:
                            raise
                        self._epochs.pop(number)
                        self._failures.could_not_start(number, error)
                    else:
                        num_started += 1
                for _ in range(num_started):
                    stall.warn_when_stalled(ready.get, self._log_slow_start)
        finally:
            torch.set_num_threads(intra_op)

    def _log_slow_start(self, seconds: float) -> None:
        _logger.warning(
            "DataLoader: iter() has waited %g s for the workers to start. %s",
            seconds,
            self.at_work(None),
        )

    def _start_thread(self, number: int, ready: Channel[None]) -> None:
        if number == _TRANSFER:
            self._threads.spawn("transfer", partial(self._run, self._transfer, ready))
        else:
            serve = partial(self._run, partial(self._serve, number), ready)
            self._threads_of[number] = self._threads.spawn(f"loader-{number}", serve)

    def _run(self, serve: Callable[[Once], None], ready: Channel[None]) -> None:
        """Run a thread from start to end.

        Whatever goes wrong, nobody waits for ever: ``say_ready`` releases the trainer in
        ``_start_threads``, and closing the epoch releases it in ``get``.
        """
        say_ready = Once(partial(ready.put, None))
        try:
            use_one_intra_op_thread()
            serve(say_ready)
        except BaseException as error:
            _logger.exception("DataLoader: a thread of the loader has failed")
            self._failures.death = error.with_traceback(None)
            epoch = self._epoch
            if epoch is not None:
                epoch.close()
        finally:
            say_ready()

    # Called on the workers' threads:

    def _transfer(self, say_ready: Once) -> None:
        assert self._device_stage is not None, "guaranteed by __init__: else it is not started"
        say_ready()
        self._device_stage.run(self._epochs[_TRANSFER])

    def _serve(self, number: int, say_ready: Once) -> None:
        if self._device_stage is not None:
            self._device_stage.settle(number)
        worker = self._workers.get(number)
        if worker is None:
            worker = self._workers[number] = Worker(
                number,
                self._spec,
                self._epochs[number],
                self._activities[number],
                copying=self._copying,
                cells=self.stats.new_cells(enabled=self._spec.stats),
                could_not_start=self._failures.could_not_start,
                note_shared=self._note_shared,
            )
        is_retired = False
        try:
            is_retired = worker.serve(say_ready, self._can_be_spared)
        finally:
            if not is_retired:
                self._workers.pop(number, None)
        if is_retired:
            return
        self._epochs.pop(number, None)  # last: from here on resize() may give the number again

    def _note_shared(self, parts: list[str]) -> None:
        """Report and log what the workers share though samples may change it; each worker finds
        the same."""
        remark = shared_remark(parts)
        if remark == self.stats.shared:
            return
        self.stats.shared = remark
        if remark not in _logged and len(_logged) < _MOST_LOGGED:
            _logged.add(remark)
            _logger.warning("DataLoader: %s", remark)

    def _can_be_spared(self) -> bool:
        """Return whether a worker that could not start may leave.

        Where all share one queue, the others do its work. If none could start, the last one to
        fail stays, to answer the jobs with its error.
        """
        return not self._spec.has_turns and len(self._failures.of_workers) < self._spec.num_workers
