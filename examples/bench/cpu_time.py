"""CPU time of this process and of everybody else on its cores."""

from __future__ import annotations

import os
import time
from pathlib import Path

from spdl_torch.machine.limits import allowed_cores


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the workers that it has joined."""
    return sum(os.times()[:4])


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
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return None
    ticks = 0
    for line in lines:
        name, *fields = line.split()
        if name in names:
            user, nice, system = map(int, fields[:3])
            ticks += user + nice + system
    return ticks / os.sysconf("SC_CLK_TCK")
