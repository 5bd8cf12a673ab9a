"""Images by FFmpeg: for its filters and pixel formats, one image after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._video.filters import get_video_filter_desc
from .._video.frames import convert_frames, decode_packets
from .._video.image import demux_image
from .decode import decode_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .._config import DecodeConfig, DemuxConfig
    from .._source import Source
    from .._storage import Storage
    from .._video.frames import ImageFrames


def stretch_filter(width: int | None, height: int | None, pix_fmt: str | None) -> str | None:
    """Return FFmpeg's filter that, like the batch kernel, stretches the picture to the size."""
    if width is None and height is None:
        return get_video_filter_desc(pix_fmt=pix_fmt)
    return get_video_filter_desc(
        scale_width=-1 if width is None else width,  # -1 keeps the shape
        scale_height=-1 if height is None else height,
        scale_algo="bilinear",
        scale_mode=None,
        pix_fmt=pix_fmt,
    )


def load_filtered_batch(
    srcs: Sequence[Source],
    filter_desc: str | None,
    demux_config: DemuxConfig | None,
    decode_config: DecodeConfig | None,
    *,
    strict: bool,
    storage: Storage | None,
) -> Tensor:
    """Return a batch; arguments, result and errors are those of :func:`load_image_batch`."""

    def decode(number: int) -> ImageFrames:
        packets = demux_image(srcs[number], demux_config=demux_config)
        return decode_packets(packets, filter_desc, decode_config)

    frames = decode_all(range(len(srcs)), decode, num_given=len(srcs), strict=strict)
    return convert_frames([*frames.values()], storage)
