"""Programs of their own, for checks that need a process that has not used CUDA yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sheet import Sheet


def json_of(sheet: Sheet, name: str, program: str, seconds: float, **environ: str) -> Any:
    """Run a program and return what it prints last; None = it failed, which the sheet says.

    seconds: how long it may take.
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        sheet.fail(name, f"status {done.returncode}: {done.stderr[-200:]!r}")
        return None
    return json.loads(done.stdout.splitlines()[-1])
