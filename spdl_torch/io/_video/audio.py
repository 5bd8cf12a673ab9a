"""Load the sound of a file or a video, whole or a part of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from numbers import Integral
from typing import TYPE_CHECKING, SupportsFloat

import torch
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.error import ArgumentError

from spdl_torch.errors import DecodeError

from .codec import to_ticks
from .opening import SOUND, MediaFile, packets_of
from .packets import window_of

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.container import InputContainer
    from torch import Tensor

    from .._source import Source

_TOLERANCE = 0.02
"""The seconds by which a container's times may differ from the samples counted: they are rounded,
mostly to milliseconds, and a frame that is lost lasts longer."""

_HIGHEST_RATE = 100_000_000
"""Twice the highest rate at which sound is stored, 49 MHz; FFmpeg's resampler still has memory for
its filters."""

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
        num_channels: 1 to 8, mixed down or spread by FFmpeg's rules; None: those of the file,
            however many.
        name: the source's name in errors; by default its path, or ``<bytes>``.

    Returns: float32, shape (channels, samples), CPU, contiguous, mostly in [-1, 1].
    Raises:
        DecodeError: no sound in it, damaged, channels that FFmpeg cannot mix, or no sample in the
            window; with a window, sound that has a gap or goes back in time before its end.
        OSError: a path cannot be read.
        ValueError: a rate below 1 or above 100,000,000, another number of channels, or a window
            that is none.
    """
    is_whole = isinstance(sample_rate, Integral)
    if sample_rate is not None and not (is_whole and 1 <= sample_rate <= _HIGHEST_RATE):
        raise ValueError(
            f"load_audio: sample_rate must be 1 to {_HIGHEST_RATE:,} or None, got {sample_rate!r}."
        )
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
    # Formats that hold nothing but sound have no times of their own: FFmpeg counts, and rounds.
    is_sound_alone = container.format.name in SOUND.split(",")
    is_timed = not is_sound_alone and (low > -math.inf or high < math.inf)
    place, counted, num_given = 0, begin, 0
    for frame in itertools.chain([first], frames, [None]):
        if frame is not None and frame.is_corrupt:
            raise DecodeError(f"{name}: damaged at {begin + place / rate:.3f} s.")
        if frame is not None and is_timed:
            if counted < end:
                _check_time(frame, counted, name)
            counted += frame.samples / frame.sample_rate
        num_given += 0 if frame is None else frame.samples
        for samples in _converted(resampler, first, frame, name):
            number = samples.shape[1]
            left, right = max(0, low - place), min(number, high - place)
            place += number
            if left < right:
                yield samples[:, int(left) : int(right)]
            if place >= high:
                return
    if num_given and not place:
        raise DecodeError(
            f"{name}: its sound is too short: FFmpeg's resampler makes no sample at {rate} Hz of "
            f"{num_given} at {first.sample_rate} Hz."
        )


def _check_time(frame: AudioFrame, counted: float, name: str) -> None:
    """Raise a DecodeError if the container has another time for a frame than the samples before
    it, counted: no sample then is where a window says."""
    if frame.pts is None or frame.time_base is None:
        return
    time = float(frame.pts * frame.time_base)
    if abs(time - counted) > _TOLERANCE:
        what = "has a gap" if time > counted else "goes back"
        raise DecodeError(
            f"{name}: its sound {what} from {counted:.3f} s to {time:.3f} s, so that samples do "
            "not tell their time: packets may be missing, or several files glued together. Load it "
            "whole, or a window before that."
        )


def _converted(
    resampler: AudioResampler, first: AudioFrame, frame: AudioFrame | None, name: str
) -> Iterator[Tensor]:
    if frame is not None and _format(frame) != _format(first):
        raise DecodeError(
            f"{name}: its sound changes its format, from {_format(first)} to {_format(frame)}."
        )
    layout, rate = resampler.layout, resampler.rate
    try:
        converted = resampler.resample(frame)
    except ArgumentError as error:
        raise DecodeError(
            f"{name}: FFmpeg cannot make {layout.name} at {rate} Hz of {_format(first)}: it has no "
            "rule for mixing these channels. With num_channels=None they come as they are."
        ) from error
    for each in converted:
        if each is not None and each.samples:
            packed = each.to_ndarray().reshape(-1, each.layout.nb_channels)
            yield torch.from_numpy(packed).T


def _format(frame: AudioFrame) -> str:
    return f"{frame.layout.name} at {frame.sample_rate} Hz in {frame.format.name}"
