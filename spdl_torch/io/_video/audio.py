"""Load the sound of a file or a video, whole or a part of it."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, SupportsFloat

import torch
from av.audio.resampler import AudioResampler

from spdl_torch.errors import DecodeError

from .._source import source_name
from .demux import window_of
from .opening import decode_errors, open_audio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from torch import Tensor

    from .._source import Source

__all__ = ["load_audio"]

_LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "4.0", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}


def load_audio(
    src: Source,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None = None,
    sample_rate: int | None = None,
    num_channels: int | None = None,
    *,
    name: str | None = None,
) -> Tensor:
    """Load the sound of an audio file or a video.

    ``load_audio("speech.flac", (1.0, 2.5), sample_rate=16_000, num_channels=1)`` -> (1, 24000)

    Decodes from the beginning up to the end of the window: no codec with memory can be entered
    anywhere else with certainty. So a window has the very samples of the whole.

    Args:
        src: as in :func:`load_video`.
        timestamp: start and end in seconds, as the container counts them; the samples of
            ``start <= time < end``. None: all. A clip's sound has the window of its frames.
        sample_rate: in samples a second; None: that of the file.
        num_channels: 1 to 8, mixed down or spread by FFmpeg's rules; None: those of the file.
        name: the source's name in errors; by default its path, or ``<bytes>``.

    Returns: float32, shape (channels, samples), CPU, contiguous, mostly in [-1, 1].
    Raises:
        DecodeError: no sound in it, damaged, or no sample in the window.
        OSError: a path cannot be read.
        ValueError: a rate below 1, another number of channels, or a window that is none.
    """
    if sample_rate is not None and sample_rate < 1:
        raise ValueError(f"load_audio: sample_rate must be >= 1, got {sample_rate}.")
    if num_channels is not None and num_channels not in _LAYOUTS:
        raise ValueError(f"load_audio: num_channels must be 1 to 8 or None, got {num_channels}.")
    start, end = (-math.inf, math.inf) if timestamp is None else window_of(timestamp)
    name = name or source_name(src)
    with open_audio(src, None, name) as (container, stream), decode_errors(name):
        parts = [*_parts(container, stream, sample_rate, num_channels, start, end, name)]
    if not parts:
        where = "in it" if timestamp is None else f"in [{start:g}, {end:g}) s"
        raise DecodeError(f"{name}: no sound {where}.")
    return torch.cat(parts, dim=1)


def _parts(
    container: InputContainer,
    stream: AudioStream,
    rate: int | None,
    num_channels: int | None,
    start: float,
    end: float,
    name: str,
) -> Iterator[Tensor]:
    """Yield the samples of the window, frame by frame."""
    frames = container.decode(stream)
    first = next(frames, None)
    if first is None:
        return
    rate = rate or first.sample_rate
    layout = first.layout.name if num_channels is None else _LAYOUTS[num_channels]
    resampler = AudioResampler(format="fltp", layout=layout, rate=rate)
    begin = (
        0.0 if first.pts is None or first.time_base is None else float(first.pts * first.time_base)
    )
    # The number of the first sample at or after a time.
    low, high = (
        side if math.isinf(side) else math.ceil((side - begin) * rate - 1e-6)
        for side in (start, end)
    )
    place = 0
    for frame in itertools.chain([first], frames, [None]):
        if frame is not None and frame.is_corrupt:
            raise DecodeError(f"{name}: damaged at {begin + place / rate:.3f} s.")
        for samples in _converted(resampler, frame, name):
            number = samples.shape[1]
            left, right = max(0, low - place), min(number, high - place)
            place += number
            if left < right:
                yield samples[:, int(left) : int(right)]
            if place >= high:
                return


def _converted(resampler: AudioResampler, frame: AudioFrame | None, name: str) -> Iterator[Tensor]:
    try:
        converted = resampler.resample(frame)
    except ValueError as error:  # of PyAV's, where the format changes within the stream
        raise DecodeError(f"{name}: its sound changes its format: {error}") from error
    for each in converted:
        if each is not None and each.samples:
            yield torch.from_numpy(each.to_ndarray())
