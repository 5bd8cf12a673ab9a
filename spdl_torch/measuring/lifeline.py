"""End a measuring process when the program that started it ends, in whatever way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading


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
