"""What a packet says of its picture: whether decoding may begin there, whether it is displayed.

Containers mark packets at which players may enter, and not all of these are entries: at a recovery
point of H.264 the picture is right only some frames later, and an index of AVI may mark every
packet. For most codecs on the list the decoder tells afterwards, whose word for a keyframe is sure.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import av

from .codec import MPEG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.packet import Packet

    from .codec import VideoCodec

TELL_KEYFRAMES = MPEG | {"av1", "ffv1", "h264", "hevc", "libdav1d", "vp8", "vp9"}
"""Codecs whose decoders call a frame a keyframe only where nothing before it is needed, by it and
by all that are displayed after it (of H.264 its header says so). In H.263 options of earlier
pictures may still be in force; APNG calls every frame one."""

_HEADER_BYTES = 1 << 16
"""Where the first slice of a picture begins, at the latest; before it are parameters."""


def tells_keyframes(codec: VideoCodec) -> bool:
    """Return whether the decoder tells, at any packet, whether decoding may begin there.

    A palette may have come beside the first packet alone, and no decoder misses it.
    """
    if codec.name in TELL_KEYFRAMES:
        return True
    return codec.pix_fmt not in (None, "pal8") and _is_intra_only(codec.name)


def is_entry(packet: Packet[Any], codec: VideoCodec) -> bool:
    """Return whether decoding may begin here, as far as the container and the header say."""
    if not packet.is_keyframe or packet.is_corrupt:
        return False
    if codec.name == "h264":
        return _is_h264_entry(bytes(memoryview(packet)[:_HEADER_BYTES]), codec.extradata)
    if codec.name not in MPEG:
        return True
    content = bytes(memoryview(packet)[:_HEADER_BYTES])
    if codec.name == "mpeg4":
        place = content.find(b"\0\0\1\xb6")
        return 0 <= place < len(content) - 4 and content[place + 4] >> 6 == 0
    place = content.find(b"\0\0\1\0")
    return 0 <= place < len(content) - 5 and content[place + 5] >> 3 & 7 == 1


def is_hidden(packet: Packet[Any], codec: VideoCodec) -> bool:
    """Return whether this packet says that its frame is not displayed, only referred to."""
    if codec.name == "vp8":
        return not memoryview(packet)[0] & 0x10
    if codec.name != "vp9" or memoryview(packet)[-1] & 0xE0 == 0xC0:
        return False  # several frames in one packet, of which one is displayed
    bits = int.from_bytes(bytes(memoryview(packet)[:2]).ljust(2, b"\0"), "big") << 4
    if bits >> 16 & 3 == 3:  # the profile with one bit more
        bits <<= 1
    return not bits & 0xA000  # no frame from before, and not displayed itself


@functools.cache
def _is_intra_only(name: str) -> bool:
    return bool(av.codec.Codec(name, "r").intra_only)


def _is_h264_entry(content: bytes, description: bytes | None) -> bool:
    """Return whether it is a picture that nothing after it looks behind, or a recovery point that
    promises exact pictures at once."""
    recovers = False
    for unit in _units(content, description):
        kind = unit[0] & 0x1F
        if kind == 5:
            return True
        if kind == 6:
            recovers = recovers or _recovers_at_once(unit[1:])
        elif 1 <= kind <= 4:
            return recovers
    return False


def _units(content: bytes, description: bytes | None) -> Iterator[bytes]:
    """Yield the beginnings of H.264's units, at least two bytes each."""
    if not description or len(description) < 5 or description[0] != 1 or content[:4] == b"\0\0\0\1":
        yield from (unit for unit in content.split(b"\0\0\1")[1:] if len(unit) >= 2)
        return
    size, place = (description[4] & 3) + 1, 0
    while place + size + 2 <= len(content):
        end = place + size + int.from_bytes(content[place : place + size], "big")
        yield content[place + size : end]
        place = max(end, place + size + 1)


def _recovers_at_once(message: bytes) -> bool:
    message = message.replace(b"\0\0\3", b"\0\0")
    place = 0
    while place + 2 < len(message):
        kind, place = _sum_of_bytes(message, place)
        size, place = _sum_of_bytes(message, place)
        if kind == 6:
            # The first bit is the number 0 of frames until then, the next one: exactly.
            return place < len(message) and message[place] & 0xC0 == 0xC0
        place += size
    return False


def _sum_of_bytes(content: bytes, place: int) -> tuple[int, int]:
    total = 0
    while place < len(content) and content[place] == 255:
        total, place = total + 255, place + 1
    return (total + content[place] if place < len(content) else total), place + 1
