"""The decoder of a video's packets, kept from one use to the next."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from av.error import FFmpegError

from .rotation import upright_filters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext

    from .._config import DecodeConfig
    from .codec import VideoCodec


class KeptDecoder:
    """A decoder that one thread at a time has.

    context: the demuxer's own, to begin with. It alone knows the rotation of the frames, which is
        learned before another takes its place.
    is_counted: whether frames are counted, which decoding several of them at once would break.
    """

    def __init__(
        self,
        codec: VideoCodec,
        packets: Sequence[Packet[Any]],
        context: VideoCodecContext | None = None,
        *,
        is_counted: bool = False,
    ) -> None:
        self.upright: list[tuple[str, str]] | None = None
        """The filters that put frames upright; None where each frame has its own rotation."""
        self._codec = codec
        self._packets = packets
        self._is_counted = is_counted
        self._context = context
        self._lock = threading.Lock()

    def take(self, num_threads: int, config: DecodeConfig | None = None) -> VideoCodecContext:
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
                context = self._codec.new_context()
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

    def learned_upright(self) -> list[tuple[str, str]] | None:
        """Return ``upright``, for packets that are decoded without the demuxer's own decoder."""
        with self._lock:
            self._learn_upright()
        return self.upright

    def _set_threads(self, context: VideoCodecContext, num_threads: int) -> None:
        context.thread_count = num_threads
        # Decoding several frames at once delays their output, which breaks counting.
        context.thread_type = "SLICE" if self._is_counted else "AUTO"

    def _configured(self, config: DecodeConfig, num_threads: int) -> VideoCodecContext:
        context = self._codec.new_context(config)
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
        if self.upright is not None or self._context is None:
            return
        self.upright = []
        # Packets that an edit list cuts off give no frame.
        for packet in [*self._packets, None]:
            with contextlib.suppress(FFmpegError):
                if frames := self._context.decode(packet):
                    self.upright = upright_filters(frames[0])
                    break
        self._context.flush_buffers()
