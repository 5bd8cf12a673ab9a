"""The folder of a cache in memory: shared by the processes of a run, gone with the last one.

It stands in a folder of this user alone. Anybody can make names in /dev/shm: where another user has
made this one, the next is tried, in all processes in the same order.

A file on which every process holds a shared lock shows who is alive. The system releases the lock
when a process ends, however it ends, so a folder that nobody holds is a leftover and is removed: by
the last process at its exit or, after a kill, by the next program that makes a cache.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import NamedTuple

from ...machine.limits import Limits
from .own_files import UnsafePlaceError, open_own_file, open_own_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # the store is off there

_SHARED_MEMORY = "/dev/shm"
_ALIVE = "alive"
_NUM_ROOTS = 100
"""The names that are tried."""


class _Held(NamedTuple):
    """A folder that this process holds."""

    folder: str
    file: int
    pid: int


def memory_folder(name: str) -> str:
    """Return the folder of a name in shared memory, made and held until this process ends.

    Processes that give the same name share it. Where there is no /dev/shm, it is on disk, among the
    temporary files.

    Raises: UnsafePlaceError: others have taken all its names; OSError: it cannot be made.
    """
    if fcntl is None:
        return os.path.join(tempfile.gettempdir(), name)  # the store is off, and makes nothing
    root = _root()
    _remove_left_over(root)
    folder = os.path.join(root, name)
    while True:
        held = _hold(folder)
        if held is not None:
            atexit.register(_leave, held)
            return folder


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on all of this user's in-memory caches together."""

    num_bytes: int

    @classmethod
    def of_this_machine(cls) -> MemoryLimit | None:
        """Return half of the memory that is free or that caches hold; None = unknown.

        In a container, its limit counts.
        """
        free = Limits.of_this_machine().memory_bytes
        return None if free is None else cls((free + sum(_held_bytes(_root()).values())) // 2)

    def left_for(self, folder: str) -> int:
        """Return the bytes that a folder may have in all, given what the others hold."""
        root, name = os.path.split(folder)
        held = _held_bytes(root)
        held.pop(name, None)
        return self.num_bytes - sum(held.values())


def _held_bytes(root: str) -> dict[str, int]:
    """Return the bytes of memory that each cache takes, by the names of their folders."""
    held: dict[str, int] = {}
    for entry in os.scandir(root):
        try:
            sizes = [512 * file.stat().st_blocks for file in os.scandir(entry.path)]
        except OSError:  # just being removed
            continue
        held[entry.name] = sum(sizes)
    return held


def _root() -> str:
    """Return the folder of all caches of this user, made if it is not there.

    Raises: UnsafePlaceError: others have taken all its names; OSError.
    """
    place = _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else tempfile.gettempdir()
    name = os.path.join(place, f"spdl_torch-cache-{os.geteuid()}")
    for number in range(_NUM_ROOTS):
        root = f"{name}-{number}" if number else name
        try:
            os.close(open_own_folder(root))
        except UnsafePlaceError:
            if number == _NUM_ROOTS - 1:
                raise
        else:
            break
    return root


def _hold(folder: str) -> _Held | None:
    """Hold a folder, made if it is not there; None = another process has just removed it."""
    path = os.path.join(folder, _ALIVE)
    try:
        own = open_own_folder(folder)
    except FileNotFoundError:
        return None
    try:
        file = open_own_file(own, _ALIVE, path)
    except FileNotFoundError:
        return None
    finally:
        os.close(own)
    fcntl.flock(file, fcntl.LOCK_SH)
    # It may have been removed between opening and holding it: then this is another file.
    if _is_at(path, file):
        return _Held(folder, file, os.getpid())
    os.close(file)
    return None


def _leave(held: _Held) -> None:
    """Remove the folder if no other process holds it. Forked children leave that to their
    parent.
    """
    if held.pid == os.getpid():
        _remove_if_alone(held.folder, held.file)


def _remove_left_over(root: str) -> None:
    for entry in os.scandir(root):
        try:
            file = os.open(os.path.join(entry.path, _ALIVE), os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # just being made, or removed
            continue
        try:
            _remove_if_alone(entry.path, file)
        finally:
            os.close(file)


def _remove_if_alone(folder: str, file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # somebody is alive
    if _is_at(os.path.join(folder, _ALIVE), file):
        shutil.rmtree(folder, ignore_errors=True)


def _is_at(path: str, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except OSError:
        return False
