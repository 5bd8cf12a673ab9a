"""Load the few frames of a clip: seek, decode only what they need, resize into one batch."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from spdl_torch.errors import DecodeError, UnsupportedOptionError

from .._options import RGB24, check_size
from .._storage import Storage, room_for
from .._transfer.transfer import CUDAConfig, check_device_config, to_device
from .codec import last_duration, tick_until
from .filters import FilterChain
from .opening import MediaFile
from .packets import VideoPackets, ascending, every_frame, undamaged
from .reading import UnsureError, Video, facts_of, no_frame

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

    from .._source import Source
    from .samplers import ClipSampler, VideoInfo

# Without the full chroma, PSNR against RGB + antialias interpolate falls from 44-47 to 38-43 dB.
# The detour by planar RGB halves the cost: swscale converts fast to and from that, 0.15 ms a frame.
_SCALE = (
    "scale=w={}:h={}:flags=bilinear+full_chroma_int+full_chroma_inp+accurate_rnd,"
    "format=pix_fmts=gbrp,scale,"
)


_SECONDS_TO_READ_ON = 5.0
"""Seek over longer gaps between two moments; reading on over shorter ones costs less."""

_LEAST_LACKING = 0.25
"""Seconds without a frame before the stated end, after which a file is taken for cut off."""


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames of a video and their times."""

    frames: Tensor
    """uint8, shape (T, H, W, 3), contiguous; of several clips (N, T, H, W, 3). On the CPU, unless
    a device was given."""
    timestamps: Tensor
    """The display times in seconds: float64, CPU, shape (T,); of several clips (N, T)."""


def load_clip(
    src: Source,
    sampler: ClipSampler,
    *,
    width: int | None = None,
    height: int | None = None,
    pix_fmt: Literal["rgb24"] = "rgb24",
    num_threads: int = 1,
    storage: Storage | None = None,
    device_config: CUDAConfig | None = None,
) -> Clip:
    """Load the frames that are displayed at given moments of a video.

    Reads and decodes only what these frames need. Frames that the container rotates are put
    upright.

    Args:
        src: as in :func:`demux_video`.
        sampler: called with a :class:`VideoInfo`, returns the moments in seconds, in any order,
            repeated or not: :func:`uniform_frames`, :func:`random_clip`, :func:`strided_frames` or
            a function of your own. A moment before the first frame gives the first frame.
        width, height: the size of the result in pixels; bilinear, straight from the video's own
            pixel format. With one None the aspect ratio is kept, with both the size.
        num_threads: the threads of FFmpeg's decoder and filters.
        storage: memory for the frames, of :func:`cpu_storage` or :func:`batch_storage`.
        device_config: of :func:`cuda_config`: the device for the frames.

    Returns: the frames in the order of the moments.
    Raises:
        DecodeError: not a video, damaged at these frames, or a moment after its end.
        OSError: a path cannot be read.
        RuntimeError: ``device_config`` names a device that is not there.
        ValueError: the sampler returns no moments, or one that is not finite; ``storage`` is too
            small.
    """
    options = width, height, pix_fmt, num_threads, storage
    clips = _load([src], sampler, "load_clip", device_config, *options)
    return Clip(clips.frames[0], clips.timestamps[0])


def load_clip_batch(
    srcs: Sequence[Source],
    sampler: ClipSampler,
    *,
    width: int | None = None,
    height: int | None = None,
    pix_fmt: Literal["rgb24"] = "rgb24",
    num_threads: int = 1,
    storage: Storage | None = None,
    device_config: CUDAConfig | None = None,
) -> Clip:
    """Load one clip of each video, all into one tensor: nothing is stacked afterwards.

    ``load_clip_batch(paths, uniform_frames(16), width=112, height=112)`` -> frames of shape
    (N, 16, 112, 112, 3)

    Args:
        srcs: at least one; each as in :func:`demux_video`.
        sampler: as in :func:`load_clip`, called for each video in turn.
        storage: memory for the frames, of :func:`cpu_storage`; or :func:`batch_storage`, whose
            batches a loader sends to its device without another copy.
        width, height, pix_fmt, num_threads, device_config: as in :func:`load_clip`.

    Returns: the clips in the order of ``srcs``.
    Raises: as :func:`load_clip`; DecodeError: the clips differ in size or number of frames;
        ValueError: no sources.
    """
    options = width, height, pix_fmt, num_threads, storage
    return _load(srcs, sampler, "load_clip_batch", device_config, *options)


