"""Open a container of video or sound, and tell damaged data from other failures."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from typing import TYPE_CHECKING, Any, Literal, cast

import av
from av.audio.stream import AudioStream
from av.error import ArgumentError, FFmpegError, InvalidDataError
from av.stream import Discard
from av.video.stream import VideoStream
from torch import Tensor

from spdl_torch.errors import DecodeError

from ...scopes import scope
from .._remote import is_url
from .._resuming import open_resuming
from .._retry import RetryPolicy
from .._source import read_source, source_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.container import InputContainer

    from .._config import DemuxConfig
    from .._source import Source

_FILE_ERRORS = frozenset({errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR})

_BUFFER_BYTES = 1 << 18
"""Bytes read from a Python file at a time; each read takes the GIL."""

_SELF_CONTAINED = (
    "matroska,mov,avi,mpegts,mpegtsraw,mpeg,flv,live_flv,kux,asf,asf_o,ogg,mxf,nut,nuv,rm,swf,wtv,"
    "ty,gxf,lxf,dv,dhav,pva,nsv,ivf,ivr,obu,av1,h261,h263,h264,hevc,vvc,evc,apv,m4v,mpegvideo,"
    "mjpeg,mjpeg_2000,mpjpeg,smjpeg,dirac,dnxhd,vc1,vc1test,cavsvideo,avs,avs2,avs3,yuv4mpegpipe,"
    "gif,gif_pipe,apng,png_pipe,jpeg_pipe,jpegxl_anim,webp_pipe,bmp_pipe,tiff_pipe,bink,smk,roq,"
    "flic,film_cpk,wc3movie,4xm,ea,idcin,thp,usm,vmd,xmv"
)
"""FFmpeg's names of the formats that a local file may have: they open no other file. FFmpeg takes
the format from the content, whatever the file is called, and opens what playlists (hls, dash),
lists (concat), numbered pictures (image2) and a few containers (imf, mlv, vobsub) name."""

_SOUND = (
    "wav,w64,aiff,au,caf,flac,mp3,aac,ac3,eac3,dts,amr,ape,wv,tta,tak,mpc,mpc8,gsm,sbc,adx,voc,sox"
)
"""The same, of formats that hold nothing but sound."""


@scope
def decode_errors(name: str) -> Iterator[None]:
    """Turn FFmpeg's complaints about the data into a DecodeError that names the source."""
    try:
        yield
    except FFmpegError as error:
        if error.errno in _FILE_ERRORS and isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, name) from error
        raise DecodeError(f"{name}: {error.strerror or error}.") from error


