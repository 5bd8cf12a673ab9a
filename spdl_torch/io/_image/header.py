"""JPEG headers: how large the picture is, and where its EXIF is.

The batch kernel needs every crop box before it starts, and a box needs the picture's size, so the
size is read here from the first bytes (a few microseconds) instead of from a decoded picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Start-of-frame markers; C4, C8 and CC lie between them and are tables.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers that stand alone, with no length after them: TEM, RST0-7 and a repeated SOI.
_JPEG_STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_JPEG_END_OF_IMAGE, _JPEG_START_OF_SCAN = 0xD9, 0xDA
_JPEG_APPLICATION_1 = 0xE1
_MARKER = re.compile(rb"\xff[^\xff]")
_MOST_SEGMENTS = 4096  # before the first scan; those of a profile of colours are 255 at most


def jpeg_size(data: memoryview) -> tuple[int, int] | None:
    """Return height and width of a JPEG, before any EXIF orientation; None for anything else, and
    where the header is damaged or does not give the size: only a codec finds it then.
    """
    if bytes(data[:2]) != b"\xff\xd8":
        return None
    for marker, position in _jpeg_segments(data):
        if marker in _JPEG_FRAMES:
            size = bytes(data[position + 3 : position + 7])
            height, width = int.from_bytes(size[:2], "big"), int.from_bytes(size[2:], "big")
            return (height, width) if height and width and len(size) == 4 else None
    return None


def is_jpeg_without_picture(data: memoryview) -> bool:
    """Return whether the bytes begin as a JPEG's, and its first segments say no size."""
    is_jpeg = bytes(data[:2]) == b"\xff\xd8"
    return is_jpeg and all(marker not in _JPEG_FRAMES for marker, _ in _jpeg_segments(data))


def exif_markers(data: memoryview) -> list[int]:
    """Return the places of the bytes that mark a JPEG's segments for EXIF; [] if it has none."""
    return [place - 1 for marker, place in _jpeg_segments(data) if marker == _JPEG_APPLICATION_1]


def _jpeg_segments(data: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the marker and the place of the length of every segment, up to the first scan."""
    position = 2
    for _ in range(_MOST_SEGMENTS):
        # libjpeg, too, skips garbage between segments, and any number of fill bytes.
        found = _MARKER.search(data, position)
        if found is None:
            return
        position = found.end()
        marker = data[position - 1]
        if marker == _JPEG_END_OF_IMAGE:
            return
        if marker != 0 and marker not in _JPEG_STANDALONE:
            yield marker, position
            if marker == _JPEG_START_OF_SCAN:
                return
            # Of a length that is cut off, too, something: nothing follows it.
            position += max(2, int.from_bytes(data[position : position + 2], "big"))
