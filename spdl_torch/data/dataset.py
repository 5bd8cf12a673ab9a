"""A pipeline as a dataset that trainers, loaders and Lightning can iterate over."""

from __future__ import annotations

import copy
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterableDataset

from ..checks import check_whole
from ..engine.definition import BuildOptions, StageSpec, default_buffer_size
from ..engine.ops import OpKind
from ..engine.recorder import FlightRecorder, new_pipeline_number
from ..errors import PipelineFailure
from ..io._storage import batch_room
from ..loader.backends.transfer_stage import AHEAD, check_device, most_pieces
from ..loader.checkpoint.lightning_states import follow_trainer
from ..loader.fetching.collating import collate_into, is_torchs_collate
from ..loader.sampling.parts import OwnRank, Tail, check_tail, length_of_shard, padding_of_shard
from ..loader.stats.counts import DatasetCounts
from ..loader.stats.stats import with_remarks_of
from ..observe.store.epoch_watchers import between_epochs
from ..pipeline.pipeline import Pipeline
from .dataset_state import DatasetState

if TYPE_CHECKING:
    import torch

    from ..engine.definition import MaxFailures, PipelineSpec, SourceSpec, Tuner
    from ..engine.hooks import HookFactory
    from ..engine.stage_hooks import StatsQueue
    from ..engine.statistics import PipelineStats
    from ..io._transfer.kept import TransferKeeper
    from ..io._transfer.region import BatchMemory
    from ..io._transfer.transfer import Transfer
    from ..loader.checkpoint.pipeline_state import PassProgress
    from ..observe.trace.profile import Profile
    from ..observe.verdict.report import Report
    from ..pipeline.builder import PipelineBuilder

_logger = logging.getLogger("spdl_torch.data")

T_co = TypeVar("T_co", covariant=True)

_STOP_SECONDS = 5.0  # the longest wait for a running op at the end of a loop


