"""Whether decoding may begin at a packet, by what the packet itself says, not its container.

Containers mark packets at which players may enter. Not all of these are entries: at a recovery
point of H.264 the picture is right only some frames later, a palette may have come with the first
packet alone, and some containers mark what they like. So the packet's own header decides, where it
is known; where it is not, decoding begins at the first packet of the video.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import av

from .bits import Bits, units

if TYPE_CHECKING:
    from collections.abc import Callable

    from av.packet import Packet

    from .codec import VideoCodec

_HEADER_BYTES = 1 << 16
"""Where the first slice of a picture begins, at the latest; before it are parameters."""


def is_checked(name: str) -> bool:
    """Return whether packets of this codec say themselves whether they are entries."""
    return name in _CHECKS


def can_have_entries(codec: VideoCodec) -> bool:
    """Return whether any packet but the first can be an entry."""
    if is_checked(codec.name):
        return True
    return codec.pix_fmt not in (None, "pal8") and _is_intra_only(codec.name)


def is_entry(packet: Packet[Any], codec: VideoCodec) -> bool:
    """Return whether this packet's frame, and all that are displayed after it, can be decoded from
    here on without any packet before."""
    if not packet.is_keyframe or packet.is_corrupt:
        return False
    check = _CHECKS.get(codec.name)
    if check is not None:
        return check(bytes(memoryview(packet)[:_HEADER_BYTES]), codec)
    return can_have_entries(codec)


def is_hidden(packet: Packet[Any], codec: VideoCodec) -> bool:
    """Return whether this packet says that its frame is not displayed, only referred to."""
    if codec.name not in ("vp8", "vp9") or not packet.size:
        return False
    content = memoryview(packet)
    if codec.name == "vp8":
        return not content[0] & 0x10
    if content[-1] & 0xE0 == 0xC0:  # several frames in one packet, of which one is displayed
        return False
    bits = Bits(bytes(content[:2]))
    return not _vp9_shows(bits)[1]


@functools.cache
def _is_intra_only(name: str) -> bool:
    return bool(av.codec.Codec(name, "r").intra_only)


def _h264(content: bytes, codec: VideoCodec) -> bool:
    recovers = False
    for unit in units(content, codec.extradata, 4):
        kind = unit[0] & 0x1F
        if kind == 5:  # a slice of a picture that nothing after it looks behind
            return True
        if kind == 6:
            recovers = recovers or _recovers_at_once(unit[1:])
        elif 1 <= kind <= 4:
            return recovers
    return False


def _recovers_at_once(message: bytes) -> bool:
    """Return whether supplemental information of H.264 promises exact pictures from here on."""
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


def _hevc(content: bytes, codec: VideoCodec) -> bool:
    for unit in units(content, codec.extradata, 21):
        kind, layer = unit[0] >> 1 & 0x3F, (unit[0] & 1) << 5 | unit[1] >> 3
        if kind < 32 and layer == 0:
            return 16 <= kind <= 21
    return False


def _vvc(content: bytes, codec: VideoCodec) -> bool:
    for unit in units(content, None, None):
        if unit[1] >> 3 < 12:
            return 7 <= unit[1] >> 3 <= 9
    return False


def _mpeg12(content: bytes, codec: VideoCodec) -> bool:
    place = content.find(b"\0\0\1\0")
    return 0 <= place < len(content) - 5 and content[place + 5] >> 3 & 7 == 1


def _mpeg4(content: bytes, codec: VideoCodec) -> bool:
    place = content.find(b"\0\0\1\xb6")
    return 0 <= place < len(content) - 4 and content[place + 4] >> 6 == 0


def _h263(content: bytes, codec: VideoCodec) -> bool:
    bits = Bits(content[:8])
    if bits.take(22) != 0x20:
        return False
    bits.take(8)  # the time
    if bits.take(2) != 2:  # always so in H.263; another number in H.261
        return False
    bits.take(3)
    if bits.take(3) != 7:  # a size; the bit after it is set in pictures that are predicted
        return not bits.take(1)
    if bits.take(3) != 1:  # the options before are still in force
        return False
    bits.take(18)
    return not bits.take(3)


def _flv1(content: bytes, codec: VideoCodec) -> bool:
    bits = Bits(content[:10])
    if bits.take(17) != 1:
        return False
    bits.take(13)  # the version, the time
    bits.take({0: 16, 1: 32}.get(bits.take(3), 0))  # a size
    return not bits.take(2)


def _theora(content: bytes, codec: VideoCodec) -> bool:
    return not content[0] & 0xC0  # a frame, and no bit for one that is predicted


def _ffv1(content: bytes, codec: VideoCodec) -> bool:
    # The first thing in its arithmetic code, at even chances: the upper half is a keyframe.
    return int.from_bytes(content[:2], "big") >= 0x7F80


def _vp8(content: bytes, codec: VideoCodec) -> bool:
    return not content[0] & 1


def _vp9(content: bytes, codec: VideoCodec) -> bool:
    return _vp9_shows(Bits(content[:2]))[0]


def _vp9_shows(bits: Bits) -> tuple[bool, bool]:
    """Return whether a frame of VP9 is a keyframe, and whether it is displayed."""
    bits.take(2)
    profile = bits.take(1) | bits.take(1) << 1
    if profile == 3:
        bits.take(1)
    if bits.take(1):  # displays a frame that was decoded before
        return False, True
    return not bits.take(1), bool(bits.take(1))


def _av1(content: bytes, codec: VideoCodec) -> bool:
    place = 0
    while place < len(content):
        header = content[place]
        kind, place = header >> 3 & 15, place + 1 + (header >> 2 & 1)
        size = len(content) - place
        if header & 2:
            size, place = _leb128(content, place)
        if kind in (3, 6):  # the header of a frame, alone or with its tiles
            # Not one from before, a keyframe, displayed.
            return place < len(content) and content[place] & 0xF0 == 0x10
        place += size
    return False


def _leb128(content: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 56, 7):
        if place >= len(content):
            break
        value |= (content[place] & 0x7F) << shift
        place += 1
        if not content[place - 1] & 0x80:
            break
    return value, place


_CHECKS: dict[str, Callable[[bytes, VideoCodec], bool]] = {
    "av1": _av1,
    "ffv1": _ffv1,
    "flv": _flv1,
    "h263": _h263,
    "libdav1d": _av1,
    "h264": _h264,
    "hevc": _hevc,
    "mpeg1video": _mpeg12,
    "mpeg2video": _mpeg12,
    "mpeg4": _mpeg4,
    "theora": _theora,
    "vp8": _vp8,
    "vp9": _vp9,
    "vvc": _vvc,
}
