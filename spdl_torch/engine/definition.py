"""The parts of a pipeline: frozen, validated, printable. Nothing here runs anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import FunctionType, GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from ..checks import check_whole
from ..shown_text import printable_line
from .ops import OpKind, as_op, locate, name_of, runs_on_one_thread

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from .hooks import HookFactory, Reports
    from .run import Run
    from .stage_hooks import StatsQueue

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

OutputOrder = Literal["completion", "input"]
MaxFailures = int | float | Real


def _runs_once(source: Any) -> bool:
    """Return whether a source is an iterator of Python's, such as a generator, ``map`` or a file:
    an ``__iter__`` of somebody's own may begin anew."""
    kind = type(source)
    name = "__anext__" if hasattr(kind, "__anext__") else "__next__"
    begin = getattr(kind, name.replace("next", "iter"), None)
    return hasattr(kind, name) and not isinstance(begin, FunctionType)


@dataclass(frozen=True)
class SourceSpec:
    """The origin of the items."""

    source: Iterable[Any] | AsyncIterable[Any] = field(repr=False)  # it may be long
    continuous: bool = False
    """Whether it is iterated again and again: one run over all epochs."""
    name: str = "src"

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable_line(self.name))
        if not isinstance(self.source, Iterable | AsyncIterable) and not hasattr(
            self.source, "__getitem__"
        ):
            raise TypeError(
                "add_source: expected an iterable or an async iterable, got "
                f"{type(self.source).__name__}. Pass e.g. a list, a generator or a sampler."
            )
        if self.continuous and _runs_once(self.source):
            raise ValueError(
                "add_source: continuous=True iterates the source once for each epoch, and a "
                f"{type(self.source).__name__} can be iterated only once. Pass an object whose "
                "__iter__ begins anew."
            )

    def __str__(self) -> str:
        continuous = ", continuous" if self.continuous else ""
        return f"{self.name}({type(self.source).__name__}{continuous})"


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One step of the pipeline: an op and how many calls of it run at once."""

    name: str
    op: Callable[[Any], Any]
    kind: OpKind
    concurrency: int = 1
    executor: Executor | None = None
    output_order: OutputOrder = "completion"
    max_failures: MaxFailures | None = None
    """None: the limit of the whole pipeline."""
    buffer_size: int | None = None
    """Items that may wait after this stage; None: ``default_buffer_size(concurrency)``."""
    batch_size: int = 0
    """The length of an aggregate stage's lists."""
    drop_last: bool = False
    on_one_thread: bool = False
    """Whether its concurrency stays, whoever tunes the pipeline: that of a transfer to a device."""

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable_line(self.name))
        check_whole(f"stage {self.name!r}", concurrency=self.concurrency)
        check_whole(f"stage {self.name!r}", buffer_size=self.buffer_size, optional=True)
        check_max_failures(self.max_failures, f"stage {self.name!r}")
        if self.output_order not in ("completion", "input"):
            raise ValueError(
                f"stage {self.name!r}: output_order must be 'completion' or 'input', "
                f"got {self.output_order!r}."
            )
        if self.concurrency > 1 and self.is_grouping:
            raise ValueError(
                f"stage {self.name!r}: concurrency must be 1 for an {self.kind.value}, got "
                f"{self.concurrency}. It keeps items, or their order, from one call to the next."
            )
        if self.executor is not None and self.is_async:
            raise ValueError(
                f"stage {self.name!r}: executor must be None for an {self.kind.value}, got "
                f"{type(self.executor).__name__}. Async ops run on the event loop of the pipeline."
            )
        if self.kind is OpKind.ASYNC_GENERATOR and self.output_order == "input":
            raise ValueError(
                f"stage {self.name!r}: output_order='input' does not go with an async generator. "
                "Use an async function that returns a list, then disaggregate()."
            )

    @property
    def is_async(self) -> bool:
        """Whether the op runs on an event loop."""
        return self.kind in (OpKind.ASYNC_FUNCTION, OpKind.ASYNC_GENERATOR)

    @property
    def is_grouping(self) -> bool:
        """Whether it makes one item of several, and so keeps some from one call to the next."""
        return self.kind in (OpKind.AGGREGATE, OpKind.AGGREGATOR)

    @property
    def is_adjustable(self) -> bool:
        """Whether its concurrency may change while it runs: that of threads of its own, whose
        number does not affect what they pass on. Not that of coroutines, which share one thread, of
        an aggregate, which holds an unfinished list, and of a transfer.
        """
        if self.on_one_thread or self.executor is not None:
            return False
        if self.concurrency > 1:
            return self.kind in (OpKind.FUNCTION, OpKind.GENERATOR)
        return self.kind is OpKind.FUNCTION and self.output_order == "input"

    def __str__(self) -> str:
        if self.kind is OpKind.AGGREGATE:
            return f"{self.name}(n={self.batch_size}, drop_last={self.drop_last})"
        if self.kind is OpKind.AGGREGATOR:
            return f"{self.name}(drop_last={self.drop_last})"
        parts = [f"concurrency={self.concurrency}", f"op={locate(self.op)}"]
        if self.output_order == "input":
            parts.append("output_order='input'")
        if self.executor is not None:
            parts.append(f"executor={type(self.executor).__name__}")
        return f"{self.name}({', '.join(parts)})"


