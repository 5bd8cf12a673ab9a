"""Load the few frames of a clip: seek, decode what is needed, resize into one batch."""

from __future__ import annotations

import math
from bisect import bisect_right
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from spdl_torch.errors import DecodeError, UnsupportedOptionError

from .._config import RGB24
from .._image.geometry import fitted_size
from .._source import source_name
from .decode import decode_wanted
from .demux import read_spans
from .filters import filter_frames
from .frames import rgb_view
from .opening import open_video
from .samplers import VideoInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

    from .._source import Source
    from .packets import VideoPackets
    from .samplers import ClipSampler

__all__ = ["Clip", "load_clip"]

_SECONDS_TO_READ_ON = 5.0
"""A longer way to the next moment is sought; to read packets over a shorter one costs less."""

# Without the full chroma, PSNR against RGB + antialias interpolate falls from 44-47 to 38-43 dB.
# By way of planar RGB it costs half: swscale has quick code to that and from that, 0.15 ms a frame.
_SCALE = (
    "scale=w={}:h={}:flags=bilinear+full_chroma_int+full_chroma_inp+accurate_rnd,"
    "format=pix_fmts=gbrp,scale,"
)


@dataclass(frozen=True, slots=True)
class Clip:
    """Some frames of a video."""

    frames: Tensor
    """uint8, shape (T, H, W, 3), CPU, contiguous."""
    timestamps: Tensor
    """float64, shape (T,): when each frame begins to be displayed, in seconds."""


def load_clip(
    src: Source,
    sampler: ClipSampler,
    *,
    width: int | None = None,
    height: int | None = None,
    pix_fmt: Literal["rgb24"] = "rgb24",
    resize: Literal["swscale", "antialias"] = "swscale",
    num_threads: int = 1,
) -> Clip:
    """Load the frames that are on display at some moments of a video.

    Only what these frames need is read and decoded. A frame that the container turns or mirrors is
    put upright.

    Args:
        src: as in :func:`demux_video`.
        sampler: called with a :class:`VideoInfo`, returns the moments in seconds, in any order and
            more than once each: :func:`uniform_frames`, :func:`random_clip`,
            :func:`strided_frames` or a function of your own. Moments before the first frame take
            that.
        width, height: of the result, in pixels. If one is None, the shape is kept; if both are,
            the size.
        resize: "swscale" is bilinear and quick, straight from the video's own pixel format;
            "antialias" is what torch's ``interpolate(mode="bilinear", antialias=True)`` makes of
            the RGB frames, within one level (of 255).
        num_threads: of FFmpeg's decoder and filters.

    Returns: the frames in the order of the moments.
    Raises:
        DecodeError: not a video, damaged where it matters, or a moment after its end.
        OSError: a path cannot be read.
        ValueError: the sampler returns no moments, or one that is no number.
    """
    _check(width, height, pix_fmt, resize)
    name = source_name(src)
    with open_video(src) as (container, stream):
        info, packets = _measure(container, stream, name)
        moments = _moments(sampler(info))
        if packets is None:
            packets = read_spans(container, stream, _spans(moments), name)
    wanted = _on_display(packets, packets.times, moments, info)
    clip = _load(packets, wanted, width, height, resize, num_threads)
    if clip is None:  # some packets have no frame: learn which have, and take the ones before
        with closing(decode_wanted(packets, packets.times, num_threads)) as frames:
            times = [frame.pts for frame in frames if frame.pts is not None]
        wanted = _on_display(packets, times, moments, info)
        clip = _load(packets, wanted, width, height, resize, num_threads)
    if clip is None:
        raise DecodeError(f"{name}: a frame does not come out of its decoder each time.")
    return clip


def _check(width: int | None, height: int | None, pix_fmt: str, resize: str) -> None:
    if any(size is not None and size < 1 for size in (width, height)):
        raise ValueError(f"width and height must be >= 1 or None, got {width=}, {height=}.")
    if resize not in ("swscale", "antialias"):
        raise ValueError(f"resize must be 'swscale' or 'antialias', got {resize!r}.")
    if pix_fmt != "rgb24":
        raise UnsupportedOptionError(
            f"load_clip: pix_fmt must be 'rgb24', got {pix_fmt!r}. Use demux_video, "
            f"decode_packets and convert_frames for other formats."
        )


