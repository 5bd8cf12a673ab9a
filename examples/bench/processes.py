"""CPU time and memory of processes and their descendants, as Linux shows them to others: what is
measured is not disturbed. Elsewhere memory is 0, and CPU time that of workers that have ended."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from spdl_torch.machine.limits import allowed_cores


def tree_pids(root: int) -> list[int]:
    """Return ``root`` and its descendants; ``root`` first."""
    found = [root]
    for pid in found:  # grows while it is walked
        with suppress(OSError):  # it ended
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
    return found


def tree_bytes(root: int) -> float:
    """Return the bytes in use by ``root`` and its descendants; 0 if this system does not say.

    Pages shared within the tree count once: private and shared memory by proportional share (PSS),
    plus the largest set of mapped files, which are the libraries that all of them map. So what
    other processes share with the tree does not make it smaller. A batch that waits in shared
    memory is in nobody's share until somebody maps and reads it; so where the tree's descriptors
    of shared memory hold more than its shares, that counts.
    """
    own = shared = largest_files = 0
    objects: dict[tuple[int, int], int] = {}
    for pid in tree_pids(root):
        with suppress(OSError):  # it ended
            share, status = _bytes_in(pid, "smaps_rollup"), _bytes_in(pid, "status")
            own += share.get("Pss_Anon", 0)
            shared += share.get("Pss_Shmem", 0)
            largest_files = max(largest_files, status.get("RssFile", 0))
            objects |= _shared_objects(pid)
    return float(own + max(shared, sum(objects.values())) + largest_files)


def _bytes_in(pid: int, name: str) -> dict[str, int]:
    """Return what a file of ``Name:  12 kB`` lines says."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{pid}/{name}").read_text(), re.M)
    return {key: 1024 * int(value) for key, value in lines}


def _shared_objects(pid: int) -> dict[tuple[int, int], int]:
    """Return the bytes of the shared memory that a process has open, by device and inode."""
    objects = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                stat = path.stat()
                objects[stat.st_dev, stat.st_ino] = 512 * stat.st_blocks
    return objects


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, to the microsecond, and of the workers that it has
    joined."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def tree_cpu_seconds() -> float:
    """Return the CPU seconds of this process, its living descendants, and those that they have
    waited for."""
    seconds = cpu_seconds()
    for pid in tree_pids(os.getpid())[1:]:
        with suppress(OSError):  # it ended just now: its parent has counted it
            stat = Path(f"/proc/{pid}/stat").read_text()
            ticks = sum(map(int, stat.rpartition(")")[2].split()[11:15]))
            seconds += ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def cpu_seconds_of_others() -> float | None:
    """Return the CPU seconds that other programs have used on our cores since the machine started;
    None where the system does not say. Workers that are not joined yet count as others."""
    cores = {f"cpu{number}" for number in allowed_cores()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    ticks = sum(sum(map(int, line[1:4])) for line in lines if line[0] in cores)  # without idling
    return ticks / os.sysconf("SC_CLK_TCK") - cpu_seconds()
