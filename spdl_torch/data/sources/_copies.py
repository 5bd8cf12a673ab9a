"""Copies of whole shards in a folder on a local disk."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from time import perf_counter_ns, time_ns
from typing import Any, BinaryIO, TypeAlias

from spdl_torch.scopes import scope

from ...io._cache.folders import NO_ROOM, Descriptor, is_at, locked, open_file, own_folder
from ...locks import lock_held_at_forks

_logger = logging.getLogger("spdl_torch.data")

BUFFER_BYTES = 1 << 18
"""A sample and the next header come in one read of the disk."""

_PIECE_BYTES = 1 << 20
_MayStop: TypeAlias = Callable[[], bool] | None

_counting = lock_held_at_forks()

_COUNTED = ("found", "awaited", "bytes", "wait_ms", "removed")
"""What is counted: the shards that were there when they were to be read, and those that were not;
the bytes downloaded, also ahead, and the time until those were there; the copies that made room for
others."""


class ShardCopies:
    """The copies in a folder, which threads and processes of the machine share.

    A shard is downloaded under the name ``x.part``, which whoever needs it meanwhile waits for, and
    then gets the name ``x-VERSION.tar``: what has that is whole. While copies are larger than
    ``max_bytes``, the one that was opened longest ago is removed.
    """

    def __init__(self, folder: str, max_bytes: float | None) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._is_full = False
        self._counts = Counter[str]()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self._max_bytes)

    def open(
        self,
        url: str,
        name: str,
        num_bytes: int,
        download: Callable[[], BinaryIO],
        may_stop: _MayStop,
    ) -> BinaryIO | None:
        """Open the copy of a shard, downloaded if it is not there; None = the disk is full.

        name: the copy's, of the shard's name and version.
        num_bytes: the shard's; 0 = not known.
        may_stop: whether the download may end at once; None = somebody waits for it.

        Raises: what opening and reading the shard raises; InterruptedError: it has been stopped.
        """
        began_ns = perf_counter_ns()
        try:
            path = os.path.join(own_folder(os.path.join(self.folder, "shards")), name)
            there = file = _opened(path)
            while file is None and not self._is_full:
                self._download(path, download, num_bytes, may_stop)
                file = _opened(path)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            if not self._is_full:
                _logger.warning(
                    "%s: %s: no more shards are kept in %s.", url, error.strerror, self.folder
                )
            self._is_full = True
            return None
        if file is None:
            return None
        os.utime(file, ns=(now := time_ns(), now))  # two may be of one tick otherwise
        if may_stop is None and there is not None:
            self._count(found=1)
        elif may_stop is None:
            self._count(awaited=1, wait_ms=(perf_counter_ns() - began_ns) // 1_000_000)
        return open(os.dup(file), "rb", BUFFER_BYTES)

    def counts(self) -> dict[str, int]:
        """Return what this process has counted, by the names of a loader's ``data``."""
        return {f"shards/{name}": self._counts[name] for name in _COUNTED}

    def remarks(self) -> tuple[str, ...]:
        """Return the line for a report: what was there, what was awaited, and for how long."""
        found, awaited, num_bytes, wait_ms, _ = self.counts().values()
        if not found + awaited:
            return ()
        return (
            f"Of the {found + awaited} times that this process opened a shard in {self.folder}, it "
            f"was there {found} times. {num_bytes / 1e6:.3g} MB were downloaded, and reading "
            f"waited {wait_ms / 1000:.2g} s for that.",
        )

    def _count(self, **new: int) -> None:
        with _counting:
            self._counts.update(new)

    def _download(self, path: str, download: Any, num_bytes: int, may_stop: _MayStop) -> None:
        """Make a copy, or wait until another thread or process has made or left it."""
        unfinished = f"{path.rpartition('-')[0]}.part"
        part = open_file(unfinished)
        with locked(part):
            # Another may have given it the shard's name meanwhile, and it may be gone since.
            if not is_at(unfinished, part) or os.path.exists(path):
                return
            try:
                with self._room(os.path.dirname(path), num_bytes):
                    pass
                with download() as source, open(part, "wb", closefd=False) as copy:
                    copy.truncate()  # what a killed process has left
                    while piece := source.read1(_PIECE_BYTES):
                        if may_stop is not None and may_stop():
                            raise InterruptedError("nobody wants the shard any more.")
                        copy.write(piece)
                size = os.fstat(part).st_size
                with self._room(os.path.dirname(path), size):
                    os.replace(unfinished, path)
            except BaseException:
                os.ftruncate(part, 0)  # nobody else has it: it has not got the name yet
                raise
            self._count(bytes=size)

    @scope
    def _room(self, folder: str, size: int) -> Iterator[None]:
        """Remove copies until one of this size has room, which nobody else takes meanwhile."""
        if self._max_bytes is None:
            yield
            return
        with locked(open_file(os.path.join(folder, "limit"))):
            copies = _copies_in(folder)
            for name in copies:
                if size + sum(copies.values()) <= self._max_bytes:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
                    self._count(removed=1)
                copies[name] = 0
            yield


def _opened(path: str) -> Descriptor | None:
    with contextlib.suppress(FileNotFoundError):
        return open_file(path, 0)
    return None


def _copies_in(folder: str) -> dict[str, int]:
    """Return the sizes of the copies in a folder, that which was opened longest ago first."""
    found = []
    for each in os.scandir(folder):
        if each.name.endswith(".tar"):
            with contextlib.suppress(FileNotFoundError):  # others make room
                found.append((each.stat().st_mtime_ns, each.name, each.stat().st_size))
    return {name: num_bytes for _, name, num_bytes in sorted(found)}
