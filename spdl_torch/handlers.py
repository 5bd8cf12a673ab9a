"""What a signal's handler raises: it is for whoever has set the handler, whatever it interrupts."""

from __future__ import annotations

import signal
import sys
from functools import partial
from types import CodeType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

# Without the enums of signal.getsignal, which take ten times as long: a pass ends by an error, too.
_getsignal = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)


def raised_in_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised an error, whatever it interrupted: the code of one
    that is in place is among the error's frames. Their locals are not looked at, as the frames
    would keep what they are let go of later.
    """
    set_ones = (each for each in map(_getsignal, range(1, signal.NSIG)) if callable(each))
    handlers = {*map(_code_of, set_ones)} - {None}
    entry = error.__traceback__ if handlers else None
    while entry is not None and entry.tb_frame.f_code not in handlers:
        entry = entry.tb_next
    return entry is not None


def unless_of_handler(*kinds: type[E]) -> tuple[type[E], ...]:
    """Return what an ``except`` clause is to catch: these kinds, or nothing if a signal's handler
    has raised what is on its way, which is for whoever has set the handler.
    """
    error = sys.exc_info()[1]
    return () if error is not None and raised_in_handler(error) else kinds


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = handler.__call__
    code: CodeType | None = getattr(handler, "__code__", None)  # a method has its function's
    return code
