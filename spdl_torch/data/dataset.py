"""A pipeline as a dataset: what trainers, loaders and Lightning can iterate over."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterableDataset

from ..errors import PipelineFailure
from ..io._transfer.transfer import Transfer
from ..observe.probes import (
    join_probing,
    probe_counters,
    probes_between,
    start_probing,
    stop_probing,
)
from ..observe.report import Report, make_report
from ..pipeline.definition import OpKind, StageSpec
from ..pipeline.pipeline import Pipeline
from ._device import AHEAD, check_device
from .sharding import length_of_shard, rank_shard, take_shard, worker_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from ..pipeline.builder import PipelineBuilder
    from ..pipeline.definition import MaxFailures, SourceSpec
    from ..pipeline.hooks import HookFactory, StatsQueue
    from ..pipeline.stats import PipelineStats

__all__ = ["PipelineDataset"]

_logger = logging.getLogger("spdl_torch.data")

T_co = TypeVar("T_co", covariant=True)

_STOP_SECONDS = 5.0  # how long the end of a loop waits for an op that still runs


class PipelineDataset(IterableDataset[T_co]):
    """An ``IterableDataset`` whose items come out of a pipeline that runs in this process.

    Each pass over it runs the pipeline once, from its source's beginning. Use it by itself, in
    Lightning, or in torch's or our DataLoader with ``batch_size=None, num_workers=0``: decoding
    and batching happen in the pipeline's threads already.

    Ends: ``break``, an exception in the loop and dropping the iterator stop every thread; a
    running op is waited for, at most 5 s. Errors of the pipeline are raised in the loop, after the
    good items: ``PipelineFailure``, an ExceptionGroup of the ops' own exceptions.

    Ranks: each takes its own part of the source. A source with ``shard(index, count)`` makes the
    parts itself; of others, rank ``r`` of ``n`` takes items ``r, r + n, ...``, so that one rank may
    have one item more than another. Workers of a DataLoader divide their rank's part again.

    Epochs: passes count 0, 1, 2, ... and tell the source by ``set_epoch``, if it has that.

    Args:
        builder: a complete definition. Its source must be iterable more than once.
        length: items of one pass on this rank, for ``len()``; None = worked out from the source
            where every stage passes one item on for one, or aggregates.
        device: a CUDA device to which items are sent, by one thread with a stream of its own, ready
            for the stream that is current where they are taken; ``"cuda"`` is the device that is
            current when a pass begins. None or the CPU: items stay where the stages made them.
        num_replicas, rank: in place of torch.distributed's world size and rank; ``1, 0`` = this
            process takes everything.
        num_threads, max_failures, report_stats_interval, queue_class, task_hook_factory: as for
            ``PipelineBuilder.build``.
    Raises: RuntimeError: the builder has no source or sink; ValueError: see the message.
    """

    def __init__(
        self,
        builder: PipelineBuilder,
        *,
        length: int | None = None,
        device: torch.device | str | int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        num_threads: int | None = None,
        max_failures: MaxFailures | None = None,
        report_stats_interval: float | None = None,
        queue_class: Callable[..., StatsQueue] | None = None,
        task_hook_factory: HookFactory | None = None,
    ) -> None:
        _check_arguments(length, num_replicas, rank)
        check_device(device, "PipelineDataset")
        self._spec = builder.get_config()
        self._length = length
        self._device = device
        self._num_replicas = num_replicas
        self._rank = rank
        self._build_options: dict[str, Any] = {
            "num_threads": num_threads,
            "max_failures": max_failures,
            "report_stats_interval": report_stats_interval,
            "queue_class": queue_class,
            "task_hook_factory": task_hook_factory,
        }
        self._next_epoch = 0
        self._source_is_spent = False
        self._pass: _Pass | None = None
        self._last_report: Report | None = None

    def set_epoch(self, epoch: int) -> None:
        """The number of the next pass, told to a source that has ``set_epoch`` (its shuffle
        depends on it); later passes count on from there.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"set_epoch: epoch must be an int >= 0, got {epoch!r}.")
        self._next_epoch = epoch

    def __iter__(self) -> Iterator[T_co]:
        # A generator: Lightning calls iter() just to look, and must not start threads by it.
        spec = replace(self._spec, source=self._begin_pass())
        place = check_device(self._device)
        if place is not None:
            spec = replace(spec, stages=(*spec.stages, _transfer_stage(place)))
        current = self._pass = _Pass(Pipeline(spec, **self._build_options))
        try:
            current.pipeline.start()
            for item in current.pipeline:
                yield item if place is None else item.receive()
        except PipelineFailure:
            current.is_failure_raised = True
            raise
        finally:
            self._end_pass(current)

    def stats(self) -> PipelineStats:
        """Figures of every stage in the pass that runs or, between passes, in the last one.

        Raises: RuntimeError: nothing was loaded yet by this object. A DataLoader's workers have
            copies of it, with figures of their own.
        """
        return self.report().stats if self._pass is None else self._pass.pipeline.stats()

    def report(self) -> Report:
        """What holds training back in the pass that runs or, between passes, did in the last one:
        ``print(dataset.report())``. Errors as of ``stats()``.
        """
        if self._pass is not None:
            return self._pass.report()
        if self._last_report is None:
            raise RuntimeError("PipelineDataset: there are no figures, nothing was loaded yet.")
        return self._last_report

    def __len__(self) -> int:
        """Items of one pass on this rank: ``length``, or what follows from the source; fewer come
        where ops drop or fail items.

        Raises: TypeError: it cannot be known.
        """
        if self._length is not None:
            return self._length
        try:
            num_items = length_of_shard(
                self._spec.source.iterable, rank_shard(self._num_replicas, self._rank)
            )
        except TypeError as error:
            raise TypeError(f"PipelineDataset has no len(): {error}. Pass length=.") from None
        for stage in self._spec.stages:
            if stage.kind in (OpKind.GENERATOR, OpKind.ASYNC_GENERATOR):
                raise TypeError(
                    f"PipelineDataset has no len(): stage {stage.name!r} may pass on any number "
                    "of items. Pass length=."
                )
            if stage.kind is OpKind.AGGREGATE:
                missing = 0 if stage.drop_last else stage.batch_size - 1
                num_items = (num_items + missing) // stage.batch_size
        return num_items

    def __getattr__(self, name: str) -> Any:
        # Not methods that raise: whoever saves checkpoints would call them.
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(
                f"PipelineDataset.{name} is not in this release: a pass cannot be resumed in its "
                "middle. Save at the end of an epoch and call set_epoch() after loading."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle has loaded nothing yet."""
        return {**self.__dict__, "_pass": None, "_last_report": None}

    def __repr__(self) -> str:
        return "\n".join(["PipelineDataset", *(f"  {part}" for part in self._spec.parts())])

    def _begin_pass(self) -> SourceSpec:
        """The source of the pass that begins: this rank's and worker's part, in its epoch."""
        source = self._spec.source.iterable
        if self._source_is_spent:
            raise RuntimeError(
                f"PipelineDataset: the source, a {type(source).__name__}, can be iterated only "
                "once, and was. Pass an object whose __iter__ begins anew (a list, a sampler, a "
                "class with a generator for __iter__) instead of an iterator."
            )
        self._source_is_spent = _runs_once(source)
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        ranks = rank_shard(self._num_replicas, self._rank)
        return replace(self._spec.source, iterable=take_shard(source, ranks, worker_shard()))

    def _end_pass(self, ending: _Pass) -> None:
        report = ending.report()
        try:
            ending.pipeline.stop(_STOP_SECONDS)
        except TimeoutError as error:
            _logger.warning("PipelineDataset: the loop has ended, but %s", error)
        finally:
            stop_probing()
            join_probing(_STOP_SECONDS)
        # Whoever takes len() items and no more (Lightning does) would never hear of it.
        if ending.pipeline.failure is not None and not ending.is_failure_raised:
            _logger.error("PipelineDataset: the pass had failed", exc_info=ending.pipeline.failure)
        if self._pass is ending:
            self._pass, self._last_report = None, report


def _transfer_stage(device: torch.device) -> StageSpec:
    """The last stage: begins to copy each item; the thread that iterates receives it."""
    return StageSpec(
        name="transfer",
        op=Transfer(device).stage,
        kind=OpKind.FUNCTION,
        output_order="input",
        max_failures=0,  # an item that did not fit on the device is no bad item
        buffer_size=AHEAD,
    )


class _Pass:
    """A running pipeline, and what the probes had counted when it began."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.is_failure_raised = False
        start_probing()
        self._before = probe_counters()

    def report(self) -> Report:
        probes = probes_between(self._before, probe_counters())
        return make_report(self.pipeline.stats(), probes)


def _runs_once(source: Any) -> bool:
    """Whether a source is its own iterator, as generators and files are."""
    if isinstance(source, AsyncIterable):
        return hasattr(source, "__anext__")
    return hasattr(source, "__next__")


def _check_arguments(length: object, num_replicas: int | None, rank: int | None) -> None:
    if length is not None and (
        isinstance(length, bool) or not isinstance(length, int) or length < 0
    ):
        raise ValueError(f"PipelineDataset: length must be an int >= 0 or None, got {length!r}.")
    if (num_replicas is None) != (rank is None):
        raise ValueError(
            f"PipelineDataset: num_replicas and rank go together, got {num_replicas} and {rank}."
        )
    if num_replicas is not None and rank is not None and not 0 <= rank < num_replicas:
        raise ValueError(
            f"PipelineDataset: rank must be within 0 and {num_replicas - 1}, got {rank}."
        )
