"""Image headers: which format the bytes are in and how large the picture is.

The batch kernel needs every crop box before it starts, and a box needs the picture's size, so the
size is read here from the first bytes (a few microseconds) instead of from a decoded picture.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple


class ImageHeader(NamedTuple):
    """The properties of a picture in its first bytes."""

    format: str
    """``"jpeg"``, ``"png"`` or ``"webp"``."""
    height: int
    """The size in pixels, before any EXIF orientation."""
    width: int


def read_header(data: memoryview) -> ImageHeader | None:
    """Read format and size of a JPEG, PNG or still WebP; None for anything else.

    None also when the header is damaged or does not give the size: only a codec finds it then.
    """
    try:
        start = bytes(data[:16])
        if start[:2] == b"\xff\xd8":
            size = _jpeg_size(data)
        elif start[:8] == b"\x89PNG\r\n\x1a\n":
            size = _png_size(data)
        elif start[:4] == b"RIFF" and start[8:12] == b"WEBP":
            size = _webp_size(data)
        else:
            return None
    except (IndexError, struct.error):  # the data ends inside the header
        return None
    if size is None or min(size.height, size.width) < 1:
        return None
    return size


MOST_PIXELS_PER_BYTE = {"jpeg": 64 * 8, "png": 1032 * 8}
"""The most pixels that a byte of a complete file can encode. JPEG: every 8x8 block takes a bit in
each scan at least. PNG: deflate shrinks at most 1032:1, and a byte holds eight 1-bit pixels."""


# Start-of-frame markers; C4, C8 and CC lie between them and are tables.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_ARITHMETIC = frozenset(range(0xC9, 0xD0)) - {0xCC}  # any number of pixels in a byte
# Markers that stand alone, with no length after them: TEM, RST0-7 and a repeated SOI.
_JPEG_STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})
_JPEG_END_OF_IMAGE, _JPEG_START_OF_SCAN = 0xD9, 0xDA
_JPEG_APPLICATION_1 = 0xE1
_MARKER = re.compile(rb"\xff[^\xff]")
_MOST_SEGMENTS = 4096  # before the first scan; those of a profile of colours are 255 at most


def is_jpeg_without_picture(data: memoryview) -> bool:
    """Return whether the bytes begin as a JPEG's, and its first segments say no size."""
    is_jpeg = bytes(data[:2]) == b"\xff\xd8"
    return is_jpeg and all(marker not in _JPEG_FRAMES for marker, _ in _jpeg_segments(data))


def exif_markers(data: memoryview) -> list[int]:
    """Return the places of the bytes that mark a JPEG's segments for EXIF; [] if it has none."""
    return [place - 1 for marker, place in _jpeg_segments(data) if marker == _JPEG_APPLICATION_1]


def begins_with_exif(data: memoryview) -> bool:
    """Return whether the first of these segments, if there is one, has EXIF's name."""
    places = exif_markers(data)
    return not places or bytes(data[places[0] + 3 : places[0] + 9]) == b"Exif\0\0"


def _jpeg_size(data: memoryview) -> ImageHeader | None:
    for marker, position in _jpeg_segments(data):
        if marker in _JPEG_ARITHMETIC:
            return None
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 3)
            return ImageHeader("jpeg", height, width)
    return None


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


def _png_size(data: memoryview) -> ImageHeader | None:
    if bytes(data[12:16]) != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return ImageHeader("png", height, width)


def _webp_size(data: memoryview) -> ImageHeader | None:
    (num_bytes,) = struct.unpack_from("<I", data, 4)
    if len(data) > 8 + num_bytes + num_bytes % 2:  # a codec would read on beyond its end
        return None
    kind = bytes(data[12:16])
    if kind == b"VP8 ":  # lossy: 3 bytes of frame tag, 3 of start code, then 14-bit sizes
        if bytes(data[23:26]) != b"\x9d\x01\x2a":
            return None
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("webp", height & 0x3FFF, width & 0x3FFF)
    if kind == b"VP8L":  # lossless: one byte of signature, then two 14-bit sizes less one
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("webp", (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if kind == b"VP8X" and not data[20] & 0x02:  # bit 1: animated
        (bits,) = struct.unpack_from("<Q", data, 22)  # 16 bits, then two 24-bit sizes less one
        return ImageHeader("webp", (bits >> 40) + 1, (bits >> 16 & 0xFFFFFF) + 1)
    return None
