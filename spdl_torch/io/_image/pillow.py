"""What Pillow does: decode every format it knows, a JPEG at a reduced size, and describe a file."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler

from .header import is_jpeg_without_picture

if TYPE_CHECKING:
    from torch import Tensor

    from .kernel import PicturePlan


_STARTS_PROGRAMS = frozenset({"EPS"})
"""Formats that Pillow leaves to another program (Ghostscript), which no data set should start."""


def open_rgb(data: Tensor, name: str, *, exif: bool = False) -> Image.Image:
    """Decode encoded bytes (uint8, one dimension) as ``Image.open(file).convert("RGB")`` does.

    exif: turn the picture as its EXIF tag says.
    Raises: DecodeError; DecompressionBombWarning: where the program made it an error.
    """
    if data.numel() == 0:
        raise DecodeError(f"{name}: the file is empty (0 bytes).")
    try:
        with Image.open(io.BytesIO(data.numpy().data), formats=_formats(data)) as image:
            if exif:
                ImageOps.exif_transpose(image, in_place=True)
            rgb = image.convert("RGB")
            if image.mode.startswith("I;16"):  # which is saturated to white
                rgb.paste(Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)))
    except Image.DecompressionBombWarning as warning:
        # An error because the program wants it to be one.
        raise Image.DecompressionBombWarning(f"{name}: {warning}") from warning
    # Pillow's parsers raise almost anything for damaged bytes: OSError, SyntaxError, struct.error,
    # KeyError, MemoryError, DecompressionBombError ...
    except unless_of_handler(Exception) as error:
        raise DecodeError(f"{name}: {reason(error)}") from error
    return rgb


def decode_reduced(data: Tensor, plan: PicturePlan, denominator: int) -> Tensor | None:
    """Decode a JPEG at a half, a quarter or an eighth of its size, by Pillow's ``draft``, and
    resize the plan's box of that: Pillow's resize takes boxes that begin between two pixels.

    Returns: uint8, (3, H, W), of the plan's ``resized``. None: Pillow cannot decode it so.
    """
    (height, width), (top, left, rows, columns) = plan.size, plan.box
    d = denominator
    box = left / d, top / d, (left + columns) / d, (top + rows) / d
    try:
        # Not Image.open, which warns of large pictures: their size has been checked.
        with JpegImageFile(io.BytesIO(data.numpy().data)) as image:
            if image.size != (width, height):
                return None
            image.draft(None, (max(1, width // denominator), max(1, height // denominator)))
            if image.size != (-(-width // denominator), -(-height // denominator)):
                return None
            rgb = image.convert("RGB")
    except unless_of_handler(Exception):
        return None  # of any class; decoding the whole picture reports what is wrong
    return to_tensor(rgb.resize(plan.resized[::-1], Image.Resampling.BILINEAR, box))


def to_tensor(image: Image.Image) -> Tensor:
    """Return the pixels of an RGB picture: uint8, (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def to_pil(image: Tensor) -> Image.Image:
    """Return the Pillow image of a picture: uint8, (3, H, W)."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def jpeg_info(data: Tensor) -> dict[Any, Any]:
    """Return Pillow's ``info`` of a JPEG that was decoded; only the header is read."""
    try:
        with Image.open(io.BytesIO(data.numpy().data), formats=["JPEG"]) as image:
            return image.info
    except unless_of_handler(Exception):  # of any class; the decoder has made a picture of it
        return {}


def check_size(height: int, width: int, name: str) -> None:
    """Hold other decoders to Pillow's limit, as the script has set it there.

    Raises: DecodeError: more pixels than allowed.
    """
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and height * width > 2 * limit:
        raise DecodeError(
            f"{name}: {width}x{height} pixels are more than the limit of {2 * limit}. If the file "
            "is to be trusted, raise PIL.Image.MAX_IMAGE_PIXELS (the limit is twice that)."
        )


def reason(error: Exception) -> str:
    """Return a codec's message without the place in its source, or the object in memory; the type's
    name if there is none."""
    text = re.sub(r"^.*\.(?:cpp|h|cc):\d+, | <_io.*", "", str(error).partition("\n")[0])
    return text or type(error).__name__


def _formats(data: Tensor) -> list[str]:
    """Return all formats that Pillow knows, those of plugins that the program registered too;
    without JPEG where the data is one without a picture: Pillow's parser would walk through all of
    it, byte by byte and with the GIL.
    """
    Image.init()
    left_out = {*_STARTS_PROGRAMS}
    if is_jpeg_without_picture(data.numpy().data):
        left_out.add("JPEG")
    return [known for known in Image.ID if known not in left_out]
