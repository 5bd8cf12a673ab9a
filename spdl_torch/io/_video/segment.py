"""Whether a Matroska file ends where it says that it does."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from av.container import InputContainer

_HEAD_BYTES = 256
"""The file's header, and the beginning of its segment."""

_HEADER, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"


def ends_with_segment(container: InputContainer) -> bool:
    """Return whether a file ends with its only segment, so that nothing can have been appended.

    False also if that is not to be known at little cost: of files of the user's own, of remote ones
    and of those written without seeking.
    """
    head = _head_of(container)
    if head[:4] != _HEADER:
        return False
    size, place = _size(head, 4)
    place += size
    if head[place : place + 4] != _SEGMENT:
        return False
    size, place = _size(head, place + 4)
    return place + size == container.size


def _head_of(container: InputContainer) -> bytes:
    file: Any = getattr(container.file, "file", None)
    if isinstance(file, io.BytesIO):
        return bytes(file.getbuffer()[:_HEAD_BYTES])
    if file is None and container.name.startswith("file:"):
        with open(container.name.removeprefix("file:"), "rb") as opened:
            return opened.read(_HEAD_BYTES)
    return b""


def _size(head: bytes, place: int) -> tuple[int, int]:
    """Return the size of an element, and where its content begins. The zeros ahead say how many
    bytes the size has."""
    first = head[place] if place < len(head) else 0
    length = 9 - first.bit_length()
    size = int.from_bytes(head[place : place + length], "big")
    return size & (1 << 7 * length) - 1, place + length
