"""Encoded packets of a video or an image, and the times at which their frames are displayed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsFloat

from ...locks import RLock
from ...scopes import scope
from .._source import Source, read_source, source_name
from .codec import VideoCodec, is_entry, is_hidden, set_threads, to_ticks
from .opening import MediaFile
from .reading import UnsureError, Video, no_frame

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext


class Label(NamedTuple):
    """What a container and a packet's header say of a frame, before anything was decoded."""

    pts: int | None
    dts: int | None
    duration: int
    is_entry: bool
    is_shown: bool

    @classmethod
    def of(cls, packet: Packet[Any], codec: VideoCodec) -> Self:
        """Return the label of a packet that has just been read."""
        times = packet.pts, packet.dts, packet.duration or 0
        is_shown = not packet.is_discard and not is_hidden(packet, codec)
        return cls(*times, is_entry(packet, codec), is_shown)


def demux_video(
    src: Source,
    *,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None = None,
    name: str | None = None,
) -> VideoPackets:
    """Read the encoded packets of a video, without decoding.

    Args:
        src: a path, a URL that fsspec opens, the file's bytes (bytes or uint8 tensor of one
            dimension) or a binary file.
        timestamp: start and end in seconds. Reads only what decoding the frames of
            ``start <= time < end`` needs: from the keyframe before them on, or, where the container
            lists no packets, from the first packet on. None reads everything.
        name: the source's name in errors; by default its path, or ``<bytes>``.

    Returns: packets from which :func:`decode_packets` decodes exactly those frames.
    Raises:
        DecodeError: not a video, damaged, or no frame in the window.
        OSError: a path cannot be read.
    """
    window = None if timestamp is None else window_of(timestamp)
    packets = _read(MediaFile(src, name), window)
    if packets.is_fast and not len(packets):
        raise no_frame(packets.source, window)
    return packets


def _read(
    file: MediaFile, window: tuple[float, float] | None, *, is_fast: bool = True
) -> VideoPackets:
    """Read the fast way; where that is closed, from the first packet on."""
    try:
        with file.open() as opened:
            video = Video(*opened, file, is_fast=is_fast)
            return VideoPackets(video, [window or (-math.inf, math.inf)], window)
    except UnsureError:
        return _read(file, window, is_fast=False)


def demux_image(src: Source, *, name: str | None = None) -> ImagePackets:
    """Read an image, without decoding it, for :func:`decode_packets` and FFmpeg's filters.

    :func:`decode_image` and :func:`load_image_batch` need no FFmpeg and take half the time.

    Args:
        src: as in :func:`decode_image`. Of an animation the first picture is read.
        name: as in :func:`demux_video`.

    Raises:
        DecodeError: not an image that FFmpeg knows.
        OSError: a path cannot be read.
    """
    # From memory: of a path FFmpeg would take "%03d" for a number, and "*" for any name.
    return _read_image(MediaFile(read_source(src), name or source_name(src)))


def _read_image(file: MediaFile) -> ImagePackets:
    with file.open() as opened:
        video = Video(*opened, file, is_fast=False)
        video.keep_first()
        return ImagePackets(video, [(-math.inf, math.inf)])


def window_of(timestamp: tuple[SupportsFloat | str, SupportsFloat | str]) -> tuple[float, float]:
    """Return start and end in seconds. Raises: ValueError: they are no window."""
    try:  # a string may be a fraction, as in SPDL
        start, end = (float(Fraction(t) if isinstance(t, str) else t) for t in timestamp)
    except (TypeError, ValueError):
        start = end = math.nan
    if not start < end:
        raise ValueError(
            f"timestamp must be (start, end) in seconds with start < end, got {timestamp!r}."
        )
    return start, end


