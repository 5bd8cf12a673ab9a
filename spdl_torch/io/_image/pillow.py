"""What Pillow does: decode every format it knows, a JPEG at a reduced size, and describe a file."""

from __future__ import annotations

import io
import os
import re
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler

from .._remote import is_url
from .._source import read_source
from .header import MOST_PIXELS_PER_BYTE, ImageHeader, is_jpeg_without_picture

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from .kernel import PicturePlan


_STARTS_PROGRAMS = frozenset({"EPS"})
"""Formats that Pillow leaves to another program (Ghostscript), which no data set should start."""

# The size of a strip; most pictures of a data set are a single one, which needs no copy.
_STRIP_PIXELS = 1 << 22


def decode_with_pillow(
    data: Tensor, name: str, *, exif: bool = False, info: dict[Any, Any] | None = None
) -> Tensor:
    """Decode encoded bytes (uint8, one dimension) to RGB: uint8, (3, H, W).

    exif: turn the picture as its EXIF tag says. info: filled with that of the picture in RGB.
    Raises: DecodeError; DecompressionBombWarning: where the program made it an error.
    """
    formats = _formats(data)
    try:
        with Image.open(io.BytesIO(data.numpy().data), formats=formats) as image:
            if exif:
                ImageOps.exif_transpose(image, in_place=True)
            pixels = _rgb_of(image)
            if info is not None:
                info.update(_converted_info(image))
    except Image.DecompressionBombWarning as warning:
        # An error because the program wants it to be one.
        raise Image.DecompressionBombWarning(f"{name}: {warning}") from warning
    # Pillow's parsers raise almost anything for damaged bytes: OSError, SyntaxError, struct.error,
    # KeyError, MemoryError, DecompressionBombError ...
    except unless_of_handler(Exception) as error:
        why = reason(error)
        if isinstance(error, UnidentifiedImageError):
            why = _why_unknown(bytes(data[:8].numpy().data), formats)
        raise DecodeError(f"{name}: {why}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_reduced(data: Tensor, plan: PicturePlan, denominator: int) -> Tensor | None:
    """Decode a JPEG at a half, a quarter or an eighth of its size, by Pillow's ``draft``, and
    resize the plan's box of that: Pillow's resize takes boxes that begin between two pixels.

    Returns: uint8, (3, H, W), of the plan's ``resized``. None: Pillow cannot decode it so.
    """
    (height, width), (top, left, rows, columns) = plan.size, plan.box
    box = [edge / denominator for edge in (left, top, left + columns, top + rows)]
    try:
        # Not Image.open, which warns of large pictures: their size has been checked.
        with JpegImageFile(io.BytesIO(data.numpy().data)) as image:
            if image.size != (width, height):
                return None
            image.draft(None, (max(1, width // denominator), max(1, height // denominator)))
            if image.size != (-(-width // denominator), -(-height // denominator)):
                return None
            resized = image.convert("RGB").resize(
                plan.resized[::-1], Image.Resampling.BILINEAR, box
            )
    except unless_of_handler(Exception):
        return None  # of any class; decoding the whole picture reports what is wrong
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def to_pil(image: Tensor, info: dict[Any, Any] | None = None) -> Image.Image:
    """Return the Pillow image of a picture: uint8, (3, H, W).

    info: what the file says of it, as of :func:`pil_info`.
    """
    result = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    result.info.update(info or {})
    return result


def pil_info(source: Tensor | str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the ``info`` of ``Image.open(file).convert("RGB")`` for a picture that was decoded.

    Only the header is read, unless it has a transparent colour, which conversion changes. So of a
    PNG what comes after its pixels is missing.

    source: the encoded bytes, or a file.
    """
    if not isinstance(source, torch.Tensor) and is_url(source):
        source = read_source(source)
    file = io.BytesIO(source.numpy().data) if isinstance(source, torch.Tensor) else source
    try:
        with Image.open(file, formats=_formats()) as image:
            if image.mode != "RGB" and "transparency" in image.info:
                return _converted_info(image)
            # Of the first picture of a WebP, which is the only one.
            times = {"timestamp": 0, "duration": 0} if image.format == "WEBP" else {}
            return {**image.info, **times}
    except unless_of_handler(Exception):  # of any class; the decoder has made a picture of it
        return {}


def is_pillows_own(format_name: str) -> bool:
    """Return whether Pillow would open a format by itself, not by what a program registered."""
    opener, _ = Image.OPEN.get(format_name.upper(), (None, None))
    return opener is None or getattr(opener, "__module__", "").startswith("PIL.")


def check_size(header: ImageHeader, num_bytes: int, name: str, *, warn: bool) -> None:
    """Hold other decoders to Pillow's limits, as the script has set them there.

    warn: of a large picture, as Pillow does of one that it opens.
    Raises: DecodeError: more pixels than allowed, or than the bytes can hold.
    """
    limit, num_pixels = Image.MAX_IMAGE_PIXELS, header.height * header.width
    size = f"{header.width}x{header.height}"
    # Codecs allocate before they notice, so a 100-byte file could ask for half a gigabyte.
    most = MOST_PIXELS_PER_BYTE.get(header.format, num_pixels) * num_bytes
    if num_pixels > most and not ImageFile.LOAD_TRUNCATED_IMAGES:
        raise DecodeError(
            f"{name}: truncated or damaged: the header promises {size} pixels, "
            f"too many for {num_bytes} bytes."
        )
    if limit is None or num_pixels <= limit:
        return
    if num_pixels > 2 * limit:
        raise DecodeError(
            f"{name}: {size} pixels are more than the limit of {2 * limit}. If the file is to be "
            f"trusted, raise PIL.Image.MAX_IMAGE_PIXELS (the limit is twice that)."
        )
    if warn:
        warnings.warn(
            f"{name}: {num_pixels} pixels are more than PIL.Image.MAX_IMAGE_PIXELS, {limit}: it "
            "may be made to take all memory. If the file is to be trusted, raise that.",
            Image.DecompressionBombWarning,
            stacklevel=3,
        )


def reason(error: Exception) -> str:
    """Return a codec's message without the place in its source; the type's name if there is
    none."""
    text = re.sub(r"^.*\.(?:cpp|h|cc):\d+, ", "", str(error).partition("\n")[0])
    return text or type(error).__name__


def _formats(data: Tensor | None = None) -> list[str]:
    """Return all formats that Pillow knows, those of plugins that the program registered too.

    data: without JPEG where it is one without a picture: Pillow's parser would walk through all of
        it, byte by byte and with the GIL.
    """
    Image.init()
    left_out = {*_STARTS_PROGRAMS}
    if data is not None and is_jpeg_without_picture(data.numpy().data) and is_pillows_own("jpeg"):
        left_out.add("JPEG")
    return [known for known in Image.ID if known not in left_out]


def _why_unknown(start: bytes, formats: list[str]) -> str:
    if start[:4] in (b"%!PS", b"\xc5\xd0\xd3\xc6"):
        return (
            "an EPS, which Pillow leaves to Ghostscript; no other program is started for an image. "
            "Convert it to another format."
        )
    if "JPEG" not in formats:
        return "a JPEG with a damaged or truncated header."
    return f"not an image: it starts with {start!r}."


def _rgb_of(image: Image.Image) -> NDArray[np.uint8]:
    """Return (H, W, 3), filled in strips: Pillow would hold a whole picture several times over, 10
    bytes a pixel or 1.7 GB for a GIF of 169 megapixels, which may be a file of 389 bytes.
    """
    image.load()  # an ICO may turn out to have another size than it said
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    num_rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        bottom = min(top + num_rows, image.height)
        strip = image.crop((0, top, image.width, bottom)) if num_rows < image.height else image
        if strip.mode.startswith("I;16"):  # convert("RGB") would saturate it to white
            strip = Image.fromarray((np.asarray(strip) >> 8).astype(np.uint8))
        pixels[top:bottom] = np.asarray(strip.convert("RGB"))
    return pixels


def _converted_info(image: Image.Image) -> dict[Any, Any]:
    return dict(image.crop((0, 0, 1, 1)).convert("RGB").info)
