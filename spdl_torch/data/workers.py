"""The loader's worker threads: they take jobs, make batches and hand them over.

A *job* is the work of one batch. For a map-style dataset without ``__getitems__`` all threads
work on the same job, a sample each, so that the first batch comes as many times sooner as there
are threads; the last one to finish collates. Handing a sample to a thread is one step of an
atomic counter, not a queue operation.

Nothing here refers to the iterator that the trainer holds, so that dropping it ends the threads.
"""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PipelineStopped
from ..observe.probes import (
    join_probing,
    probe_counters,
    probes_between,
    start_probing,
    stop_probing,
)
from ..observe.report import Report, make_report
from ..pipeline.channel import Channel, ChannelClosed
from ..pipeline.hooks import StageInfo, TaskStatsHook
from ..pipeline.stats import (
    PipelineStats,
    QueuePerfStats,
    StageStats,
    TaskCounters,
    queue_stats,
    task_stats,
)
from ..pipeline.threads import ThreadGroup
from ._device import AHEAD
from .fetch import BatchMaker, EndOfIterable, add_thread_note, takes_batches
from .jobs import Epoch, Exhausted, Failed, Job, Loaded, Result
from .random import SampleRandom, process_generators_kept
from .worker_info import acting_as_worker, own_copy, rebound

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._device import DeviceStage

__all__ = ["LoadSpec", "WorkerPool"]

# Below this time for a whole batch, waking other threads costs more than they gain (a wake-up
# takes 10 to 50 µs, measured), so one thread makes the batch alone.
_SHARE_ABOVE_NS = 1_000_000

_JOIN_SECONDS = 1.0  # idle threads end at once; a longer wait would hide a hang

_MAX_EPOCHS_WAITING = 1_000  # resets of a persistent loader before its workers look again


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpec:
    """What the workers need to know of the loader, as it was when iteration began."""

    dataset: Any
    iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    num_workers: int
    max_outstanding: int
    """Jobs given out and not yet received: ``prefetch_factor * num_workers``."""
    in_order: bool
    base_seed: int
    worker_init_fn: Callable[[int], None] | None
    stats: bool
    finalize: Callable[[Any], Any] | None
    """Applied to every batch by the thread that made it (pinning); None = nothing to do."""
    device_index: int | None
    """The accelerator that is current on the trainer's thread; None = none is in use."""

    @property
    def shares_jobs(self) -> bool:
        """Whether several threads can work on one batch."""
        return self.auto_collation and not self.iterable and not takes_batches(self.dataset)


