"""Load the few frames of a clip: seek, decode only what they need, resize into one batch."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from spdl_torch.errors import DecodeError, UnsupportedOptionError

from .._config import RGB24
from .._sizes import check_size, fitted_size
from .._source import source_name
from .._storage import room_for
from .._transfer.transfer import check_device_config, to_device
from .clip_reading import ClipReading
from .decode import decode_wanted
from .filters import filter_frames
from .frames import rgb_view
from .packets import UnsureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from av.video.frame import VideoFrame

    from .._source import Source
    from .._storage import Storage
    from .._transfer.transfer import CUDAConfig
    from .packets import VideoPackets
    from .samplers import ClipSampler

# Without the full chroma, PSNR against RGB + antialias interpolate falls from 44-47 to 38-43 dB.
# The detour by planar RGB halves the cost: swscale converts fast to and from that, 0.15 ms a frame.
_SCALE = (
    "scale=w={}:h={}:flags=bilinear+full_chroma_int+full_chroma_inp+accurate_rnd,"
    "format=pix_fmts=gbrp,scale,"
)


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
    resize: Literal["swscale", "antialias"] = "swscale",
    num_threads: int = 1,
    storage: Storage | None = None,
    device_config: CUDAConfig | None = None,
) -> Clip:
    """Load the frames that are displayed at given moments of a video.

    Reads and decodes only what these frames need. Frames that the container rotates or mirrors are
    put upright.

    Args:
        src: as in :func:`demux_video`.
        sampler: called with a :class:`VideoInfo`, returns the moments in seconds, in any order,
            repeated or not: :func:`uniform_frames`, :func:`random_clip`, :func:`strided_frames` or
            a function of your own. A moment before the first frame gives the first frame.
        width, height: the size of the result in pixels. With one None the aspect ratio is kept,
            with both the size.
        resize: "swscale" is bilinear and fast, straight from the video's own pixel format;
            "antialias" equals torch's ``interpolate(mode="bilinear", antialias=True)`` of the RGB
            frames, within one level (of 255).
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
    _check(width, height, pix_fmt, resize, "load_clip")
    if device_config is not None:
        check_device_config(device_config, "load_clip")
    room = partial(room_for, storage=storage)
    clip = _load_clip(src, sampler, (width, height), resize, num_threads, room)
    return _sent(clip, device_config)


def _sent(clip: Clip, config: CUDAConfig | None) -> Clip:
    """Return the clip with its frames on the device, if one was given."""
    return clip if config is None else replace(clip, frames=to_device(clip.frames, config))


