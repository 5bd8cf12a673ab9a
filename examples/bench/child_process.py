"""Run a module in a child process, follow its progress, watch its memory."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, TYPE_CHECKING, Any

from spdl_torch.scopes import scope

from .memory import tree_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

_SECONDS_BETWEEN_SAMPLES = 0.4
_PART_OF_A_CORE = 0.025
"""For samples: one of a tree of four processes that have imported torch takes 30 to 50 ms, which
two cores would miss."""


class ChildFailure(RuntimeError):
    """The job's process ended without an answer; the message ends with what it printed."""


def answers_of(
    program: str | Path,
    argument: str,
    on_line: Callable[[dict[str, Any]], None],
    limit_seconds: float = float("inf"),
) -> Generator[tuple[dict[str, Any], float | None]]:
    """Run a module, or the file of a path, with that argument; yield its answers as they come, each
    with the peak bytes of the process tree since the one before.

    ``on_line`` is called with every line of progress.

    Cancellation: an exception in the caller's thread, Ctrl-C included, and closing the iterator
    kill the process and all its workers at once; nothing of them is left afterwards. The child is a
    session of its own, so that Ctrl-C reaches only the caller. It ends with this process too, if
    it calls :func:`~bench.reporter.end_with_the_parent`.

    Raises: ChildFailure: the process ended without an answer, or had none within the limit.
    """
    with tempfile.TemporaryFile("w+") as printed, _started(program, argument, printed) as child:
        lines = _follow(child)
        peak: float | None = None
        next_sample = 0.0
        must_end_by = time.monotonic() + limit_seconds
        has_answered = False
        while True:
            if time.monotonic() > must_end_by:
                raise ChildFailure(f"no answer within {limit_seconds:g} s, so it was ended.")
            try:
                line = lines.get(timeout=_SECONDS_BETWEEN_SAMPLES)
            except queue.Empty:
                line = {}
            if line is None:
                if has_answered and child.wait() == 0:
                    return
                raise ChildFailure(_last_words(child, printed))
            if "answer" in line:
                yield line["answer"], peak
                # Sampled again at once: the next answer may come before the next sample is due.
                has_answered, peak, next_sample = True, None, 0.0
            elif line:
                on_line(line)
            if time.monotonic() >= next_sample:
                spent = time.thread_time()
                peak = max(peak or 0.0, tree_bytes(child.pid) or 0.0) or None
                rest = (time.thread_time() - spent) / _PART_OF_A_CORE
                next_sample = time.monotonic() + max(_SECONDS_BETWEEN_SAMPLES, rest)


@scope
def _started(
    program: str | Path, argument: str, printed: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    what = ["-m", program] if isinstance(program, str) else [str(program)]
    command = [sys.executable, *what, argument]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # its lifeline: it ends if this process is killed
        stdout=subprocess.PIPE,
        stderr=printed,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            yield child
        finally:
            _kill(child)


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill the child and its workers, which are its process group."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()


def _follow(child: subprocess.Popen[str]) -> queue.SimpleQueue[dict[str, Any] | None]:
    """Return a queue of the child's lines as they come, then None. The thread ends with the
    child's output."""
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    stdout = child.stdout
    assert stdout is not None, "guaranteed by stdout=PIPE"

    def read() -> None:
        for line in stdout:
            lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, name="child-follow", daemon=True).start()
    return lines


def _last_words(child: subprocess.Popen[str], printed: IO[str]) -> str:
    status = child.wait()
    printed.seek(0)
    return f"the process ended with status {status} and no answer:\n{printed.read().strip()}"