class WorkerPool:
    """The threads of one iterator and the epoch that they work on.

    ``break``, an exception and Ctrl-C reach it as ``request_stop``: every wait ends at once; a
    sample that is being fetched is finished, then its thread ends. Only the interpreter's exit
    waits for that, for a bounded time.
    """

    def __init__(self, spec: LoadSpec, device_stage: DeviceStage | None = None) -> None:
        self._spec = spec
        self._device_stage = device_stage
        self._pid = os.getpid()
        self._threads = ThreadGroup(self.request_stop)
        self._fetch_stats = TaskStatsHook(StageInfo(0, 1, "fetch", spec.num_workers))
        self._collate_stats = TaskStatsHook(StageInfo(0, 2, "collate", spec.num_workers))
        self._num_epochs = 0
        self._init_errors: dict[int, BaseException] = {}
        self._sample_ns = 0.0  # of the last batch; the workers write, the trainer's thread reads
        # One for each worker and, last, one for the owner of the way to the device.
        self._epochs = tuple(
            Channel[Epoch](_MAX_EPOCHS_WAITING)
            for _ in range(spec.num_workers + (device_stage is not None))
        )
        self._last_report = make_report(
            PipelineStats(elapsed=0.0, consumer_wait_ratio=0.0, stages=())
        )
        self._is_probing = spec.stats
        if spec.stats:
            start_probing()
        self._epoch: Epoch | None = self._begin_epoch()
        self._start_threads()

    # -- the trainer's thread ------------------------------------------------------------------

    def submit(self, number: int, index: Any, worker: int) -> None:
        """Give out a job: to ``worker``, or to whoever is free where all share one queue."""
        epoch, hands = self._running(), self._hands_for(index)
        job = Job(number, index, shared=hands > 1)
        for _ in range(hands):
            epoch.jobs_of(worker).put(job)

    def get(self, timeout: float | None) -> Result:
        """The next result, in order if the spec says so. Raises: TimeoutError."""
        result = self._running().outlet.get(timeout)
        # Another thread may have made the batch that torch would give to this worker first.
        error = self._init_errors.pop(result.number, None)
        if error is not None:
            return Failed(result.number, error)
        return result if self._device_stage is None else self._device_stage.hand_over(result)

    def restart(self) -> None:
        """Begin another epoch on the same threads; what is outstanding is dropped."""
        self._running().close()
        self._epoch = self._begin_epoch()

    def request_stop(self) -> None:
        """End every wait and with it the threads. Never blocks; safe in a finalizer."""
        if not self.in_this_process:
            return  # a forked child has no threads to stop, and perhaps locks that nobody holds
        epoch, self._last_report = self._epoch, self.report()
        if epoch is not None:
            epoch.close()
        is_probing, self._is_probing = self._is_probing, False
        if is_probing:
            stop_probing()
        self._epoch = None  # batches that nobody will take are freed, whoever keeps the pool
        for channel in self._epochs:
            channel.close()

    def stop(self) -> None:
        """``request_stop`` and wait for the threads, which have nothing left to do."""
        self.request_stop()
        self._threads.join(_JOIN_SECONDS)
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

    def stats(self) -> PipelineStats:
        """Figures of this epoch or, when the threads have ended, of the last one."""
        epoch = self._epoch
        return self._last_report.stats if epoch is None else self._stats(epoch)

    def report(self) -> Report:
        """What holds training back in this epoch or, when the threads have ended, did in the
        last one.
        """
        epoch = self._epoch
        if epoch is None:
            return self._last_report
        probes = probes_between(epoch.probes_before, probe_counters())
        return make_report(self._stats(epoch), probes, pooled=("fetch", "collate"))

    def _stats(self, epoch: Epoch) -> PipelineStats:
        results, outlet = epoch.results.counters(), epoch.outlet.counters()
        ready = queue_stats(results)
        jobs_wait_ns = sum(channel.counters().get_wait[0] for channel in epoch.jobs)
        fetch = self._fetch_stats.counters().since(epoch.fetch_before)
        collate = self._collate_stats.counters().since(epoch.collate_before)
        stages = [
            self._stage_stats("fetch", fetch, ready, jobs_wait_ns),
            self._stage_stats("collate", collate, ready, jobs_wait_ns),
        ]
        if self._device_stage is not None:
            lap = self._device_stage.hook.counters().since(epoch.transfer_before)
            waits_ns = results.get_wait[0], outlet.put_wait[0]
            stages.append(self._stage_stats("transfer", lap, queue_stats(outlet), *waits_ns))
        return PipelineStats(
            elapsed=fetch.elapsed_ns / 1e9,
            consumer_wait_ratio=min(1.0, outlet.get_wait[0] / max(1, outlet.elapsed_ns)),
            stages=tuple(stages),
        )

    def _stage_stats(
        self,
        name: str,
        lap: TaskCounters,
        queue: QueuePerfStats,
        wait_in_ns: int,
        wait_out_ns: int = 0,
    ) -> StageStats:
        num_threads = 1 if name == "transfer" else self._spec.num_workers
        thread_ns = max(1, lap.elapsed_ns * num_threads)
        return StageStats(
            name=name,
            concurrency=num_threads,
            tasks=task_stats(lap),
            queue=queue,
            num_dropped=0,
            busy_ratio=min(1.0, lap.busy_ns / thread_ns),
            wait_in_ratio=min(1.0, wait_in_ns / thread_ns),
            wait_out_ratio=min(1.0, wait_out_ns / thread_ns),
        )

    def _hands_for(self, index: Any) -> int:
        """How many workers shall work on a batch: all, or one if it is too small to share."""
        if not self._spec.shares_jobs or not isinstance(index, list | tuple):
            return 1
        if 0 < self._sample_ns * len(index) < _SHARE_ABOVE_NS:
            return 1
        return max(1, min(self._spec.num_workers, len(index)))

    def _begin_epoch(self) -> Epoch:
        spec = self._spec
        self._num_epochs += 1
        results = Channel[Result](spec.max_outstanding)
        stage = self._device_stage
        epoch = Epoch(
            # A job stands in its queue once for every worker that is to help with it.
            tuple(
                Channel[Job](spec.max_outstanding * spec.num_workers)
                for _ in range(spec.num_workers if spec.iterable else 1)
            ),
            results,
            results if stage is None else Channel[Result](AHEAD),
            spec.in_order,
            # torch draws a base seed only once for a persistent loader; its epochs must differ.
            spec.base_seed + self._num_epochs,
            self._fetch_stats.counters(),
            self._collate_stats.counters(),
            TaskCounters() if stage is None else stage.hook.counters(),
            probe_counters(),
        )
        for channel in self._epochs:
            channel.put(epoch)
        return epoch

    def _start_threads(self) -> None:
        # set_num_threads(1) in a worker also changes what later threads start with, and the
        # trainer's own setting if that was never used: read it first, put it back at the end.
        intra_op = torch.get_num_threads()
        ready = threading.Semaphore(0)
        try:
            with process_generators_kept() if self._spec.worker_init_fn else nullcontext():
                for number in range(self._spec.num_workers):
                    target = partial(self._run_worker, number, ready)
                    self._threads.spawn(f"loader-{number}", target)
                if self._device_stage is not None:
                    target = partial(self._run_transfer, self._device_stage, ready)
                    self._threads.spawn("transfer", target)
                for _ in self._epochs:
                    ready.acquire()
        finally:
            torch.set_num_threads(intra_op)

    # -- the owner of the way to the device ----------------------------------------------------

    def _run_transfer(self, stage: DeviceStage, ready: threading.Semaphore) -> None:
        _use_one_intra_op_thread()
        ready.release()
        stage.run(self._epochs[-1])

    # -- the worker threads --------------------------------------------------------------------

    def _run_worker(self, number: int, ready: threading.Semaphore) -> None:
        spec = self._spec
        _use_one_intra_op_thread()
        dataset, streams = own_copy(spec.dataset), SampleRandom(spec.base_seed + number)
        _offer_streams(dataset, streams)
        make_batches = partial(
            BatchMaker,
            dataset,
            rebound(spec.collate_fn, spec.dataset, dataset),
            iterable=spec.iterable,
            auto_collation=spec.auto_collation,
            drop_last=spec.drop_last,
            streams=streams,
            fetch_cell=self._fetch_stats.new_cell() if spec.stats else None,
            collate_cell=self._collate_stats.new_cell() if spec.stats else None,
        )
        with acting_as_worker(number, spec.num_workers, spec.base_seed, dataset), streams:
            broken = self._init_worker(number, dataset)
            # Where all share one queue, the workers that could start do the work; if none could,
            # the last one to find out stays, to fail the jobs. Decided before the trainer goes on.
            leave = broken and not spec.iterable and len(self._init_errors) < spec.num_workers
            ready.release()
            while not leave:
                try:
                    epoch = self._epochs[number].get()
                    made = partial(make_batches, epoch_seed=epoch.seed)
                    self._work(epoch, epoch.jobs_of(number), made, broken)
                except ChannelClosed:
                    leave = self._epochs[number].closed

    def _init_worker(self, number: int, dataset: Any) -> _Broken | None:
        try:
            if self._spec.device_index is not None:
                torch.accelerator.set_device_index(self._spec.device_index)
            if self._spec.worker_init_fn is not None:
                rebound(self._spec.worker_init_fn, self._spec.dataset, dataset)(number)
        except BaseException as error:
            add_thread_note(error, f"in worker_init_fn({number})")
            self._init_errors[number] = error
            return _Broken(error, raised=True)
        return None

    def _work(
        self,
        epoch: Epoch,
        jobs: Channel[Job],
        make_batches: Callable[[], BatchMaker],
        broken: _Broken | None,
    ) -> None:
        """One epoch; ends by ChannelClosed. An error in setting up comes in place of batches."""
        maker: BatchMaker | _Broken
        try:
            maker = broken or make_batches()
        except BaseException as error:
            add_thread_note(error, f"in iter({type(self._spec.dataset).__name__})")
            maker = _Broken(error)
        while True:
            job = jobs.get()
            result = self._help(maker, job) if job.shared else self._make(maker, job)
            if result is not None:
                epoch.deliver(result)
            del job, result  # or the last batch would stay alive while this thread waits

    def _make(self, maker: BatchMaker | _Broken, job: Job) -> Result:
        started_ns = perf_counter_ns()
        try:
            batch = maker.make(job.number, job.index)
            if self._spec.shares_jobs:
                self._sample_ns = (perf_counter_ns() - started_ns) / max(1, len(job.index))
            return Loaded(job.number, self._finalize(batch))
        except EndOfIterable:
            return Exhausted(job.number)
        except BaseException as error:  # SystemExit too: the trainer waits for an answer
            return Failed(job.number, error)

    def _help(self, maker: BatchMaker | _Broken, job: Job) -> Result | None:
        """Take samples of a shared job until none is left; the result if this was the last."""
        last, taken, started_ns = False, 0, perf_counter_ns()
        while (position := job.take()) is not None:
            if position < job.first_error:  # torch fetches nothing behind a batch's first error
                try:
                    job.samples[position] = maker.sample_at(
                        job.number, position, job.index[position]
                    )
                except BaseException as error:
                    job.errors[position] = error
                    job.first_error = min(job.first_error, position)
            taken += 1
            last = job.finish_one()
        if taken:
            self._sample_ns = (perf_counter_ns() - started_ns) / taken
        if not last:
            return None
        if job.errors:
            return Failed(job.number, job.errors[min(job.errors)])
        try:
            return Loaded(job.number, self._finalize(maker.collate(job.samples)))
        except BaseException as error:
            return Failed(job.number, error)

    def _finalize(self, batch: Any) -> Any:
        return batch if self._spec.finalize is None else self._spec.finalize(batch)


def _use_one_intra_op_thread() -> None:
    torch.set_num_threads(1)
    # torch applies its process-wide setting to a thread at the thread's first look at it: let
    # that happen now, before the trainer's setting is put back.
    torch.get_num_threads()


def _offer_streams(dataset: Any, streams: SampleRandom) -> None:
    """A dataset that makes whole batches, and says so, draws for each sample from its stream."""
    while dataset is not None:
        if hasattr(type(dataset), "sample_context"):
            dataset.sample_context = streams.sample_context
        dataset = getattr(dataset, "dataset", None)  # torch's Subset and its kin pass lists on


class _Broken:
    """Stands for a BatchMaker that could not be made: raises the reason once, then what it was.

    Once, because the error that the trainer gets refers to the trainer's frames, perhaps to the
    iterator: a thread that kept it would keep itself alive.
    """

    def __init__(self, error: BaseException, *, raised: bool = False) -> None:
        self._error: BaseException | None = None if raised else error
        self._reason = f"{type(error).__name__}: {error}"

    def make(self, *_: Any) -> Any:
        error, self._error = self._error, None
        raise error or RuntimeError(f"DataLoader: this worker could not start, {self._reason}")

    sample_at = collate = make
