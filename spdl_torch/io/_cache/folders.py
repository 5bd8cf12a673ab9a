"""Folders that no other user can have written, held by the processes that use them.

What a cache reads may run code. So a folder is checked before anything in it is opened: in one of
mode 0700 that is ours, and no link, nobody else can put a file.

A file on which every process holds a shared lock shows that a folder is in use. The system releases
the lock when a process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator

from ...handlers import unless_of_handler
from ...scopes import scope

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # stores are off there

HAS_LOCKS = fcntl is not None
"""Whether a store can be used on this system."""

DATA, INDEX = "data", "index"
"""The files of the store in a folder."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a full disk."""

_ALIVE = "alive"


class Descriptor(int):
    """An open file, closed when nobody has it any more."""

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self)


class UnsafePlaceError(ValueError):
    """Somebody else may have written what is there."""


def hash_of(*parts: int | str) -> int:
    """Return 63 bits that depend on every part, the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def file_stamp(path: str, *parts: int | str) -> int:
    """Return the hash of a file's current content, from its whole path, size and modification
    time.

    Raises: OSError: it does not exist.
    """
    there = os.stat(path)
    return hash_of(os.path.abspath(path), there.st_size, there.st_mtime_ns, *parts)


def hold(folder: str) -> Descriptor:
    """Hold a folder, made if it is not there, as long as the file that this returns is open.

    Raises: UnsafePlaceError: it is not this user's alone; OSError.
    """
    path = os.path.join(folder, _ALIVE)
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)  # what is missing now stays so
    while True:
        try:
            file = open_file(os.path.join(own_folder(folder), _ALIVE))
        except FileNotFoundError:  # another process has just removed the folder
            continue
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_SH)
        # It may have been removed between opening and holding it: then this is another file.
        if is_at(path, file):
            os.utime(file)  # whoever makes room removes what was used longest ago
            return file


@scope
def locked(file: int) -> Iterator[None]:
    """Exclude all others from a file. Each has to open it anew, threads too: a lock belongs to all
    who share an open file.
    """
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile has it open, too


@scope
def byte_locked(file: int, place: int) -> Iterator[None]:
    """Exclude other processes from a byte of a file, where the system can do so; no threads."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
    except unless_of_handler(OSError):  # a TimeoutError is an OSError
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


def remove_unused(folder: str) -> bool:
    """Remove a folder that no process holds, and return whether it is gone."""
    try:
        file = open_file(os.path.join(folder, _ALIVE), 0)
    except unless_of_handler(OSError):  # it is just being made, or removed
        return False
    return remove_if_alone(folder, file)


def remove_if_alone(folder: str, file: int) -> bool:
    """Remove a folder that nobody holds but by this open file, and return whether it is gone."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except unless_of_handler(OSError):
        return False
    if is_at(os.path.join(folder, _ALIVE), file):
        shutil.rmtree(folder, ignore_errors=True)
    return True


def last_use(folder: str) -> float:
    """Return the time at which a process last began to use a folder."""
    there = _stat(folder, _ALIVE)
    return float("inf") if there is None else there.st_mtime


def bytes_taken(folder: str) -> int:
    """Return the bytes of the store in a folder; 0 = there is none."""
    found = (_stat(folder, name) for name in (DATA, INDEX))
    return sum(there.st_size for there in found if there is not None)


def _stat(folder: str, name: str) -> os.stat_result | None:
    try:
        return os.stat(os.path.join(folder, name))
    except unless_of_handler(OSError):
        return None


def own_folder(path: str) -> str:
    """Return the path of a folder of this user alone, made with mode 0700 if it is not there.

    Raises: UnsafePlaceError: it is a link, another user's, or open to others; OSError.
    """
    if parent := os.path.dirname(path):
        os.makedirs(parent, mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    there = os.lstat(path)
    mode, why = stat.S_IMODE(there.st_mode), ""
    if not stat.S_ISDIR(there.st_mode):
        why, advice = "it is a link or a file, not a folder", "Remove it"
    elif there.st_uid != os.geteuid():
        why, advice = "it belongs to another user", "Give a folder of your own"
    elif mode & (stat.S_IRWXG | stat.S_IRWXO):
        why = f"it is open to others (mode {mode:04o})"
        advice = "Remove it, or give a folder on a file system that keeps permissions"
    if why:
        raise UnsafePlaceError(
            f"cache: {path} is refused: {why}, and what others write there could run code here. "
            f"{advice}."
        )
    if mode != 0o700:  # the umask took more than others' bits
        os.chmod(path, 0o700)
    return path


def bytes_taken_in(place: str) -> int:
    """Return the bytes of all stores in the folders of a place."""
    return sum(bytes_taken(entry.path) for entry in os.scandir(place))


def open_file(path: str, flags: int = os.O_CREAT) -> Descriptor:
    """Open a file to read and write, made with mode 0600 if it is not there."""
    return Descriptor(os.open(path, flags | os.O_RDWR | os.O_CLOEXEC, 0o600))


def is_at(path: str, file: int) -> bool:
    """Return whether an open file has this name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except unless_of_handler(OSError):
        return False
