"""The nodes of a machine with several sockets: the cores and the memory that belong together."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from .limits import text_of
from .starting import start

if TYPE_CHECKING:
    from collections.abc import Callable

    Cores = frozenset[int]

_ROOT = Path("/")
_NODES = Path("sys/devices/system/node")
_DEVICES = Path("sys/bus/pci/devices")


def nodes(root: Path | None = None) -> dict[int, Cores]:
    """Return the cores of each node that has cores and memory, by its number; {} where the system
    does not say. A node without memory has none that would be near, one without cores nobody who
    would be.

    root: of the system's files; ``/`` except in tests.
    """
    folder = (root or _ROOT) / _NODES
    numbers = _listed(folder / "online")
    if (folder / "has_memory").exists():
        numbers &= _listed(folder / "has_memory")
    found = {number: _listed(folder / f"node{number}" / "cpulist") for number in sorted(numbers)}
    return {number: cores for number, cores in found.items() if cores}


def node_of(pci_address: str, root: Path | None = None) -> int | None:
    """Return the number of the node that a device is attached to, by its address such as
    ``0000:1a:00.0``; None = unknown, as in most virtual machines.
    """
    number = text_of((root or _ROOT) / _DEVICES / pci_address / "numa_node").strip()
    return int(number) if number.isdecimal() else None  # unknown: -1


def bind(cores: Cores) -> bool:
    """Let the calling thread, and those that it will start, run only on those of these cores on
    which it may run now; return False if there are none, or the system refuses.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, cores & os.sched_getaffinity(0))
    except OSError:
        return False
    return True


def may_bind() -> bool:
    """Return whether the system lets threads be bound; a sandbox may not. The calling thread is
    bound to where it may run anyway.
    """
    return hasattr(os, "sched_getaffinity") and bind(frozenset(os.sched_getaffinity(0)))


def call_near(cores: Cores, work: Callable[[], None]) -> None:
    """Call a function on these cores, if there are any, and return when it has: memory is where the
    thread is that first writes to it.

    The calling thread may be the user's, so it is not moved: unless it is there, another one works.
    """
    if not cores or os.sched_getaffinity(0) <= cores:
        work()
        return

    def run() -> None:
        bind(cores)
        work()

    thread = threading.Thread(target=run, name="spdl-near", daemon=True)
    try:
        start(thread)
    except RuntimeError:  # the system has no more threads, or the interpreter exits
        work()
        return
    thread.join()


def _listed(path: Path) -> Cores:
    """Return the numbers that a file lists, as in ``0-3,8``; none if it is not there."""
    found = set[int]()
    for part in text_of(path).strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
