"""Open a container of video or sound, as often as needed; tell damaged data from other failures."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, cast

import av
from av.audio.stream import AudioStream
from av.error import ArgumentError, FFmpegError
from av.stream import Discard
from av.video.stream import VideoStream
from torch import Tensor

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler

from ...scopes import scope
from .._remote import RetryPolicy, is_url
from .._resuming import open_resuming
from .._source import Source, memory_of, source_name, stored

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet

_FILE_ERRORS = frozenset({errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR})

_BUFFER_BYTES = 1 << 18
"""Bytes read from a Python file at a time; each read takes the GIL."""

_MOST_IN_MEMORY = 1 << 26
"""The bytes of a source that cannot seek which are kept in memory; more are in a temporary file."""

_TRIES = 8
"""How often FFmpeg may ask to read again."""

_SELF_CONTAINED = (
    "matroska,mov,avi,mpegts,mpegtsraw,mpeg,flv,live_flv,kux,asf,asf_o,ogg,mxf,nut,nuv,rm,swf,wtv,"
    "ty,gxf,lxf,dv,dhav,pva,nsv,ivf,ivr,obu,av1,h261,h263,h264,hevc,vvc,evc,apv,m4v,mpegvideo,"
    "mjpeg,mjpeg_2000,mpjpeg,smjpeg,dirac,dnxhd,vc1,vc1test,cavsvideo,avs,avs2,avs3,yuv4mpegpipe,"
    "gif,gif_pipe,apng,png_pipe,jpeg_pipe,jpegxl_anim,webp_pipe,bmp_pipe,tiff_pipe,bink,smk,roq,"
    "flic,film_cpk,wc3movie,4xm,ea,idcin,thp,usm,vmd,xmv,"
    "wav,w64,aiff,au,caf,flac,mp3,aac,ac3,eac3,dts,amr,ape,wv,tta,tak,mpc,mpc8,gsm,sbc,adx,voc,sox"
)
"""FFmpeg's names of the formats that a local file may have: they open no other file. FFmpeg takes
the format from the content, whatever the file is called, and opens what playlists (hls, dash),
lists (concat), numbered pictures (image2) and a few containers (imf, mlv, vobsub) name."""


@scope
def decode_errors(name: str) -> Iterator[None]:
    """Turn FFmpeg's complaints about the data into a DecodeError that names the source."""
    try:
        yield
    except FFmpegError as error:
        if error.errno in _FILE_ERRORS and isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, name) from error
        raise DecodeError(f"{name}: {error.strerror or error}.") from error


class MediaFile:
    """A source of video or sound, which can be opened again.

    What cannot seek is kept: in memory, or in a temporary file if it is large.
    """

    def __init__(self, source: Source, name: str | None = None) -> None:
        self.name = name or source_name(source)
        """The name in errors."""
        self.source = stored(source)
        self._position: int | None = None

    @scope
    def open(
        self, kind: Literal["audio", "video"] = "video"
    ) -> Iterator[tuple[InputContainer, AudioStream | VideoStream]]:
        """The container and its best stream of that kind; other streams are not read.

        Raises:
            DecodeError: not a container that FFmpeg knows, or one without a stream that it can
                decode.
            OSError: a path that cannot be read.
        """
        with contextlib.ExitStack() as stack, decode_errors(self.name):
            container = stack.enter_context(self._open(stack))
            stream = container.streams.best(kind)
            if not isinstance(stream, AudioStream | VideoStream):
                kinds = ", ".join(sorted({each.type for each in container.streams})) or "nothing"
                raise DecodeError(f"{self.name}: no {kind} stream in it, only: {kinds}.")
            if stream.codec_context is None:
                raise DecodeError(f"{self.name}: FFmpeg has no decoder for its {kind} stream.")
            for other in container.streams:
                if other.index != stream.index:
                    other.discard = Discard.all
            yield container, stream

    def _open(self, stack: contextlib.ExitStack) -> InputContainer:
        source: Any = self.source
        if isinstance(source, str | os.PathLike) and not is_url(source):
            return _open_path(os.fspath(source))
        if isinstance(source, str):
            opened = open_resuming(source, RetryPolicy(), seekable=True)
            source = self._rewound(stack.enter_context(opened))
        elif isinstance(source, bytes | bytearray | memoryview | Tensor):
            source = io.BytesIO(memory_of(source, "video"))
        elif callable(getattr(source, "read", None)):
            source = self._rewound(source)
        else:
            raise TypeError(
                f"a video source must be a path, a URL, bytes, a uint8 tensor or a file opened "
                f"with 'rb', got {type(source).__name__}."
            )
        # Bytes may come from anywhere: whatever they say, nothing else is opened on their behalf.
        return _av_open(_File(source), protocol_whitelist="none")

    def _rewound(self, file: Any) -> Any:
        """Return a file at the place where it was at first; a copy of it if it cannot seek."""
        if self._position is None:
            self._position = _position_of(file)
        if self._position is None:
            kept: Any = tempfile.SpooledTemporaryFile(_MOST_IN_MEMORY)  # noqa: SIM115 - the next line
            weakref.finalize(self, kept.close)
            shutil.copyfileobj(file, kept, _BUFFER_BYTES)
            self.source, self._position, file = kept, 0, kept
        file.seek(self._position)
        return file


