"""An image as FFmpeg reads it: for its filters, and for programs written for ``spdl.io``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.errors import DecodeError

from .._source import read_source, source_name
from .codec import VideoCodec
from .demux import filter_packets
from .opening import open_video
from .packets import ImagePackets

if TYPE_CHECKING:
    from .._config import DemuxConfig
    from .._source import Source


def demux_image(
    src: Source,
    *,
    demux_config: DemuxConfig | None = None,
    bsf: str | None = None,
    name: str | None = None,
) -> ImagePackets:
    """Read an image, without decoding it, for :func:`decode_packets` and FFmpeg's filters.

    :func:`decode_image` and :func:`load_image_batch` need no FFmpeg and take half the time.

    Args:
        src: as in :func:`decode_image`. Of an animation the first picture is read.
        demux_config, bsf, name: as in :func:`demux_video`.

    Raises:
        DecodeError: not an image that FFmpeg knows.
        OSError: a path cannot be read.
        ValueError: FFmpeg has no such format, or refuses ``bsf``.
    """
    name = name or source_name(src)
    # From memory: of a path FFmpeg would take "%03d" for a number, and "*" for any name.
    with open_video(read_source(src), demux_config, name) as (container, stream):
        found = next((packet for packet in container.demux(stream) if packet.size), None)
        if found is None:
            raise DecodeError(f"{name}: no picture in it.")
        found.pts = found.dts = 0  # some formats give it no time
        packets = [found] if bsf is None else filter_packets([found], stream, bsf)
        return ImagePackets(name, VideoCodec.of(stream), packets)