def _load(
    srcs: Sequence[Source],
    sampler: ClipSampler,
    where: str,
    device_config: CUDAConfig | None,
    *options: Any,
) -> Clip:
    """Load the clips of a batch, one after the other."""
    if device_config is not None:
        check_device_config(device_config, where)
    batch = _Batch(len(srcs), where, *options)
    times = [_load_clip(MediaFile(src), sampler, batch) for src in srcs]
    frames = batch.frames if device_config is None else to_device(batch.frames, device_config)
    return Clip(frames, torch.stack(times))


@dataclass
class _Batch:
    """A batch of clips, which are put into it one after the other."""

    num_clips: int
    where: str
    """The function that is called, in errors."""
    width: int | None
    height: int | None
    pix_fmt: str
    num_threads: int
    """Those of a decoder, and of the filters."""
    storage: Storage | None
    frames: Tensor = field(init=False)
    """uint8, (N, T, H, W, 3); the first frame's size is that of all."""
    num_done: int = 0

    def __post_init__(self) -> None:
        check_size(self.width, self.height, self.where)
        if self.pix_fmt != "rgb24":
            raise UnsupportedOptionError(
                f"{self.where}: pix_fmt must be 'rgb24', got {self.pix_fmt!r}. Use demux_video, "
                f"decode_packets and convert_frames for other formats."
            )
        if not self.num_clips:
            raise ValueError(f"{self.where}: srcs must hold at least one video, got none.")

    @property
    def filters(self) -> str:
        """FFmpeg's description of the resize."""
        if self.width is None and self.height is None:
            return RGB24
        return _SCALE.format(*(-1 if n is None else n for n in (self.width, self.height))) + RGB24

    def add(self, shown: Iterator[_Shown], video: Video, num_moments: int) -> Tensor:
        """Put in the frames of one clip, resized; return their times.

        Raises: DecodeError: their shape is not that of those before.
        """
        chain = FilterChain(self.filters, video.source, (0, 1), self.num_threads)
        times = torch.empty(num_moments, dtype=torch.float64, device="cpu")
        for frame, rows in shown:
            times[rows] = float(frame.pts or 0)
            (filtered,) = chain.push(frame)
            image = _rgb_view(filtered)
            shape = num_moments, *image.shape
            if not hasattr(self, "frames"):
                self.frames = room_for((self.num_clips, *shape), self.storage)
            if shape != self.frames.shape[1:]:
                raise DecodeError(
                    f"{video.source}: the frames change from {tuple(self.frames.shape[1:])} to "
                    f"{shape}. Give width and height, and a sampler that always returns as many "
                    "moments."
                )
            for row in rows:
                self.frames[self.num_done, row].copy_(image)
        self.num_done += 1
        return times * float(video.codec.tick)


def _load_clip(file: MediaFile, sampler: ClipSampler, batch: _Batch) -> Tensor:
    """Load one clip into the batch, and return its times: near its moments where that is sure, and
    else by a decode from the first packet on, which is what exact means."""
    with file.open() as opened:
        video = Video(*opened, file)
        info = facts_of(video)
        moments = _moments_of(sampler(info))
        if video.is_fast:
            with contextlib.suppress(UnsureError):
                shown = _near(video, moments, info, batch.num_threads)
                return batch.add(shown, video, len(moments))
    with file.open() as opened:
        video = Video(*opened, file)
        return batch.add(_from_first(video, moments, info, batch.num_threads), video, len(moments))