@scope
def open_video(
    source: Source, config: DemuxConfig | None = None, name: str | None = None
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container and its best video stream; other streams are not read.

    name: of the source in errors; None: its own.
    Raises:
        DecodeError: not a container that FFmpeg knows, or one without a video that it can decode.
        OSError: a path that cannot be read.
    """
    with _opened(source, config, name or source_name(source), "video", _SELF_CONTAINED) as opened:
        container, stream = opened
        assert isinstance(stream, VideoStream), "guaranteed by its kind"
        yield container, stream


@scope
def open_audio(
    source: Source, name: str | None = None
) -> Iterator[tuple[InputContainer, AudioStream]]:
    """The container and its best stream of sound; other streams are not read.

    Raises: as :func:`open_video`.
    """
    formats = f"{_SELF_CONTAINED},{_SOUND}"
    with _opened(source, None, name or source_name(source), "audio", formats) as opened:
        container, stream = opened
        assert isinstance(stream, AudioStream), "guaranteed by its kind"
        yield container, stream


def is_sound_only(container: InputContainer) -> bool:
    """Return whether a container is of a format that holds nothing but sound."""
    return container.format.name in _SOUND.split(",")


@scope
def _opened(
    source: Source,
    config: DemuxConfig | None,
    name: str,
    kind: Literal["audio", "video"],
    formats: str,
) -> Iterator[tuple[InputContainer, AudioStream | VideoStream]]:
    with contextlib.ExitStack() as stack, decode_errors(name):
        container = stack.enter_context(_open(source, config, stack, formats))
        stream = container.streams.best(kind)
        if not isinstance(stream, AudioStream | VideoStream):
            kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
            raise DecodeError(f"{name}: no {kind} stream in it, only: {kinds}.")
        if stream.codec_context is None:
            raise DecodeError(f"{name}: FFmpeg has no decoder for its {kind} stream.")
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        try:
            yield container, stream
        except InvalidDataError as error:
            if can_seek(container) or "mp4" not in container.format.name:
                raise
            raise DecodeError(
                f"{name}: {error.strerror}. The source cannot seek, and an MP4 whose list of "
                "packets is at its end is not readable so: pass its bytes, or write it anew with "
                "the list first: ffmpeg -i FILE -c copy -movflags faststart FILE.mp4"
            ) from error


def position_of(source: Source) -> int | None:
    """Return the place in a file at which opening it begins, 0 for what is opened by name; None
    for a file that cannot be opened twice."""
    if not callable(getattr(source, "read", None)):
        return 0
    try:
        return int(source.tell()) if source.seekable() else None  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        return None


def can_seek(container: InputContainer) -> bool:
    """Return whether what a container is read from can seek, as a pipe cannot."""
    file: Any = getattr(container.file, "file", None)
    if file is None:  # opened by name
        return True
    return bool(file.seekable()) if hasattr(file, "seekable") else hasattr(file, "seek")


def rewind(source: Source, position: int | None) -> None:
    """Return a file to a place, so that it can be opened again."""
    if position is not None and callable(getattr(source, "seek", None)):
        source.seek(position)  # type: ignore[union-attr]


def _open(
    source: Source, config: DemuxConfig | None, stack: contextlib.ExitStack, formats: str
) -> InputContainer:
    if isinstance(source, str | os.PathLike) and not is_url(source):
        return _open_path(os.fspath(source), config, formats)
    file: Any
    if isinstance(source, str):
        opened = open_resuming(source, RetryPolicy(), seekable=True)
        file = _Seekable(stack.enter_context(opened))
    elif isinstance(source, bytes | bytearray | memoryview):
        file = io.BytesIO(source)
    elif isinstance(source, Tensor):
        file = io.BytesIO(read_source(source).numpy().tobytes())
    elif callable(getattr(source, "read", None)):
        file = _Seekable(source)
    else:
        raise TypeError(
            f"a video source must be a path, a URL, bytes, a uint8 tensor or a file opened with "
            f"'rb', got {type(source).__name__}."
        )
    # Bytes may come from anywhere: whatever they say, nothing else is opened on their behalf.
    options = {"protocol_whitelist": "none"}
    return _av_open(file, options, config)


def _open_path(path: str, config: DemuxConfig | None, formats: str) -> InputContainer:
    if config is not None and config.format is not None:
        formats = config.format  # asked for by the program, not by the file's content
    options = {"protocol_whitelist": "file", "format_whitelist": formats}
    try:
        # "file:", for FFmpeg takes a name such as "12:30.mp4" for a protocol.
        return _av_open(f"file:{path}", options, config)
    except ArgumentError as error:  # FFmpeg's error for both, and it does not say for which
        raise DecodeError(
            f"{path}: {error.strerror}. It is damaged, or of a format that may name other files "
            "(a playlist, a list of files), none of which is opened."
        ) from error


class _Seekable:
    """A binary file in which a seek to where there is nothing fails as FFmpeg expects.

    FFmpeg seeks wherever damaged data points, and to the last byte of an empty file. Files raise
    exceptions then, which PyAV would pass on in place of what FFmpeg makes of a failed seek.
    """

    def __init__(self, file: Any) -> None:
        # Bound once, so that reading costs no call more; what the file lacks, PyAV asks for.
        for name in ("read", "tell", "readable", "seekable", "name"):
            if hasattr(file, name):
                setattr(self, name, getattr(file, name))
        if hasattr(file, "seek"):
            self._seek = file.seek
            self.seek = self._seek_or_fail

    def _seek_or_fail(self, offset: int, whence: int) -> int | None:
        try:
            return cast("int | None", self._seek(offset, whence))
        except ValueError:  # of BytesIO and fsspec
            return -1
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return -1


# A title in an encoding other than UTF-8 should not stop anybody from seeing the pictures. PyAV
# keeps its bytes by itself from 19 on, where it has no argument for it any more.
_LENIENT: dict[str, Any] = (
    {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
)


def _av_open(file: Any, options: dict[str, str], config: DemuxConfig | None) -> InputContainer:
    size = _BUFFER_BYTES
    format_name = None
    if config is not None:
        size, format_name = max(size, config.buffer_size), _known_format(config.format)
        options = {**options, **(config.format_options or {})}
    container: InputContainer = av.open(
        file, format=format_name, container_options=options, buffer_size=size, **_LENIENT
    )
    return container


def _known_format(name: str | None) -> str | None:
    if name is not None and name not in av.formats_available:
        raise ValueError(f"demux_config: FFmpeg has no format {name!r} here.")
    return name
