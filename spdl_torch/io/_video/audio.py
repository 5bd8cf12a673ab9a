"""Load the sound of a file or a video, whole or a part of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, SupportsFloat

import torch
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream

from spdl_torch.errors import DecodeError

from ...checks import check_whole
from .._options import window_of
from .codec import to_ticks
from .opening import MediaFile, packets_of

if TYPE_CHECKING:
    from av.container import InputContainer
    from torch import Tensor

    from .._source import Source

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
        timestamp: start and end in seconds; the samples of ``start <= time < end``, counted from
            the time of the first. None: all. A clip's sound has the window of its frames.
        sample_rate: in samples a second; None: that of the file.
        num_channels: 1 to 8, mixed down or spread by FFmpeg's rules; None: those of the file,
            however many.
        name: the source's name in errors; by default its path, or ``<bytes>``.

    Returns: float32, shape (channels, samples), CPU, contiguous, mostly in [-1, 1].
    Raises:
        DecodeError: no sound in it, damaged, channels that FFmpeg cannot mix, or no sample in the
            window.
        OSError: a path cannot be read.
        ValueError: a rate below 1, another number of channels, a window that is none, or sound
            whose format changes.
    """
    check_whole("load_audio", optional=True, sample_rate=sample_rate)
    if num_channels is not None and num_channels not in _LAYOUTS:
        raise ValueError(f"load_audio: num_channels must be 1 to 8 or None, got {num_channels}.")
    start, end = (-math.inf, math.inf) if timestamp is None else window_of(timestamp)
    file = MediaFile(src, name)
    with file.open("audio") as (container, stream):
        assert isinstance(stream, AudioStream), "guaranteed by its kind"
        parts = [*_parts(container, stream, sample_rate, num_channels, start, end, file.name)]
    if not parts:
        where = "in it" if timestamp is None else f"in [{start:g}, {end:g}) s"
        raise DecodeError(f"{file.name}: no sound {where}.")
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
    packets = itertools.chain(packets_of(container, stream), [None])
    frames = (frame for packet in packets for frame in stream.decode(packet))
    first = next(frames, None)
    if first is None:
        return
    rate = rate or first.sample_rate
    layout = first.layout.name if num_channels is None else _LAYOUTS[num_channels]
    # Packed, for PyAV counts planes that are not there from 8 channels on.
    resampler = AudioResampler(format="flt", layout=layout, rate=rate)
    begin = float((first.pts or 0) * (first.time_base or 0))  # 0 where it has none
    # The number of the first sample at or after a time.
    low, high = (to_ticks(side - begin, Fraction(1, rate)) for side in (start, end))
    place = 0
    for frame in itertools.chain([first], frames, [None]):
        if frame is not None and frame.is_corrupt:
            raise DecodeError(f"{name}: damaged at {begin + place / rate:.3f} s.")
        for converted in resampler.resample(frame):
            packed = converted.to_ndarray().reshape(-1, converted.layout.nb_channels)
            samples = torch.from_numpy(packed).T
            number = samples.shape[1]
            left, right = max(0, low - place), min(number, high - place)
            place += number
            if left < right:
                yield samples[:, int(left) : int(right)]
            if place >= high:
                return
