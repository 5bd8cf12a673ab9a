"""The loader's worker threads, seen from the trainer: it gives out jobs and is given batches.

A *job* is the work of one batch. For a map-style dataset without ``__getitems__`` all threads
work on the same job, a sample each, so that the first batch comes as many times sooner as there
are threads; the last one to finish collates. Handing a sample to a thread is one step of an
atomic counter, not a queue operation.

Nothing here refers to the iterator that the trainer holds, so that dropping it ends the threads.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...errors import PipelineStopped
from ...observe.verdict.probes import join_probing, probe_counters, start_probing, stop_probing
from ...pipeline.channel.channel import Channel, ChannelClosed
from ...pipeline.failures import text_of
from ...pipeline.hooks.stage_info import StageInfo
from ...pipeline.hooks.task_hooks import TaskStatsHook
from ...pipeline.recorder.flight_recorder import FlightRecorder
from ...pipeline.stats.counters import TaskCounters
from ...pipeline.threads.thread_group import ThreadGroup
from ..rng.patches import process_generators_kept
from .activity import Activity, describe_activities
from .contention import Crowd
from .epoch import Epoch
from .jobs import Failed, Job, Result
from .stats import PoolFigures
from .transfer_stage import AHEAD
from .worker_info import use_one_intra_op_thread
from .worker_thread import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..checkpoint.resume_state import WorkerState
    from ..rng.keys import StreamKey
    from .load_spec import LoadSpec
    from .transfer_stage import DeviceStage

__all__ = ["WorkerPool"]

_logger = logging.getLogger("spdl_torch.data")

_JOIN_SECONDS = 1.0  # idle threads end at once; a longer wait would hide a hang

_TRANSFER = -1  # in place of a worker's number

_MOST_WORKERS = 1_000_000

_MAX_EPOCHS_WAITING = 1_000  # resets of a persistent loader before its workers look again


class WorkerPool:
    """The threads of one iterator and the epoch that they work on.

    ``break``, an exception and Ctrl-C reach it as ``request_stop``: every wait ends at once; a
    sample that is being fetched is finished, then its thread ends. Only the interpreter's exit
    waits for that, for a bounded time.
    """

    def __init__(self, spec: LoadSpec, device_stage: DeviceStage | None = None) -> None:
        self._spec = spec
        self._shares_jobs = spec.shares_jobs
        self._device_stage = device_stage
        self._pid = os.getpid()
        # Weakly: else only a garbage collection would free the pool, and with it the dataset.
        self._threads = ThreadGroup(partial(_stop, weakref.ref(self)))
        self._activities = [Activity() for _ in range(spec.told_workers)]
        self._copying = threading.Lock()
        self._fetch_stats = TaskStatsHook(StageInfo(0, 1, "fetch", spec.num_workers))
        self._collate_stats = TaskStatsHook(StageInfo(0, 2, "collate", spec.num_workers))
        self._init_errors: dict[int, BaseException] = {}
        self._death: BaseException | None = None  # of a thread of ours, by a mistake of ours
        self._is_whole = True  # no worker has left because it could not start
        # One for each worker that there is, and one for the owner of the way to the device.
        self._epochs = {n: Channel[Epoch](_MAX_EPOCHS_WAITING) for n in range(spec.num_workers)}
        if device_stage is not None:
            self._epochs[_TRANSFER] = Channel(_MAX_EPOCHS_WAITING)
        self.figures = PoolFigures(
            self._fetch_stats,
            self._collate_stats,
            None if device_stage is None else device_stage.hook,
        )
        self._epoch: Epoch | None = None

    # -- the trainer's thread ------------------------------------------------------------------

    def start(self, key: StreamKey, workers: Sequence[WorkerState] = ()) -> None:
        """Start the threads, and the first epoch on them.

        Apart from ``__init__``, so that whoever holds the pool can arrange for ``request_stop``
        before there is anything to stop: Ctrl-C may come at any moment of this.
        Raises: RuntimeError: the system has no more threads; those that were started end.
        """
        if self._spec.stats:
            start_probing(self)
        self._begin_epoch(key, workers)
        self._start_threads()

    def submit(
        self, number: int, index: Any, worker: int, first: int, *, wants_state: bool = False
    ) -> None:
        """Give out a job: to ``worker``, or to whoever is free where all share one queue.

        ``first`` is the position of its first sample in the epoch. ``wants_state``: an iterable
        that keeps a state is asked for it after this batch.
        """
        epoch = self._running()
        hands = epoch.crowd.hands(index, self._spec.num_workers)
        job = Job(number, index, first, shared=hands > 1, wants_state=wants_state)
        try:
            for _ in range(hands):
                epoch.jobs_of(worker).put(job)
        except ChannelClosed:
            self._raise_death()
            raise

    def get(self, timeout: float | None) -> Result:
        """The next result, in order if the spec says so. Raises: TimeoutError."""
        epoch = self._running()
        epoch.consumer.ask(epoch.outlet)
        try:
            result = epoch.outlet.get(timeout)
        except ChannelClosed:
            self._raise_death()
            raise
        epoch.consumer.got(result.number)
        # Another thread may have made the batch that torch would give to this worker first.
        error = self._init_errors.pop(result.number, None)
        if error is not None:
            return Failed(result.number, error)
        return result if self._device_stage is None else self._device_stage.hand_over(result)

    @property
    def num_taken(self) -> int:
        """Results of this epoch that ``get`` has taken, be it to be cut off by Ctrl-C."""
        return 0 if self._epoch is None else self._epoch.outlet.num_got

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Work on so many threads from now on, where all take from one queue; returns how many
        there are. Those that join are waited for; those too many leave before another job. If
        ``worker_init_fn`` fails on one, it leaves again, the log tells, and their number stays.
        """
        epoch, more = self._running(), num_workers - self._spec.num_workers
        assert not self._spec.has_turns, "guaranteed by the iterator"
        if not self._is_whole or max_outstanding < 1:
            return self._spec.num_workers
        jobs = epoch.jobs[0]
        epoch.crowd.gone(epoch.crowd.alone)  # who is parked hears of nothing
        jobs.grow(max_outstanding * num_workers)
        epoch.results.grow(max_outstanding)
        self._set_size(num_workers, max_outstanding)
        if more < 0:
            jobs.dismiss(-more)
            return num_workers
        free = (n for n in range(self._spec.told_workers) if n not in self._epochs)
        joining = tuple(itertools.islice(free, more - jobs.recall(more)))
        for number in joining:
            self._epochs[number] = Channel(_MAX_EPOCHS_WAITING)
            self._epochs[number].put(epoch)
        if joining:
            self._start_threads(joining)
        if not self._is_whole:
            errors = [self._init_errors.pop(n) for n in joining if n in self._init_errors]
            _logger.warning("DataLoader: %d workers left again", len(errors), exc_info=errors[0])
            self._set_size(num_workers - len(errors), max_outstanding)
        return self._spec.num_workers

    def _set_size(self, num_workers: int, max_outstanding: int) -> None:
        spec = self._spec
        self._spec = replace(spec, num_workers=num_workers, max_outstanding=max_outstanding)
        self.figures.workers.change(num_workers)

    def at_work(self, awaited: int | None) -> str:
        """What the threads do, in words; ``awaited``: the batch that the trainer waits for."""
        return describe_activities(self._activities, self._threads.threads(), awaited)

    def restart(self, key: StreamKey, workers: Sequence[WorkerState] = ()) -> None:
        """Begin another epoch on the same threads; what is outstanding is dropped."""
        leaving = self._running().jobs[0].recall(self._spec.told_workers)
        self.interrupt()
        epoch = self._begin_epoch(key, workers)
        epoch.jobs[0].dismiss(leaving)  # who has not left yet

    def interrupt(self) -> None:
        """Drop what is outstanding, so that who waits in ``get`` goes on; ``restart`` follows."""
        self._running().close()

    def request_stop(self) -> None:
        """End every wait and with it the threads. Never blocks; safe in a finalizer."""
        if not self.in_this_process:
            return  # a forked child has no threads to stop, and perhaps locks that nobody holds
        epoch = self._epoch
        try:
            self.figures.end()
        finally:  # whatever becomes of the figures
            try:
                self._end_waits(epoch)
            except BaseException:  # Ctrl-C, in a finalizer perhaps, where nobody would try again
                self._end_waits(epoch)
                raise

    def _end_waits(self, epoch: Epoch | None) -> None:
        for channel in tuple(self._epochs.values()):
            channel.close()
        if epoch is not None:
            epoch.close()
        # What nobody will take is freed, whoever keeps the pool; errors know it by their frames.
        self._epoch = None
        self._init_errors.clear()
        stop_probing(self)

    def stop(self, timeout: float = _JOIN_SECONDS) -> None:
        """``request_stop`` and wait for the threads, which have nothing left to do."""
        self.request_stop()
        self._threads.join(timeout)
        join_probing(_JOIN_SECONDS)

    def _running(self) -> Epoch:
        if self._epoch is None or not self.in_this_process:
            raise PipelineStopped(
                "DataLoader: the worker threads of this iterator have ended"
                + ("." if self.in_this_process else "; they did not follow into a forked process.")
                + " Call iter(loader) for new ones."
            )
        return self._epoch

    @property
    def in_this_process(self) -> bool:
        """False in a forked child: the threads stayed in the parent."""
        return os.getpid() == self._pid

    def _begin_epoch(self, key: StreamKey, workers: Sequence[WorkerState]) -> Epoch:
        spec = self._spec
        results = Channel[Result](spec.max_outstanding)
        stage = self._device_stage
        recorder = FlightRecorder("DataLoader", spec.pipeline_number, enabled=spec.stats)
        recorder.belongs_to(self.figures)
        outlet = results if stage is None else Channel[Result](AHEAD)
        epoch = Epoch(
            # A job stands in its queue once for every worker that is to help with it.
            jobs=tuple(
                Channel[Job](spec.max_outstanding * spec.num_workers)
                for _ in range(spec.num_workers if spec.has_turns else 1)
            ),
            results=results,
            outlet=outlet,
            in_order=spec.in_order,
            key=key,
            workers=tuple(workers),
            fetch_before=self._fetch_stats.counters(),
            collate_before=self._collate_stats.counters(),
            transfer_before=TaskCounters() if stage is None else stage.hook.counters(),
            probes_before=probe_counters(),
            crowd=Crowd(self._activities, shares_jobs=self._shares_jobs, adapts=not spec.has_turns),
            recorder=recorder,
            consumer=recorder.new_consumer_ring(2 if stage is None else 3, outlet),
        )
        self.figures.begin(epoch)
        recorder.add_queue(0, "jobs", epoch.jobs[0].capacity)
        recorder.add_queue(1, "batches", results.capacity)
        if stage is not None:
            recorder.add_queue(2, "device batches", epoch.outlet.capacity)
        # Ours before anybody has it: Ctrl-C in between must not leave workers in an epoch that
        # nobody can close.
        self._epoch = epoch
        for epochs in tuple(self._epochs.values()):
            epochs.put(epoch)
        return epoch

    def _start_threads(self, more: Sequence[int] = ()) -> None:
        """All, or some more workers; waits until they are ready."""
        # set_num_threads(1) in a worker also changes what later threads start with, and the
        # trainer's own setting if that was never used: read it first, put it back at the end.
        intra_op = torch.get_num_threads()
        # A channel: Ctrl-C in the wait of a Semaphore may leave its lock held, and the threads
        # that are to release it would wait for ever.
        ready, num_started = Channel[None](_MOST_WORKERS), 0
        try:
            with process_generators_kept() if self._spec.worker_init_fn else nullcontext():
                for number in more or tuple(self._epochs):
                    try:
                        self._start_thread(number, ready)
                    except RuntimeError as error:  # the system has no more threads
                        if not more:
                            raise
                        self._epochs.pop(number)
                        self._could_not_start(number, error)
                    else:
                        num_started += 1
                for _ in range(num_started):
                    ready.get()
        finally:
            torch.set_num_threads(intra_op)

    def _start_thread(self, number: int, ready: Channel[None]) -> None:
        if number == _TRANSFER:
            self._threads.spawn("transfer", partial(self._run, self._transfer, ready))
        else:
            serve = partial(self._serve, number)
            self._threads.spawn(f"loader-{number}", partial(self._run, serve, ready))

    def _run(self, serve: Callable[[_Once], None], ready: Channel[None]) -> None:
        """A thread's whole life. Whatever goes wrong, nobody waits for it for ever: neither who
        starts it nor who waits for its batches.
        """
        say_ready = _Once(partial(ready.put, None))
        try:
            use_one_intra_op_thread()
            serve(say_ready)
        except BaseException as error:
            _logger.exception("DataLoader: a thread of the loader has failed")
            self._death = error.with_traceback(None)
            epoch = self._epoch
            if epoch is not None:
                epoch.close()
        finally:
            say_ready()

    def _raise_death(self) -> None:
        if self._death is not None:
            raise RuntimeError(
                "DataLoader: a thread of the loader has failed, by no fault of the dataset's: "
                f"{text_of(self._death)}. The log has its traceback; please report it."
            ) from self._death

    # -- the threads ---------------------------------------------------------------------------

    def _transfer(self, say_ready: _Once) -> None:
        assert self._device_stage is not None, "guaranteed by __init__: else it is not started"
        say_ready()
        self._device_stage.run(self._epochs[_TRANSFER])

    def _serve(self, number: int, say_ready: _Once) -> None:
        stages = (self._fetch_stats, self._collate_stats)
        cells = tuple(stage.new_cell() if self._spec.stats else None for stage in stages)
        worker = Worker(
            *(number, self._spec, self._epochs[number], self._activities[number]),
            copying=self._copying,
            cells=cells,
            could_not_start=self._could_not_start,
        )
        worker.serve(say_ready, self._can_be_spared)
        self._epochs.pop(number, None)  # last: the number may be given again

    def _could_not_start(self, number: int, error: BaseException) -> None:
        """The loop is given the error in place of the batch that torch would give this worker
        first."""
        self._init_errors[number] = error
        self._is_whole = False

    def _can_be_spared(self) -> bool:
        """Where all share one queue, the workers that could start do the work; if none could, the
        last one to find out stays, to fail the jobs."""
        return not self._spec.has_turns and len(self._init_errors) < self._spec.num_workers


class _Once:
    """A call that is made once, however often it is asked for."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


def _stop(pool: weakref.ref[WorkerPool]) -> None:
    """At the interpreter's exit."""
    found = pool()
    if found is not None:
        found.request_stop()
