"""Threads and buffer sizes as a value: estimated, tuned or given, printed, and applied."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..checks import check_whole
from ..engine.ops import OpKind
from ..machine.limits import limits_given
from ..pipeline.builder import PipelineBuilder
from .estimate import (
    CHEAP_ROOM,
    WHERE,
    dataset_of,
    may_run_at_once,
    plan_of_loader,
    plan_of_pipeline,
    shown_bytes,
    size_in_dataset,
    size_in_pipeline,
)
from .tuning import PipelineTuner, Tuning, check_shares, manual_call
from .workers import AutoWorkers

if TYPE_CHECKING:
    from ..engine.definition import StageSpec
    from ..observe.store.entries import LogEntry

_logger = logging.getLogger("spdl_torch.autotune")


@dataclass(frozen=True, kw_only=True, slots=True)
class PerfParams:
    """Threads and buffer sizes for a DataLoader or a pipeline, made by :meth:`estimate`,
    :meth:`manual` or :meth:`auto`; ``repr()`` is the call of ``manual`` that gives the same.
    """

    num_workers: int | None = None
    """The workers of a DataLoader. None, here and below: not set."""
    prefetch_factor: int | None = None
    """The batches that each worker of a DataLoader makes ahead."""
    concurrency: Mapping[str, int] = field(default_factory=dict)
    """The concurrent calls of a pipeline's stages, by name."""
    buffer_size: Mapping[str, int] = field(default_factory=dict)
    """The items that may wait after a pipeline's stages, by name."""
    num_threads: int | None = None
    """The concurrent calls of a pipeline over all stages."""
    inferred: tuple[str, ...] = field(default=(), compare=False)
    """The findings and conclusions of ``estimate``, in lines."""
    tuning: Tuning | None = None
    """The options of tuning while running; None = no tuning."""

    def __post_init__(self) -> None:
        check_whole("PerfParams", num_workers=self.num_workers, least=0, optional=True)
        numbers: dict[str, Any] = {
            "prefetch_factor": self.prefetch_factor,
            "num_threads": self.num_threads,
            **{f"concurrency of {name!r}": n for name, n in self.concurrency.items()},
            **{f"buffer_size of {name!r}": n for name, n in self.buffer_size.items()},
        }
        check_whole("PerfParams", optional=True, **numbers)

    @classmethod
    def manual(
        cls,
        stages: Mapping[str, int] | None = None,
        /,
        *,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        buffer_size: int | Mapping[str, int] | None = None,
        num_threads: int | None = None,
        **concurrency: int,
    ) -> PerfParams:
        """Return settings of your own: ``PerfParams.manual(decode=12, collate=2)``.

        stages: concurrency by stage, for names that are not identifiers or are parameters here.
        buffer_size: one for all these stages, or by stage.
        Raises: TypeError, ValueError: a number that is not a positive int; a stage named twice.
        """
        twice = sorted((stages or {}).keys() & concurrency.keys())
        if twice:
            raise ValueError(f"PerfParams.manual: stage {twice[0]!r} is given twice.")
        concurrency = {**(stages or {}), **concurrency}
        if isinstance(buffer_size, int):
            buffer_size = dict.fromkeys(concurrency, buffer_size)
        return cls(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            concurrency=concurrency,
            buffer_size=dict(buffer_size or {}),
            num_threads=num_threads,
        )

    @classmethod
    def estimate(
        cls,
        target: Any,
        *,
        batch_size: int | None = None,
        prefetch_factor: int = 2,
        element_bytes: int | None = None,
        keep: Collection[str] = (),
        cpu_util: float = 0.4,
        memory_util: float = 0.7,
        num_cores: float | None = None,
        memory_bytes: int | None = None,
        local_world_size: int | None = None,
        write: Callable[[str], object] | None = print,
    ) -> PerfParams:
        """Estimate the threads and buffers that fit into a share of this rank's cores and memory.

        For a dataset or a DataLoader: ``num_workers`` and ``prefetch_factor``. For a
        ``PipelineBuilder``: the concurrency of every stage that has 1, is a plain function, has no
        executor and is not in ``keep``, ``buffer_size`` of every stage that has none, and
        ``num_threads``. Runs nothing but the measurement of an element's size.

        The formula is Scanner's, with a share of the cores besides that of memory (in bytes):

        - threads = ``cpu_util * num_cores / local_world_size``, at least 1: the most that run at
          once; each stage may have as many;
        - bytes in flight, at most = ``memory_util * memory_bytes / local_world_size``. A loader has
          in flight ``num_workers * prefetch_factor`` batches, the samples of those being collated
          and the trainer's. A pipeline has two items for each thread of a stage and the stage's
          buffer; the sink's buffer and the consumer's. Each element of an aggregated list counts;
        - where that is too much, buffers shrink first, to 1, then threads, to 1 at least.

        Buffers are never larger than useful: ``prefetch_factor`` batches for each worker; twice the
        threads on either side of a buffer or, for small items, 64.

        Args:
            target: a map-style or iterable dataset, our or torch's DataLoader, a PipelineBuilder.
            batch_size: None = the DataLoader's, else 1.
            prefetch_factor: the most wanted.
            element_bytes: the size of the largest sample or item; None = that of three that the
                calling thread loads.
            keep: stages whose op must not run several times at once.
            cpu_util: the share of the cores; 0.4, as in SPDL's guide, leaves the rest to the
                training step. Raise it where nothing else needs them.
            memory_util: the share of the available memory; 0.7 as in Scanner.
            num_cores, memory_bytes, local_world_size: None = :meth:`Limits.of_this_machine`. Pass
                ``local_world_size=1`` where each rank is bound to cores of its own.
            write: called with the inference as one text; None = logged at INFO level.
        Raises: TypeError, ValueError: an argument that is out of range.
        Warns: UserWarning: the size of an element, or the memory, is not known, so that memory
            sets no bound.
        """
        limits = limits_given(num_cores, memory_bytes, local_world_size)
        check_whole(WHERE, prefetch_factor=prefetch_factor)
        check_whole(WHERE, batch_size=batch_size, element_bytes=element_bytes, optional=True)
        check_shares(WHERE, cpu_util=cpu_util, memory_util=memory_util)
        # The tiny term makes up for 0.29 * 100 being a little less than 29.
        cores = max(1, int(limits.own_cores * cpu_util + 1e-9))
        memory = limits.own_memory(memory_util)
        size, origin, made_of = element_bytes, "given", ""
        if isinstance(target, PipelineBuilder):
            if batch_size is not None:
                raise ValueError(
                    f"{WHERE}: batch_size must be None for a pipeline, whose aggregates say how "
                    f"many items are in a list, got {batch_size}."
                )
            spec = target.get_config()
            if size is None:
                size, origin = size_in_pipeline(spec)
            plan = plan_of_pipeline(spec, size, keep)
            most_room = max(CHEAP_ROOM, 2 * cores, *(2 * stage.concurrency for stage in spec.pipes))
        else:
            if keep:
                raise ValueError(
                    f"{WHERE}: keep is for a PipelineBuilder, got {sorted(keep)} with a "
                    f"{type(target).__name__}."
                )
            dataset, batch_size = dataset_of(target, batch_size)
            if size is None:
                size, origin = size_in_dataset(dataset)
            plan, most_room = plan_of_loader(batch_size), prefetch_factor
            made_of = f", {batch_size:,} in a batch"

        def fits(threads: int, room: int) -> bool:
            return size is None or memory is None or size * plan(threads, room)[0] <= memory

        # Buffers shrink first, then threads.
        threads = max((n for n in range(1, cores + 1) if fits(n, 1)), default=1)
        room = max((n for n in range(1, most_room + 1) if fits(threads, n)), default=1)
        num_elements, settings = plan(threads, room)
        ranks = f" / {limits.local_world_size} ranks" if limits.local_world_size > 1 else ""
        lines = [
            f"cores: {limits.num_cores:g} * {cpu_util:g}{ranks} -> threads: {cores}",
            f"memory: {shown_bytes(limits.memory_bytes)} * {memory_util:g}{ranks} -> "
            f"{shown_bytes(memory)}",
            f"element: {shown_bytes(size)} ({origin}){made_of}",
        ]
        if size is not None:
            most = f"in flight: at most {shown_bytes(size * num_elements)}"
            more = ", more than that: one thread and room for one are least"
            lines.append(most if fits(threads, room) else most + more)
        if size is None or memory is None:
            unknown = "the system does not say how much there is. Pass memory_bytes"
            doubt = unknown if size is not None else f"{origin}. Pass element_bytes"
            warnings.warn(f"{WHERE}: memory sets no bound: {doubt}.", stacklevel=2)
        params = cls(**settings, inferred=tuple(lines))
        (write or _logger.info)(str(params))
        return params

    @classmethod
    def auto(
        cls,
        *,
        keep: Collection[str] = (),
        max_threads: int | None = None,
        cpu_util: float = 1.0,
        memory_util: float = 0.7,
        num_cores: float | None = None,
        memory_bytes: int | None = None,
        local_world_size: int | None = None,
        window_seconds: float = 2.0,
        log: Callable[[LogEntry], Any] | None = None,
        write: Callable[[str], object] | None = print,
    ) -> PerfParams:
        """Return settings that change while training runs, as long as that makes it faster.

        For a ``PipelineBuilder``, by ``apply`` and ``build_options``: the concurrency of its plain
        functions without executor that are not in ``keep``, and of generators with several threads.
        For our DataLoader, by ``loader_options``: its workers. The items and their order stay the
        same. The aim is a consumer that does not wait.

        Args:
            keep: stages whose op must not run several times at once.
            max_threads: the most threads of all these stages together; None = 8 for each core of
                this rank, at least 32.
            cpu_util: the share of this rank's cores that the stages may keep busy. Cores taken
                from the training step show in its speed, by which each change is judged.
            memory_util: the share of the memory that is available at the start.
            num_cores, memory_bytes, local_world_size: None = :meth:`Limits.of_this_machine`.
            window_seconds: the time between two changes; longer while fewer than 20 items come.
            log: called with an event ``decision`` for each change: ``SQLiteStatsWriter.log``.
            write: called with the settings as code once nothing is left to gain, and at the end;
                None = only logged at INFO level.
        Raises: TypeError, ValueError: an argument that is out of range.
        """
        return cls(
            tuning=Tuning(
                keep=frozenset(keep),
                max_threads=max_threads,
                cpu_util=cpu_util,
                memory_util=memory_util,
                num_cores=num_cores,
                memory_bytes=memory_bytes,
                local_world_size=local_world_size,
                window_seconds=window_seconds,
                log=log,
                write=write,
            )
        )

    def loader_options(self) -> dict[str, int]:
        """Return arguments for a DataLoader: ``DataLoader(dataset, **these)``, ours or torch's;
        those of ``auto`` are for ours.

        Raises: ValueError: ``num_workers`` is not set.
        """
        if self.tuning is not None:
            return {"num_workers": AutoWorkers.to_begin_with(self.tuning)}
        if self.num_workers is None:
            raise ValueError(
                "PerfParams.loader_options: num_workers must be given, got None. These are for a "
                "pipeline: use apply() and build_options()."
            )
        options = {"num_workers": self.num_workers}
        if self.prefetch_factor is not None and self.num_workers > 0:
            options["prefetch_factor"] = self.prefetch_factor  # torch refuses it without workers
        return options

    def apply(self, builder: PipelineBuilder[Any, Any], /) -> PipelineBuilder[Any, Any]:
        """Return a builder of the same pipeline with these concurrencies and buffer sizes.

        The items and their order stay the same: a stage that ran one call at a time gets
        ``output_order="input"`` if it gets more, or may get more, unless its op is an async
        generator.
        Raises: ValueError: there is no such stage, or it is an aggregate and cannot run several
            calls at once; RuntimeError: the builder has no source or sink.
        """
        spec = builder.get_config()
        names = [stage.name for stage in spec.pipes]
        keep = () if self.tuning is None else sorted(self.tuning.keep)
        for name in [*self.concurrency, *self.buffer_size, *keep]:
            if name not in names:
                raise ValueError(
                    f"PerfParams.apply: the pipeline has no stage {name!r}; it has "
                    f"{', '.join(map(repr, names)) or 'none'}."
                )
        stages = tuple(self._changed(stage) for stage in spec.pipes)
        return PipelineBuilder.from_config(replace(spec, pipes=stages))

    def build_options(self) -> dict[str, Any]:
        """Return options for ``PipelineBuilder.build`` or ``PipelineDataset``: ``num_threads``, if
        set; with ``auto`` a tuner, for one pipeline or dataset.
        """
        options: dict[str, Any] = {}
        if self.num_threads is not None:
            options["num_threads"] = self.num_threads
        if self.tuning is not None:
            options["tuner"] = PipelineTuner(self.tuning, "pipeline")
        return options

    def __str__(self) -> str:
        """Return the inference, then the settings as code."""
        return "\n".join([*self.inferred, repr(self)])

    def __repr__(self) -> str:
        if self.tuning is not None:
            return "PerfParams.auto()"
        names = ("num_workers", "prefetch_factor", "num_threads")
        others = {name: getattr(self, name) for name in names}
        return manual_call(self.concurrency, self.buffer_size, **others)

    def _changed(self, stage: StageSpec) -> StageSpec:
        concurrency = self.concurrency.get(stage.name, stage.concurrency)
        if concurrency > 1 and stage.kind is OpKind.AGGREGATE:
            raise ValueError(
                f"PerfParams.apply: concurrency of {stage.name!r} must be 1, got {concurrency}. An "
                "aggregate collects one list at a time."
            )
        # An async generator has no order other than that of completion.
        has_order = stage.kind is not OpKind.ASYNC_GENERATOR
        keeps_order = stage.concurrency == 1 < concurrency and has_order
        if self.tuning is not None and may_run_at_once(stage):
            keeps_order = stage.name not in self.tuning.keep
        return replace(
            stage,
            concurrency=concurrency,
            buffer_size=self.buffer_size.get(stage.name, stage.buffer_size),
            output_order="input" if keeps_order else stage.output_order,
        )
