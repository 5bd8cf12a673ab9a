"""The stacks of busy threads, for the message after somebody waited too long for them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import selectors
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# What is on the way from a thread's start to the user's code: a file, or all files of a folder.
OURS = (
    threading.__file__,
    *(f"{_PACKAGE / layer}{os.sep}" for layer in ("engine", "pipeline")),
    *(f"{_PACKAGE / 'loader' / room}{os.sep}" for room in ("backends", "fetching", "rng")),
    # A worker that has a process to itself is its main thread.
    f"{Path(multiprocessing.__file__).parent}{os.sep}",
)
_CHILD = str(_PACKAGE / "loader" / "backends" / "processes" / "child.py")
# Files in which a thread waits for others of its run, or only watches.
WAITING = {
    str(_PACKAGE / "engine" / "channel.py"),
    str(_PACKAGE / "engine" / "hooks.py"),
    str(_PACKAGE / "machine" / "probes.py"),
    str(_PACKAGE / "observe" / "store" / "writer.py"),
    str(_PACKAGE / "observe" / "trace" / "last_seconds.py"),
}
_MOST_STACKS = 8


def stack_of(thread: threading.Thread) -> str:
    """Return a thread's stack, the innermost call last, without our own frames around the user's.

    "" = the thread waits for others of its run, or has ended.
    """
    return _text_of(thread, _calls_of_all())


def _calls_of_all() -> dict[int, traceback.StackSummary]:
    """Return all stacks, by the ident of the thread.

    faulthandler reads them in one step, while every thread holds still; walking the frames of a
    running thread in Python is not safe (CPython 3.11).
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    calls: dict[int, traceback.StackSummary] = {}
    for block in re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE):
        number = re.match(r"(?:Thread|Current thread) 0x([0-9a-f]+)", block)
        if number is not None:
            found = reversed(
                re.findall(r'^  File "(.*)", line (\d+) in (.*)$', block, re.MULTILINE)
            )
            calls[int(number[1], 16)] = traceback.StackSummary.from_list(
                [traceback.FrameSummary(path, int(line), name) for path, line, name in found]
            )
    return calls


def _text_of(thread: threading.Thread, all_calls: dict[int, traceback.StackSummary]) -> str:
    calls = all_calls.get(thread.ident or 0)
    if not calls or not thread.is_alive():  # another thread may have its ident now
        return ""
    innermost = [call.filename for call in calls[-2:]]  # a Condition waits in threading.py
    if innermost[-1] == threading.__file__:
        innermost.pop()
    if innermost[-1] in WAITING:
        return ""
    if innermost[-1] == selectors.__file__:
        return "  (the event loop waits for its coroutines)"
    # A forked child's stack begins with that of the trainer, which started it.
    bottom = max((n for n, call in enumerate(calls) if call.filename == _CHILD), default=0)
    above = (n for n in range(bottom, len(calls)) if not calls[n].filename.startswith(OURS))
    first = next(above, len(calls) - 1)
    return "".join(traceback.format_list(calls[first:])).rstrip()


def describe_busy(threads: Sequence[threading.Thread]) -> str:
    """Return the names and stacks of the busy threads, as a text."""
    calls = _calls_of_all()
    busy = [(thread.name, stack) for thread in threads if (stack := _text_of(thread, calls))]
    if not busy:
        return "None of its threads is at work."
    names = ", ".join(name for name, _ in busy)
    stacks = [f"{name}:\n{stack}" for name, stack in busy[:_MOST_STACKS]]
    return "\n".join([f"Busy threads: {names}.", *stacks])
