"""Read what a clip needs of a video: its facts, for the sampler; then the spans of its moments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .._source import source_name
from .demux import read_again_if_unsure, read_spans
from .moments import facts_of, facts_of_packets, moments_of, on_display, spans_of
from .opening import open_video, position_of, rewind
from .reading import PacketReader

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

    from .._source import Source
    from .packets import VideoPackets
    from .samplers import ClipSampler, VideoInfo


class ClipReading:
    """Reads the packets of a clip, of which the moments are chosen once."""

    def __init__(self, src: Source, sampler: ClipSampler) -> None:
        self._src = src
        self._sampler = sampler
        self._name = source_name(src)
        self._place = position_of(src)
        self._moments: list[float] = []

    @property
    def can_repeat(self) -> bool:
        """Whether the source can be read again."""
        return self._place is not None

    def read(self, *, whole: bool = False) -> tuple[VideoPackets, list[int]]:
        """Read the packets of the moments, or the whole video.

        Returns: the packets, and the place of each moment's frame among their frames.
        Raises: as :func:`load_clip`.
        """
        if whole:
            rewind(self._src, self._place)
        packets, info = read_again_if_unsure(self._src, None, self._name, self._read, whole=whole)
        return packets, on_display(packets, self._moments, info)

    def _read(
        self, container: InputContainer, stream: VideoStream, whole: bool
    ) -> tuple[VideoPackets, VideoInfo]:
        reader = PacketReader(container, stream, self._name)
        if whole:
            packets = read_spans(reader, [(-math.inf, math.inf)], whole=True)
            info = facts_of_packets(packets)
            self._choose(info)
        else:
            info, can_go_on = facts_of(reader, keeps_all=not self.can_repeat)
            self._choose(info)
            packets = self._read_spans(reader) if can_go_on else self._read_anew()
        return packets, info

    def _read_anew(self) -> VideoPackets:
        rewind(self._src, self._place)
        with open_video(self._src, None, self._name) as (container, stream):
            reader = PacketReader(container, stream, self._name)
            reader.incoming.mark_as_surveyed()
            return self._read_spans(reader)

    def _read_spans(self, reader: PacketReader) -> VideoPackets:
        return read_spans(reader, spans_of(self._moments))

    def _choose(self, info: VideoInfo) -> None:
        if not self._moments:  # a random sampler is asked once
            self._moments = moments_of(self._sampler(info))
