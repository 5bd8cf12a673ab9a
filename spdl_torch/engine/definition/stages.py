"""Make the stages of a pipeline by hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .ops import OpKind, as_op, name_of, runs_on_one_thread
from .specs import MaxFailures, OutputOrder, StageSpec

if TYPE_CHECKING:
    from collections.abc import Iterable
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
        on_one_thread=runs_on_one_thread(call),
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


def _members(items: Iterable[Any]) -> Iterable[Any]:
    yield from items
