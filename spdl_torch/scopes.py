"""Contexts written as generators, through which every exception passes as it is.

``contextlib.contextmanager`` puts the traceback of an exception back by assigning it, and an
exception whose class refuses assignments, as a frozen dataclass does, comes out as another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_END = object()


def scope(function: Callable[P, Iterator[T]]) -> Callable[P, _Scope[T]]:
    """Return a function whose result is a context: as ``contextlib.contextmanager`` makes it, for
    any exception.
    """

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> _Scope[T]:
        return _Scope(partial(function, *args, **kwargs))

    return make


class _Scope(AbstractContextManager[T], ContextDecorator):
    """One context, entered once; as a decorator, once a call."""

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin = begin
        self._running: Any = None

    def _recreate_cm(self) -> _Scope[T]:  # ContextDecorator's hook
        return _Scope(self._begin)

    def __enter__(self) -> T:
        self._running = self._begin()
        for value in self._running:
            return value  # type: ignore[no-any-return]  # the generator's
        raise RuntimeError("the context's generator did not yield")

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool | None:
        if error is None:
            if next(self._running, _END) is not _END:
                raise RuntimeError("the context's generator did not stop")
            return False
        try:
            self._running.throw(error)
        except StopIteration as end:  # it has handled the error, unless that is what it raises
            return end is not error
        except BaseException as raised:
            # A generator wraps StopIteration in a RuntimeError.
            is_wrapped = isinstance(error, StopIteration) and raised.__cause__ is error
            if raised is not error and not is_wrapped:
                raise
            # Take the generator's own frames off, if the class lets the traceback be assigned. No
            # function of this module does it, which may be empty: at the interpreter's end.
            try:
                error.__traceback__ = traceback
            except Exception:
                pass  # then they stay
            return False
        raise RuntimeError("the context's generator did not stop after an error")