class VideoPackets:
    """The encoded packets of a video, or of a window of it, in decoding order.

    May be decoded many times, by one thread at a time. In the fast way the packets say which frames
    there are. Otherwise a decode of all tells, once somebody asks for their times.
    """

    def __init__(
        self,
        video: Video,
        spans: Sequence[tuple[float, float]],
        timestamp: tuple[float, float] | None = None,
    ) -> None:
        """Read what the frames in some spans of time need, or everything.

        Args:
            video: open, at its first packet.
            spans: in seconds, ascending and apart.
            timestamp: the window, if it is one.

        Raises: UnsureError: the fast way ends here.
        """
        self.source = video.source
        """The file's name in errors."""
        self._file = video.file
        self.codec = codec = video.codec
        self.width, self.height = codec.width, codec.height
        """The coded size in pixels, before a rotation."""
        self.pix_fmt, self.frame_rate = codec.pix_fmt, codec.frame_rate
        """FFmpeg's name of the coded pixel format; the average frames per second, as numerator and
        denominator."""
        self.time_base = codec.tick
        """The length of one tick in seconds."""
        self.timestamp = timestamp
        """The window in seconds, or None."""
        self.is_counted = video.is_counted
        """Whether frames are counted, for the container has no times (AVI, raw streams)."""
        self.is_fast = video.is_fast
        """Whether the packets say which frames there are, and decoding may begin at any entry."""
        self.packets = video.near(spans) if self.is_fast else video.from_first(spans[-1][1])
        """PyAV's packets."""
        self.num_packets = len(self.packets)
        """Their number, those before the window that decoding needs included."""
        self.labels = [Label.of(packet, self.codec) for packet in self.packets]
        self._context: VideoCodecContext = video.stream.codec_context
        self._lock = RLock()
        self._shown: list[tuple[int, int]] | None = None
        if self.is_fast:
            self._shown = self._promised(is_from_first=self.packets[:1] == [video.first])

    def _promised(self, *, is_from_first: bool) -> list[tuple[int, int]]:
        """Return ``shown`` as the packets say it.

        Raises: UnsureError: they do not tell which frame is displayed when.
        """
        if not self.labels or not self.labels[0].is_entry:
            raise UnsureError(f"{self.source}: it begins with no keyframe.")
        dts = [label.dts for label in self.labels if label.dts is not None]
        if any(later < earlier for earlier, later in pairwise(dts)):
            raise UnsureError(f"{self.source}: its times go back.")
        displayed = [(label.pts, n) for n, label in enumerate(self.labels) if label.is_shown]
        shown = sorted((time, number) for time, number in displayed if time is not None)
        if len({time for time, _ in shown}) < len(displayed):
            raise UnsureError(f"{self.source}: it has packets without a time of their own.")
        (low, high), first = self.ticks_of_window, self.labels[0].pts or 0
        if is_from_first and shown and shown[0][0] < first:
            raise UnsureError(f"{self.source}: it begins with frames that refer to others before.")
        low = max(low, first)
        return shown[bisect_left(shown, (low, -1)) : bisect_left(shown, (high, -1))]

    @property
    def ticks_of_window(self) -> tuple[float, float]:
        """The first tick of the window, and the first after it."""
        start, end = self.timestamp or (-math.inf, math.inf)
        return to_ticks(start, self.time_base), to_ticks(end, self.time_base)

    @property
    def shown(self) -> list[tuple[int, int]]:
        """For each frame of the window its time in ticks, and the number of the packet with which
        it comes out; in a decode of all, its own number."""
        if self._shown is None:
            from .decode import frames_in_order

            with self.decoder() as context:
                frames = enumerate(frames_in_order(self, context))
                self._shown = [(frame.pts or 0, number) for number, (frame, _) in frames]
        return self._shown

    def fall_back(self) -> None:
        """Leave the fast way, after what came out did not pass the check."""
        with self._lock:
            if self.timestamp is None:
                self.is_fast, self._shown = False, None
            else:
                again = _read(self._file, self.timestamp, is_fast=False)
                self.__dict__.update({**again.__dict__, "_lock": self._lock})

    @scope
    def decoder(self, num_threads: int = 1) -> Iterator[VideoCodecContext]:
        """The demuxer's own decoder, which one thread at a time has; ``num_threads`` are those of
        the first time."""
        with self._lock:
            context = self._context
            if not context.is_open:
                set_threads(context, num_threads, is_counted=self.is_counted)
            try:
                yield context
            finally:
                context.skip_frame = "DEFAULT"
                context.flush_buffers()

    def get_timestamps(self) -> list[float]:
        """Return the display time of each frame of the window, in seconds, ascending."""
        tick = self.time_base
        return [float(time * tick) for time, _ in self.shown]

    timestamps = property(get_timestamps)
    """The same."""

    @property
    def duration(self) -> float:
        """The seconds from the first frame of the window to the end of its last."""
        if self.timestamp is not None:
            return self.timestamp[1] - self.timestamp[0]
        (first, _), (last, _) = self.shown[0], self.shown[-1]
        return float((last - first + last_duration(self.labels)) * self.time_base)

    def clone(self) -> VideoPackets:
        """Return the same packets, read again, with another decoder."""
        return _read(self._file, self.timestamp)

    def __len__(self) -> int:
        """Return the number of frames in the window."""
        return len(self.shown)


class ImagePackets(VideoPackets):
    """The encoded packet of one image, decoded as stored: nothing puts it upright."""

    def clone(self) -> ImagePackets:
        """Return the same, likewise."""
        return _read_image(self._file)


def last_duration(labels: Sequence[Label]) -> int:
    """Return for how long the frame that is displayed last is displayed, in ticks; 0 if unknown."""
    times = [label.pts if label.pts is not None else label.dts or 0 for label in labels]
    return labels[max(range(len(times)), key=times.__getitem__)].duration