def load_clip_batch(
    srcs: Sequence[Source],
    sampler: ClipSampler,
    *,
    width: int | None = None,
    height: int | None = None,
    pix_fmt: Literal["rgb24"] = "rgb24",
    resize: Literal["swscale", "antialias"] = "swscale",
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
        width, height, pix_fmt, resize, num_threads, device_config: as in :func:`load_clip`.

    Returns: the clips in the order of ``srcs``.
    Raises: as :func:`load_clip`; DecodeError: the clips differ in size or number of frames;
        ValueError: no sources.
    """
    _check(width, height, pix_fmt, resize, "load_clip_batch")
    if device_config is not None:
        check_device_config(device_config, "load_clip_batch")
    if not srcs:
        raise ValueError("load_clip_batch: srcs must hold at least one video, got none.")
    size = width, height
    rows = _Rows(len(srcs), partial(room_for, storage=storage))
    times = [
        _load_clip(src, sampler, size, resize, num_threads, partial(rows.take, k, src)).timestamps
        for k, src in enumerate(srcs)
    ]
    return _sent(Clip(rows.whole, torch.stack(times)), device_config)


class _Rows:
    """The memory of a batch of clips. The first clip's shape is that of all."""

    def __init__(self, num_clips: int, room: _Room) -> None:
        self._batch: Tensor | None = None
        self._num_clips = num_clips
        self._room = room

    @property
    def whole(self) -> Tensor:
        """The batch, once a row was taken for each clip."""
        assert self._batch is not None, "guaranteed by _load_clip: it has taken every row"
        return self._batch

    def take(self, row: int, src: Source, shape: tuple[int, ...]) -> Tensor:
        """Return the memory of one clip. Raises: DecodeError: its shape is another one."""
        if self._batch is None:
            self._batch = self._room((self._num_clips, *shape))
        if shape != self._batch.shape[1:]:
            raise DecodeError(
                f"{source_name(src)}: a clip of shape {shape} does not go with those before, of "
                f"{tuple(self._batch.shape[1:])}. Give width and height, and a sampler that always "
                "returns as many moments."
            )
        return self._batch[row]


def _load_clip(
    src: Source,
    sampler: ClipSampler,
    size: _Size,
    resize: str,
    num_threads: int,
    room: _Room,
) -> Clip:
    reading = ClipReading(src, sampler)
    packets, wanted = reading.read()
    try:
        return _load(packets, wanted, size, resize, num_threads, room)
    except UnsureError:
        if packets.sequence is not None or not reading.can_repeat:
            raise
    packets, wanted = reading.read(whole=True)
    return _load(packets, wanted, size, resize, num_threads, room)


def _check(width: int | None, height: int | None, pix_fmt: str, resize: str, where: str) -> None:
    check_size(width, height, where)
    if resize not in ("swscale", "antialias"):
        raise ValueError(f"resize must be 'swscale' or 'antialias', got {resize!r}.")
    if pix_fmt != "rgb24":
        raise UnsupportedOptionError(
            f"{where}: pix_fmt must be 'rgb24', got {pix_fmt!r}. Use demux_video, "
            f"decode_packets and convert_frames for other formats."
        )


def _load(
    packets: VideoPackets,
    wanted: Sequence[int],
    size: _Size,
    resize: str,
    num_threads: int,
    room: _Room,
) -> Clip:
    """Decode and resize the frames at the places ``wanted``."""
    rows: dict[int, list[int]] = {}
    for row, place in enumerate(wanted):
        rows.setdefault(place, []).append(row)
    batch: Tensor | None = None
    resized = _swscaled if resize == "swscale" else _antialiased
    places = sorted(rows)
    with closing(decode_wanted(packets, places, num_threads)) as decoded:
        for place, image in zip(places, resized(decoded, packets, size, num_threads), strict=True):
            if batch is None:
                batch = room((len(wanted), *image.shape))
            if image.shape != batch.shape[1:]:
                raise DecodeError(
                    f"{packets.source}: the frames change from {tuple(batch.shape[1:])} to "
                    f"{tuple(image.shape)}. Give width and height."
                )
            for row in rows[place]:
                batch[row].copy_(image)
    assert batch is not None, "guaranteed by decode_wanted: every frame, of at least one"
    ticks = [packets.times[place] for place in wanted]
    times = torch.tensor(ticks, dtype=torch.float64, device="cpu")
    return Clip(batch, times * float(packets.time_base))


_Size: TypeAlias = tuple[int | None, int | None]
"""Width and height in pixels; None: derived from the other one, or the video's."""
_Room: TypeAlias = "Callable[[tuple[int, ...]], Tensor]"
"""Gets a shape, returns memory of it: uint8, contiguous."""


def _swscaled(
    decoded: Iterator[VideoFrame], packets: VideoPackets, size: _Size, num_threads: int
) -> Iterator[Tensor]:
    width, height = (-1 if pixels is None else pixels for pixels in size)
    scale = _SCALE.format(width, height) if size != (None, None) else ""
    filtered = filter_frames(decoded, scale + RGB24, packets, num_threads)
    return (rgb_view(frame) for frame in filtered)


def _antialiased(
    decoded: Iterator[VideoFrame], packets: VideoPackets, size: _Size, num_threads: int
) -> Iterator[Tensor]:
    for image in _swscaled(decoded, packets, (None, None), num_threads):
        width, height = fitted_size(*size, image.shape[1], image.shape[0])
        # A batch of one in channels_last memory, for which the uint8 kernel is fast.
        picture = image.contiguous().permute(2, 0, 1)[None]
        resized = interpolate(picture, (height, width), mode="bilinear", antialias=True)
        yield resized[0].permute(1, 2, 0)
