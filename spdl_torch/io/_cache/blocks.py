"""Read a large file from a store, block by block."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

from .hashing import hash_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .store import Store

_BLOCK_BYTES = 1 << 20


class CachedBlocks(io.RawIOBase):
    """Reads a file from a store, and from its origin what the store does not have.

    Each block is stored when it is first read, so parts that no process has read are not stored.
    A block that is shorter than the others is the last one; it may be empty.

    open_origin: called when a block is missing; it need not be able to seek.
    """

    def __init__(
        self, store: Store, name: str, stamp: int, open_origin: Callable[[], BinaryIO]
    ) -> None:
        self._store = store
        self._name = name
        self._stamp = stamp
        self._open_origin = open_origin
        self._origin: BinaryIO | None = None
        self._origin_place = 0
        self._place = 0
        self._held: tuple[int, bytes | bytearray] = (-1, b"")

    @staticmethod
    def count(num_bytes: int) -> int:
        """Return the number of blocks that a file of ``num_bytes`` has."""
        return -(-num_bytes // _BLOCK_BYTES)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, counted from the front or from here."""
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation(f"{self._name}: the file's length is not known.")
        self._place = offset + (self._place if whence == io.SEEK_CUR else 0)
        return self._place

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # only memoryviews come
        """Fill the buffer from one block, and return the number of bytes."""
        number, inside = divmod(self._place, _BLOCK_BYTES)
        if self._held[0] != number:
            self._held = number, self._block(number)
        content = memoryview(self._held[1])[inside : inside + len(buffer)]
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)

    def close(self) -> None:
        """Close the origin, if it was opened."""
        if self._origin is not None:
            self._origin.close()
            self._origin = None
        super().close()

    def _block(self, number: int) -> bytes | bytearray:
        key = hash_of(self._name, number)
        kept = self._store.get(key, self._stamp)
        if kept is not None:
            return kept
        content = self._read(number * _BLOCK_BYTES)
        self._store.put(key, self._stamp, [content])
        return content

    def _read(self, first: int) -> bytes:
        """Read a block from the origin."""
        self._go_to(first)
        content = self._take(_BLOCK_BYTES)
        self._origin_place = first + len(content)
        return content

    def _go_to(self, first: int) -> None:
        if self._origin is not None and first < self._origin_place and not self._origin.seekable():
            self._origin.close()
            self._origin = None
        if self._origin is None:
            self._origin, self._origin_place = self._open_origin(), 0
        if first == self._origin_place:
            return
        if self._origin.seekable():
            self._origin.seek(first)
            return
        while self._origin_place < first and (
            passed := self._origin.read(min(_BLOCK_BYTES, first - self._origin_place))
        ):
            self._origin_place += len(passed)

    def _take(self, size: int) -> bytes:
        assert self._origin is not None, "guaranteed by _go_to"
        parts, missing = [], size
        while missing and (part := self._origin.read(missing)):
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