def _measure(
    container: InputContainer, stream: VideoStream, name: str
) -> tuple[VideoInfo, VideoPackets | None]:
    """The facts; and all packets, where these have to be read to know them."""
    time_base = float(stream.time_base or 0)
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    start = float(stream.start_time or 0) * time_base
    seconds = 0.0
    if stream.duration:
        seconds = stream.duration * time_base
    elif container.duration:
        seconds = container.duration / 1e6
    packets = None
    if not seconds > 0 or not rate > 0:
        packets = read_spans(container, stream, [(-math.inf, math.inf)], name)
        if not packets.times:
            raise DecodeError(f"{name}: no frame in it.")
        start, seconds = packets.get_timestamps()[0], packets.duration
        rate = rate or len(packets) / max(seconds, 1e-3)
    info = VideoInfo(
        source=name,
        codec=stream.codec_context.name,
        start_seconds=start,
        duration_seconds=seconds,
        frame_rate=rate,
        num_frames=stream.frames or (round(seconds * rate) if packets is None else len(packets)),
        width=stream.width,
        height=stream.height,
    )
    return info, packets


def _moments(sampled: Sequence[float] | Tensor) -> list[float]:
    moments = [float(moment) for moment in sampled]
    if not moments or not all(map(math.isfinite, moments)):
        raise ValueError(f"a sampler must return at least one finite moment, got {moments}.")
    return moments


def _spans(moments: Sequence[float]) -> list[tuple[float, float]]:
    """Stretches of time to read, ascending."""
    ordered = sorted(moments)
    gaps = [k + 1 for k, (a, b) in enumerate(pairwise(ordered)) if b - a > _SECONDS_TO_READ_ON]
    return [(ordered[a], ordered[b - 1]) for a, b in pairwise([0, *gaps, len(ordered)])]


def _on_display(
    packets: VideoPackets, times: Sequence[int], moments: Sequence[float], info: VideoInfo
) -> list[int]:
    """For each moment the frame's own time, in ticks."""
    if not times:
        raise DecodeError(f"{packets.source}: no frame in it.")
    tick = float(packets.time_base)
    end = max(info.start_seconds + info.duration_seconds, times[-1] * tick)
    wanted = []
    for moment in moments:
        if moment > end + 1 / info.frame_rate:
            raise DecodeError(
                f"{packets.source}: no frame at {moment:g} s, the video ends at {end:g} s."
            )
        place = bisect_right(times, math.floor(moment / tick + 1e-6)) - 1
        wanted.append(times[max(0, place)])
    return wanted


def _load(
    packets: VideoPackets,
    wanted: Sequence[int],
    width: int | None,
    height: int | None,
    resize: str,
    num_threads: int,
) -> Clip | None:
    """None if a wanted frame does not come out."""
    rows: dict[int | None, list[int]] = {}
    for row, wanted_time in enumerate(wanted):
        rows.setdefault(wanted_time, []).append(row)
    batch: Tensor | None = None
    resized = _swscaled if resize == "swscale" else _antialiased
    with closing(decode_wanted(packets, sorted(set(wanted)), num_threads)) as decoded:
        for time, image in resized(decoded, packets, (width, height), num_threads):
            if batch is None:
                batch = torch.empty((len(wanted), *image.shape), dtype=torch.uint8, device="cpu")
            if image.shape != batch.shape[1:]:
                raise DecodeError(
                    f"{packets.source}: the frames change from {tuple(batch.shape[1:])} to "
                    f"{tuple(image.shape)}. Give width and height."
                )
            for row in rows.pop(time, ()):
                batch[row].copy_(image)
    if rows or batch is None:
        return None
    seconds = torch.tensor(wanted, dtype=torch.float64, device="cpu") * float(packets.time_base)
    return Clip(batch, seconds)


_Size: TypeAlias = tuple[int | None, int | None]


def _swscaled(
    decoded: Iterator[VideoFrame], packets: VideoPackets, size: _Size, num_threads: int
) -> Iterator[tuple[int | None, Tensor]]:
    width, height = (-1 if pixels is None else pixels for pixels in size)
    scale = _SCALE.format(width, height) if size != (None, None) else ""
    filtered = filter_frames(decoded, scale + RGB24, packets, num_threads)
    return ((frame.pts, rgb_view(frame)) for frame in filtered)


def _antialiased(
    decoded: Iterator[VideoFrame], packets: VideoPackets, size: _Size, num_threads: int
) -> Iterator[tuple[int | None, Tensor]]:
    for time, image in _swscaled(decoded, packets, (None, None), num_threads):
        width, height = fitted_size(*size, image.shape[1], image.shape[0])
        # A batch of one in channels_last memory, for which the uint8 kernel is quick.
        picture = image.contiguous().permute(2, 0, 1)[None]
        resized = interpolate(picture, (height, width), mode="bilinear", antialias=True)
        yield time, resized[0].permute(1, 2, 0)
