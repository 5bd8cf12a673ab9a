"""A container's description of its video: its clock, and what a packet's header says of its
picture.

Containers mark packets at which players may enter, and not all of these are entries: at a recovery
point of H.264 the picture is right only some frames later, and an index of AVI may mark every
packet. For most codecs on the list the decoder tells afterwards, whose word for a keyframe is sure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import av

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.stream import VideoStream

MPEG = frozenset({"mpeg1video", "mpeg2video", "mpeg4"})
"""FFmpeg's names of the codecs of MPEG up to 4 part 2, which have much in common."""

TELL_KEYFRAMES = MPEG | {"av1", "ffv1", "h264", "hevc", "libdav1d", "vp8", "vp9"}
"""Codecs whose decoders call a frame a keyframe only where nothing before it is needed, by it and
by all that are displayed after it (of H.264 its header says so). In H.263 options of earlier
pictures may still be in force; APNG calls every frame one."""

_HEADER_BYTES = 1 << 16
"""Where the first slice of a picture begins, at the latest; before it are parameters."""

_MOST_ROUNDED = 2.0**-50
"""How far a time that was computed from a tick may be off that, as a share of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoCodec:
    """A container's description of its video stream."""

    name: str
    """FFmpeg's name of the codec, such as ``h264``."""
    width: int
    """The coded width in pixels, before a rotation that the container asks for."""
    height: int
    pix_fmt: str | None
    """FFmpeg's name of the pixel format; None where only decoding shows it."""
    frame_rate: tuple[int, int]
    """The average frames per second, as numerator and denominator; (0, 1) if unknown."""
    time_base: tuple[int, int]
    """The seconds of one tick of a timestamp, as numerator and denominator."""
    sample_aspect_ratio: tuple[int, int]
    """The aspect ratio of a pixel, width over height; (0, 1) if unknown."""
    reorder_depth: int
    """The number of frames that the decoder holds back to reorder them."""
    extradata: bytes | None

    @classmethod
    def of(cls, stream: Any) -> Self:
        """Return the description of an open stream."""
        names = "name width height pix_fmt reorder_depth extradata"
        return cls(
            frame_rate=_pair(rate_of(stream)),
            time_base=_pair(stream.time_base),
            sample_aspect_ratio=_pair(stream.sample_aspect_ratio),
            **{name: getattr(stream.codec_context, name) for name in names.split()},
        )

    @property
    def tick(self) -> Fraction:
        """The seconds of one tick of a timestamp."""
        return Fraction(*self.time_base)

    @property
    def ticks_of_a_frame(self) -> Fraction:
        """How long a frame is displayed on average; 0 if unknown."""
        rate = Fraction(*self.frame_rate)
        return 1 / (rate * self.tick) if rate else Fraction(0)


def rate_of(stream: VideoStream) -> Fraction | None:
    """Return the average frames per second that a container states; None if it states none.

    A frame a tick is none, where FFmpeg's guess is another rate: in raw DV.
    """
    average, guess = stream.average_rate, stream.guessed_rate
    is_tick = average is not None and average * (stream.time_base or 0) == 1
    return guess or average if is_tick else average or guess


ImageCodec: TypeAlias = VideoCodec
"""The codec of an image, for which SPDL has a type of its own."""


class Label(NamedTuple):
    """What a container and a packet's header say of a frame, before anything was decoded."""

    pts: int | None
    dts: int | None
    duration: int
    is_entry: bool
    is_shown: bool

    @classmethod
    def of(cls, packet: Packet[Any], codec: VideoCodec) -> Self:
        """Return the label of a packet that has just been read."""
        times = packet.pts, packet.dts, packet.duration or 0
        is_shown = not packet.is_discard and not is_hidden(packet, codec)
        return cls(*times, is_entry(packet, codec), is_shown)


def last_duration(labels: Sequence[Label]) -> int:
    """Return for how long the frame that is displayed last is displayed, in ticks; 0 if unknown."""
    times = [label.pts if label.pts is not None else label.dts or 0 for label in labels]
    return labels[max(range(len(times)), key=times.__getitem__)].duration


def _pair(value: Any) -> tuple[int, int]:
    """Return numerator and denominator of PyAV's rational number; (0, 1) if it is unknown."""
    return (value.numerator, value.denominator) if value else (0, 1)


def to_ticks(seconds: float, tick: Fraction) -> float:
    """Return the first tick at or after a time; a time computed from a tick gives that tick."""
    ticks = seconds / float(tick)
    rounding = max(1e-6, abs(ticks) * _MOST_ROUNDED)
    return ticks if math.isinf(ticks) else math.ceil(ticks - rounding)


def tick_until(seconds: float, tick: Fraction) -> float:
    """Return the last tick at or before a time; likewise."""
    return -to_ticks(-seconds, tick)


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
