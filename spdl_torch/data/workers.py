"""The loader's worker threads: they take jobs, make batches and hand them over.

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
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PipelineStopped
from ..observe.probes import join_probing, probe_counters, start_probing, stop_probing
from ..pipeline.channel import Channel, ChannelClosed, Dismissed
from ..pipeline.hooks import StageInfo, TaskStatsHook
from ..pipeline.recorder import FlightRecorder
from ..pipeline.stats import TaskCounters
from ..pipeline.threads import ThreadGroup
from ..pipeline.timeline import Outcome
from ._device import AHEAD
from .broken import Broken
from .crowd import Crowd
from .desks import Desk, describe_desks
from .fetch import BatchMaker, EndOfIterable
from .figures import PoolFigures
from .generators import process_generators_kept
from .jobs import Epoch, Exhausted, Failed, Job, Loaded, NoBatch, Result
from .notes import add_thread_note
from .random import SampleRandom, StreamKey, takes_streams
from .skipping import NoGoodSample
from .timing import record_parts
from .worker_info import acting_as_worker, own_copy, rebound, use_one_intra_op_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..pipeline.recorder import Ring
    from ._device import DeviceStage
    from .load_spec import LoadSpec
    from .resume import WorkerState

__all__ = ["WorkerPool"]

_logger = logging.getLogger("spdl_torch.data")

_JOIN_SECONDS = 1.0  # idle threads end at once; a longer wait would hide a hang

_NOTHING_LEFT = Exhausted(-1)  # the others took all samples of a shared job

_TRANSFER = -1  # in place of a worker's number

_MAX_EPOCHS_WAITING = 1_000  # resets of a persistent loader before its workers look again


class WorkerPool:
    """The threads of one iterator and the epoch that they work on.

    ``break``, an exception and Ctrl-C reach it as ``request_stop``: every wait ends at once; a
    sample that is being fetched is finished, then its thread ends. Only the interpreter's exit
    waits for that, for a bounded time.
    """

    def __init__(
        self,
        spec: LoadSpec,
        key: StreamKey,
        workers: Sequence[WorkerState] = (),
        device_stage: DeviceStage | None = None,
    ) -> None:
        self._spec = spec
        self._shares_jobs = spec.shares_jobs
        self._device_stage = device_stage
        self._pid = os.getpid()
        self._threads = ThreadGroup(self.request_stop)
        self._desks = [Desk() for _ in range(spec.told_workers)]
        self._copying = threading.Lock()
        self._fetch_stats = TaskStatsHook(StageInfo(0, 1, "fetch", spec.num_workers))
        self._collate_stats = TaskStatsHook(StageInfo(0, 2, "collate", spec.num_workers))
        self._init_errors: dict[int, BaseException] = {}
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
        self._is_probing = spec.stats
        if spec.stats:
            start_probing()
        self._epoch: Epoch | None = self._begin_epoch(key, workers)
        self._start_threads()

    # -- the trainer's thread ------------------------------------------------------------------

    def submit(self, number: int, index: Any, worker: int, first: int) -> None:
        """Give out a job: to ``worker``, or to whoever is free where all share one queue.

        ``first`` is the position of its first sample in the epoch.
        """
        epoch = self._running()
        hands = epoch.crowd.hands(index, self._spec.num_workers)
        job = Job(number, index, first, shared=hands > 1)
        for _ in range(hands):
            epoch.jobs_of(worker).put(job)

    def get(self, timeout: float | None) -> Result:
        """The next result, in order if the spec says so. Raises: TimeoutError."""
        epoch = self._running()
        epoch.consumer.ask(epoch.outlet)
        result = epoch.outlet.get(timeout)
        epoch.consumer.got(result.number)
        # Another thread may have made the batch that torch would give to this worker first.
        error = self._init_errors.pop(result.number, None)
        if error is not None:
            return Failed(result.number, error)
        return result if self._device_stage is None else self._device_stage.hand_over(result)

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
        return describe_desks(self._desks, self._threads.threads(), awaited)

    def restart(self, key: StreamKey, workers: Sequence[WorkerState] = ()) -> None:
        """Begin another epoch on the same threads; what is outstanding is dropped."""
        leaving = self._running().jobs[0].recall(self._spec.told_workers)
        self.interrupt()
        self._epoch = epoch = self._begin_epoch(key, workers)
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
            if epoch is not None:
                epoch.close()
            is_probing, self._is_probing = self._is_probing, False
            if is_probing:
                stop_probing()
            self._epoch = None  # batches that nobody will take are freed, whoever keeps the pool
            for channel in tuple(self._epochs.values()):
                channel.close()

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
            tuple(
                Channel[Job](spec.max_outstanding * spec.num_workers)
                for _ in range(spec.num_workers if spec.has_turns else 1)
            ),
            results,
            outlet,
            spec.in_order,
            key,
            tuple(workers),
            self._fetch_stats.counters(),
            self._collate_stats.counters(),
            TaskCounters() if stage is None else stage.hook.counters(),
            probe_counters(),
            Crowd(self._desks, shares_jobs=self._shares_jobs, adapts=not spec.has_turns),
            recorder,
            recorder.new_consumer_ring(2 if stage is None else 3, outlet),
        )
        self.figures.begin(epoch)
        recorder.add_queue(0, "jobs", epoch.jobs[0].capacity)
        recorder.add_queue(1, "batches", results.capacity)
        if stage is not None:
            recorder.add_queue(2, "device batches", epoch.outlet.capacity)
        for epochs in tuple(self._epochs.values()):
            epochs.put(epoch)
        return epoch

    def _start_threads(self, more: Sequence[int] = ()) -> None:
        """All, or some more workers; waits until they are ready."""
        # set_num_threads(1) in a worker also changes what later threads start with, and the
        # trainer's own setting if that was never used: read it first, put it back at the end.
        intra_op = torch.get_num_threads()
        ready = threading.Semaphore(0)
        numbers = more or tuple(self._epochs)
        try:
            with process_generators_kept() if self._spec.worker_init_fn else nullcontext():
                for number in numbers:
                    if number == _TRANSFER and self._device_stage is not None:
                        target = partial(self._run_transfer, self._device_stage, ready)
                        self._threads.spawn("transfer", target)
                    else:
                        target = partial(self._run_worker, number, ready)
                        self._threads.spawn(f"loader-{number}", target)
                for _ in numbers:
                    ready.acquire()
        finally:
            torch.set_num_threads(intra_op)

    # -- the owner of the way to the device ----------------------------------------------------

    def _run_transfer(self, stage: DeviceStage, ready: threading.Semaphore) -> None:
        use_one_intra_op_thread()
        ready.release()
        stage.run(self._epochs[_TRANSFER])

    # -- the worker threads --------------------------------------------------------------------

    def _run_worker(self, number: int, ready: threading.Semaphore) -> None:
        spec = self._spec
        use_one_intra_op_thread()
        dataset = own_copy(spec.dataset, self._copying)
        streams = SampleRandom(spec.base_seed, number)
        for each in takes_streams(dataset) if spec.stream_per_sample else ():
            each.sample_context = streams.sample_context
        fetch_cell = self._fetch_stats.new_cell() if spec.stats else None
        collate_cell = self._collate_stats.new_cell() if spec.stats else None
        make_batches = partial(
            BatchMaker,
            dataset,
            rebound(spec.collate_fn, spec.dataset, dataset),
            iterable=spec.iterable,
            auto_collation=spec.auto_collation,
            drop_last=spec.drop_last,
            streams=streams,
            tolerance=spec.tolerance,
            fetch_cell=fetch_cell,
            collate_cell=collate_cell,
        )
        self._desks[number].thread = threading.current_thread()
        with acting_as_worker(number, spec.told_workers, spec.base_seed, dataset), streams:
            broken = self._init_worker(number, dataset)
            # Where all share one queue, the workers that could start do the work; if none could,
            # the last one to find out stays, to fail the jobs. Decided before the trainer goes on.
            leave = broken and not spec.has_turns and len(self._init_errors) < spec.num_workers
            ready.release()
            begun = False
            while not leave:
                try:
                    epoch = self._epochs[number].get()
                    if begun and spec.is_seeded:
                        streams.begin_worker(epoch.key.epoch_seed)
                    begun = True
                    ring = epoch.recorder.new_ring("worker", 1, number)
                    record_parts(ring, fetch=fetch_cell, collate=collate_cell)
                    made = partial(
                        make_batches,
                        key=epoch.key_of(number) if spec.stream_per_sample else None,
                        resume=epoch.workers[number] if spec.iterable else None,
                    )
                    self._work(epoch, number, ring, made, broken)
                except ChannelClosed:
                    leave = self._epochs[number].closed
                except Dismissed:
                    leave = True
                    epoch.crowd.gone(number)
        self._epochs.pop(number, None)  # last: the number may be given again

    def _init_worker(self, number: int, dataset: Any) -> Broken | None:
        try:
            if self._spec.device_index is not None:
                torch.accelerator.set_device_index(self._spec.device_index)
            if self._spec.worker_init_fn is not None:
                rebound(self._spec.worker_init_fn, self._spec.dataset, dataset)(number)
        except BaseException as error:
            add_thread_note(error, f"in worker_init_fn({number})")
            self._init_errors[number] = error
            self._is_whole = False
            return Broken(error, raised=True)
        return None

    def _work(
        self,
        epoch: Epoch,
        worker: int,
        ring: Ring,
        make_batches: Callable[[], BatchMaker],
        broken: Broken | None,
    ) -> None:
        """One epoch; ends by ChannelClosed. An error in setting up comes in place of batches."""
        maker: BatchMaker | Broken
        jobs, desk, crowd = epoch.jobs_of(worker), self._desks[worker], epoch.crowd
        desk.maker = None
        try:
            maker = broken or make_batches()
            desk.maker = maker if isinstance(maker, BatchMaker) else None
        except BaseException as error:
            add_thread_note(error, f"in iter({type(self._spec.dataset).__name__})")
            maker = Broken(error)
        since_ns = ring.begin()
        while True:
            crowd.wait(worker)
            job = jobs.get()
            started_ns, cpu_ns, number = perf_counter_ns(), thread_time_ns(), job.number
            desk.since_ns, desk.job = started_ns, job
            spell = crowd.enter()
            if job.shared:
                result, taken = self._help(maker, job)
            else:
                result = self._make(maker, job)
                taken = job.size if isinstance(result, Loaded) else 0  # failures take other times
            crowd.leave(worker, spell, taken, job.size)
            desk.job = None
            if result is _NOTHING_LEFT:
                # Nor may it keep the job: an error there has the loop's frames, these the
                # iterator, and the iterator this thread.
                del job
                continue
            ended_ns, cpu_ns = perf_counter_ns(), thread_time_ns() - cpu_ns
            output, outcome = (-1 if result is None else number), Outcome.PASSED
            if result is not None:
                epoch.deliver(result)
                epoch.record_bad(result)
            if isinstance(result, Failed):
                outcome = Outcome.FAILED
                epoch.recorder.failed("worker", number, result.error)
            del job, result  # or the last batch would stay alive while this thread waits
            done_ns = perf_counter_ns()
            if done_ns - since_ns >= ring.shortest_ns:
                ring.add(
                    *(since_ns, started_ns, ended_ns, done_ns, cpu_ns, number, output),
                    *(jobs, epoch.results, outcome),
                )
            since_ns = done_ns

    def _make(self, maker: BatchMaker | Broken, job: Job) -> Result:
        try:
            batch, tries = maker.make(job.first, job.index, job.number)
            return Loaded(job.number, self._finalize(batch), maker.progress(), tries)
        except NoGoodSample as nothing:
            return NoBatch(job.number, nothing.args[0], maker.progress())
        except EndOfIterable:
            return Exhausted(job.number, maker.progress(), maker.tries())
        except BaseException as error:  # SystemExit too: the trainer waits for an answer
            return Failed(job.number, error, maker.progress(), maker.tries())

    def _help(self, maker: BatchMaker | Broken, job: Job) -> tuple[Result | None, int]:
        """Take samples of a shared job until none is left: their number, and if one of them was
        the last of all, the result.
        """
        last, taken = False, 0
        maker.begin(job.first, job.bad)
        while (position := job.take()) is not None:
            if position < job.first_error:  # torch fetches nothing behind a batch's first error
                try:
                    job.samples[position] = maker.sample_at(position, job.index[position])
                except BaseException as error:
                    job.errors[position] = error
                    job.first_error = min(job.first_error, position)
            taken += 1
            last = job.finish_one()
        maker.forget_bad()
        if not taken:
            return _NOTHING_LEFT, 0
        return (self._collate(maker, job) if last else None), taken

    def _collate(self, maker: BatchMaker | Broken, job: Job) -> Result:
        """The result of a shared job whose samples are all there."""
        if job.errors:
            return Failed(job.number, job.errors[min(job.errors)])
        samples, tries = job.samples, None
        try:
            if self._spec.tolerance is not None:
                samples, tries = maker.good_of(samples, job.bad)
            batch = maker.collate(samples, job.index, job.number)
            return Loaded(job.number, self._finalize(batch), None, tries)
        except NoGoodSample as nothing:
            return NoBatch(job.number, nothing.args[0])
        except BaseException as error:
            return Failed(job.number, error)

    def _finalize(self, batch: Any) -> Any:
        return batch if self._spec.finalize is None else self._spec.finalize(batch)
