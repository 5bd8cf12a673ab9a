"""Threads and buffer sizes as a value: estimated, tuned or given, printed, and applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from ..checks import check_whole
from ..engine.ops import OpKind
from ..machine.limits import Limits
from ..objects.generator_states import generators_kept
from ..pipeline.builder import PipelineBuilder
from .tuning import PipelineTuner, Tuning, nbytes_in
from .workers import AutoWorkers

if TYPE_CHECKING:
    from ..engine.definition import PipelineSpec, StageSpec

    _Plan = Callable[[int, int], tuple[int, dict[str, Any]]]
    """From threads and the room of a buffer to the elements in flight and the settings."""

_WHERE = "PerfParams.estimate"
_NUM_SAMPLES = 3


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
            samples, plan, most_room = _forms_of(spec), _plan_of_pipeline(spec), 2 * cores
        else:
            dataset, batch_size = _dataset_of(target, batch_size)
            samples, plan = _samples_of(dataset), _plan_of_loader(batch_size)
            most_room = prefetch_factor
        size, why = _size_of_largest(samples)

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
        if self.tuning is not None and _may_run_at_once(stage):
            keeps_order = stage.name not in self.tuning.keep
        return replace(
            stage,
            concurrency=concurrency,
            buffer_size=self.buffer_size.get(stage.name, stage.buffer_size),
            output_order="input" if keeps_order else stage.output_order,
        )


def _plan_of_loader(batch_size: int) -> _Plan:
    """Return what the numbers of a loader's workers and of their batches ahead amount to."""

    def plan(workers: int, room: int) -> tuple[int, dict[str, Any]]:
        # What was requested and not taken; the samples of batches that are being collated, besides
        # those batches; the one that the training step works on.
        num_elements = batch_size * (workers * room + workers + 1)
        return num_elements, {"num_workers": workers, "prefetch_factor": room}

    return plan


def _plan_of_pipeline(spec: PipelineSpec[Any]) -> _Plan:
    """Return what the threads of each stage and the room after it amount to in a pipeline."""
    stages = spec.pipes
    names = Counter(stage.name for stage in stages)  # settings go by name
    free = {s.name for s in stages if _may_run_at_once(s) and names[s.name] == 1}
    # Stages that were given their threads keep them; the others share the cores.
    others = [s for s in stages if s.name not in free and s.executor is None and not s.is_async]
    given = sum(stage.concurrency for stage in others)

    def plan(threads: int, room: int) -> tuple[int, dict[str, Any]]:
        num_elements, length = 0, 1
        for stage in stages:
            length *= max(1, stage.batch_size)  # the elements in an item from here on, at most
            width = threads if stage.name in free else stage.concurrency
            # Each thread has an item and its result.
            num_elements += length * (2 * width + (stage.buffer_size or room))
        num_elements += length * (spec.sink.buffer_size + 1)
        settings: dict[str, Any] = {
            "concurrency": {s.name: threads for s in stages if s.name in free},
            "buffer_size": {s.name: room for s in stages if s.buffer_size is None},
        }
        if free:
            settings["num_threads"] = threads + given
        return num_elements, settings

    return plan


def _may_run_at_once(stage: StageSpec) -> bool:
    """Return whether the stage is a plain function whose concurrency nobody has set."""
    is_plain = stage.kind is OpKind.FUNCTION and stage.executor is None
    return is_plain and stage.concurrency == 1 and not stage.on_one_thread


def _dataset_of(target: Any, batch_size: int | None) -> tuple[Any, int]:
    """Return the dataset, and the number of samples that a worker makes at a time."""
    from torch.utils.data import DataLoader

    if not isinstance(target, DataLoader):
        is_readable = hasattr(target, "__getitem__") or hasattr(target, "__iter__")
        if not is_readable or hasattr(type(target), "report"):  # a PipelineDataset has its threads
            raise TypeError(
                "PerfParams.estimate: expected a dataset, a DataLoader, or the definition of a "
                f"pipeline, got {type(target).__name__}."
            )
        return target, batch_size or 1
    # A batch sampler hides the size of its batches from the loader.
    of_loader = target.batch_size or getattr(target.batch_sampler, "batch_size", None)
    return target.dataset, batch_size or of_loader or 1


def _samples_of(dataset: Any) -> Iterator[Any]:
    """Yield samples spread evenly over a dataset with indices, else its first ones."""
    from torch.utils.data import IterableDataset

    is_indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    try:
        length = len(dataset) if is_indexed else None
    except TypeError:  # tar shards without an index, or no len at all
        length = None
    if length is None:
        yield from _first_of(dataset)
        return
    for place in range(0, length, -(-length // _NUM_SAMPLES) or 1):
        yield dataset[place]


def _forms_of(spec: PipelineSpec[Any]) -> Iterator[Any]:
    """Yield what the stages before the first aggregate, process or coroutine make of the source's
    first items; where there is none of them, those items.
    """
    plain = [*takewhile(lambda s: s.kind is OpKind.FUNCTION and s.executor is None, spec.pipes)]
    for form in _first_of(spec.src.source):
        if not plain:
            yield form
        for stage in plain:
            form = stage.op(form)
            if form is None:
                break  # dropped
            yield form


def _first_of(source: Any) -> Iterator[Any]:
    if isinstance(source, Iterator):  # they would be missing later
        raise TypeError(f"a {type(source).__name__} is an iterator, which runs once")
    return islice(source, _NUM_SAMPLES)


def _size_of_largest(samples: Iterable[Any]) -> tuple[int | None, str]:
    """Return the bytes of the largest sample; or None, and why they are not known."""
    try:
        with generators_kept():
            sizes = [nbytes_in(each) for each in samples]
    except Exception as error:  # the user's own: if it matters, training will raise it
        return None, f"{type(error).__name__}: {error}"
    return (max(sizes), "") if sizes else (None, "there is no sample")
