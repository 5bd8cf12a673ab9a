"""JPEGs by torchcodec, whose decoders take the place of torchvision's: the same pixels."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from .header import exif_markers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@functools.lru_cache(maxsize=1)
def jpeg_decoder() -> Callable[[Tensor], Tensor] | None:
    """Return the function that decodes a JPEG (uint8, one dimension) to uint8 (3, H, W), CPU; None
    without a torchcodec that can.

    It does not hold the GIL, and raises RuntimeError for what is not a JPEG.
    """
    try:
        decode_jpeg = importlib.import_module("torchcodec.decoders").decode_jpeg
    # Versions before 0.16 decode no pictures, and need FFmpeg to be imported.
    except (AttributeError, ImportError, OSError, RuntimeError):
        return None

    def decode(data: Tensor) -> Tensor:
        if bytes(data[:3].numpy().data) != b"\xff\xd8\xff":  # it would skip what else is there
            raise RuntimeError("Unsupported image file.")
        image: Tensor = decode_jpeg(_without_orientation(data), mode="RGB")
        return image

    return decode


def library_version() -> str:
    """Return the version of the torchcodec that decodes."""
    return str(importlib.import_module("torchcodec").__version__)


def _without_orientation(data: Tensor) -> Tensor:
    """Return the same bytes if they have no EXIF segment, else a copy in which it is marked as one
    of another kind.

    torchcodec turns pictures as their EXIF tag says, and cannot be asked not to.
    """
    places = exif_markers(data.numpy().data)
    if places:
        data = data.clone()
        for place in places:
            data[place] = _APPLICATION_15
    return data


_APPLICATION_15 = 0xEF  # which no decoder looks at
