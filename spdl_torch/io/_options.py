"""Options that several functions take: FFmpeg's, named as in ``spdl.io``, and sizes."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..shown_text import short_repr

RGB24 = "format=pix_fmts=rgb24"
"""The default filter."""


@dataclass(frozen=True, slots=True)
class DemuxConfig:
    """The options for opening a container."""

    format: str | None = None
    """FFmpeg's name of the format, such as ``mp4`` or ``rawvideo``; None
    detects it from the content."""
    format_options: Mapping[str, str] | None = None
    """FFmpeg's options of that format; FFmpeg ignores those it does not know."""
    buffer_size: int = 8096
    """Bytes read at a time from memory, URLs and Python files; at least 256 KiB are read."""

    def __post_init__(self) -> None:
        _check_options("demux_config: format_options", self.format_options)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The choice of a decoder, and its options."""

    decoder: str | None = None
    """FFmpeg's name of a decoder for the stream's codec, such as ``libdav1d``; None: its own."""
    decoder_options: Mapping[str, str] | None = None
    """FFmpeg's options of that decoder, such as ``{"threads": "4"}``."""
    num_threads: int | None = field(init=False, default=None)
    """The value of the option ``threads``; 0 lets FFmpeg choose, None = not given."""

    def __post_init__(self) -> None:
        _check_options("decode_config: decoder_options", self.decoder_options)
        threads = (self.decoder_options or {}).get("threads")
        if threads is None:
            return
        if threads != "auto" and not threads.isdecimal():
            raise ValueError(
                f"decode_config: the option threads must be a number or 'auto', got {threads!r}."
            )
        object.__setattr__(self, "num_threads", 0 if threads == "auto" else int(threads))


demux_config = DemuxConfig
"""The options for opening a container, for ``demux_config=``."""

decode_config = DecodeConfig
"""The choice of a decoder, for ``decode_config=``."""


def _check_options(where: str, options: Mapping[str, str] | None) -> None:
    for name, value in (options or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(
                f"{where} must map texts to texts, as FFmpeg has them, got {name!r}: {value!r}."
            )


def check_batch(sources: object, where: str) -> None:
    """Raise a TypeError for one source, of which a batch would be made letter by letter."""
    if isinstance(sources, str | bytes | bytearray | os.PathLike):
        raise TypeError(
            f"{where}: expected a list of sources, got one: {short_repr(sources)}. Put it in a "
            "list, or call the function for one."
        )


def check_size(width: int | None, height: int | None, where: str) -> None:
    """Raise a TypeError unless both are whole numbers, or None, and a ValueError below 1."""
    for name, pixels in (("width", width), ("height", height)):
        try:
            number = 1 if pixels is None else operator.index(pixels)
        except TypeError:
            raise TypeError(
                f"{where}: {name} must be an int or None, in pixels, got {pixels!r}. "
                "Convert it with int()."
            ) from None
        if number < 1:
            raise ValueError(f"width and height must be >= 1 or None, got {width=}, {height=}.")


def fitted_size(
    width: int | None, height: int | None, own_width: int, own_height: int
) -> tuple[int, int]:
    """Return width and height; if one is None the shape is kept, if both are, the size."""
    if width is None and height is None:
        return own_width, own_height
    if width is None:
        width = max(1, round(own_width * (height or 1) / own_height))
    if height is None:
        height = max(1, round(own_height * width / own_width))
    return width, height
