"""From a video's path to its clips: which frames, decoded, scaled, cropped and flipped by FFmpeg.

The two steps of :class:`ClipReader` are one call for a dataset and two stages for a pipeline.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from spdl_torch.errors import DecodeError
from spdl_torch.io import convert_frames, demux_video, get_filter_desc, sample_decode_video

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from _k400 import Video

    from spdl_torch.data.sources import ListSource
    from spdl_torch.io import VideoPackets

_logger = logging.getLogger("k400")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipShape:
    """The shape of the clips cut out of a video."""

    num_frames: int
    stride: int | None
    """Frames from one to the next; None = spread over ``seconds``."""
    seconds: float
    resize: tuple[int, int]
    """Height and width to which the video is scaled, with any excess cut off."""
    crop: int
    """Height and width of the clip."""


class Request(NamedTuple):
    """The clips that are wanted from a video."""

    index: int
    seed: int | None
    """The seed of the random clip, crop and flip; None = evenly spread clips, central crop."""


class Encoded(NamedTuple):
    """A video that is read but not decoded yet."""

    request: Request
    packets: VideoPackets


class Sample(NamedTuple):
    """The clips of a video."""

    clips: Tensor
    """uint8, shape (clips, num_frames, height, width, 3)."""
    label: int
    index: int


class Skipped(NamedTuple):
    """A placeholder for a video that cannot be loaded."""

    index: int


class ClipReader:
    """Two steps from a request to a sample, for a dataset or for two stages of a pipeline."""

    def __init__(
        self, videos: Sequence[Video], shape: ClipShape, num_clips: int, skip_bad: bool
    ) -> None:
        self.videos = videos
        self.shape = shape
        self.num_clips = num_clips
        self.skip_bad = skip_bad

    def demux(self, request: Request) -> Encoded | Skipped:
        """Read the packets; this waits for storage and computes little."""
        video = self.videos[request.index]
        try:
            return Encoded(request, demux_video(video.path, timestamp=video.window))
        except (DecodeError, OSError) as error:
            return self._skip(request.index, error)

    def decode(self, encoded: Encoded | Skipped) -> Sample | Skipped:
        """Decode, scale, crop and flip the frames of the clips; this computes without the GIL."""
        if isinstance(encoded, Skipped):
            return encoded
        request, packets = encoded
        generator = None
        if request.seed is not None:
            generator = torch.Generator().manual_seed(request.seed)
        indices = clip_indices(packets.timestamps, self.shape, self.num_clips, generator)
        flat = [index for clip in indices for index in clip]
        once = sorted(set(flat))  # clips may overlap; short videos repeat their last frame
        try:
            filters = clip_filters(packets, self.shape, generator)
            frames = convert_frames(sample_decode_video(packets, once, filter_desc=filters))
        except DecodeError as error:
            return self._skip(request.index, error)
        if once != flat:
            frames = frames[torch.tensor([once.index(index) for index in flat])]
        clips = frames.unflatten(0, (len(indices), self.shape.num_frames))
        return Sample(clips, self.videos[request.index].label, request.index)

    def _skip(self, index: int, error: Exception) -> Skipped:
        if not self.skip_bad:
            raise error
        _logger.warning("skipped: %s", error)
        return Skipped(index)


def clip_indices(
    timestamps: Sequence[float],
    shape: ClipShape,
    num_clips: int,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Return the frames of each clip, ascending; frames past the end are the last one again.

    With a generator each clip begins at a random place, without one they are evenly spread, and a
    single one is in the middle.
    """
    last = len(timestamps) - 1
    where = [0.5] if num_clips == 1 else [k / (num_clips - 1) for k in range(num_clips)]
    if generator is not None:
        where = torch.rand(num_clips, generator=generator).tolist()
    steps = range(shape.num_frames)
    if shape.stride is not None:
        slack = max(last - (shape.num_frames - 1) * shape.stride, 0)
        starts = [min(int(place * (slack + 1)), slack) for place in where]
        return [[min(start + k * shape.stride, last) for k in steps] for start in starts]
    first, step = timestamps[0], shape.seconds / shape.num_frames
    slack_seconds = max(timestamps[-1] - first - step * (shape.num_frames - 1), 0.0)
    begins = [first + place * slack_seconds for place in where]
    # The frame on display at a time is the last one that began by then.
    shown = partial(bisect_right, timestamps)
    return [[max(shown(begin + k * step + 1e-6) - 1, 0) for k in steps] for begin in begins]


def clip_filters(
    packets: VideoPackets, shape: ClipShape, generator: torch.Generator | None
) -> str | None:
    """Return FFmpeg's filters from a decoded frame to one of the clip."""
    height, width = shape.resize
    top, left, flip = (height - shape.crop) // 2, (width - shape.crop) // 2, False
    if generator is not None:
        top = int(torch.randint(height - shape.crop + 1, (), generator=generator))
        left = int(torch.randint(width - shape.crop + 1, (), generator=generator))
        flip = bool(torch.rand((), generator=generator) < 0.5)
    crop = f"crop={shape.crop}:{shape.crop}:{left}:{top}:exact=1"
    return get_filter_desc(
        packets,
        scale_width=width,
        scale_height=height,
        scale_algo="bilinear",
        scale_mode="crop",
        filter_desc=crop + (",hflip" if flip else ""),
    )


class ClipDataset(Dataset):
    """One sample per video, for a DataLoader."""

    thread_safe = True  # nothing is kept between samples, and PyAV decodes without the GIL

    def __init__(self, reader: ClipReader, is_random: bool) -> None:
        self.reader = reader
        self.is_random = is_random

    def __len__(self) -> int:
        return len(self.reader.videos)

    def __getitem__(self, index: int) -> Sample | Skipped:
        # Threads of spdl_torch.DataLoader draw from a stream of each sample's own.
        seed = int(torch.randint(2**62, ())) if self.is_random else None
        return self.reader.decode(self.reader.demux(Request(index, seed)))


class Requests:
    """The source of a pipeline: every video once per epoch; to train, shuffled and with seeds."""

    def __init__(self, order: ListSource[int], seed: int | None) -> None:
        self.order = order
        self.seed = seed

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Request]:
        for index in self.order:
            seed = None
            if self.seed is not None:
                seed = hash((self.seed, self.order.epoch, index)) % 2**62
            yield Request(index, seed)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which has another order and other seeds."""
        self.order.set_epoch(epoch)

    def shard(self, index: int, count: int) -> Requests:
        """Return the part of a rank."""
        part = self.order.shard(index, count)
        part.set_epoch(self.order.epoch)
        return Requests(part, self.seed)


def collate(samples: Sequence[Sample | Skipped]) -> dict[str, Any]:
    """Return a batch of the videos that could be loaded, with the number of the others."""
    good = [sample for sample in samples if isinstance(sample, Sample)]
    return {
        "clips": torch.stack([sample.clips for sample in good]) if good else torch.empty(0),
        "labels": torch.tensor([sample.label for sample in good], dtype=torch.int64),
        "indices": [sample.index for sample in good],
        "num_skipped": len(samples) - len(good),
    }
