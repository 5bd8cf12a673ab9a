"""Threads and buffer sizes as a value: estimated, tuned or given, printed, and applied."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..checks import check_whole
from ..engine.ops import OpKind
from ..machine.limits import Limits
from ..pipeline.builder import PipelineBuilder
from .estimate import (
    dataset_of,
    forms_of,
    may_run_at_once,
    plan_of_loader,
    plan_of_pipeline,
    samples_of,
    size_of_largest,
)
from .tuning import PipelineTuner, Tuning
from .workers import AutoWorkers

if TYPE_CHECKING:
    from ..engine.definition import StageSpec

_WHERE = "PerfParams.estimate"


@dataclass(frozen=True, kw_only=True, slots=True)
class PerfParams:
    """Threads and buffer sizes for a DataLoader or a pipeline, made by :meth:`estimate`,
    :meth:`manual` or :meth:`auto`.
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
    tuning: Tuning | None = None
    """The options of tuning while running; None = no tuning."""

    @classmethod
    def manual(cls, **settings: Any) -> PerfParams:
        """Return settings of your own, by their names here:
        ``PerfParams.manual(concurrency={"decode": 12, "collate": 2})``.

        Wrong numbers are refused by the loader or the pipeline that gets them.
        """
        return cls(**settings)

    @classmethod
    def estimate(
        cls,
        target: Any,
        *,
        batch_size: int | None = None,
        prefetch_factor: int = 2,
        cpu_util: float = 0.4,
        memory_util: float = 0.7,
    ) -> PerfParams:
        """Estimate the threads and buffers that fit into a share of this rank's cores and memory,
        and print them.

        For a dataset or a DataLoader: ``num_workers`` and ``prefetch_factor``. For a
        ``PipelineBuilder``: the concurrency of every stage that has 1, is a plain function and has
        no executor, ``buffer_size`` of every stage that has none, and ``num_threads``. Runs nothing
        but the measurement of an element's size: the calling thread loads three.

        The formula is Scanner's, with a share of the cores besides that of memory (in bytes):

        - threads = ``cpu_util`` * cores / ranks on this machine, at least 1: the most that run at
          once; each stage may have as many;
        - bytes in flight, at most = ``memory_util`` * available memory / ranks. A loader has in
          flight ``num_workers * prefetch_factor`` batches, the samples of those being collated and
          the trainer's. A pipeline has two items for each thread of a stage and the stage's buffer;
          the sink's buffer and the consumer's. Each element of an aggregated list counts from there
          on;
        - where that is too much, buffers shrink first, to 1, then threads, to 1 at least. Where the
          size of an element is not known, memory sets no bound.

        Args:
            target: a map-style or iterable dataset, our or torch's DataLoader, a PipelineBuilder.
            batch_size: None = the DataLoader's, else 1.
            prefetch_factor: the most wanted. The buffers of a pipeline hold at most two items for
                each thread.
            cpu_util: the share of the cores; 0.4, as in SPDL's guide, leaves the rest to the
                training step. Raise it where nothing else needs them.
            memory_util: the share of the available memory; 0.7 as in Scanner.
        Raises: TypeError, ValueError: an argument that is out of range.
        """
        check_whole(_WHERE, prefetch_factor=prefetch_factor)
        check_whole(_WHERE, batch_size=batch_size, optional=True)
        for name, share in (("cpu_util", cpu_util), ("memory_util", memory_util)):
            if not 0 < share <= 1:
                raise ValueError(f"{_WHERE}: {name} must be above 0, at most 1, got {share!r}.")
        limits = Limits.of_this_machine()
        # The tiny term makes up for 0.29 * 100 being a little less than 29.
        cores = max(1, int(limits.own_cores * cpu_util + 1e-9))
        memory = limits.own_memory(memory_util)
        if isinstance(target, PipelineBuilder):
            if batch_size is not None:
                raise ValueError(
                    f"{_WHERE}: batch_size must be None for a pipeline, whose aggregates say how "
                    f"many items are in a list, got {batch_size}."
                )
            spec = target.get_config()
            samples, plan, most_room = forms_of(spec), plan_of_pipeline(spec), 2 * cores
        else:
            dataset, batch_size = dataset_of(target, batch_size)
            samples, plan = samples_of(dataset), plan_of_loader(batch_size)
            most_room = prefetch_factor
        size, why = size_of_largest(samples)

        def fits(threads: int, room: int) -> bool:
            return size is None or memory is None or size * plan(threads, room)[0] <= memory

        # Buffers shrink first, then threads.
        threads = max((n for n in range(1, cores + 1) if fits(n, 1)), default=1)
        room = max((n for n in range(1, most_room + 1) if fits(threads, n)), default=1)
        num_elements, settings = plan(threads, room)
        params = cls(**settings)
        bound = f"memory sets no bound ({why or 'the system does not say how much there is'})"
        if size is not None and memory is not None:
            bound = f"{size * num_elements:,} of {memory:,} bytes in flight, {size:,} an element"
        print(f"{_WHERE}: {cores} of {limits.own_cores:g} cores, {bound}: {params}")
        return params

    @classmethod
    def auto(cls, *, keep: Collection[str] = (), max_threads: int | None = None) -> PerfParams:
        """Return settings that change while training runs, as long as that makes it faster.

        For a ``PipelineBuilder``, by ``apply`` and ``build_options``: the concurrency of its plain
        functions without executor that are not in ``keep``, and of generators with several threads.
        For our DataLoader, by ``loader_options``: its workers. The items and their order stay the
        same. The aim is a consumer that does not wait.

        Args:
            keep: stages whose op must not run several times at once.
            max_threads: the most threads of all these stages together; None = 8 for each core of
                this rank, at least 32.
        Raises: TypeError, ValueError: ``max_threads`` is no positive int.
        """
        check_whole("PerfParams.auto", max_threads=max_threads, optional=True)
        return cls(tuning=Tuning(keep=frozenset(keep), max_threads=max_threads))

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

    def _changed(self, stage: StageSpec) -> StageSpec:
        concurrency = self.concurrency.get(stage.name, stage.concurrency)
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
