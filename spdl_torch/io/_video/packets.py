"""Encoded packets of a video and the times at which their frames are displayed."""

from __future__ import annotations

import contextlib
import math
import threading
from bisect import bisect_left
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from av.error import FFmpegError
from av.packet import Packet

from .rotation import upright_filters

if TYPE_CHECKING:
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame

    from .._config import DecodeConfig
    from .codec import VideoCodec

__all__ = ["ImagePackets", "VideoPackets", "displayed", "to_ticks"]


class _State(NamedTuple):
    source: str
    codec: VideoCodec
    timestamp: tuple[float, float] | None
    upright: list[tuple[str, str]] | None
    times: list[int]
    packets: list[tuple[bytes, int | None, int | None, int | None, bool]]


class VideoPackets:
    """The encoded packets of a video, or of a window of it, in decoding order.

    May be decoded many times, by one thread at a time, and pickled.
    """

    def __init__(
        self,
        source: str,
        codec: VideoCodec,
        packets: list[Packet[Any]],
        timestamp: tuple[float, float] | None = None,
        context: VideoCodecContext | None = None,
    ) -> None:
        self.source = source
        """The file's name in errors."""
        self.codec = codec
        self.packets = packets
        """PyAV's packets, from a keyframe on."""
        self.timestamp = timestamp
        """The window in seconds, or None."""
        self.is_timed = packets[0].pts is not None
        """Whether the container has display times. Without them (AVI, raw streams) frames are
        counted."""
        self.display = _display_times(packets, self.is_timed)
        """The display time of every packet's frame, in ticks."""
        self.times = self._times_in_window()
        """The display times of the window's frames, ascending, in ticks."""
        self.upright: list[tuple[str, str]] | None = None
        """The filters that put frames upright; None where each frame has its own rotation."""
        self._context = context
        self._lock = threading.Lock()

    @property
    def num_packets(self) -> int:
        """The number of packets read, those before the window that decoding needs included."""
        return len(self.packets)

    @property
    def width(self) -> int:
        """The coded width in pixels, before a rotation."""
        return self.codec.width

    @property
    def height(self) -> int:
        """The coded height in pixels, before a rotation."""
        return self.codec.height

    @property
    def pix_fmt(self) -> str | None:
        """FFmpeg's name of the coded pixel format."""
        return self.codec.pix_fmt

    @property
    def frame_rate(self) -> tuple[int, int]:
        """The average frames per second, as numerator and denominator."""
        return self.codec.frame_rate

    @property
    def time_base(self) -> Fraction:
        """The length of one tick in seconds."""
        return Fraction(*self.codec.time_base)

    @property
    def timestamps(self) -> list[float]:
        """The display time of each frame of the window, in seconds, ascending."""
        return self.get_timestamps()

    @property
    def duration(self) -> float:
        """The seconds from the first frame of the window to the end of its last."""
        if self.timestamp is not None:
            start, end = self.timestamp
            return end - start
        last = max(self.packets, key=lambda packet: packet.pts or 0).duration or 0
        return float((self.times[-1] - self.times[0] + last) * self.time_base)

    def get_timestamps(self) -> list[float]:
        """Return the display time of each frame of the window, in seconds, ascending."""
        return [float(time * self.time_base) for time in self.times]

    def clone(self) -> Self:
        """Return the same packets with another decoder."""
        with self._lock:
            self._learn_upright()
        twin = type(self)(self.source, self.codec, self.packets, self.timestamp)
        twin.upright = self.upright
        return twin

    def take_context(
        self, num_threads: int, config: DecodeConfig | None = None
    ) -> VideoCodecContext:
        """Return a decoder, which the caller gives back. Blocks while another caller has it.

        Raises: ValueError: FFmpeg has no such decoder or option as ``config`` asks for.
        """
        self._lock.acquire()
        try:
            context = self._context
            if config is not None:
                self._learn_upright()
                return self._configured(config, num_threads)
            if context is None or (context.is_open and context.thread_count != num_threads):
                self._learn_upright()
                context = self.codec.new_context()
            if not context.is_open:
                self._set_threads(context, num_threads)
            return context
        except BaseException:
            self._lock.release()
            raise

    def give_back(self, context: VideoCodecContext, config: DecodeConfig | None = None) -> None:
        """Return a decoder, and let others decode. A configured one is not kept."""
        context.flush_buffers()
        if self._context is None and config is None:
            self._context = context
        self._lock.release()

    def _set_threads(self, context: VideoCodecContext, num_threads: int) -> None:
        context.thread_count = num_threads
        # Decoding several frames at once delays their output, which breaks counting.
        context.thread_type = "AUTO" if self.is_timed else "SLICE"

    def _configured(self, config: DecodeConfig, num_threads: int) -> VideoCodecContext:
        context = self.codec.new_context(config)
        given = config.num_threads
        self._set_threads(context, num_threads if given is None else given)
        try:
            context.open()
        except FFmpegError as error:
            raise ValueError(f"decode_config: FFmpeg refuses it: {error}.") from error
        if context.options:  # those that the decoder did not take
            unknown = ", ".join(sorted(context.options))
            raise ValueError(
                f"decode_config: the decoder {context.name!r} has no option {unknown}."
            )
        return context

    def _learn_upright(self) -> None:
        """Find the rotation of the frames, which only the demuxer's own decoder knows."""
        if self.upright is not None or self._context is None:
            return
        frames: list[VideoFrame] = []
        with contextlib.suppress(FFmpegError):
            frames += self._context.decode(self.packets[0])
            frames += self._context.decode(None)
        self._context.flush_buffers()
        self.upright = upright_filters(frames[0]) if frames else []

    def __len__(self) -> int:
        """Return the number of frames in the window."""
        return len(self.times)

    def __repr__(self) -> str:
        window = "" if self.timestamp is None else " in [{:g}, {:g}) s".format(*self.timestamp)
        return (
            f"<VideoPackets of {self.source!r}: {len(self)} frames{window}, "
            f"{self.num_packets} packets, {self.codec!r}>"
        )

    def __getstate__(self) -> _State:
        packets = [(bytes(p), p.pts, p.dts, p.duration, p.is_keyframe) for p in self.packets]
        with self._lock:
            self._learn_upright()
        return _State(self.source, self.codec, self.timestamp, self.upright, self.times, packets)

    def __setstate__(self, state: _State) -> None:
        source, codec, timestamp, upright, times, contents = state
        packets = []
        for content, pts, dts, duration, is_keyframe in contents:
            packet: Packet[Any] = Packet(content)
            packet.pts, packet.dts, packet.time_base = pts, dts, Fraction(*codec.time_base)
            packet.duration = duration
            packet.is_keyframe = is_keyframe
            packets.append(packet)
        self.__init__(source, codec, packets, timestamp)  # type: ignore[misc]  # unpickling
        self.upright = upright
        self.times = times  # leaves out packets to be discarded, a mark that packets made here lack

    def _times_in_window(self) -> list[int]:
        shown = sorted(
            {
                time
                for packet, time in zip(self.packets, self.display, strict=True)
                if time >= self.display[0] and not packet.is_discard
            }
        )
        if self.timestamp is None:
            return shown
        start, end = (to_ticks(second, self.time_base) for second in self.timestamp)
        return shown[bisect_left(shown, start) : bisect_left(shown, end)]


class ImagePackets(VideoPackets):
    """The encoded packet of one image, decoded as stored: nothing puts it upright."""

    def __init__(self, source: str, codec: VideoCodec, packets: list[Packet[Any]], *_: Any) -> None:
        super().__init__(source, codec, packets)
        self.upright = []


def displayed(packet: Packet[Any]) -> int | None:
    """Return the display time of a packet's frame in ticks, estimated where frames are counted."""
    return packet.dts if packet.pts is None else packet.pts


def _display_times(packets: list[Packet[Any]], is_timed: bool) -> list[int]:
    if not is_timed:
        return sorted(packet.dts or 0 for packet in packets)
    times: list[int] = []
    for packet in packets:
        # A packet without a time belongs to the frame before: the second field of a picture.
        times.append(times[-1] if packet.pts is None else packet.pts)
    return times


def to_ticks(seconds: float, time_base: Fraction) -> float:
    """Return the first tick at or after a time; a time computed from a tick gives that tick."""
    if math.isinf(seconds):
        return seconds
    return math.ceil(seconds / float(time_base) - 1e-6)
