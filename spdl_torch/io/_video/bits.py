"""The beginnings of encoded pictures: their units, and the bits in these."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def units(content: bytes, description: bytes | None, length_at: int | None) -> Iterator[bytes]:
    """Yield the beginnings of H.264's and HEVC's units, at least two bytes each.

    description: of the codec, in the container.
    length_at: where that has the size of the lengths before units.
    """
    size = None if length_at is None else _length_bytes(description, length_at)
    if size is None or content[:4] == b"\0\0\0\1":
        for unit in content.split(b"\0\0\1")[1:]:
            if len(unit) >= 2:
                yield unit
        return
    place = 0
    while place + size + 2 <= len(content):
        end = place + size + int.from_bytes(content[place : place + size], "big")
        yield content[place + size : end]
        place = max(end, place + size + 1)


def _length_bytes(description: bytes | None, length_at: int) -> int | None:
    """Return the bytes of the lengths before units; None where a start code is before each."""
    if description is None or len(description) <= length_at or description[0] != 1:
        return None
    return (description[length_at] & 3) + 1


class Bits:
    """Reads the bits of a few bytes; zeros after their end."""

    def __init__(self, content: bytes) -> None:
        self._value = int.from_bytes(content, "big")
        self._num_left = 8 * len(content)

    def take(self, number: int) -> int:
        """Return the next bits as a number."""
        self._num_left -= number
        shifted = self._value >> self._num_left if self._num_left >= 0 else 0
        return shifted & ((1 << number) - 1)
