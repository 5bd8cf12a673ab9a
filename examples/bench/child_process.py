"""Run a measurement in a child process, and watch its memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from .processes import tree_bytes

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS_BETWEEN_SAMPLES = 0.4
_PART_OF_A_CORE = 0.025
"""For samples: one of a tree of four processes that have imported torch takes 30 to 50 ms, which
two cores would miss."""


class ChildFailure(RuntimeError):
    """The job's process ended without an answer; the message ends with what it printed."""


def run_child(program: Path, argument: str, limit_seconds: float) -> tuple[dict[str, Any], float]:
    """Run a program with that argument; return its answer, which is JSON, and the peak bytes of its
    process tree.

    Cancellation: Ctrl-C kills the process and all its workers at once. The child is a session of
    its own, so that Ctrl-C reaches only the caller.
    Raises: ChildFailure: the process ended without an answer, or had none within the limit.
    """
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as printed:
        child = subprocess.Popen(
            [sys.executable, str(program), argument],
            stdin=subprocess.PIPE,  # its lifeline: it ends if this process is killed
            stdout=answer,
            stderr=printed,
            start_new_session=True,
        )
        try:
            peak = _watch(child, limit_seconds)
        finally:
            _kill(child)
        answer.seek(0)
        printed.seek(0)
        if child.returncode == 0 and (text := answer.read()):
            return json.loads(text), peak
        words = f"status {child.returncode} and no answer:\n{printed.read().strip()}"
        raise ChildFailure(f"the process ended with {words}")


def _watch(child: subprocess.Popen[bytes], limit_seconds: float) -> float:
    """Wait for the end; return the peak bytes of the process tree."""
    peak, must_end_by = 0.0, time.monotonic() + limit_seconds
    while child.poll() is None:
        if time.monotonic() > must_end_by:
            raise ChildFailure(f"no answer within {limit_seconds:g} s, so it was ended.")
        spent = time.thread_time()
        peak = max(peak, tree_bytes(child.pid))
        rest = (time.thread_time() - spent) / _PART_OF_A_CORE
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(_SECONDS_BETWEEN_SAMPLES, rest))
    return peak


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its workers, which are its process group."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    with child:  # closes its standard input, and waits
        pass
