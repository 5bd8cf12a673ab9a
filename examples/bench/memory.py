"""Memory of a process and all its descendants, read from outside so that they are not disturbed."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from pathlib import Path

_PROC = Path("/proc")


def tree_bytes(pid: int) -> float | None:
    """Return the bytes in use by ``pid`` and its descendants; None if this system does not say.

    On Linux pages shared within the tree count once: private and shared memory by proportional
    share (PSS), plus the largest set of mapped files, which are the libraries that all of them
    map. So what other processes share with the tree does not make it smaller. A batch that waits
    in shared memory is in nobody's share until somebody maps and reads it; so where the tree's
    descriptors of shared memory hold more than its shares, that counts. Elsewhere it is the sum of
    the resident sizes, which counts shared pages once per process.
    """
    if (_PROC / "self" / "smaps_rollup").exists():
        return _linux_bytes(pid)
    return _ps_bytes(pid)


def tree_pids(root: int) -> list[int]:
    """Return ``root`` and its descendants, from ``/proc``; ``root`` first."""
    parents = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            stat = _read(entry / "stat")
            if stat:  # "pid (name, which may hold spaces) state parent ..."
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return descendants(root, parents)


def _linux_bytes(root: int) -> float | None:
    own = shared = largest_files = 0
    objects: dict[tuple[int, int], int] = {}
    for pid in tree_pids(root):
        rollup = _fields(_read(_PROC / str(pid) / "smaps_rollup"))
        status = _fields(_read(_PROC / str(pid) / "status"))
        own += rollup.get("Pss_Anon", 0)
        shared += rollup.get("Pss_Shmem", 0)
        largest_files = max(largest_files, status.get("RssFile", 0))
        objects |= _shared_objects(_PROC / str(pid) / "fd")
    return float(own + max(shared, sum(objects.values())) + largest_files) or None


def _shared_objects(descriptors: Path) -> dict[tuple[int, int], int]:
    """Return the bytes of the shared memory that a process has open, by device and inode."""
    objects = {}
    for path in _entries(descriptors):
        try:
            if os.readlink(path).startswith(("/memfd:", "/dev/shm/")):
                stat = os.stat(path)
                objects[stat.st_dev, stat.st_ino] = 512 * stat.st_blocks
        except OSError:  # closed meanwhile
            continue
    return objects


def _entries(folder: Path) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder)]
    except OSError:  # the process ended
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process ended between the listing and the reading
        return ""


def _fields(text: str) -> dict[str, int]:
    """Parse ``Name:  12 kB`` lines into bytes by name."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


def _ps_bytes(root: int) -> float | None:
    try:
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    rows = [[int(field) for field in line.split()] for line in listing.splitlines()]
    kilobytes = {pid: rss for pid, _, rss in rows}
    tree = descendants(root, {pid: parent for pid, parent, _ in rows})
    return sum(kilobytes.get(pid, 0) for pid in tree) * 1024.0 or None


def descendants(root: int, parents: dict[int, int]) -> list[int]:
    """Return a process and those that it and its children have started, by their parents' ids."""
    children = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    found = [root]
    for pid in found:  # grows while it is walked
        found.extend(children[pid])
    return found
