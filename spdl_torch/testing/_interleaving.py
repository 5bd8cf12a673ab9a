"""Threads that switch between almost any two steps of the user's code."""

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
_PAUSED = 64  # of 256 steps; also the longest pause, in microseconds
_MOST_PAUSES = 4_000
"""The pauses of one block: a fraction of a second, even for a dataset that loops over pixels in
Python."""


@scope
def threads_interleaved() -> Iterator[None]:
    """Make threads that start in the block switch often; afterwards restore how it was.

    A short switch interval alone shows few races: a thread keeps the GIL while it runs short lines.
    So a quarter of the steps of user code, and of Python's modules that it calls, release the GIL,
    by the tracing hook that debuggers use. A step is a bytecode: a buffer may be written and read
    in one line.
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
    steps, pauses = itertools.count(), itertools.count()
    is_over = False

    def on_step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal is_over
        if is_over:
            return None
        # In lockstep, four threads that shuffle a list alike would undo one another's swaps.
        irregular = next(steps) * _GOLDEN >> 16 & 0xFF
        if irregular < _PAUSED:
            is_over = next(pauses) >= _MOST_PAUSES
            sleep(_SWITCH_SECONDS * irregular)
        return on_step

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        if is_over or frame.f_code.co_flags & _GENERATORS:
            return None
        module, caller = str(frame.f_globals.get("__name__")), frame.f_back
        # Python's own modules where user code calls them: tarfile is one of them, the loader not.
        is_called = caller is not None and caller.f_trace is on_step
        if is_library(module) and (not is_called or is_ours(module)):
            return None
        frame.f_trace_opcodes = True
        return on_step

    return on_call
