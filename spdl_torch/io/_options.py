"""Options that several functions take: FFmpeg's, named as in ``spdl.io``, and sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import SupportsFloat

from ..checks import check_whole
from ..errors import UnsupportedOptionError

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


def check_size(width: int | None, height: int | None, where: str) -> None:
    """Raise a TypeError unless both are whole numbers, or None, and a ValueError below 1."""
    if width is not None:
        check_whole(where, width=operator.index(width))
    if height is not None:
        check_whole(where, height=operator.index(height))


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
