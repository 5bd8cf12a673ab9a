"""Run the program in a fresh process, and measure all of it from outside."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plans import ProgramPlan

LOADERS = {"torch": "torch.utils.data", "ours": "spdl_torch"}
"""The one import that users change."""


def run_program(loader: str, plan: ProgramPlan, folder: Path, num_samples: int) -> dict[str, float]:
    """Train by ``plan``, from the start of Python to its exit.

    Returns: ``seconds``, ``cpu_seconds`` of the process and its workers, and what the program says
        itself: ``import_ms``, ``first_batch_ms``.
    Raises: RuntimeError: it failed; the message ends with what it printed.
    """
    settings = {
        "ordinary": plan.ordinary.name,
        "folder": str(folder),
        "num_samples": num_samples,
        **{
            field.name: getattr(plan, field.name)
            for field in dataclasses.fields(plan)
            if field.name != "dataset"
        },
    }
    program = str(Path(__file__).with_name("train.py"))
    command = [sys.executable, program, LOADERS[loader], json.dumps(settings)]
    cpu, start = _children_seconds(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, used = time.perf_counter() - start, _children_seconds() - cpu
    if done.returncode:
        raise RuntimeError(f"{loader}: status {done.returncode}\n{done.stderr}")
    said: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**said, "seconds": seconds, "cpu_seconds": used}


def _children_seconds() -> float:
    """Return the CPU time of all children that were waited for, with those that they waited for."""
    times = os.times()
    return times.children_user + times.children_system
