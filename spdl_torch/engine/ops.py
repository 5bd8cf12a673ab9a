"""The op of a stage: its kind, by which it is called, and its name."""

from __future__ import annotations

import enum
import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable


class OpKind(enum.Enum):
    """The way in which a stage's op is called."""

    FUNCTION = "function"  # item -> item
    GENERATOR = "generator"  # item -> many items
    ASYNC_FUNCTION = "async function"
    ASYNC_GENERATOR = "async generator"
    AGGREGATE = "aggregate"  # many items -> one list; keeps a remainder
    AGGREGATOR = "aggregator"  # the user's own: many items -> one, whenever it decides


def as_op(op: Any) -> tuple[Callable[[Any], Any], OpKind]:
    """Return the argument of ``pipe`` as a callable of one item, and its kind."""
    if not callable(op):
        if not hasattr(op, "__getitem__"):
            raise TypeError(
                "pipe: op must be a function, a generator function, an async function or have "
                f"__getitem__, got {type(op).__name__}."
            )
        op = op.__getitem__
    _check_takes_one_argument(op)
    # The kind of a callable object is that of its __call__, of a partial that of its function.
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


_Op = TypeVar("_Op", bound="Callable[..., Any]")


def on_one_thread(op: _Op) -> _Op:
    """Mark a function whose stages nobody but the user gives several threads."""
    vars(op)["_on_one_thread"] = True
    return op


def runs_on_one_thread(op: Any) -> bool:
    """Return whether the function, or that of a partial or a method, is so marked."""
    target = op.func if isinstance(op, functools.partial) else op
    return bool(getattr(target, "_on_one_thread", False))


def name_of(op: Any) -> str:
    """Return a short, stable name for a stage."""
    if isinstance(op, functools.partial):
        return name_of(op.func)
    if inspect.ismethod(op) and op.__name__ == "__call__":
        return type(op.__self__).__name__
    return getattr(op, "__name__", None) or type(op).__name__


def locate(op: Any) -> str:
    """Return ``decode at train.py:41`` where the source is known, else the name alone."""
    target = op.func if isinstance(op, functools.partial) else op
    code = getattr(inspect.unwrap(target) if callable(target) else target, "__code__", None)
    where = f" at {Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
    return f"{name_of(op)}{where}"


def _check_takes_one_argument(op: Callable[[Any], Any]) -> None:
    try:
        signature = inspect.signature(op)
    except (TypeError, ValueError):
        return  # many built-ins have no signature
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(
            f"pipe: {locate(op)} must take exactly one argument, its signature is {signature}. "
            "Bind the others with functools.partial."
        ) from None
