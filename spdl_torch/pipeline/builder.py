"""The fluent way to define a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from ..engine.definition import (
    Aggregate,
    BuildOptions,
    Disaggregate,
    Pipe,
    PipelineSpec,
    SinkSpec,
    SourceSpec,
)
from ..lazy_names import all_left_out
from .pipeline import Pipeline

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ..engine.definition import Aggregator, MaxFailures, OutputOrder, StageSpec, Tuner
    from ..engine.hooks import HookFactory
    from ..engine.stage_hooks import StatsQueue

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")


class PipelineBuilder(Generic[T, U]):
    """Collect a source, stages and a sink, then build a :class:`Pipeline`.

    Every method but ``build`` and ``get_config`` returns a builder. One builder can build any
    number of pipelines; each runs the source from its beginning.
    """

    def __init__(self) -> None:
        self._source: SourceSpec | None = None
        self._stages: list[StageSpec] = []
        self._sink: SinkSpec | None = None

    if not TYPE_CHECKING:  # which would take any name for a method

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            hint = all_left_out()["PipelineBuilder"].get(name)
            raise AttributeError(f"{text}. {hint}" if hint else text, name=name, obj=self)

    @classmethod
    def from_config(cls, spec: PipelineSpec[Any], /) -> Self:
        """Return a builder that holds a whole definition, e.g. one that was changed by
        ``dataclasses.replace``.
        """
        builder = cls()
        builder._source, builder._sink = spec.src, spec.sink
        builder._stages = list(spec.pipes)
        return builder

    def add_source(
        self, source: Iterable[S] | AsyncIterable[S], *, continuous: bool = False
    ) -> PipelineBuilder[S, S]:
        """Take items from ``source``, on a thread of its own, as fast as the stages take them.

        continuous: iterate over the source again and again, in one pipeline over all epochs: each
            ``iter(pipeline)`` gives one epoch, while the items of the next are under way already.
            No item crosses from one epoch into another, and lists that ``aggregate`` collects end
            with the epoch. Before each epoch but the first a source that has ``set_epoch`` is
            called with the next number, counted from its ``epoch``; others order themselves
            anew in ``__iter__``.
        Raises: ValueError: there is a source already; a generator or another iterator of Python's,
            which cannot begin again, for ``continuous``.
        """
        if self._source is not None:
            raise ValueError("add_source: the pipeline has a source already; it takes one.")
        self._source = SourceSpec(source, continuous)
        return self  # type: ignore[return-value]  # the same builder, now with its item type

    def pipe(
        self,
        op: Any,
        /,
        *,
        concurrency: int = 1,
        executor: Executor | None = None,
        name: str | None = None,
        output_order: OutputOrder = "completion",
        max_failures: MaxFailures | None = None,
        buffer_size: int | None = None,
    ) -> PipelineBuilder[T, Any]:
        """Call ``op`` with every item, at most ``concurrency`` calls at once.

        op: function, generator function (one item in, many out), ``async def``, async generator,
            or anything with ``__getitem__``. Returning None drops the item.
        executor: where to run the calls, e.g. a process pool; None = threads of the pipeline.
            A generator on an executor is run to its end before its first item is passed on.
        name: of the stage in statistics and errors; None = the op's name.
        output_order: ``"completion"`` passes items on as they are done, ``"input"`` in the order
            in which they came. The bounds on concurrency and waiting items hold in both.
        max_failures: see ``build``; for this stage alone.
        buffer_size: items that may wait after this stage; None = twice the concurrency of this
            stage or of the next, whichever is larger, at least 2, and up to 256 while more
            than 10,000 a second are taken.
        """
        stage = Pipe(
            op,
            concurrency=concurrency,
            executor=executor,
            name=name,
            output_order=output_order,
            max_failures=max_failures,
            buffer_size=buffer_size,
        )
        self._stages.append(stage)
        return self

    def aggregate(
        self, input: int | Aggregator, /, *, drop_last: bool = False
    ) -> PipelineBuilder[T, Any]:
        """Collect ``input`` items into a list, or let an ``Aggregator`` combine them.

        drop_last: leave out an incomplete last list. ``sizes 4,4,2 drop_last=True -> 4,4``.
        """
        self._stages.append(Aggregate(input, drop_last=drop_last))
        return self

    def disaggregate(self) -> PipelineBuilder[T, Any]:
        """Pass the members of each list on one by one, in order."""
        self._stages.append(Disaggregate())
        return self

    def add_sink(self, buffer_size: int = 3) -> Self:
        """Let at most ``buffer_size`` finished items wait for the consumer.

        Raises: ValueError: there is a sink already, or ``buffer_size`` < 1.
        """
        if self._sink is not None:
            raise ValueError("add_sink: the pipeline has a sink already; it takes one.")
        self._sink = SinkSpec(buffer_size)
        return self

    def get_config(self) -> PipelineSpec[U]:
        """Return the definition so far: frozen, printable, picklable if its ops are.

        Raises: RuntimeError: the source or the sink is missing.
        """
        if self._source is None:
            raise RuntimeError("PipelineBuilder: no source; call add_source(iterable) first.")
        if self._sink is None:
            raise RuntimeError("PipelineBuilder: no sink; call add_sink() last.")
        return PipelineSpec(self._source, self._stages, self._sink)

    def build(
        self,
        *,
        num_threads: int | None = None,
        max_failures: MaxFailures | None = None,
        report_stats_interval: float | None = None,
        queue_class: Callable[..., StatsQueue] | None = None,
        task_hook_factory: HookFactory | None = None,
        stage_id: int = 0,
        use_thread_output_queue: bool = False,
        stats: bool = True,
        tuner: Tuner | None = None,
    ) -> Pipeline[U]:
        """Return a pipeline that is ready to run; no thread exists before its first item is asked
        for.

        num_threads: how many stage tasks without an executor of their own run at once;
            None = the sum of the concurrencies.
        max_failures: limit of each stage: an int = more than so many failing items, a float or
            Fraction = more than that share of the tasks, judged after 100 tasks, and at the end
            when no task at all succeeded. None = 10 %; -1 = no limit.
        report_stats_interval: seconds between two reports; None or -1 = one, at the end.
        queue_class: :class:`StatsQueue`, a subclass, or a ``functools.partial`` of it, called with
            ``(info, buffer_size=n)``; a queue that has no interval then has
            ``report_stats_interval``.
        task_hook_factory: called with each :class:`StageInfo`; None = one :class:`TaskStatsHook`.
        stage_id: the source's number in the names of stages; the stages count on from it.
        use_thread_output_queue: makes no difference: items are always handed over by threads.
        stats: time every task and keep what the threads did; False saves about 1 µs a task.
        tuner: changes the stages' concurrency while they run; ``PerfParams.auto().build_options()``
            has one. It needs ``stats``.
        """
        options = BuildOptions(
            num_threads=num_threads,
            max_failures=max_failures,
            report_stats_interval=report_stats_interval,
            queue_class=queue_class,
            task_hook_factory=task_hook_factory,
            stage_id=stage_id,
            stats=stats,
            tuner=tuner,
        )
        return Pipeline(self.get_config(), options)


def build_pipeline(pipeline_cfg: PipelineSpec[S], /, **options: Any) -> Pipeline[S]:
    """Return a pipeline that runs a definition; arguments as of ``PipelineBuilder.build``."""
    builder: PipelineBuilder[Any, S] = PipelineBuilder.from_config(pipeline_cfg)
    return builder.build(**options)


# One list of the options: help() and editors find it here, too.
_of_build = list(inspect.signature(PipelineBuilder.build).parameters.values())[1:]
_of_this = list(inspect.signature(build_pipeline).parameters.values())[:1]
vars(build_pipeline)["__signature__"] = inspect.Signature([*_of_this, *_of_build])
