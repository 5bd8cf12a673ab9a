"""The resources that this process may use, given its container and other local ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import monotonic

_ROOT = Path("/")
_RANKS = "LOCAL_WORLD_SIZE"  # set by torchrun
_KEPT_SECONDS = 5.0

_UNLIMITED_BYTES = 1 << 60
"""The size from which a limit means no limit: cgroups v1 writes the largest page-aligned number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The resources of this machine, for all ranks that run on it together."""

    num_cores: float
    """The cores that the process may use; 1.5 in a container limited to one and a half."""
    memory_bytes: int | None = None
    """The memory available without swapping; None = unknown."""
    local_world_size: int = 1
    """Ranks that share cores and memory."""

    @property
    def own_cores(self) -> float:
        """The part of the cores that is this rank's."""
        return self.num_cores / self.local_world_size

    def own_memory(self, share: float) -> int | None:
        """Return a share, 0 to 1, of the memory that is this rank's, in bytes; None = unknown."""
        memory = self.memory_bytes
        return None if memory is None else int(memory * share / self.local_world_size)

    @classmethod
    def of_this_machine(cls) -> Limits:
        """Read the limits from the system.

        Cores: those that this process may run on, and no more than its cgroup's CPU quota.
        Memory: what the machine has available, and no more than its cgroup has left; cached files
        do not count as used. Ranks: torchrun's variable ``LOCAL_WORLD_SIZE``, else 1.
        """
        return read_limits(_ROOT, len(allowed_cores()), os.environ)


def usable_cores() -> float:
    """Return the number of cores that this process may use: those that it may run on, no more than
    its cgroup's CPU quota, divided among the ranks on this machine. Not always a whole number.

    Whoever watches asks often, and the files of cgroups take long to read: a quota that was changed
    is noticed within some seconds.
    """
    asked = _ROOT, len(allowed_cores()), os.environ.get(_RANKS)
    return _own_cores(asked, monotonic() // _KEPT_SECONDS)


@lru_cache(maxsize=1)
def _own_cores(*_asked_and_when: object) -> float:
    return Limits.of_this_machine().own_cores


def whole_cores() -> int:
    """Return how many workers these cores keep busy, at least one."""
    return max(1, int(usable_cores()))


def read_limits(root: Path, num_cores: int, environ: Mapping[str, str]) -> Limits:
    """Read the limits from the files below ``root``, which is ``/`` except in tests."""
    folders = list(_cgroups(root))
    quotas = [_quota(folder) for folder in folders]
    memory = [_memory_available(root)]
    memory += [_memory_left(folder, *names) for folder in folders for names in _MEMORY_FILES]
    ranks = environ.get(_RANKS, "")
    return Limits(
        num_cores=min([float(num_cores), *(quota for quota in quotas if quota is not None)]),
        memory_bytes=min((left for left in memory if left is not None), default=None),
        local_world_size=max(1, int(ranks)) if ranks.isdecimal() else 1,
    )


_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""In versions 2 and 1 of cgroups, which share no folder: the limit, the usage, the cached files."""


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups and of their parents, whose limits apply too.

    A container may see its own cgroup as the outermost one while its name is given as seen from
    outside; folders that are not there have no files, and so no limits.
    """
    mount = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if not controllers:
            tops = [mount, mount / "unified"]
        elif {"cpu", "memory"} & {*controllers.split(",")}:
            tops = [mount / controllers]
        else:
            continue
        inner = Path(name.lstrip("/"))
        for top in tops:
            for part in (inner, *inner.parents):
                yield top / part


def _quota(folder: Path) -> float | None:
    """Return the CPU quota of a cgroup in cores (CPU time over wall time), if any."""
    names = "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"  # the first alone, or the others
    fields = " ".join(text_of(folder / name) for name in names).split()
    quota, period = (*fields, "", "")[:2]  # no quota: "max" or "-1"
    if not quota.isdecimal() or not period.isdecimal() or not int(quota) or not int(period):
        return None
    return int(quota) / int(period)


def _memory_left(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Return the bytes that a cgroup may still take, counting cached files as free."""
    limit, usage = (text_of(folder / name).strip() for name in (limit_name, usage_name))
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _UNLIMITED_BYTES:
        return None
    cache = _field(folder / "memory.stat", cache_name) or 0
    return max(0, int(limit) - int(usage) + cache)


def _memory_available(root: Path) -> int | None:
    """Return the machine's available memory in bytes, without swapping."""
    kibibytes = _field(root / "proc/meminfo", "MemAvailable:")
    if kibibytes is not None:
        return kibibytes * 1024
    # Not Linux: the free memory or, where that is unknown, half of the installed memory.
    for name, share in (("SC_AVPHYS_PAGES", 1), ("SC_PHYS_PAGES", 2)):
        try:
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") // share
        except (AttributeError, OSError, ValueError):
            continue  # not on this system
    return None


def _field(path: Path, name: str) -> int | None:
    """Return the number that follows a name at the beginning of a line."""
    for line in text_of(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def text_of(path: Path) -> str:
    """Return what the system says in a file; "" = it has that elsewhere, or not at all."""
    try:
        return path.read_text()
    except OSError:
        return ""


def allowed_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on, those of its main thread."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(os.getpid()))
    return frozenset(range(os.cpu_count() or 1))
