"""Read those packets of a video that some of its frames need."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

from av.bitstream import BitStreamFilterContext
from av.error import FFmpegError

from spdl_torch.errors import DecodeError

from .._source import source_name
from .opening import open_video, position_of, rewind
from .packets import UnsureError, VideoPackets
from .reading import PacketReader
from .sequence import find_sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

    from .._config import DemuxConfig
    from .._source import Source

_T = TypeVar("_T")


def demux_video(
    src: Source,
    *,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None = None,
    demux_config: DemuxConfig | None = None,
    bsf: str | None = None,
    name: str | None = None,
) -> VideoPackets:
    """Read the encoded packets of a video, without decoding.

    Args:
        src: a path, a URL that fsspec opens, the file's bytes (bytes or uint8 tensor of one
            dimension) or a binary file.
        timestamp: start and end in seconds. Reads only what decoding the frames of
            ``start <= time < end`` needs, from the keyframe before them on. None reads everything.
        demux_config: options for opening the container, from :func:`demux_config`.
        bsf: FFmpeg's description of bitstream filters to apply to the packets.
        name: the source's name in errors; by default its path, or ``<bytes>``.

    Returns: packets from which :func:`decode_packets` decodes exactly those frames.
    Raises:
        DecodeError: not a video, damaged, or no frame in the window.
        OSError: a path cannot be read.
        ValueError: FFmpeg has no such format, or refuses ``bsf``.
    """
    return read_window(src, timestamp, demux_config, bsf, name)


def read_window(
    src: Source,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None,
    config: DemuxConfig | None,
    bsf: str | None,
    name: str | None,
    *,
    whole: bool = False,
) -> VideoPackets:
    """Do the same.

    whole: read all of the video, and find the window's frames by decoding it.
    """
    name = name or source_name(src)
    window = None if timestamp is None else window_of(timestamp)
    spans = [(-math.inf, math.inf)] if window is None else [window]

    def read(container: InputContainer, stream: VideoStream, whole: bool) -> VideoPackets:
        return read_spans(PacketReader(container, stream, name), spans, window, bsf, whole=whole)

    packets = read_again_if_unsure(src, config, name, read, whole=whole)
    if not packets.times:
        if window is not None:
            packets.check_order()
        raise DecodeError(f"{name}: no frame {_where(window)}.")
    return packets


def read_again_if_unsure(
    src: Source,
    config: DemuxConfig | None,
    name: str,
    read: Callable[[InputContainer, VideoStream, bool], _T],
    *,
    whole: bool = False,
) -> _T:
    """Open a video and read what is needed; all of it where less does not tell the frames.

    read: called with the open video, and with whether to read the whole of it.
    whole: start with that.
    Raises: UnsureError: less does not tell, and the source cannot be read again.
    """
    place = position_of(src)
    if not whole:
        try:
            with open_video(src, config, name) as (container, stream):
                return read(container, stream, False)
        except UnsureError:
            if place is None:
                raise
    rewind(src, place)
    with open_video(src, config, name) as (container, stream):
        return read(container, stream, True)


def read_spans(
    reader: PacketReader,
    spans: Sequence[tuple[float, float]],
    window: tuple[float, float] | None = None,
    bsf: str | None = None,
    *,
    whole: bool = False,
) -> VideoPackets:
    """Read the packets that the frames displayed in some spans of time need.

    Args:
        spans: starts and ends in seconds, ascending and apart. The frames displayed at a start and
            at an end are included.
        window: the ``timestamp`` of the result.
        bsf: as in :func:`demux_video`.
        whole: read everything, and find the frames by decoding it.

    Raises: DecodeError: the video has no packets; UnsureError: its packets do not tell which frame
        is displayed when, so that all of it is to be read.
    """
    incoming = reader.incoming
    name, stream, layout = incoming.name, incoming.stream, incoming.layout
    for start, end in [(-math.inf, math.inf)] if whole else spans:
        reader.read(start, end)
    reader.look_at_the_rest()
    if not reader.packets:
        if incoming.doubt is not None and not whole:
            raise UnsureError(f"{name}: {incoming.doubt}.")
        raise DecodeError(f"{name}: no frame in it.")
    found = reader.packets if bsf is None else filter_packets(reader.packets, stream, bsf)
    packets = VideoPackets(
        name,
        incoming.codec,
        found,
        window,
        stream.codec_context,
        is_whole=reader.is_whole,
        is_counted=layout.is_counted,
        is_listed=layout.is_listed and not layout.may_go_on,
    )
    reader.check_times(packets.labels)
    doubt = incoming.doubt or packets.doubt(
        from_start=reader.is_from_start, may_lack=layout.may_lack
    )
    if whole or (doubt is not None and packets.is_whole):
        find_sequence(packets)
    elif doubt is not None:
        raise UnsureError(f"{name}: {doubt}.")
    return packets


def filter_packets(packets: list[Packet[Any]], stream: VideoStream, bsf: str) -> list[Packet[Any]]:
    """Apply FFmpeg's bitstream filters to the packets of a stream.

    Raises: ValueError: FFmpeg refuses the filters.
    """
    try:
        filters = BitStreamFilterContext(bsf, stream)
    except (FFmpegError, ValueError) as error:
        raise ValueError(f"bsf: FFmpeg refuses {bsf!r}: {error}.") from error
    filtered = [out for packet in packets for out in filters.filter(packet)]
    return [*filtered, *filters.filter(None)]


def window_of(timestamp: tuple[SupportsFloat | str, SupportsFloat | str]) -> tuple[float, float]:
    """Return start and end in seconds. Raises: ValueError: they are no window."""
    # A string may be a fraction, as in SPDL.
    start, end = (float(Fraction(t) if isinstance(t, str) else t) for t in timestamp)
    if not start < end:
        raise ValueError(f"timestamp must be (start, end) with start < end, got {timestamp}.")
    return start, end


def _where(window: tuple[float, float] | None) -> str:
    return "in it" if window is None else "in [{:g}, {:g}) s".format(*window)
