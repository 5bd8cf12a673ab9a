"""CPU time of this process, of its tree, and of everybody else on its cores."""

from __future__ import annotations

import os
import time
from pathlib import Path

from spdl_torch.machine.limits import allowed_cores

from .memory import tree_pids


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, to the microsecond, and of the workers that it has
    joined."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def tree_cpu_seconds() -> float:
    """Return the CPU seconds of this process, its living descendants, and those that they have
    waited for."""
    if not Path("/proc/self/stat").exists():
        return cpu_seconds()  # without workers that still live
    ticks = 0
    for pid in tree_pids(os.getpid())[1:]:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it ended just now: its parent has counted it
            continue
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return cpu_seconds() + ticks / os.sysconf("SC_CLK_TCK")


class OtherPrograms:
    """Measures, from its creation on, how many of our cores other programs keep busy."""

    def __init__(self) -> None:
        self._start = time.monotonic(), _busy_seconds(), cpu_seconds()

    def cores(self) -> float | None:
        """Cores in use by others on average; None where the system does not say.

        Workers that are not joined yet count as others.
        """
        start_time, busy_before, own_before = self._start
        busy_now = _busy_seconds()
        if busy_before is None or busy_now is None:
            return None
        others = (busy_now - busy_before) - (cpu_seconds() - own_before)
        return max(0.0, others / (time.monotonic() - start_time))


def _busy_seconds() -> float | None:
    """Return the CPU seconds that anybody has used on our cores since the machine started."""
    names = {f"cpu{number}" for number in allowed_cores()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    ticks = sum(sum(map(int, line[1:4])) for line in lines if line[0] in names)  # without idling
    return ticks / os.sysconf("SC_CLK_TCK")
