"""Options that several functions take: FFmpeg's, named as in ``spdl.io``, and sizes."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UnsupportedOptionError
from ..shown_text import short_repr

RGB24 = "format=pix_fmts=rgb24"
"""The default filter."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """What :func:`decode_config` returns."""

    num_threads: int
    """The threads of a decoder and of the filters; 0 lets FFmpeg choose."""


def decode_config(*, decoder_options: Mapping[str, str] | None = None) -> DecodeConfig:
    """Return a number of threads for ``decode_config=``, as SPDL's programs write it.

    ``decode_config(decoder_options={"threads": "4"})`` says what ``num_threads=4`` says; 0 lets
    FFmpeg choose, and there are no other options.
    """
    others = dict(decoder_options or {})
    threads = others.pop("threads", 1)
    if others:
        raise UnsupportedOptionError(
            f"decode_config: decoder_options must be {{'threads': a number}}, got also {others}. "
            "For other options open the file with PyAV."
        )
    return DecodeConfig(int(threads))


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
