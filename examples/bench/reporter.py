"""What a measuring process owes the program that started it: reports, as JSON lines on its standard
output, and an end when that program ends, in whatever way.

``{"phase", "total"}`` when a part begins, ``{"done"}`` while it goes on, ``{"answer"}`` at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from typing import TextIO

_SECONDS_BETWEEN_LINES = 0.1


class Reporter:
    """Writes the lines; at most ten a second, so that reporting costs nothing."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines
        self._next_time = 0.0

    def phase(self, name: str, total: int) -> None:
        """Begin a part of ``total`` samples; 0 if there is nothing to count."""
        self.write(phase=name, total=total)

    def done(self, count: int) -> None:
        """Report that ``count`` samples of the part are done."""
        now = time.monotonic()
        if now >= self._next_time:
            self._next_time = now + _SECONDS_BETWEEN_LINES
            self.write(done=count)

    def write(self, **fields: object) -> None:
        """Send one line at once."""
        print(json.dumps(fields), file=self._lines, flush=True)


def end_with_the_parent() -> None:
    """Kill this process when its parent ends: its standard input is a pipe that the parent never
    writes to.

    The pipe's other end closes when the parent is gone, even by ``kill -9``, which no handler in
    the parent could report; then this process and its workers are killed, so that none of them
    keeps a core busy. Does nothing in a process that leads no session of its own: that one was
    started by hand.
    """
    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():
        threading.Thread(target=_wait_and_kill, name="lifeline", daemon=True).start()


def _wait_and_kill() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os.killpg(0, signal.SIGKILL)
