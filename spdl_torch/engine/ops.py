"""The op of a stage: its kind, its name, and how it is called: on a thread, or by the user's
executor, whose processes are forked before a pipeline has threads. It is timed where it runs."""

from __future__ import annotations

import enum
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future


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


Measured = tuple[Any, int, int]
"""An op's result, its wall time and its thread CPU time in ns; -1 = CPU time was not read."""

EXHAUSTED = object()
"""The result of ``next_of`` after the last output."""


def measure(op: Callable[[Any], Any], item: Any) -> Measured:
    """Return the result of ``op(item)`` and its times."""
    wall, cpu = perf_counter_ns(), thread_time_ns()
    result = op(item)
    return result, perf_counter_ns() - wall, thread_time_ns() - cpu


def unmeasured(op: Callable[[Any], Any], item: Any) -> Measured:
    """Return the result of ``op(item)`` without its times."""
    return op(item), 0, -1


def measure_list(op: Callable[[Any], Any], item: Any) -> Measured:
    """Return all outputs of a generator, as a list."""
    return measure(lambda item: list(op(item)), item)


def next_of(outputs: Any) -> Any:
    """Return a generator's next output: an op, so that it can be measured."""
    return next(outputs, EXHAUSTED)


class ExecutorCalls:
    """The calls of one stage that its executor has not finished."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self.are_refused = False
        """Whether the executor refused one: it is broken or shut down, and would refuse all."""
        self._is_stopped = is_stopped
        # Workers add and discard; cancel(), on any thread, goes through a copy of it.
        self._submitted: set[Future[Measured]] = set()

    def make(self, executor: Executor, measured: Callable[[Any], Measured], item: Any) -> Measured:
        """Make a call there, and wait for it. Raises: what the op raises; CancelledError."""
        try:
            future = executor.submit(measured, item)
        except Exception:
            self.are_refused = True
            raise
        self._submitted.add(future)
        try:
            # The race with a stop: the run closes the outlet before it has the calls cancelled. So
            # either that saw this future, or the outlet is seen closed here.
            if self._is_stopped():
                future.cancel()
            return future.result()
        finally:
            self._submitted.discard(future)

    def cancel(self) -> None:
        """Withdraw those that the executor has not begun. Never blocks."""
        for future in self._submitted.copy():
            future.cancel()


def fork_processes(executor: Executor | None) -> None:
    """Let the executor fork its processes now, on this thread, if that is what it does.

    A ``ProcessPoolExecutor`` forks them all at its first job, which would come from a stage's
    thread. Copies of that thread lack the caller's context and thread-local variables, and free the
    caller's in the child, where a library may wait for ever for threads that are not there.
    """
    module = sys.modules.get("concurrent.futures.process")  # not imported: no such executor
    if module is None or not isinstance(executor, module.ProcessPoolExecutor):
        return
    context: Any = getattr(executor, "_mp_context", None)  # private: without it, forked later
    if context is not None and context.get_start_method() == "fork":
        with suppress(RuntimeError):  # broken or shut down, which the stage reports
            executor.submit(int)
