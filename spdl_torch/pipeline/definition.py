"""What a pipeline is made of: frozen, validated, printable. Nothing here runs anything."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from concurrent.futures import Executor

__all__ = ["OpKind", "OutputOrder", "PipelineSpec", "SinkSpec", "SourceSpec", "StageSpec"]

OutputOrder = Literal["completion", "input"]
MaxFailures = int | float | Real


class OpKind(enum.Enum):
    """How a stage's op is called."""

    FUNCTION = "function"  # item -> item
    GENERATOR = "generator"  # item -> many items
    ASYNC_FUNCTION = "async function"
    ASYNC_GENERATOR = "async generator"
    AGGREGATE = "aggregate"  # many items -> one list; keeps a remainder


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Where items come from."""

    iterable: Iterable[Any] | AsyncIterable[Any]
    name: str = "src"

    def __post_init__(self) -> None:
        if not isinstance(self.iterable, Iterable | AsyncIterable) and not hasattr(
            self.iterable, "__getitem__"
        ):
            raise TypeError(
                "add_source: expected an iterable or an async iterable, got "
                f"{type(self.iterable).__name__}. Pass e.g. a list, a generator or a sampler."
            )

    def __str__(self) -> str:
        return f"{self.name}({type(self.iterable).__name__})"


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """Of an aggregate stage."""
    drop_last: bool = False

    def __post_init__(self) -> None:
        _check_positive(f"stage {self.name!r}: concurrency", self.concurrency)
        if self.buffer_size is not None:
            _check_positive(f"stage {self.name!r}: buffer_size", self.buffer_size)
        check_max_failures(self.max_failures, f"stage {self.name!r}")
        if self.output_order not in ("completion", "input"):
            raise ValueError(
                f"stage {self.name!r}: output_order must be 'completion' or 'input', "
                f"got {self.output_order!r}."
            )
        if self.executor is not None and self.is_async:
            raise ValueError(
                f"stage {self.name!r}: executor must be None for an {self.kind.value}, got "
                f"{type(self.executor).__name__}. Async ops run on the stage's own event loop."
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
    def is_adjustable(self) -> bool:
        """Whether its concurrency may change while it runs: not that of coroutines, which share a
        thread, nor of an aggregate, which has a list in its hands.
        """
        return self.kind in (OpKind.FUNCTION, OpKind.GENERATOR)

    def __str__(self) -> str:
        if self.kind is OpKind.AGGREGATE:
            return f"{self.name}(n={self.batch_size}, drop_last={self.drop_last})"
        parts = [f"concurrency={self.concurrency}", f"op={locate(self.op)}"]
        if self.output_order == "input":
            parts.append("output_order='input'")
        if self.executor is not None:
            parts.append(f"executor={type(self.executor).__name__}")
        return f"{self.name}({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Where items wait for the consumer."""

    buffer_size: int = 3

    def __post_init__(self) -> None:
        _check_positive("add_sink: buffer_size", self.buffer_size)

    def __str__(self) -> str:
        return f"sink(buffer_size={self.buffer_size})"


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A whole pipeline; prints one line a stage. Picklable if its ops are."""

    source: SourceSpec
    stages: tuple[StageSpec, ...] = field(default=())
    sink: SinkSpec = field(default_factory=SinkSpec)

    def __str__(self) -> str:
        return "\n".join(["PipelineSpec:", *(f"  {part}" for part in self.parts())])

    def parts(self) -> list[str]:
        """One line for each stage, source and sink included."""
        return [str(self.source), *map(str, self.stages), str(self.sink)]


BURST_BUFFER_SIZE = 256
"""Room where the user gave no ``buffer_size``, while items pass at more than 10,000 a second."""


def default_buffer_size(concurrency: int) -> int:
    """Enough that every thread of the next and of this stage finds an item or room while another
    one is being woken: twice the threads, at least 2. Chosen by ``spdl-torch bench engine``.
    """
    return max(2, 2 * concurrency)


def as_op(op: Any) -> tuple[Callable[[Any], Any], OpKind]:
    """What a user passed to ``pipe`` as something to call with one item, and how."""
    if not callable(op):
        if not hasattr(op, "__getitem__"):
            raise TypeError(
                "pipe: op must be a function, a generator function, an async function or have "
                f"__getitem__, got {type(op).__name__}."
            )
        op = op.__getitem__
    _check_takes_one_argument(op)
    # A callable object is judged by its __call__; partials are seen through.
    target = op.func if isinstance(op, functools.partial) else op
    if not inspect.isroutine(target) and not inspect.isclass(target):
        target = type(target).__call__
    if inspect.isasyncgenfunction(target):
        return op, OpKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(target):
        return op, OpKind.ASYNC_FUNCTION
    if inspect.isgeneratorfunction(target):
        return op, OpKind.GENERATOR
    return op, OpKind.FUNCTION


def name_of(op: Any) -> str:
    """A short, stable name for a stage."""
    if isinstance(op, functools.partial):
        return name_of(op.func)
    if inspect.ismethod(op) and op.__name__ == "__call__":
        return type(op.__self__).__name__
    return getattr(op, "__name__", None) or type(op).__name__


def locate(op: Any) -> str:
    """``decode at train.py:41`` where the source is known, else the name alone."""
    target = op.func if isinstance(op, functools.partial) else op
    code = getattr(inspect.unwrap(target) if callable(target) else target, "__code__", None)
    where = f" at {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
    return f"{name_of(op)}{where}"


def check_max_failures(limit: MaxFailures | None, where: str) -> None:
    """An int is a number of items, any other number a share between 0 and 1."""
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, Real):
        raise TypeError(f"{where}: max_failures must be a number or None, got {limit!r}.")
    if isinstance(limit, int):
        if limit < 0:
            raise ValueError(f"{where}: max_failures must be >= 0, got {limit}.")
    elif not 0 <= float(limit) <= 1:
        raise ValueError(f"{where}: a share in max_failures must be within 0 and 1, got {limit}.")


def _check_positive(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, got {value!r}.")
    if value < 1:
        raise ValueError(f"{what} must be >= 1, got {value}.")


def _check_takes_one_argument(op: Callable[[Any], Any]) -> None:
    try:
        signature = inspect.signature(op)
    except (TypeError, ValueError):
        return  # many built-ins do not tell
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(
            f"pipe: {locate(op)} must take exactly one argument, its signature is {signature}. "
            "Bind the others with functools.partial."
        ) from None
