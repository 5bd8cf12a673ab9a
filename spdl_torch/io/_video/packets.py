"""Encoded packets of a video or an image, and two ways from them to frames.

Exact means: the frame and the time that a decode of all gives, from the first packet on. The fast
way begins near the frames, and checks whether it went right.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self

from av.error import FFmpegError

from spdl_torch.errors import DecodeError

from .codec import (
    MPEG,
    TELL_KEYFRAMES,
    Label,
    VideoCodec,
    is_entry,
    is_hidden,
    last_duration,
    to_ticks,
)
from .opening import decode_errors
from .reading import UnsureError, Video, goes_back

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame

    from .opening import MediaFile

_KNOWS_NONREF = MPEG | {"h264"}
"""Codecs in which a frame marked as a non-reference is a reference for no other frame at all. In
HEVC it may be one for a higher temporal layer."""

_MOST_WAITING = 32
"""The most frames that are kept until one has a time."""


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
        self.labels = [Label.of(packet, codec) for packet in self.packets]
        self.decoder = video.decoder
        is_from_first = self.packets[:1] == [video.first]
        self._shown = self._promised(is_from_first=is_from_first) if self.is_fast else None

    @classmethod
    def read(
        cls, file: MediaFile, window: tuple[float, float] | None = None, *, is_fast: bool = True
    ) -> Self:
        """Read a file the fast way; where that is closed, from the first packet on."""
        try:
            with file.open() as opened:
                video = Video(*opened, file, is_fast=is_fast)
                return cls(video, [window or (-math.inf, math.inf)], window)
        except UnsureError:
            return cls.read(file, window, is_fast=False)

    def _promised(self, *, is_from_first: bool) -> list[tuple[int, int]]:
        """Return ``shown`` as the packets say it.

        Raises: UnsureError: they do not tell which frame is displayed when.
        """
        if not self.labels or not self.labels[0].is_entry:
            raise UnsureError(f"{self.source}: it begins with no keyframe.")
        dts = [label.dts for label in self.labels if label.dts is not None]
        if any(later < earlier for earlier, later in itertools.pairwise(dts)):
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
    def num_packets(self) -> int:
        """The number of packets, those before the window that decoding needs included."""
        return len(self.packets)

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
            with self.decoder.begun() as context:
                frames = enumerate(self._frames_of_window(context))
                self._shown = [(frame.pts or 0, number) for number, (frame, _) in frames]
        return self._shown

    def get_timestamps(self) -> list[float]:
        """Return the display time of each frame of the window, in seconds, ascending."""
        return [float(time * self.time_base) for time, _ in self.shown]

    timestamps = property(get_timestamps)
    """The same."""

    @property
    def duration(self) -> float:
        """The seconds from the first frame of the window to the end of its last."""
        if self.timestamp is not None:
            return self.timestamp[1] - self.timestamp[0]
        (first, _), (last, _) = self.shown[0], self.shown[-1]
        return float((last - first + last_duration(self.labels)) * self.time_base)

    def clone(self) -> Self:
        """Return the same packets, read again, with another decoder."""
        return self.read(self._file, self.timestamp)

    def __len__(self) -> int:
        """Return the number of frames in the window."""
        return len(self.shown)

    def frames(self, wanted: Sequence[int] | None, num_threads: int = 1) -> Generator[VideoFrame]:
        """The frames of the window at the places ``wanted`` (ascending), in that order; None: all.

        Each has its time as its pts. Close the iterator, or run it to its end.

        Raises: UnsureError: the fast way did not go right; DecodeError: the data is damaged where
            it matters; IndexError: there is no such place.
        """
        with self.decoder.begun(num_threads) as context, decode_errors(self.source):
            yield from (self._fast if self.is_fast else self._in_order)(context, wanted)

    def fall_back(self) -> None:
        """Leave the fast way, after what came out did not pass the check."""
        with self.decoder.lock:
            if self.timestamp is None:
                self.is_fast, self._shown = False, None
            else:
                again = self.read(self._file, self.timestamp, is_fast=False)
                again.decoder.lock = self.decoder.lock
                self.__dict__.update(again.__dict__)

    def _fast(
        self, context: VideoCodecContext, wanted: Sequence[int] | None
    ) -> Iterator[VideoFrame]:
        """Decode from the entries before the wanted frames, without the frames that nobody needs:
        each time the wanted frames must come after a keyframe, in their order, and all of them.

        Raises: UnsureError: the frames are not so.
        """
        shown = self.shown
        wanted = range(len(shown)) if wanted is None else wanted
        if wanted and not 0 <= wanted[0] <= wanted[-1] < len(shown):
            raise IndexError(f"indices must be in [0, {len(shown)}), got {list(wanted)}.")
        error = UnsureError(f"{self.source}: other frames come out than its packets promise.")
        skips = context.thread_count == 1 and self.codec.name in _KNOWS_NONREF
        times = {shown[place][1]: shown[place][0] for place in wanted}
        left = iter([shown[place][0] for place in wanted])
        for start, numbers in self._runs(times):
            is_sure, missing = False, {times[number] for number in numbers}
            try:
                run = [*self.packets[start : numbers[-1] + 1], None]
                for number, packet in enumerate(run, start):
                    if packet is not None and packet.is_corrupt:
                        raise error
                    if packet is not None and skips:
                        context.skip_frame = "DEFAULT" if number in times else "NONREF"
                    for frame in context.decode(packet):
                        is_sure = is_sure or frame.key_frame
                        if frame.pts not in missing:
                            continue
                        if not is_sure or frame.pts != next(left, None) or frame.is_corrupt:
                            raise error
                        missing.remove(frame.pts)
                        frame.time_base = self.time_base
                        yield frame
            except FFmpegError as damage:
                raise UnsureError(f"{self.source}: {damage}.") from damage
            if missing:
                raise error
            context.flush_buffers()

    def _runs(self, times: dict[int, int]) -> list[tuple[int, list[int]]]:
        """Return where to begin decoding, and the numbers of the packets wanted from there.

        times: of the wanted frames, by the packets with which they come out.
        """
        labels = self.labels
        entries = [number for number, label in enumerate(labels) if label.is_entry]
        runs: list[tuple[int, list[int]]] = []
        for number in sorted(times):
            place = bisect_right(entries, number) - 1
            # Frames displayed before an entry may refer to those before it.
            while place > 0 and (labels[entries[place]].pts or 0) > times[number]:
                place -= 1
            start, numbers = entries[place], [number]
            if runs and start <= runs[-1][1][-1]:
                before, others = runs.pop()
                start, numbers = min(start, before), [*others, number]
            runs.append((start, numbers))
        return runs

    def _in_order(
        self, context: VideoCodecContext, wanted: Sequence[int] | None
    ) -> Iterator[VideoFrame]:
        """Decode from the first packet on, until the last wanted frame has come; None: all."""
        left = itertools.count() if wanted is None else iter(wanted)
        place, count = next(left, None), 0
        for frame, is_damaged in self._frames_of_window(context):
            if count == place:
                yield undamaged(frame, is_damaged, self.source)
                place = next(left, None)
                if place is None:
                    return
            count += 1
        if wanted is not None:
            raise IndexError(f"indices must be in [0, {count}), got {list(wanted)}.")

    def _frames_of_window(self, context: VideoCodecContext) -> Iterator[tuple[VideoFrame, bool]]:
        """Yield the frames of the window as a decode of all gives them; whether each is damaged.

        Raises: DecodeError: the times of a window's frames go back.
        """
        low, high = self.ticks_of_window
        frames = every_frame(self, context)
        if self.timestamp is not None:
            frames = ascending(frames, self)
        for frame, is_damaged in frames:
            time = frame.pts or 0
            if time >= high:
                return
            if time >= low:
                yield frame, is_damaged


class ImagePackets(VideoPackets):
    """The encoded packet of one image, decoded as stored: nothing puts it upright."""

    def __init__(self, video: Video, *window: Any) -> None:
        """Take the first packet of an open container, which may have more."""
        video.keep_first()
        super().__init__(video, *window)


def every_frame(
    video: Video | VideoPackets, context: VideoCodecContext
) -> Iterator[tuple[VideoFrame, bool]]:
    """Decode a video from its first packet on; yield each frame, with its time in ticks as its pts,
    and whether it is damaged: that lasts until the next keyframe.

    Times that are missing are evenly spaced: back from the first one that is known, and on from
    each. Where none is, frames are counted from the first packet's time on.
    """
    packets = iter(video.packets)
    first = next(packets, None)
    if first is None:
        return
    step, base, since = video.codec.ticks_of_a_frame or Fraction(1), Fraction(first.dts or 0), 0
    frames = _untimed(first, packets, context, video)
    head: list[tuple[VideoFrame, bool]] = []
    for each in frames:
        head.append(each)
        if each[0].pts is not None or len(head) == _MOST_WAITING:
            base = base if each[0].pts is None else each[0].pts - (len(head) - 1) * step
            break
    for frame, is_damaged in itertools.chain(head, frames):
        if frame.pts is None:
            frame.pts = round(base + since * step)
        else:
            base, since = Fraction(frame.pts), 0
        since += 1
        frame.time_base = video.codec.tick
        yield frame, is_damaged


def _untimed(
    first: Packet[Any],
    others: Iterable[Packet[Any]],
    context: VideoCodecContext,
    video: Video | VideoPackets,
) -> Iterator[tuple[VideoFrame, bool]]:
    """Yield the same frames with the times that containers and counting give; None: no time."""
    is_damaged, damaged = _may_lack_references(first, video.codec), set()
    fed: deque[int] = deque()
    for packet in itertools.chain([first], others, [None]):
        if packet is not None:
            fed.append(packet.dts or 0)
            if packet.is_corrupt:
                damaged.add(packet.pts)
        for frame in context.decode(packet):
            is_corrupt = frame.is_corrupt or frame.pts in damaged
            is_damaged = is_corrupt or (is_damaged and not frame.key_frame)
            # The first frame on the screen has the first packet's time, and so on.
            if video.is_counted:
                frame.pts = fed.popleft() if fed else None
            yield frame, is_damaged


def _may_lack_references(first: Packet[Any], codec: VideoCodec) -> bool:
    """Return whether frames before the first keyframe may come out of the decoder, although they
    lack what they refer to. Those of HEVC are left out, or whole."""
    if first.is_discard or is_hidden(first, codec):
        return False
    is_told = codec.name in TELL_KEYFRAMES - {"hevc"} and is_entry(first, codec)
    return codec.name == "mpeg4" or is_told


def ascending(
    frames: Iterable[tuple[VideoFrame, bool]], video: Video | VideoPackets
) -> Iterator[tuple[VideoFrame, bool]]:
    """Yield the same, each after a look at the next ones: a decoder that has lost its way gives
    frames out of order. Raises: DecodeError: times go back, so that none means one frame."""
    last: int | None = None
    ahead: deque[tuple[VideoFrame, bool]] = deque()
    for frame, is_damaged in frames:
        if last is not None and frame.pts is not None and frame.pts < last:
            raise goes_back(video, last, frame.pts)
        last = frame.pts
        ahead.append((frame, is_damaged))
        if len(ahead) > max(1, video.codec.reorder_depth):
            yield ahead.popleft()
    yield from ahead


def undamaged(frame: VideoFrame, is_damaged: bool, name: str) -> VideoFrame:
    """Return a frame that is wanted. Raises: DecodeError: it is damaged."""
    if is_damaged:
        raise DecodeError(f"{name}: damaged before or in the frame at {frame.time:.3f} s.")
    return frame
