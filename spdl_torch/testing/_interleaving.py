"""Threads that switch between almost any two lines of the user's code."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from time import sleep
from typing import TYPE_CHECKING, Any

from ..scopes import scope
from ._members import is_library, is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_SWITCH_SECONDS = 1e-6
# Python 3.11 crashes when threads share a generator that is traced, and pauses elsewhere show that.
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_GOLDEN = 0x9E3779B1  # Knuth's multiplier: its multiples by 0, 1, 2, ... look random
_PAUSED = 64  # of 256 lines; also the longest pause, in microseconds
_MOST_PAUSES = 2_000
"""The pauses of one block: a fraction of a second, even for a dataset that loops over pixels in
Python."""


@scope
def threads_interleaved() -> Iterator[None]:
    """Make threads that start in the block switch often; afterwards restore how it was.

    A short switch interval alone shows few races: a thread keeps the GIL while it runs short lines.
    So a quarter of the lines of user code, and of Python's modules that it calls, release the GIL,
    by the tracing hook that debuggers use.
    """
    interval, tracer = sys.getswitchinterval(), threading.gettrace()
    sys.setswitchinterval(_SWITCH_SECONDS)
    threading.settrace(_pausing())
    try:
        yield
    finally:
        threading.settrace(tracer)
        sys.setswitchinterval(interval)


def _pausing() -> Callable[[FrameType, str, Any], Any]:
    lines, pauses = itertools.count(), itertools.count()
    is_over = False

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal is_over
        if is_over:
            return None
        # In lockstep, four threads that shuffle a list alike would undo one another's swaps.
        irregular = next(lines) * _GOLDEN >> 16 & 0xFF
        if irregular < _PAUSED:
            is_over = next(pauses) >= _MOST_PAUSES
            sleep(_SWITCH_SECONDS * irregular)
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        if is_over or frame.f_code.co_flags & _GENERATORS:
            return None
        module, caller = str(frame.f_globals.get("__name__")), frame.f_back
        # Python's own modules where user code calls them: tarfile is one of them, the loader not.
        is_called = caller is not None and caller.f_trace is on_line
        return on_line if not is_library(module) or (is_called and not is_ours(module)) else None

    return on_call
