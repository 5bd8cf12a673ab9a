"""A container's description of its video, decoders made from it, and its clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import av
from av.codec.codec import UnknownCodecError
from av.error import FFmpegError

if TYPE_CHECKING:
    from av.video.codeccontext import VideoCodecContext
    from av.video.stream import VideoStream

    from .._config import DecodeConfig

MPEG = frozenset({"mpeg1video", "mpeg2video", "mpeg4"})
"""FFmpeg's names of the codecs of MPEG up to 4 part 2, which have much in common."""

_MOST_ROUNDED = 2.0**-50
"""How far a time that was computed from a tick may be off that, as a share of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoCodec:
    """A container's description of its video stream."""

    name: str
    """FFmpeg's name of the codec, such as ``h264``."""
    width: int
    """The coded width in pixels, before a rotation that the container asks for."""
    height: int
    pix_fmt: str | None
    """FFmpeg's name of the pixel format; None where only decoding shows it."""
    frame_rate: tuple[int, int]
    """The average frames per second, as numerator and denominator; (0, 1) if unknown."""
    time_base: tuple[int, int]
    """The seconds of one tick of a timestamp, as numerator and denominator."""
    sample_aspect_ratio: tuple[int, int]
    """The aspect ratio of a pixel, width over height; (0, 1) if unknown."""
    reorder_depth: int
    """The number of frames that the decoder holds back to reorder them."""
    bits_per_coded_sample: int
    codec_tag: str
    extradata: bytes | None

    @classmethod
    def of(cls, stream: Any) -> Self:
        """Return the description of an open stream."""
        context: Any = stream.codec_context
        return cls(
            name=context.name,
            width=context.width,
            height=context.height,
            pix_fmt=context.pix_fmt,
            frame_rate=_pair(rate_of(stream)),
            time_base=_pair(stream.time_base),
            sample_aspect_ratio=_pair(stream.sample_aspect_ratio),
            reorder_depth=context.reorder_depth,
            bits_per_coded_sample=context.bits_per_coded_sample,
            codec_tag=context.codec_tag,
            extradata=context.extradata,
        )

    @property
    def tick(self) -> Fraction:
        """The seconds of one tick of a timestamp."""
        return Fraction(*self.time_base)

    @property
    def ticks_of_a_frame(self) -> Fraction:
        """How long a frame is displayed on average; 0 if unknown."""
        rate = Fraction(*self.frame_rate)
        return 1 / (rate * self.tick) if rate else Fraction(0)

    def __repr__(self) -> str:
        rate = "{}/{}".format(*self.frame_rate)
        return f"<{self.name} {self.pix_fmt} {self.width}x{self.height} at {rate} frames/s>"

    def new_context(self, config: DecodeConfig | None = None) -> VideoCodecContext:
        """Return a decoder of such a stream, not opened yet.

        Raises: ValueError: FFmpeg has no decoder of the name that ``config`` gives.
        """
        name = self.name if config is None else config.decoder or self.name
        try:
            context: Any = av.CodecContext.create(name, "r")
        except UnknownCodecError as error:
            raise ValueError(f"decode_config: FFmpeg has no decoder {name!r} here.") from error
        context.width, context.height = self.width, self.height
        if self.pix_fmt is not None:
            context.pix_fmt = self.pix_fmt
        if self.extradata:
            context.extradata = self.extradata
        if len(self.codec_tag) == 4 and self.codec_tag.isprintable():
            context.codec_tag = self.codec_tag
        # Without the first, H.264 frames come out of order until the decoder has learned the depth.
        context.options = {
            "has_b_frames": str(self.reorder_depth),
            "bits_per_coded_sample": str(self.bits_per_coded_sample),
            **_without_threads(config),
        }
        return context  # type: ignore[no-any-return]  # untyped in PyAV

    def open(
        self,
        context: VideoCodecContext,
        num_threads: int,
        config: DecodeConfig | None = None,
        *,
        is_counted: bool = False,
    ) -> None:
        """Open a decoder. Raises: ValueError: it has no such option as ``config`` asks for."""
        given = None if config is None else config.num_threads
        context.thread_count = num_threads if given is None else given
        # Decoding several frames at once delays their output, which breaks counting.
        context.thread_type = "SLICE" if is_counted else "AUTO"
        if config is None:
            return  # it opens with its first packet
        try:
            context.open()
        except FFmpegError as error:
            raise ValueError(f"decode_config: FFmpeg refuses it: {error}.") from error
        if context.options:  # those that the decoder did not take
            unknown = ", ".join(sorted(context.options))
            raise ValueError(
                f"decode_config: the decoder {context.name!r} has no option {unknown}."
            )


def rate_of(stream: VideoStream) -> Fraction | None:
    """Return the average frames per second that a container states; None if it states none.

    A frame a tick is none, where FFmpeg's guess is another rate: in raw DV.
    """
    average, guess = stream.average_rate, stream.guessed_rate
    is_tick = average is not None and average * (stream.time_base or 0) == 1
    return guess or average if is_tick else average or guess


ImageCodec: TypeAlias = VideoCodec
"""The codec of an image, for which SPDL has a type of its own."""


def _without_threads(config: DecodeConfig | None) -> dict[str, str]:
    options = {} if config is None else config.decoder_options or {}
    return {name: value for name, value in options.items() if name != "threads"}


def _pair(value: Any) -> tuple[int, int]:
    """Return numerator and denominator of PyAV's rational number; (0, 1) if it is unknown."""
    return (value.numerator, value.denominator) if value else (0, 1)


def to_ticks(seconds: float, tick: Fraction) -> float:
    """Return the first tick at or after a time; a time computed from a tick gives that tick."""
    ticks = seconds / float(tick)
    rounding = max(1e-6, abs(ticks) * _MOST_ROUNDED)
    return ticks if math.isinf(ticks) else math.ceil(ticks - rounding)


def tick_until(seconds: float, tick: Fraction) -> float:
    """Return the last tick at or before a time; likewise."""
    return -to_ticks(-seconds, tick)
