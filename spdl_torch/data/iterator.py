"""The two iterators behind :class:`~spdl_torch.DataLoader`: inline and on threads.

Both derive from torch's ``_BaseDataLoaderIter``, whose constructor draws from the generators in
torch's order, and by which Lightning recognises an iterator that must not be pickled.
"""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import pin_memory as _torch_pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..observe.report import make_report
from ..pipeline.hooks import StageInfo, TaskStatsHook
from ..pipeline.stats import PipelineStats, QueueCounters, StageStats, queue_stats, task_stats
from ._device import open_device_stage
from .fetch import BatchMaker, EndOfIterable
from .jobs import Exhausted, Failed
from .workers import LoadSpec, WorkerPool

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from ..observe.report import Report

    Device = torch.device | str | int | None

__all__ = ["Figures", "InlineIterator", "ThreadIterator"]


class Figures(Protocol):
    """What a loader measures: readable during an epoch, and of the last one after it."""

    def stats(self) -> PipelineStats:
        """The figures alone."""
        ...

    def report(self) -> Report:
        """With the probes' readings and the verdict, which cost more."""
        ...


class InlineIterator(_BaseDataLoaderIter):
    """``num_workers=0``: batches are made on the trainer's thread when they are asked for."""

    def __init__(self, loader: DataLoader[Any], device: Device, *, stats: bool) -> None:
        super().__init__(loader)
        if self._timeout > 0:
            raise AssertionError(
                f"DataLoader: timeout must be 0 for num_workers=0, got {self._timeout}: there is "
                "no other thread to wait for."
            )
        self._stages = [
            TaskStatsHook(StageInfo(0, n, s)) for n, s in ((1, "fetch"), (2, "collate"))
        ]
        self._device_stage = open_device_stage(device, stats=stats)
        self._maker = BatchMaker(
            self._dataset,
            self._collate_fn,
            iterable=isinstance(self._dataset, IterableDataset),
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            fetch_cell=self._stages[0].new_cell() if stats else None,
            collate_cell=self._stages[1].new_cell() if stats else None,
        )
        if self._device_stage is not None:
            self._stages.append(self._device_stage.hook)

    def _next_data(self) -> Any:
        index = next(self._sampler_iter)
        try:
            batch = self._maker.make(self._num_yielded, index)
        except EndOfIterable:
            raise StopIteration from None
        if self._pin_memory:
            batch = _pinned(batch, self._pin_memory_device)
        stage = self._device_stage
        return batch if stage is None else stage.move(batch, self._num_yielded)

    def figures(self) -> Figures:
        """Reads the figures, also after the end, without keeping this iterator alive."""
        return _InlineFigures(self._stages)


class ThreadIterator(_BaseDataLoaderIter):
    """Batches made by threads ahead of the trainer, received in torch's order.

    The sampler is pulled here, on the trainer's thread, where torch pulls it: for
    ``prefetch_factor * num_workers`` batches at ``iter()``, then for one at each ``next()``.
    """

    def __init__(self, loader: DataLoader[Any], device: Device, *, stats: bool) -> None:
        super().__init__(loader)
        assert loader.prefetch_factor is not None, "set by torch for num_workers > 0"
        self._max_outstanding = loader.prefetch_factor * loader.num_workers
        if self._max_outstanding < 1:
            raise AssertionError(
                f"DataLoader: prefetch_factor must be >= 1, got {loader.prefetch_factor}."
            )
        self._iterable = isinstance(self._dataset, IterableDataset)
        self._pool = WorkerPool(
            self._load_spec(loader, stats), open_device_stage(device, stats=stats)
        )
        # The pool knows nothing of this object: dropping it (Lightning's way to end a loader)
        # stops the threads.
        self._finalizer = weakref.finalize(self, self._pool.request_stop)
        self._finalizer.atexit = False  # at exit the pool's thread group stops and joins them
        self._prime()

    def _load_spec(self, loader: DataLoader[Any], stats: bool) -> LoadSpec:
        pin = partial(_pinned, device=self._pin_memory_device) if self._pin_memory else None
        return LoadSpec(
            dataset=self._dataset,
            iterable=self._iterable,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            num_workers=self._num_workers,
            max_outstanding=self._max_outstanding,
            in_order=loader.in_order,
            stats=stats,
            base_seed=int(self._base_seed),
            worker_init_fn=loader.worker_init_fn,
            finalize=pin,
            device_index=torch.accelerator.current_device_index() if self._pin_memory else None,
        )

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Another epoch of a persistent loader; what is still outstanding is dropped."""
        super()._reset(loader, first_iter)
        self._pool.restart()
        self._prime()

    def _prime(self) -> None:
        self._num_submitted = 0
        self._num_received = 0
        # Iterables: which worker has job n, and who has not ended yet. As in torch, a job that
        # was given to a worker behind its end is passed over.
        self._worker_of: dict[int, int] = {}
        self._active = set(range(self._num_workers))
        self._turns = itertools.cycle(range(self._num_workers))
        for _ in range(self._max_outstanding):
            self._submit_next()

    def _submit_next(self) -> None:
        try:
            index = next(self._sampler_iter)
        except StopIteration:
            return
        if not self._active:
            return
        worker = next(w for w in self._turns if w in self._active)
        if self._iterable:
            self._worker_of[self._num_submitted] = worker
        self._pool.submit(self._num_submitted, index, worker)
        self._num_submitted += 1

    def _next_data(self) -> Any:
        while self._num_received < self._num_submitted:
            result = self._receive()
            self._num_received += 1
            if isinstance(result, Exhausted):
                self._active.discard(self._worker_of[result.number])
                self._submit_next()
                continue
            self._submit_next()
            return result
        if not self._persistent_workers:
            self._pool.stop()
        raise StopIteration

    def __next__(self) -> Any:
        result = super().__next__()
        if isinstance(result, Failed):
            self._num_yielded -= 1
            error = result.error
            # The error keeps this frame. It must not keep the iterator and with it the threads.
            del self, result
            raise error
        return result.batch

    def _receive(self) -> Any:
        try:
            return self._pool.get(self._timeout or None)
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None

    def figures(self) -> Figures:
        """Reads this epoch's figures, also after its end, without keeping this iterator alive."""
        return self._pool


class _InlineFigures:
    """Figures of the stages; the trainer waits for all of their time."""

    def __init__(self, stages: list[TaskStatsHook]) -> None:
        self._stages = stages

    def stats(self) -> PipelineStats:
        return _inline_stats(self._stages)

    def report(self) -> Report:
        return make_report(self.stats(), pooled=("fetch", "collate"))


def _inline_stats(stages: list[TaskStatsHook]) -> PipelineStats:
    readings = [stage.counters() for stage in stages]
    elapsed_ns = max(1, readings[0].elapsed_ns)
    rows = (
        StageStats(
            name=hook.info.stage_name,
            concurrency=1,
            tasks=task_stats(tasks),
            queue=queue_stats(QueueCounters()),
            num_dropped=0,
            busy_ratio=tasks.busy_ns / elapsed_ns,
            wait_in_ratio=0.0,
            wait_out_ratio=0.0,
        )
        for hook, tasks in zip(stages, readings, strict=True)
    )
    waited_ns = sum(tasks.busy_ns for tasks in readings)
    return PipelineStats(
        elapsed=elapsed_ns / 1e9,
        consumer_wait_ratio=min(1.0, waited_ns / elapsed_ns),
        stages=tuple(rows),
    )


def _pinned(batch: Any, device: str | None) -> Any:
    return cast("Any", _torch_pin_memory).pin_memory(batch, device)
