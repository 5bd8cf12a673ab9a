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
from .torchcodec_video import (
    SURE_FORMATS,
    check_decoder,
    check_torchcodec,
    frames_at,
    readable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from av.video.frame import VideoFrame

    from .._source import Source
    from .._storage import Storage
    from .._transfer.transfer import CUDAConfig
    from .packets import VideoPackets
    from .samplers import ClipSampler, VideoInfo

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
    decoder: Literal["ffmpeg", "torchcodec"] = "ffmpeg",
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
        decoder: "torchcodec" decodes by torchcodec (extra ``torchcodec``, and FFmpeg's shared
            libraries): with ``device_config`` on the GPU, by its video decoder. MP4, MOV, Matroska
            and WebM go that way; other containers, rotated frames, and what torchcodec does not
            take, are decoded on the CPU as by "ffmpeg". It knows only ``resize="antialias"``, on
            the GPU within one level of that on the CPU, and takes no ``storage``. It notices less
            damage within frames, and returns whatever it made of them.
        device_config: of :func:`cuda_config`: the device for the frames.

    Returns: the frames in the order of the moments.
    Raises:
        DecodeError: not a video, damaged at these frames, or a moment after its end.
        ImportError: ``decoder`` names a library that is not installed.
        OSError: a path cannot be read.
        RuntimeError: ``device_config`` names a device that is not there, or torchcodec was built
            without CUDA.
        UnsupportedOptionError: ``decoder="torchcodec"`` with what it does not do.
        ValueError: the sampler returns no moments, or one that is not finite; ``storage`` is too
            small.
    """
    _check(width, height, pix_fmt, resize, "load_clip")
    check_decoder(decoder, "load_clip")
    if device_config is not None:
        check_device_config(device_config, "load_clip")
    size = width, height
    if decoder == "torchcodec":
        _check_torchcodec(size, resize, storage, device_config, "load_clip")
        return _by_torchcodec(src, sampler, size, num_threads, device_config)
    room = partial(room_for, storage=storage)
    clip = _load_clip(src, sampler, size, resize, num_threads, room)
    return _sent(clip, device_config)


def _sent(clip: Clip, config: CUDAConfig | None) -> Clip:
    """Return the clip with its frames on the device, if one was given."""
    if config is None or clip.frames.device.type != "cpu":
        return clip
    return replace(clip, frames=to_device(clip.frames, config))


def _check_torchcodec(
    size: _Size, resize: str, storage: Storage | None, config: CUDAConfig | None, where: str
) -> None:
    if size != (None, None) and resize != "antialias":
        raise UnsupportedOptionError(
            f"{where}: decoder='torchcodec' goes with resize='antialias', got {resize!r}."
        )
    if storage is not None:
        raise UnsupportedOptionError(
            f"{where}: decoder='torchcodec' has memory of its own, got storage. Leave it out."
        )
    check_torchcodec(config)


def _by_torchcodec(
    src: Source, sampler: ClipSampler, size: _Size, num_threads: int, config: CUDAConfig | None
) -> Clip:
    """Return the same packets, moments and times as without it; only pixels are torchcodec's."""
    name, src = source_name(src), readable(src)

    def load(packets: VideoPackets, wanted: Sequence[int], info: VideoInfo) -> Clip | None:
        tick = float(packets.time_base)
        fitted = None if size == (None, None) else fitted_size(*size, info.width, info.height)
        frames = frames_at(src, wanted, tick, fitted, config, num_threads)
        return frames if frames is None else Clip(frames, _times(wanted, tick))

    room = partial(room_for, storage=None)
    clip = _load_clip(
        src, sampler, size, "antialias", num_threads, room, name=name, torchcodecs=load
    )
    return _sent(clip, config)


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
    decoder: Literal["ffmpeg", "torchcodec"] = "ffmpeg",
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
        decoder: as there; "torchcodec" has memory of its own for each clip, which is copied into
            the batch, on the device if one is given.

    Returns: the clips in the order of ``srcs``.
    Raises: as :func:`load_clip`; DecodeError: the clips differ in size or number of frames;
        ValueError: no sources.
    """
    _check(width, height, pix_fmt, resize, "load_clip_batch")
    check_decoder(decoder, "load_clip_batch")
    if device_config is not None:
        check_device_config(device_config, "load_clip_batch")
    if not srcs:
        raise ValueError("load_clip_batch: srcs must hold at least one video, got none.")
    size = width, height
    if decoder == "torchcodec":
        _check_torchcodec(size, resize, storage, device_config, "load_clip_batch")
        return _batch_by_torchcodec(srcs, sampler, size, num_threads, device_config)
    rows = _Rows(len(srcs), partial(room_for, storage=storage))
    times = [
        _load_clip(src, sampler, size, resize, num_threads, partial(rows.take, k, src)).timestamps
        for k, src in enumerate(srcs)
    ]
    return _sent(Clip(rows.whole, torch.stack(times)), device_config)


def _batch_by_torchcodec(
    srcs: Sequence[Source],
    sampler: ClipSampler,
    size: _Size,
    num_threads: int,
    config: CUDAConfig | None,
) -> Clip:
    """Return the batch where the first clip is; the clips are copied there one by one."""
    times: list[Tensor] = []
    rows: _Rows | None = None
    for k, src in enumerate(srcs):
        clip = _by_torchcodec(src, sampler, size, num_threads, config)
        rows = rows or _Rows(len(srcs), clip.frames.new_empty)
        rows.take(k, src, tuple(clip.frames.shape)).copy_(clip.frames)
        times.append(clip.timestamps)
    assert rows is not None, "guaranteed by the caller: there are sources"
    return Clip(rows.whole, torch.stack(times))


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
    *,
    name: str | None = None,
    torchcodecs: _Other | None = None,
) -> Clip:
    """Load one clip. name: of the source; None: its own. torchcodecs: tried first; where it returns
    None, the clip is decoded here.
    """
    reading = ClipReading(src, sampler, name or source_name(src))
    read = reading.read()
    packets = read.packets
    clip = None
    if torchcodecs is not None and read.container_format in SURE_FORMATS and packets.is_plain:
        clip = torchcodecs(packets, [packets.times[place] for place in read.wanted], read.info)
    if clip is not None:
        return clip
    try:
        return _load(packets, read.wanted, size, resize, num_threads, room)
    except UnsureError:
        if packets.sequence is not None or not reading.can_repeat:
            raise
    read = reading.read(whole=True)
    return _load(read.packets, read.wanted, size, resize, num_threads, room)


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
    return Clip(batch, _times([packets.times[place] for place in wanted], float(packets.time_base)))


def _times(wanted: Sequence[int], tick: float) -> Tensor:
    return torch.tensor(wanted, dtype=torch.float64, device="cpu") * tick


_Size: TypeAlias = tuple[int | None, int | None]
"""Width and height in pixels; None: derived from the other one, or the video's."""
_Room: TypeAlias = "Callable[[tuple[int, ...]], Tensor]"
"""Gets a shape, returns memory of it: uint8, contiguous."""
_Other: TypeAlias = "Callable[[VideoPackets, Sequence[int], VideoInfo], Clip | None]"
"""Another way to decode the frames at those display times, in ticks."""


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
