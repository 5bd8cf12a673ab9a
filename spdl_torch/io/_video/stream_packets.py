"""The packets of one stream, as FFmpeg reads them from a container."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from av.error import FFmpegError

from .codec import rate_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

_TRIES = 8
"""How often FFmpeg may ask to read again."""


def packets_of(
    container: InputContainer, stream: AudioStream | VideoStream
) -> Iterator[Packet[Any]]:
    """Yield the packets of a stream that hold data."""
    for tries_left in reversed(range(_TRIES)):
        try:
            for packet in container.demux(stream):
                if packet.size:
                    yield packet
            return
        except BlockingIOError as error:
            # FFmpeg's at random bytes in a transport stream, after which there is more.
            if not (tries_left and isinstance(error, FFmpegError)):
                raise  # or of the user's own file object
        except IndexError as error:
            # PyAV raises it after the last packet: it looks up all streams of the container, those
            # included that FFmpeg found only while reading, which PyAV does not know.
            if not _is_from_stream_lookup(error):
                raise  # from the user's own file object
            return


def _is_from_stream_lookup(error: IndexError) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_name == "_get_streams"


def counted(packets: Iterator[Packet[Any]], stream: VideoStream) -> Iterator[Packet[Any]]:
    """Number the packets, whatever FFmpeg made of their times."""
    rate = rate_of(stream) or Fraction(25)
    for number, packet in enumerate(packets):
        packet.pts = None  # FFmpeg gives some packets a time, which it has counted, too
        packet.dts = round(number / rate / (stream.time_base or rate))
        yield packet


def identity_of(packet: Packet[Any]) -> tuple[int | None, ...]:
    """Return what tells a packet from all others of its stream. Its dts is not in it unless it has
    no other time: FFmpeg guesses that of Matroska, in another way after a seek."""
    return packet.pos, displayed(packet), packet.size


def displayed(packet: Packet[Any]) -> int | None:
    """Return the display time of a packet's frame in ticks, estimated where frames are counted."""
    return packet.dts if packet.pts is None else packet.pts