def _moments_of(sampled: Sequence[float] | Tensor) -> list[float]:
    """Return the moments of a sampler. Raises: ValueError: none, or one that is not finite."""
    moments = [float(moment) for moment in sampled]
    if not moments or not all(map(math.isfinite, moments)):
        raise ValueError(f"a sampler must return at least one finite moment, got {moments}.")
    return moments


def _spans_of(moments: Sequence[float]) -> list[tuple[float, float]]:
    """Return the spans of time to read, ascending."""
    ordered = sorted(moments)
    gaps = [k + 1 for k, (a, b) in enumerate(pairwise(ordered)) if b - a > _SECONDS_TO_READ_ON]
    return [(ordered[a], ordered[b - 1]) for a, b in pairwise([0, *gaps, len(ordered)])]


def _near(
    video: Video, moments: Sequence[float], info: VideoInfo, num_threads: int
) -> Iterator[_Shown]:
    """Yield the frames on display at the moments, and the rows of these, decoding near them."""
    packets, tick = VideoPackets(video, _spans_of(moments)), video.codec.tick
    times = [time for time, _ in packets.shown]
    if not times:
        raise UnsureError(f"{packets.source}: no frame in it.")
    stated = info.start_seconds + info.duration_seconds
    duration = last_duration(packets.labels)
    end = float((times[-1] + duration) * tick)
    end = end if duration else max(stated, end)
    _check_end(video, max(moments), end, info)
    rows: dict[int, list[int]] = {}
    for row, moment in sorted(enumerate(moments), key=lambda each: each[1]):
        place = max(0, bisect_right(times, tick_until(moment, tick)) - 1)
        rows.setdefault(place, []).append(row)
    with contextlib.closing(packets.frames(list(rows), num_threads)) as decoded:
        yield from zip(decoded, rows.values(), strict=True)


def _from_first(
    video: Video, moments: Sequence[float], info: VideoInfo, num_threads: int
) -> Iterator[_Shown]:
    """Yield the same, decoding from the first packet on until the last moment."""
    ends = [tick_until(moment, video.codec.tick) for moment in moments]
    left = sorted(range(len(ends)), key=ends.__getitem__, reverse=True)
    before = None
    with video.decoder.begun(num_threads) as context:
        for frame, is_damaged in ascending(every_frame(video, context), video):
            rows = []
            while before is not None and left and ends[left[-1]] < (frame.pts or 0):
                rows.append(left.pop())
            if before is not None and rows:
                yield undamaged(*before, video.source), rows
            if not left:
                return
            before = frame, is_damaged
    if before is None:
        raise no_frame(video.source)
    end = float(((before[0].pts or 0) + video.codec.ticks_of_a_frame) * video.codec.tick)
    _check_end(video, max(moments), end, info)
    yield undamaged(*before, video.source), left


def _check_end(video: Video, moment: float, end: float, info: VideoInfo) -> None:
    """Raise a DecodeError for a moment after the end of the last frame, in seconds."""
    stated = info.start_seconds + info.duration_seconds
    allowed = end + max(_LEAST_LACKING, 1.5 / info.frame_rate)
    # MP4 states the sum of the steps between packets, which may be more than between the frames.
    if moment > allowed and not (moment <= stated and video.is_whole_mp4):
        cut = f": it is cut off, and states {stated:g} s" if stated > allowed else ""
        raise DecodeError(
            f"{info.source}: no frame at {moment:g} s, the video ends at {end:g} s{cut}."
        )


def _rgb_view(frame: VideoFrame) -> Tensor:
    """Return a view of an rgb24 frame: uint8, shape (H, W, 3), CPU, with gaps between the rows.

    The memory is freed with the frame.
    """
    plane = frame.planes[0]
    flat = torch.frombuffer(plane, dtype=torch.uint8)
    return flat.as_strided((frame.height, frame.width, 3), (plane.line_size, 3, 1))


_Shown: TypeAlias = "tuple[VideoFrame, list[int]]"
"""A frame, and the rows of the clip that it fills."""
