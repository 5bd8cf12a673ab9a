"""Check how programs end while a loader sends batches: in time, with their own status, silently.

Each program is a process of its own. The kernels that it has launched take some seconds; only CUDA
itself waits for them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .sheet import Sheet

MOST_SECONDS = 12.0
_PATIENCE_SECONDS = 60.0

PRELUDE = """
import os, signal, sys, time
import torch
from spdl_torch import DataLoader
if __name__ == "__main__":
    loader = DataLoader(range(10**6), batch_size=256, num_workers=4, device="cuda", {options})
    batches = iter(loader)
    for _ in range(12):  # as far ahead of the device as a loop can be
        batch = next(batches)
        torch.cuda._sleep(200_000_000)
    print("READY", flush=True)
"""


class Ending(NamedTuple):
    """A way in which a program ends."""

    name: str
    code: str
    """The code that it runs once it has batches."""
    status: int
    options: str = 'isolation="thread"'
    signal: int | None = None
    """The signal that it is sent then."""
    is_quiet: bool = True
    """Whether it must write nothing to standard error."""


ENDINGS: tuple[Ending, ...] = (
    Ending("end_of_program", "", 0),
    Ending("sys_exit", "sys.exit(3)", 3),
    Ending("exception", "raise KeyError('mine')", 1, is_quiet=False),
    Ending(
        *("ctrl_c", "while True:\n    batch = next(batches)", -signal.SIGINT),
        signal=signal.SIGINT,
        is_quiet=False,
    ),
    Ending("persistent_workers", "", 0, 'isolation="thread", persistent_workers=True'),
    Ending("processes", "", 0, 'isolation="process"'),
)


def check_exits(sheet: Sheet, endings: Sequence[Ending] = ENDINGS, prelude: str = PRELUDE) -> None:
    """Run each, and measure the time from its last batch to its end."""
    for ending in endings:
        status, seconds, complaint = _ended(ending, prelude)
        name = f"exit_{ending.name}"
        if status is None:
            sheet.fail(name, f"still running after {_PATIENCE_SECONDS:g} s")
        elif status != ending.status:
            sheet.fail(name, f"status {status}, not {ending.status}: {complaint[-200:]!r}")
        elif "terminate called" in complaint or (ending.is_quiet and complaint):
            sheet.fail(name, f"it wrote {complaint[-200:]!r}")
        else:
            sheet.at_most(f"{name}_seconds", seconds, MOST_SECONDS)


def _ended(ending: Ending, prelude: str) -> tuple[int | None, float, str]:
    """Return the program's exit status (None: it had to be killed), how long it took to end, and
    what it wrote to standard error.
    """
    code = prelude.format(options=ending.options) + textwrap.indent(ending.code, "    ") + "\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert process.stdout is not None, "guaranteed by PIPE"
    with process:
        process.stdout.readline()  # READY, or the end of output if it failed
        started = time.monotonic()
        if ending.signal is not None and process.poll() is None:
            process.send_signal(ending.signal)
        try:
            _, complaint = process.communicate(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return None, _PATIENCE_SECONDS, ""
        return process.returncode, time.monotonic() - started, complaint
