"""The fluent way to write a pipeline down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from .definition import (
    MaxFailures,
    OpKind,
    OutputOrder,
    PipelineSpec,
    SinkSpec,
    SourceSpec,
    StageSpec,
    as_op,
    name_of,
)
from .pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Callable, Iterable, Iterator
    from concurrent.futures import Executor

    from .hooks import HookFactory, StatsQueue
    from .tuning import Tuner

__all__ = ["PipelineBuilder"]


class PipelineBuilder:
    """Collects a source, stages and a sink, then builds a :class:`Pipeline`.

    Every method but ``build`` and ``get_config`` returns a builder. One builder can build any
    number of pipelines; each runs the source from its beginning.
    """

    def __init__(self) -> None:
        self._source: SourceSpec | None = None
        self._stages: list[StageSpec] = []
        self._sink: SinkSpec | None = None

    @classmethod
    def from_config(cls, spec: PipelineSpec, /) -> Self:
        """A builder that holds a whole definition, e.g. one changed by ``dataclasses.replace``."""
        builder = cls()
        builder._source, builder._sink = spec.source, spec.sink
        builder._stages = list(spec.stages)
        return builder

    def add_source(self, source: Iterable[Any] | AsyncIterable[Any]) -> Self:
        """Take items from ``source``, on a thread of its own, as fast as the stages take them.

        Raises: ValueError: there is a source already.
        """
        if self._source is not None:
            raise ValueError("add_source: the pipeline has a source already; it takes one.")
        self._source = SourceSpec(source)
        return self

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
    ) -> Self:
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
            stage or of the next, whichever is larger, at least 2, and up to 64 while more
            than 10,000 a second are taken.
        """
        call, kind = as_op(op)
        self._stages.append(
            StageSpec(
                name=name or name_of(op),
                op=call,
                kind=kind,
                concurrency=concurrency,
                executor=executor,
                output_order=output_order,
                max_failures=max_failures,
                buffer_size=buffer_size,
            )
        )
        return self

    def aggregate(self, n: int, /, *, drop_last: bool = False) -> Self:
        """Collect ``n`` items into a list. ``sizes 4,4,2 drop_last=True -> 4,4``."""
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"aggregate: n must be an int, got {n!r}.")
        if n < 1:
            raise ValueError(f"aggregate: n must be >= 1, got {n}.")
        self._stages.append(
            StageSpec(
                name=f"aggregate({n})",
                op=list,
                kind=OpKind.AGGREGATE,
                batch_size=n,
                drop_last=drop_last,
            )
        )
        return self

    def disaggregate(self) -> Self:
        """Pass the members of each list on one by one, in order."""
        self._stages.append(
            StageSpec(name="disaggregate", op=_members, kind=OpKind.GENERATOR, output_order="input")
        )
        return self

    def add_sink(self, buffer_size: int = 3) -> Self:
        """Let at most ``buffer_size`` finished items wait for the consumer.

        Raises: ValueError: there is a sink already, or ``buffer_size`` < 1.
        """
        if self._sink is not None:
            raise ValueError("add_sink: the pipeline has a sink already; it takes one.")
        self._sink = SinkSpec(buffer_size)
        return self

    def get_config(self) -> PipelineSpec:
        """The definition so far: frozen, printable, picklable if its ops are.

        Raises: RuntimeError: the source or the sink is missing.
        """
        if self._source is None:
            raise RuntimeError("PipelineBuilder: no source; call add_source(iterable) first.")
        if self._sink is None:
            raise RuntimeError("PipelineBuilder: no sink; call add_sink() last.")
        return PipelineSpec(self._source, tuple(self._stages), self._sink)

    def build(
        self,
        *,
        num_threads: int | None = None,
        max_failures: MaxFailures | None = None,
        report_stats_interval: float | None = None,
        queue_class: Callable[..., StatsQueue] | None = None,
        task_hook_factory: HookFactory | None = None,
        stats: bool = True,
        tuner: Tuner | None = None,
    ) -> Pipeline:
        """A pipeline that is ready to run; no thread exists before its first item is asked for.

        num_threads: how many stage tasks without an executor of their own run at once;
            None = the sum of the concurrencies.
        max_failures: limit of each stage: an int = more than so many failing items, a float or
            Fraction = more than that share of the tasks, judged after 100 tasks, and at the end
            when no task at all succeeded. None = 10 %.
        report_stats_interval: seconds between two reports; None = one, at the end.
        queue_class: :class:`StatsQueue`, a subclass, or a ``functools.partial`` of it, called with
            ``(info, buffer_size, interval)``.
        task_hook_factory: called with each :class:`StageInfo`; None = one :class:`TaskStatsHook`.
        stats: time every task and keep what the threads did; False saves about 1 µs a task.
        tuner: changes the stages' concurrency while they run; ``PerfParams.auto().build_options()``
            has one. It needs ``stats``.
        """
        return Pipeline(
            self.get_config(),
            num_threads=num_threads,
            max_failures=max_failures,
            report_stats_interval=report_stats_interval,
            queue_class=queue_class,
            task_hook_factory=task_hook_factory,
            stats=stats,
            tuner=tuner,
        )


def _members(items: Iterable[Any]) -> Iterator[Any]:
    yield from items
