"""Open the store of a cache, in memory or in a folder on disk, and stamp what is kept there."""

from __future__ import annotations

import os
from typing import Any

from ...engine.threads.shared_state import SharedCounter
from .hashing import hash_of
from .memory import MemoryLimit, memory_folder
from .store import Store
from .training import training_name

_numbers = SharedCounter()


def open_store(
    cache: Any, identity: str, *, max_bytes: int | None, num_numbers: int | None, who: str
) -> Store:
    """Return the store in ``"memory"`` or in a folder, for the samples of one identity.

    It is off where no folder can be made in memory.

    Raises: TypeError, ValueError: the place or the limit does not fit, or others could have written
        there; OSError: the given folder cannot be made.
    """
    if max_bytes is not None and (isinstance(max_bytes, bool) or max_bytes < 1):
        raise ValueError(f"{who}: max_bytes must be >= 1 or None, got {max_bytes!r}.")
    check_cache(cache, who)
    name = f"{hash_of('cache', identity):016x}"
    limit: int | MemoryLimit | None
    if cache == "memory":
        try:
            # The ranks of a training run make the same caches in the same order.
            folder = memory_folder(f"{training_name()}-{next(_numbers)}-{name}")
            limit = MemoryLimit.of_this_machine() if max_bytes is None else max_bytes
        except OSError as error:
            return Store("memory", num_numbers=num_numbers, why_off=str(error))
    else:
        folder, limit = os.path.join(os.fspath(cache), name), max_bytes
    return Store(folder, max_bytes=limit, num_numbers=num_numbers)


def check_cache(cache: Any, who: str) -> None:
    """Check the place of a cache. Raises: TypeError: it is neither "memory" nor a path."""
    if not isinstance(cache, str | os.PathLike):
        raise TypeError(f'{who}: cache must be "memory" or the path of a folder, got {cache!r}.')


def file_stamp(path: str, *parts: int | str) -> int:
    """Return the stamp of a file's current content, from its whole path, size and modification
    time.

    Raises: OSError: it does not exist.
    """
    there = os.stat(path)
    return hash_of(os.path.abspath(path), there.st_size, there.st_mtime_ns, *parts)