@dataclass(frozen=True)
class SinkSpec:
    """The place where items wait for the consumer."""

    buffer_size: int = 3

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)

    def __post_init__(self) -> None:
        check_whole("add_sink", buffer_size=self.buffer_size)

    def __str__(self) -> str:
        return f"sink(buffer_size={self.buffer_size})"


@dataclass(frozen=True)
class PipelineSpec(Generic[T_co]):
    """A whole pipeline; prints one line a stage. Picklable if its ops are."""

    src: SourceSpec
    pipes: Sequence[StageSpec]
    sink: SinkSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "pipes", tuple(self.pipes))

    def __str__(self) -> str:
        return "\n".join(["PipelineSpec:", *(f"  {part}" for part in self.parts())])

    def parts(self) -> list[str]:
        """Return a line for each stage, source and sink included."""
        return [str(self.src), *map(str, self.pipes), str(self.sink)]


BURST_BUFFER_SIZE = 256
"""Capacity of a queue without ``buffer_size`` while more than 10,000 items a second pass."""


def default_buffer_size(concurrency: int) -> int:
    """Return twice the threads, at least 2: enough that each thread of this stage and of the next
    finds an item or room while another is being woken, by ``python examples/bench engine``.
    """
    return max(2, 2 * concurrency)


def check_max_failures(limit: MaxFailures | None, where: str) -> None:
    """Check a limit: an int counts items, another number is a share from 0 to 1; -1 = no limit."""
    if limit is None or limit == -1:
        return
    if isinstance(limit, bool) or not isinstance(limit, Real):
        raise TypeError(f"{where}: max_failures must be a number or None, got {limit!r}.")
    if isinstance(limit, Integral):
        if int(limit) < 0:
            raise ValueError(
                f"{where}: max_failures must be >= 0, or -1 for no limit, got {limit}."
            )
    elif not 0 <= float(limit) <= 1:
        raise ValueError(f"{where}: a share in max_failures must be between 0 and 1, got {limit}.")


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
    if type(input) is Collate:  # a subclass may combine the items in another way
        input = input.n
    if isinstance(input, Aggregator):
        return StageSpec(
            name=f"aggregate({type(input).__name__})",
            op=input.accumulate,
            kind=OpKind.AGGREGATOR,
            drop_last=drop_last,
        )
    check_whole("aggregate", n=input)
    return StageSpec(
        name=f"aggregate({input})",
        op=list,
        kind=OpKind.AGGREGATE,
        batch_size=input,
        drop_last=drop_last,
    )


def Disaggregate() -> StageSpec:
    """Return a stage that passes the members of each list on one by one, in order."""
    return StageSpec(name="disaggregate", op=iter, kind=OpKind.GENERATOR, output_order="input")


class Tuner(Protocol):
    """Tunes one run after the other; each starts from the previous result."""

    def attach(self, run: Run) -> Reports:
        """Attach to a new run, none of whose threads exists yet.

        The result is called once in every ``interval``, on the run's reporter thread, and a last
        time at the end of the run.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of ``PipelineBuilder.build``, which says what they mean."""

    num_threads: int | None = None
    max_failures: MaxFailures | None = None
    report_stats_interval: float | None = None
    queue_class: Callable[..., StatsQueue] | None = None
    task_hook_factory: HookFactory | None = None
    stage_id: int = 0
    stats: bool = True
    tuner: Tuner | None = None

    def __post_init__(self) -> None:
        check_max_failures(self.max_failures, "build")