def packets_of(
    container: InputContainer, stream: AudioStream | VideoStream
) -> Iterator[Packet[Any]]:
    """Yield the packets of a stream that hold data, from where the container stands."""
    for tries_left in reversed(range(_TRIES)):
        try:
            for packet in container.demux(stream):
                if packet.size:
                    yield packet
            return
        except BlockingIOError as error:
            # FFmpeg's at random bytes in a transport stream, after which there is more.
            if not (tries_left and isinstance(error, FFmpegError)):
                raise  # or of the user's own file object
        except IndexError as error:
            # PyAV raises it after the last packet: it looks up all streams of the container, those
            # included that FFmpeg found only while reading, which PyAV does not know.
            if not _is_from_stream_lookup(error):
                raise  # from the user's own file object
            return


def _is_from_stream_lookup(error: IndexError) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_name == "_get_streams"


def _position_of(file: Any) -> int | None:
    """Return the place at which a file is; None if it cannot seek."""
    try:
        return int(file.tell()) if file.seekable() else None
    except unless_of_handler(AttributeError, OSError, ValueError):
        return None


class _File:
    """A binary file in which a seek to where there is nothing fails as FFmpeg expects.

    FFmpeg seeks wherever damaged data points, and to the last byte of an empty file. Files raise
    exceptions then, which PyAV would pass on in place of what FFmpeg makes of a failed seek.
    """

    def __init__(self, file: Any) -> None:
        self.read, self.tell, self._seek = file.read, file.tell, file.seek

    def seek(self, offset: int, whence: int) -> int | None:
        """Seek; return -1 where that fails."""
        try:
            return cast("int | None", self._seek(offset, whence))
        except ValueError:  # of BytesIO and fsspec
            return -1
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return -1


def _open_path(path: str) -> InputContainer:
    try:
        # "file:", for FFmpeg takes a name such as "12:30.mp4" for a protocol.
        options = {"protocol_whitelist": "file", "format_whitelist": _SELF_CONTAINED}
        return _av_open(f"file:{path}", **options)
    except ArgumentError as error:  # FFmpeg's error for both, and it does not say for which
        raise DecodeError(
            f"{path}: {error.strerror}. It is damaged, or of a format that may name other files "
            "(a playlist, a list of files), none of which is opened."
        ) from error


# A title in an encoding other than UTF-8 should not stop anybody from seeing the pictures. PyAV
# keeps its bytes by itself from 19 on, where it has no argument for it any more.
_LENIENT: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
)


def _av_open(file: Any, **options: str) -> InputContainer:
    container: InputContainer = av.open(
        file, container_options=options, buffer_size=_BUFFER_BYTES, **_LENIENT
    )
    return container
