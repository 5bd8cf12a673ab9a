"""``spdl.io.utils``: tracing, and FFmpeg's own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...observe import trace_counter, trace_event, tracing as _tracing
from ...scopes import scope

__all__ = [
    "built_with_cuda",
    "built_with_nvcodec",
    "built_with_nvjpeg",
    "get_ffmpeg_filters",
    "get_ffmpeg_log_level",
    "get_ffmpeg_versions",
    "set_ffmpeg_log_level",
    "trace_counter",
    "trace_event",
    "trace_gc",
    "tracing",
]

_EVENT_BYTES = 150
_LEAST_EVENTS = 200_000

_QUIET = -8
_log_level = _QUIET  # PyAV's default; PyAV has no way to ask for it


@scope
def tracing(
    output: str | os.PathLike[str] | int,
    buffer_size: int = 4096,
    process_name: str | None = None,
    enable: bool = True,
) -> Iterator[None]:
    """Trace the block: :func:`spdl_torch.observe.tracing` with SPDL's arguments.

    The file is in Chrome's JSON format, whatever its name; https://ui.perfetto.dev and
    chrome://tracing open it.

    output: path, or a descriptor of an open file, which is closed.
    buffer_size: room for events, in KiB; at least enough for 200,000.
    process_name: the name of the process in the trace.
    enable: False = do nothing.
    Raises: ValueError: before the block begins, if ``output`` is a folder or a file that is no
        trace.
    """
    max_events = max(_LEAST_EVENTS, buffer_size * 1024 // _EVENT_BYTES)
    with _tracing(output, enable, max_events=max_events, process_name=process_name):
        yield


def trace_gc() -> None:
    """Do nothing: garbage collections that take 0.1 ms or longer are in every trace."""


def set_ffmpeg_log_level(val: int, /) -> None:
    """Let FFmpeg print messages of a level, and more important ones, on standard error.

    val: -8: nothing, the default; 16: errors; 24: warnings; 32: information; up to 56.
    """
    from ...io._video import av

    global _log_level
    _log_level = val
    # PyAV's own callback, into Python's logging, takes the GIL on every thread of FFmpeg.
    av.logging.restore_default_callback()
    av.logging.set_libav_level(val)


def get_ffmpeg_log_level() -> int:
    """Return the level set last by :func:`set_ffmpeg_log_level`; -8 before that."""
    return _log_level


def get_ffmpeg_filters() -> list[str]:
    """Return the names of the filters for ``filter_desc=``, sorted."""
    from ...io._video import av

    return sorted(av.filter.filters_available)


def get_ffmpeg_versions() -> dict[str, tuple[int, int, int]]:
    """Return the versions of the libraries, by name, of the FFmpeg that PyAV brings."""
    from ...io._video import av

    return dict(av.library_versions)


def built_with_cuda() -> bool:
    """Return whether this torch was built for CUDA, with or without a device."""
    import torch

    return torch.version.cuda is not None


def built_with_nvcodec() -> bool:
    """Return False: videos are decoded on the CPU."""
    return False


def built_with_nvjpeg() -> bool:
    """Return False: images are decoded on the CPU."""
    return False