class PipelineDataset(IterableDataset[T_co]):
    """An ``IterableDataset`` whose items come from a pipeline that runs in this process.

    Each pass over it runs the pipeline once, from the beginning of its source. Use it by itself, in
    Lightning, or in torch's or our DataLoader with ``batch_size=None, num_workers=0``: the
    pipeline's threads already decode and batch.

    Stopping: ``break``, an exception in the loop and dropping the iterator stop every thread; this
    waits for a running op, at most 5 s. Errors of the pipeline are raised in the loop, after the
    good items: ``PipelineFailure``, an ExceptionGroup of the ops' own exceptions.

    Ranks: each takes its own part of the source. A source with ``shard(index, count)`` makes the
    parts itself; from others, rank ``r`` of ``n`` takes items ``r, r + n, ...``. ``tail`` makes the
    parts equally long. Workers of a DataLoader divide their rank's part again.

    Epochs: passes count 0, 1, 2, ... and set the source's epoch by its ``set_epoch``, if any.

    Args:
        builder: a complete definition. Its source must be iterable more than once.
        length: the number of items of one pass on this rank, for ``len()``; None = computed from
            the source if every stage maps one item to one, or aggregates.
        device: a CUDA device to which one thread copies the items, on its own stream, ready for the
            stream that is current when the loop receives them; ``"cuda"`` is the device that is
            current when a pass begins. With None or the CPU, items stay where the stages made them.
            What an op makes in :func:`~spdl_torch.io.batch_storage`, and what torch's
            ``default_collate`` makes as the last stage, lies in pinned memory and is copied from
            there.
        num_replicas, rank: override torch.distributed's world size and rank; ``1, 0`` = this
            process takes everything.
        tail: the treatment of last items that are too few for every rank: ``"drop"`` leaves them
            out; ``"pad"`` gives the ranks that lack one an item from the source's beginning;
            ``"uneven"`` gives them to the first ranks, which may then make one step more.
        num_threads, max_failures, report_stats_interval, queue_class, task_hook_factory, stats,
            tuner: as for ``PipelineBuilder.build``.
    Raises: RuntimeError: the builder has no source or sink; ValueError: see the message.
    """

    _divides_itself = True  # see divides_itself() of sampling.sampler_chain

    def __init__(
        self,
        builder: PipelineBuilder[Any, T_co],
        *,
        length: int | None = None,
        device: torch.device | str | int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        tail: Tail = "drop",
        num_threads: int | None = None,
        max_failures: MaxFailures | None = None,
        report_stats_interval: float | None = None,
        queue_class: Callable[..., StatsQueue] | None = None,
        task_hook_factory: HookFactory | None = None,
        stats: bool = True,
        tuner: Tuner | None = None,
    ) -> None:
        check_whole("PipelineDataset", length=length, least=0, optional=True)
        check_tail(tail, "PipelineDataset")
        check_device(device, "PipelineDataset")
        if not callable(getattr(builder, "get_config", None)):
            kind = type(builder).__name__
            raise TypeError(f"PipelineDataset: builder must be a PipelineBuilder, got {kind}.")
        self._spec: PipelineSpec[T_co] = builder.get_config()
        if self._spec.src.continuous:
            raise ValueError(
                "PipelineDataset: the source must not be continuous, since every pass runs the "
                "pipeline once. Leave continuous=True out, or iterate over what build() returns."
            )
        self._length = length
        self._device = device
        self._own_rank = OwnRank("PipelineDataset", num_replicas, rank)
        self._tail: Tail = tail
        self._options = BuildOptions(
            num_threads=num_threads,
            max_failures=max_failures,
            report_stats_interval=report_stats_interval,
            queue_class=queue_class,
            task_hook_factory=task_hook_factory,
            stats=stats,
            tuner=tuner,
        )
        self._pipeline_number = new_pipeline_number()
        self._state = DatasetState(self._spec)
        self._pass: _Pass | None = None
        self._last: tuple[Report, FlightRecorder] | None = None  # of the pass that ended last
        self._cached_step: float | None = None
        self._keeper: TransferKeeper | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass, which a source with ``set_epoch`` gets for its shuffle;
        later passes count on from there.
        """
        check_whole("set_epoch", epoch=epoch, least=0)
        self._state.set_epoch(epoch)

    def __iter__(self) -> Iterator[T_co]:
        follow_trainer()
        return self._items()

    def _items(self) -> Iterator[T_co]:
        # A generator: Lightning also calls iter() without iterating, which must start no threads.
        yield from self._begun_pass()

    def _begun_pass(self) -> Iterator[T_co]:
        """Return an iterator whose pass has begun, resumed or not, though no thread has: the next
        ``iter()`` begins another one. For Lightning, which may need nothing more of a resumed pass.
        """
        return self._items_of(*self._state.begin(self._own_rank.shard(), self._tail))

    def _items_of(self, source: SourceSpec, progress: PassProgress) -> Iterator[T_co]:
        target = check_device(self._device)
        if target is None:
            yield from self._run(source, progress, None)
            return
        from ..io._transfer.kept import TransferKeeper  # for a device alone

        if self._keeper is None:
            self._keeper = TransferKeeper()
        transfer, give_back = self._keeper.lend(target)
        try:
            yield from self._run(source, progress, transfer)
        finally:
            give_back()

    def _run(
        self, source: SourceSpec, progress: PassProgress, transfer: Transfer | None
    ) -> Iterator[T_co]:
        spec, ended = replace(self._spec, src=source), threading.Event()
        if transfer is not None:
            spec = replace(spec, pipes=_stages_to(transfer, spec.pipes, ended))
        recorder = FlightRecorder(
            "PipelineDataset", self._pipeline_number, enabled=self._options.stats
        )
        pipeline = Pipeline(spec, self._options, recorder=recorder)
        with between_epochs(self):
            current = self._pass = _Pass(pipeline, recorder, self._spec.src.source)
        progress.pipeline = pipeline
        try:
            current.pipeline.start()
            current.has_begun = True
            items = iter(current.pipeline)
            progress.throw_away(items)
            for item in items:
                progress.num_items += 1
                yield item if transfer is None else item.receive()
        except Exception as error:  # a builtin: at the interpreter's end this module is empty
            if not isinstance(error, PipelineFailure):
                raise
            current.is_failure_raised = True
            if not progress.misfits:
                raise
        finally:
            ended.set()
            self._end_pass(current)
            progress.is_over = True
        if progress.misfits:
            self._state.put_back(progress)
        progress.check_fit()
        # The last statement, and no call: what Ctrl-C cuts off has not shown the loop its end.
        progress.finished = progress.is_over = True

    def loading_counts(self) -> dict[str, int]:
        """Return what the source has counted in this process; {} = it counts nothing."""
        source: Any = self._spec.src.source
        return source.loading_counts() if hasattr(type(source), "loading_counts") else {}

    def loading_remarks(self) -> tuple[str, ...]:
        """Return the source's remarks for a loader's report."""
        source: Any = self._spec.src.source
        return source.loading_remarks() if hasattr(type(source), "loading_remarks") else ()

    def snapshot(self) -> PipelineStats:
        """Return the statistics of every stage in the running pass or, between passes, the last.

        Raises: RuntimeError: this object has loaded nothing yet. A DataLoader's workers have
            copies of it, with their own statistics.
        """
        current = self._pass  # read once: the loop's thread may end it meanwhile
        return self.report().stats if current is None else current.snapshot()

    def report(self) -> Report:
        """Return what holds training back in the running pass or, between passes, did in the last
        one: ``print(dataset.report())``. Raises: as ``snapshot()``.
        """
        return self.profile().report() if self._cached_step else self._measured()[0]

    def profile(self) -> Profile:
        """Return the report, and what every thread did in the last seconds of the running pass or,
        between passes, of the last one: ``dataset.profile().write_trace("trace.json.gz")``.
        Raises: as ``snapshot()``.
        """
        from ..observe.trace.tracing import profile_of_run  # brings pages and a store

        report, recorder = self._measured()
        return profile_of_run(report, recorder.timeline(), self._cached_step)

    def headspace(self, num_items: int = 10, *, num_steps: int = 100) -> Iterator[T_co]:
        """Yield cached items: loop over this instead of the dataset to see how fast training is
        without loading. It keeps ``num_items`` items and repeats them for ``num_steps`` steps. From
        then on ``report()`` says how much longer the steps of a pass take than these.

        It runs the source from its beginning to get the items that it keeps.
        Raises: ValueError: a number < 1.
        """

        def keep(seconds: float) -> None:
            self._cached_step = seconds
            self._last = measured or self._last

        from ..pipeline.caching import cached_batches

        measured = self._last  # the statistics of a real pass stay; keep() puts them back
        return cached_batches(self, num_items, num_steps, keep)

    @property
    def decisions(self) -> list[Any]:
        """The changes made so far by the tuner, and why; at most the last 1000."""
        return list(getattr(self._options.tuner, "decisions", ()))

    def _measured(self) -> tuple[Report, FlightRecorder]:
        """Return the report and the recorder of the running pass or, between passes, the last."""
        current, last = self._pass, self._last
        if current is not None:
            return current.report(), current.recorder
        if last is None:
            raise RuntimeError("PipelineDataset: there are no figures, nothing was loaded yet.")
        return last

    def __len__(self) -> int:
        """Return the number of items of one pass on this rank: ``length``, or computed from the
        source; fewer come if ops drop or fail items.

        Raises: TypeError: the number is unknown.
        """
        if self._length is not None:
            return self._length
        try:
            source = self._spec.src.source
            num_items = length_of_shard(source, self._own_rank.shard(), self._tail)
        except TypeError as error:
            raise TypeError(f"PipelineDataset has no len(): {error}. Pass length=.") from None
        for stage in self._spec.pipes:
            if stage.kind not in (OpKind.FUNCTION, OpKind.ASYNC_FUNCTION, OpKind.AGGREGATE):
                raise TypeError(
                    f"PipelineDataset has no len(): stage {stage.name!r} may pass on any number "
                    "of items. Pass length=."
                )
            if stage.kind is OpKind.AGGREGATE:
                missing = 0 if stage.drop_last else stage.batch_size - 1
                num_items = (num_items + missing) // stage.batch_size
        return num_items

    @property
    def num_padded(self) -> int:
        """The number of source items that this rank has only because of ``tail="pad"``: the last
        ones of its part, which repeat other ranks'. Raises: TypeError: the source has no len.
        """
        return padding_of_shard(self._spec.src.source, self._own_rank.shard(), self._tail)

    def state_dict(self) -> dict[str, Any]:
        """Return a state of the pass: what the loop has received, not what is in flight. It
        holds only numbers, apart from what a source's own ``state_dict()`` adds.

        It is exact if items come in the source's order. After a stage of several threads without
        ``output_order="input"`` they do not, and a warning says so: as many items as were in
        flight may be lost or repeated.
        """
        return self._state.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a state in the next pass; if the loop had seen the end of that pass, begin the
        next one. The source's epoch is set accordingly.

        The items that were handed out are skipped in the source, immediately if it has
        ``iterate(start)``. If an op had dropped or failed any, the pass runs from its beginning and
        the items that were handed out are thrown away.

        Raises: ValueError: not a dataset's state; later, when the pass begins: the state does not
            fit the number of ranks.
        """
        self._state.load(state_dict)

    def _state_before(self, num_back: int) -> dict[str, Any]:
        return self._state.state(num_back=num_back)

    def _state_to_resume(self) -> dict[str, Any] | None:
        return self._state.to_resume()

    def _ends_empty_tail(self) -> bool:
        """Return whether the present or coming pass resumes after its last item. If it is the
        coming one, move on to the next pass.
        """
        try:
            length = len(self)
        except TypeError:
            return False
        return self._state.ends_empty_tail(length)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy or a pickle, which has loaded nothing yet."""
        unused = ("_pass", "_last", "_cached_step", "_keeper")
        own = {"_state": copy.copy(self._state), "_pipeline_number": new_pipeline_number()}
        return {**self.__dict__, **dict.fromkeys(unused), **own}

    def __repr__(self) -> str:
        return "\n".join(["PipelineDataset", *(f"  {part}" for part in self._spec.parts())])

    def _end_pass(self, ending: _Pass, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends an iterator that was left open, it imports nothing any more.
        has_report = ending.has_begun and not is_exiting()
        report = ending.report() if has_report else None
        try:
            ending.pipeline.stop(_STOP_SECONDS)
        except TimeoutError as error:
            _logger.warning("PipelineDataset: the loop has ended, but %s", error)
        # A loop that takes len() items and no more (Lightning's) never sees the failure raised.
        if ending.pipeline.failure is not None and not ending.is_failure_raised:
            _logger.error("PipelineDataset: the pass had failed", exc_info=ending.pipeline.failure)
        if self._pass is ending:
            # In this order: a thread that finds no pass finds what was kept of this one.
            self._last = self._last if report is None else (report, ending.recorder)
            self._pass = None


def _stages_to(
    transfer: Transfer, stages: Sequence[StageSpec], ended: threading.Event
) -> tuple[StageSpec, ...]:
    """Return the stages of a pass whose items go to a device: functions on the stages' own threads
    are offered pinned memory, and the transfer comes last.
    """
    memory = transfer.batch_memory(most_pieces(sum(map(_most_under_way, stages)) + AHEAD))
    offered = [
        replace(stage, op=_in_memory(stage.op, memory, is_last=stage is stages[-1]))
        if memory is not None and stage.kind is OpKind.FUNCTION and stage.executor is None
        else stage
        for stage in stages
    ]
    return (*offered, _transfer_stage(transfer, ended))


def _most_under_way(stage: StageSpec) -> int:
    """Return how many items a stage may work on, or leave waiting after it."""
    waiting = stage.buffer_size or default_buffer_size(stage.concurrency)
    return stage.concurrency + waiting


def _in_memory(
    op: Callable[[Any], Any], memory: BatchMemory, *, is_last: bool
) -> Callable[[Any], Any]:
    """Return an op that is offered memory for its batch; torch's collate uses it by itself if it is
    last.

    A user's op after it could keep views of the memory, from which the loop might begin copies that
    nobody knows of.
    """
    own = collate_into(memory) if is_last and is_torchs_collate(op) else op

    @functools.wraps(op, updated=())
    def call(item: Any) -> Any:
        memory.begin()
        try:
            with batch_room(memory.room):
                return own(item)
        finally:
            memory.end()

    return call


def _transfer_stage(transfer: Transfer, ended: threading.Event) -> StageSpec:
    """Return the last stage, which begins to copy each item; the iterating thread receives it.

    ended: set when the pass is over. The stage may then wait for a model that is far behind.
    """

    def stage(item: Any) -> Any:
        transfer.await_model(lambda: not ended.is_set())
        return transfer.stage(item)

    return StageSpec(
        name="transfer",
        op=stage,
        kind=OpKind.FUNCTION,
        output_order="input",
        max_failures=0,  # running out of device memory is not the item's fault: do not skip it
        buffer_size=AHEAD,
        on_one_thread=True,
    )


class _Pass:
    """A running pipeline."""

    def __init__(self, pipeline: Pipeline[Any], recorder: FlightRecorder, source: Any) -> None:
        self.pipeline = pipeline
        self._source = source
        self._counts = DatasetCounts(source)
        self.recorder = recorder
        self.has_begun = False  # Ctrl-C may cut off the start
        self.is_failure_raised = False

    def snapshot(self) -> PipelineStats:
        return replace(self.pipeline.snapshot(), counts=self._counts.now())

    def report(self) -> Report:
        from ..observe.verdict.report import make_report  # only for who asks

        report = make_report(self.snapshot(), self.pipeline.report().probes)
        return with_remarks_of(self._source, report)
