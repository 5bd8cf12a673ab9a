"""Make the parts of a pipeline by hand: stages, and sources that merge several pipelines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .ops import OpKind, as_op, name_of
from .specs import MaxFailures, MergeSpec, OutputOrder, PipelineSpec, StageSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

T = TypeVar("T")


def Pipe(
    op: Any,
    /,
    *,
    concurrency: int = 1,
    executor: Executor | None = None,
    name: str | None = None,
    output_order: OutputOrder = "completion",
    max_failures: MaxFailures | None = None,
    buffer_size: int | None = None,
) -> StageSpec:
    """Return a stage that calls ``op`` with every item: see ``PipelineBuilder.pipe``."""
    call, kind = as_op(op)
    return StageSpec(
        name=name or name_of(op),
        op=call,
        kind=kind,
        concurrency=concurrency,
        executor=executor,
        output_order=output_order,
        max_failures=max_failures,
        buffer_size=buffer_size,
    )


class Aggregator(ABC):
    """The base of stages that combine items in their own way, on one thread. The object itself is
    used, not a copy, so each running pipeline needs its own.
    """

    @abstractmethod
    def accumulate(self, item: Any) -> Any:
        """Take an item; return the item to pass on, None = nothing yet."""

    @abstractmethod
    def flush(self) -> Any:
        """Return the rest at the end of the data or of an epoch, and be empty then; None = no rest.

        With ``drop_last`` its result is dropped, and so it is where a run ends early (by ``break``
        or an error).
        """


class Collate(Aggregator, Generic[T]):
    """Lists of ``n`` items; ``Aggregate(Collate(n))`` is ``Aggregate(n)``."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._items: list[T] = []

    def accumulate(self, item: T) -> list[T] | None:
        """Return a list when there are ``n`` items."""
        self._items.append(item)
        return self.flush() if len(self._items) >= self.n else None

    def flush(self) -> list[T] | None:
        """Return the items collected so far; None = there are none."""
        items, self._items = self._items, []
        return items or None


def Aggregate(input: int | Aggregator, /, *, drop_last: bool = False) -> StageSpec:
    """Return a stage that collects lists of ``input`` items, or uses an :class:`Aggregator`.

    drop_last: leave out an incomplete last list. ``sizes 4,4,2 drop_last=True -> 4,4``.
    """
    if isinstance(input, Collate):
        input = input.n
    if isinstance(input, Aggregator):
        return StageSpec(
            name=f"aggregate({type(input).__name__})",
            op=input.accumulate,
            kind=OpKind.AGGREGATOR,
            drop_last=drop_last,
        )
    if isinstance(input, bool) or not isinstance(input, int):
        raise TypeError(f"aggregate: n must be an int or an Aggregator, got {input!r}.")
    if input < 1:
        raise ValueError(f"aggregate: n must be >= 1, got {input}.")
    return StageSpec(
        name=f"aggregate({input})",
        op=list,
        kind=OpKind.AGGREGATE,
        batch_size=input,
        drop_last=drop_last,
    )


def Disaggregate() -> StageSpec:
    """Return a stage that passes the members of each list on one by one, in order."""
    return StageSpec(name="disaggregate", op=_members, kind=OpKind.GENERATOR, output_order="input")


def PathVariants(
    router: Callable[[Any], Any],
    paths: Sequence[Sequence[StageSpec]],
    name: str | None = None,
    batched: bool = False,
) -> StageSpec:
    """Return stages among which ``router`` chooses: see ``PipelineBuilder.path_variants``."""
    name = name or "path_variants"
    _check_paths(name, router, paths, batched=batched)
    return StageSpec(
        name=name,
        op=router,
        kind=OpKind.PATH_VARIANTS,
        paths=tuple(map(tuple, paths)),
        batched=batched,
    )


def Merge(
    pipeline_configs: Sequence[PipelineSpec[Any]], op: Callable[..., Any] | None = None
) -> MergeSpec:
    """Return a source whose items are those that several pipelines make.

    pipeline_configs: each with a source of its own. The ``buffer_size`` of its sink is how many of
        its items may wait for the merge.
    op: called once with ``(info, input_queues, output_queue)``, asynchronous (``await
        queue.get()``, ``await queue.put(item)``) or plain; :func:`is_eof` says of what ``get``
        gave whether that queue has ended. It ends the data by returning, also before the queues
        have ended. None = items as they come.
    """
    if not pipeline_configs:
        raise ValueError("Merge: there must be at least one upstream pipeline, got none.")
    for config in pipeline_configs:
        if not isinstance(config, PipelineSpec):
            raise TypeError(f"Merge: expected PipelineSpecs, got {type(config).__name__}.")
    if op is not None and not callable(op):
        raise TypeError(f"Merge: op must be a function or None, got {type(op).__name__}.")
    return MergeSpec(pipeline_configs=tuple(pipeline_configs), op=op)


def _members(items: Iterable[Any]) -> Iterable[Any]:
    yield from items


_ONE_FOR_ONE = (OpKind.FUNCTION, OpKind.ASYNC_FUNCTION)


def _check_paths(
    name: str, router: object, paths: Sequence[Sequence[object]], *, batched: bool
) -> None:
    if not callable(router):
        raise ValueError(f"{name}: router must be a function, got {type(router).__name__}.")
    if not paths:
        raise ValueError(f"{name}: there must be at least one path, got none.")
    for number, path in enumerate(paths):
        if not path:
            raise ValueError(
                f"{name}: path {number} is empty. Give it a stage, e.g. Pipe(lambda item: item)."
            )
        for stage in path:
            if not isinstance(stage, StageSpec):
                raise ValueError(
                    f"{name}: path {number} must be made of Pipe, Aggregate, Disaggregate and "
                    f"PathVariants, got {type(stage).__name__}."
                )
            if batched and not (stage.kind in _ONE_FOR_ONE or stage.batched):
                raise ValueError(
                    f"{name}: path {number} must give one list for one list, since batched=True "
                    f"puts the parts of a list together again; {stage.name!r} is of another kind "
                    f"({stage.kind.value}). Do that before or after the path variants."
                )
