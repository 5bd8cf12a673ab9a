"""The numbers of H.264's pictures, which show that one which others refer to is missing.

No other codec needs them: a decoder of MPEG refers to the last two pictures whatever they are, and
other codecs name what they refer to. H.264's takes what is nearest for what is missing, and so
makes another picture if pictures before it were left out because nothing refers to them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ...named_tuples import NamedTuple
from .bits import Bits, length_bytes, units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.packet import Packet

    from .codec import VideoCodec

_HEADER_BYTES = 1 << 16
"""Where the first slice of a picture begins, at the latest; before it are parameters."""

_SLICE_BYTES = 16
"""The numbers of a slice are in its first bytes."""

_SLICES = (1, 2, 5)
_PARAMETERS = (7, 8)
_LENGTH_AT = 4

_WITH_CHROMA = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})
"""The profiles whose parameters say more of colours."""


class ReferenceNumbers:
    """The numbers of consecutive pictures.

    Looks at every packet that is read, so it is made to take two microseconds for each.
    """

    def __init__(self, codec: VideoCodec) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._sequence_of: dict[int, int] = {}
        self._last: int | None = None
        """The number of the last picture that others may refer to."""
        self._is_known = codec.name == "h264"
        self._length_bytes = length_bytes(codec.extradata, _LENGTH_AT)
        if self._is_known:
            for unit in _described(codec.extradata or b""):
                self._learn(unit)

    def forget(self) -> None:
        """Expect any number: packets are left out on purpose."""
        self._last = None

    def lacks(self, packet: Packet[Any]) -> bool:
        """Return whether a picture is missing before that of the next packet."""
        if not self._is_known:
            return False
        content = memoryview(packet)
        if self._length_bytes is None or bytes(content[:4]) == b"\0\0\0\1":
            unit = self._first_after_codes(content)
        else:
            unit = self._first_after_lengths(content, self._length_bytes)
        return unit is not None and self._is_late(unit)

    def _first_after_lengths(self, content: memoryview, size: int) -> bytes | None:
        """Return the beginning of the first slice, and learn from what is before it."""
        place = 0
        while place + size + 2 <= len(content):
            begin = place + size
            kind = content[begin] & 0x1F
            if kind in _SLICES:
                return bytes(content[begin : begin + _SLICE_BYTES])
            place = max(begin + int.from_bytes(content[place:begin], "big"), begin + 1)
            if kind in _PARAMETERS:
                self._learn(bytes(content[begin:place]))
        return None

    def _first_after_codes(self, content: memoryview) -> bytes | None:
        for unit in units(bytes(content[:_HEADER_BYTES]), None, None):
            kind = unit[0] & 0x1F
            if kind in _SLICES:
                return unit[:_SLICE_BYTES]
            if kind in _PARAMETERS:
                self._learn(unit)
        return None

    def _is_late(self, unit: bytes) -> bool:
        bits = int.from_bytes(_plain(unit)[1:9].ljust(8, b"\0"), "big")
        num_before, parameters = _beginning(bits >> 48)
        sequence = self._sequences.get(self._sequence_of.get(parameters, -1))
        if sequence is None:
            self._last = None
            return False
        left = 64 - num_before - 2 * sequence.has_planes - sequence.num_bits
        number = bits >> left & (1 << sequence.num_bits) - 1
        is_first = unit[0] & 0x1F == 5  # refers to nothing, and nor does anything after it
        is_reference = bool(unit[0] & 0x60)
        last = self._last
        if is_reference or is_first:
            self._last = number
        if last is None or is_first:
            return False
        step = (number - last) % (1 << sequence.num_bits)
        if step or not is_reference:
            return step > 1
        is_field = not sequence.is_in_frames and bits >> (left - 1) & 1
        return not is_field  # two fields of a frame share its number

    def _learn(self, unit: bytes) -> None:
        if unit[0] & 0x1F == 7:
            number, sequence = _sequence(Bits(_plain(unit[1:])))
            self._sequences[number] = sequence
        elif unit[0] & 0x1F == 8:
            bits = Bits(_plain(unit[1 : 1 + _SLICE_BYTES]))
            self._sequence_of[bits.golomb()] = bits.golomb()


class _Sequence(NamedTuple):
    """What the parameters of a sequence say of its slices."""

    num_bits: int
    has_planes: bool
    is_in_frames: bool


@functools.lru_cache(maxsize=1 << 12)
def _beginning(bits: int) -> tuple[int, int]:
    """Return how many bits are before a slice's number, and the number of its parameters; -1 where
    more than 16 bits are before it, as in no first slice of an encoder's."""
    reader = Bits(bits.to_bytes(2, "big"))
    reader.golomb()  # where the slice begins
    reader.golomb()  # its kind
    parameters = reader.golomb()
    return (16 - reader.num_left, parameters) if reader.num_left > 0 else (0, -1)


def _sequence(bits: Bits) -> tuple[int, _Sequence]:
    profile = bits.take(8)
    bits.take(16)  # constraints and the level
    number = bits.golomb()
    has_planes = False
    if profile in _WITH_CHROMA:
        chroma = bits.golomb()
        has_planes = chroma == 3 and bool(bits.take(1))
        bits.golomb(), bits.golomb(), bits.take(1)  # bits of a sample
        if bits.take(1):
            for matrix in range(12 if chroma == 3 else 8):
                if bits.take(1):
                    _skip_matrix(bits, 16 if matrix < 6 else 64)
    num_bits = 4 + bits.golomb()
    order = bits.golomb()
    if order == 0:
        bits.golomb()
    elif order == 1:
        bits.take(1), bits.golomb(), bits.golomb()
        for _ in range(min(bits.golomb(), 255)):
            bits.golomb()
    bits.golomb(), bits.take(1), bits.golomb(), bits.golomb()  # references; width and height
    return number, _Sequence(num_bits, has_planes, bool(bits.take(1)))


def _skip_matrix(bits: Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.signed_golomb()) % 256
        last = following or last


def _described(description: bytes) -> Iterator[bytes]:
    """Yield the parameters in a codec's description."""
    if length_bytes(description, _LENGTH_AT) is None:
        yield from units(description, None, None)
        return
    place = _LENGTH_AT + 1
    for mask in (0x1F, 0xFF):  # parameters of sequences, then of pictures
        if place >= len(description):
            return
        number, place = description[place] & mask, place + 1
        for _ in range(number):
            end = place + 2 + int.from_bytes(description[place : place + 2], "big")
            if end - place > 3:
                yield description[place + 2 : end]
            place = end


def _plain(unit: bytes) -> bytes:
    """Return a unit without the bytes that keep it from looking like the next one's beginning."""
    return unit.replace(b"\0\0\3", b"\0\0")
