"""Paths and URLs whose contents are kept on this machine."""

from __future__ import annotations

import atexit
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, overload

if TYPE_CHECKING:
    from collections.abc import Callable


class ReadsCached(Protocol):
    """The part of :class:`spdl_torch.io.Reader` that a path needs."""

    def __call__(self, path: str) -> Any:
        """Return the content of a path, from the cache or from where it is."""

    async def aread(self, path: str) -> Any:
        """Return the same on an event loop."""


class CachedPath(str):
    """A path or URL like any other ``str``, which the functions of ``spdl_torch.io`` read through a
    cache; others open what it names.
    """

    __slots__ = ("_reader",)

    _reader: ReadsCached

    def __new__(cls, path: str, reader: ReadsCached) -> CachedPath:
        """Make one from a plain path."""
        made = super().__new__(cls, path)
        made._reader = reader
        return made

    def content(self) -> bytes:
        """Return the whole content. Raises: OSError, and whatever else the reader raises."""
        content: bytes = self._reader(str(self))
        return content

    async def acontent(self) -> bytes:
        """Return the whole content, on an event loop."""
        content: bytes = await self._reader.aread(str(self))
        return content

    def __reduce__(self) -> tuple[Callable[..., CachedPath], tuple[str, bytes]]:
        return _restored, (str(self), pickle.dumps(self._reader))


class CachedPaths(Sequence[str]):
    """A list of paths, each of which becomes a :class:`CachedPath` when it is taken."""

    def __init__(self, paths: Sequence[str], reader: ReadsCached) -> None:
        self._paths = paths
        self._reader = reader

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[str]: ...
    def __getitem__(self, place: int | slice) -> str | Sequence[str]:
        """Return the path at a place, or a list of them."""
        if isinstance(place, slice):
            return CachedPaths(self._paths[place], self._reader)
        return CachedPath(self._paths[place], self._reader)


def _restored(path: str, reader: bytes) -> CachedPath:
    return CachedPath(path, _reader_of(reader))


@lru_cache(maxsize=8)
def _reader_of(content: bytes) -> ReadsCached:
    """Return one reader for all paths that come from another process: it opens the cache once."""
    reader: ReadsCached = pickle.loads(content)
    return reader


# The cache's files must be closed before the interpreter tears modules down.
atexit.register(_reader_of.cache_clear)
