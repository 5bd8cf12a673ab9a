"""Which library decodes a picture. One chain decides, by what is installed and what is wanted:

    of a common JPEG, a part or a reduced size      libjpeg-turbo 3, where it is installed
    of any other JPEG, a reduced size               Pillow
    a whole JPEG or still WebP                      torchvision
    a whole JPEG, where torchvision has no decoders torchcodec
    everything else                                 Pillow

What one refuses is left to the next, so every file that Pillow reads is read, and only if all
refuse is it a ``DecodeError``. The pixels do not depend on who decodes; all but Pillow do so
without the GIL.

A JPEG keeps each block of 8 x 8 pixels as 64 frequencies. A decoder that leaves the high ones out
makes 4 x 4, 2 x 2 or 1 pixel of a block and saves most of its work on pictures of many megapixels:
what remains is to read the bits. libjpeg-turbo and Pillow, which carries it, do so with equal
pixels. Pillow resizes the result, because a box of the picture seldom begins at a pixel of the
smaller one, and its resize takes boxes that begin in between.

PNG is Pillow's too, though torchvision has a codec: that one jumps into freed stack when libpng
reports an error, so one flipped bit in a file kills the process (torchvision 0.29).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL.Image import Image, Resampling

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler

from .._source import Source, read_source, source_name
from . import kernel, libjpeg_turbo, pillow
from .header import begins_with_exif, exif_markers, is_scan, plain_jpeg_scan, read_header

if TYPE_CHECKING:
    from torch import Tensor

    from .header import ImageHeader
    from .kernel import PicturePlan

# Looking at the bytes first and reacquiring the GIL once more eat up smaller savings.
_LEAST_SHARE_SAVED = 1 / 8
_LEAST_PIXELS = 96 * 96

# Parts that are decoded before the kernel resizes them: 10 MB of photographs, however large the
# batch is.
_PARTS_AT_ONCE = 32


def image_codec() -> str:
    """Return the library that decodes the JPEGs of random crops: ``"libjpeg-turbo (FILE)"``, which
    decodes only the part in the crop; else as :func:`whole_codec`.
    """
    library = libjpeg_turbo.find_library()
    return whole_codec() if library is None else f"libjpeg-turbo ({library.path})"


def whole_codec() -> str:
    """Return the library that decodes whole JPEGs: ``"torchvision"``, ``"torchcodec (VERSION)"`` or
    ``"Pillow"``.
    """
    if kernel.has_codec():
        return "torchvision"
    if torchcodec_jpeg() is None:
        return "Pillow"
    return f"torchcodec ({importlib.import_module('torchcodec').__version__})"


def decode_image(src: Source, *, apply_exif_orientation: bool = False) -> Tensor:
    """Decode one image to RGB; the content decides the format, not the name.

    JPEG and WebP by torchvision's codecs, without the GIL; every other format that Pillow opens, of
    animations the first frame, by Pillow, formats of plugins that the program registered too. Only
    EPS is refused, for which Pillow starts another program. Equal to Pillow's
    ``convert("RGB")``: alpha is dropped, not blended; CMYK is converted without a profile. One
    exception: 16-bit gray keeps the high byte, where Pillow saturates.

    Args:
        src: path, bytes, uint8 tensor of one dimension, or binary file object.
        apply_exif_orientation: turn and mirror the picture as its EXIF tag says.

    Returns: uint8, shape (3, H, W), CPU, rows of RGB pixels in memory (channels_last).
    Raises:
        DecodeError: not an image, truncated, damaged, or larger than Pillow's
            ``Image.MAX_IMAGE_PIXELS`` allows (twice that many pixels, as in Pillow).
        OSError: the path cannot be read.
        DecompressionBombWarning: Pillow's, of more than ``MAX_IMAGE_PIXELS``, if the program made
            it an error.
    """
    return decode_tensor(
        read_source(src), source_name(src), apply_exif_orientation=apply_exif_orientation
    )


def decode_tensor(data: Tensor, name: str, *, apply_exif_orientation: bool = False) -> Tensor:
    """Decode a whole picture from encoded bytes (uint8, one dimension); ``name`` is for the error.

    Returns and raises as :func:`decode_image`.
    """
    codec = _checked_codec(data, name, apply_exif_orientation)
    refusal = None
    if codec is not None:
        try:
            return codec(data)
        except unless_of_handler(RuntimeError) as error:
            refusal = error
    try:
        return pillow.decode_with_pillow(data, name, exif=apply_exif_orientation)
    except DecodeError:
        if refusal is None:
            raise
        raise DecodeError(f"{name}: {pillow.reason(refusal)}") from refusal


def decode_pil(data: Tensor, name: str) -> Image:
    """Decode encoded bytes to what ``Image.open(file).convert("RGB")`` returns, ``info`` included.

    Raises: as :func:`decode_image`.
    """
    if data.numel() and _whole_codec_of(read_header(data.numpy().data)) is not None:
        return pillow.to_pil(decode_tensor(data, name), pillow.pil_info(data))
    _checked_codec(data, name)
    info: dict[Any, Any] = {}
    return pillow.to_pil(pillow.decode_with_pillow(data, name, info=info), info)


def decode_at_least(data: Tensor, name: str, least: tuple[int, int]) -> Tensor:
    """Decode a picture; a JPEG at the smallest size that has at least this height and width.

    Returns: uint8, (3, H, W), CPU.
    Raises: as :func:`decode_image`.
    """
    found = None
    if data.numel() and _is_jpeg(data) and (size := header_size(data, name)) is not None:
        denominator = _denominator_for(size, least)
        found = pillow.decode_reduced(data, size, denominator) if denominator > 1 else None
    return decode_tensor(data, name) if found is None else found


def header_size(data: Tensor, name: str) -> tuple[int, int] | None:
    """Return height and width of a picture that is decoded after its box is known, else None.

    Raises: DecodeError: the header asks for more pixels than allowed or than the bytes can hold.
    """
    header = read_header(data.numpy().data)
    is_jpeg = header is not None and header.format == "jpeg" and pillow.is_pillows_own("jpeg")
    if header is None or not (is_jpeg or _whole_codec_of(header)):
        return None
    pillow.check_size(header, data.numel(), name, warn=True)
    return header.height, header.width


def num_ahead(num_pictures: int, *, scaled: bool) -> int:
    """Return how many of a batch's pictures go through :func:`decode_ahead` at once."""
    if not kernel.has_codec():  # whole pictures of a batch may be more than there is memory
        return 1
    return num_pictures if libjpeg_turbo.find_library() is None and not scaled else _PARTS_AT_ONCE


def decode_ahead(
    data: Sequence[Tensor],
    plans: Sequence[PicturePlan],
    names: Sequence[str],
    *,
    scaled: bool,
    whole: bool,
) -> tuple[list[Tensor], list[PicturePlan]]:
    """Decode what the batch kernel does not, and plan for what that gives: the part in the plan's
    box of common JPEGs and, if ``scaled``, reduced sizes; if ``whole``, all the rest as well.

    What is not worth it, or is in any way unusual, stays as it is for the batch kernel: what cannot
    be decoded as a whole is not decoded in part either.

    data: encoded bytes (uint8, one dimension) or decoded pictures (uint8, (3, H, W)).
    Raises: DecodeError: if ``whole``: a picture cannot be, or has another size than its plan.
    """
    contents, fitted, library = [*data], [*plans], libjpeg_turbo.find_library()
    denominators = {}
    for k, (content, plan) in enumerate(zip(data, plans, strict=True)):
        denominator = _denominator_for(plan.box[2:], plan.resized) if scaled else 1
        is_part = denominator > 1 or (library is not None and _is_worth_it(plan))
        if is_part and content.dim() == 1 and _is_jpeg(content):
            denominators[k] = denominator
    sound = set() if library is None else _sound_jpegs({k: data[k] for k in denominators})
    for k, denominator in denominators.items():
        able, plan, found = library if k in sound else None, plans[k], None
        if denominator > 1:
            found, size = _load_scaled_box(data[k], plan, denominator, able), plan.resized
        if found is None and able is not None and _is_worth_it(plan):
            found, size = able.decode_region(data[k], plan.size, plan.box), plan.box[2:]
        if found is not None:
            contents[k], fitted[k] = found, plan._replace(size=size, box=(0, 0, *size))
    for k, content in enumerate(contents if whole else ()):
        if content.dim() == 1:
            contents[k] = decode_tensor(content, names[k])
        if contents[k].shape[1:] != fitted[k].size:
            raise DecodeError(
                f"{names[k]}: the header says height and width {fitted[k].size}, "
                f"the codec gave {tuple(contents[k].shape[1:])}."
            )
    return contents, fitted


def _denominator_for(size: tuple[int, int], wanted: tuple[int, int]) -> int:
    """Return the largest of 8, 4 and 2 by which a box of ``size`` can be divided and still be as
    large as ``wanted``; 1 = none of them. Pillow has no others, nor libjpeg-turbo fast ones.
    """
    fits = (d for d in (8, 4, 2) if size[0] >= wanted[0] * d and size[1] >= wanted[1] * d)
    return next(fits, 1)


def _load_scaled_box(
    data: Tensor, plan: PicturePlan, denominator: int, library: libjpeg_turbo.LibJpegTurbo | None
) -> Tensor | None:
    """Decode a JPEG at ``1 / denominator`` of its size, and resize the plan's box of it.

    library: decodes it; None: Pillow.
    Returns: uint8 (3, H, W), of the plan's ``resized``. None: it cannot be decoded so.
    """
    (top, left, height, width), d = plan.box, denominator
    first_row, first_column = top // d, left // d
    end_row, end_column = -(-(top + height) // d), -(-(left + width) // d)
    box = first_row, first_column, end_row - first_row, end_column - first_column
    picture = None if library is None else library.decode_region(data, plan.size, box, d)
    if picture is None:
        whole = pillow.decode_reduced(data, plan.size, d)
        if whole is None:
            return None
        picture = whole[:, first_row:end_row, first_column:end_column]
    y, x = top / d - first_row, left / d - first_column
    resized = pillow.to_pil(picture).resize(
        plan.resized[::-1], Resampling.BILINEAR, box=(x, y, x + width / d, y + height / d)
    )
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def _checked_codec(
    data: Tensor, name: str, turns: bool = False
) -> Callable[[Tensor], Tensor] | None:
    """Return :func:`_whole_codec_of` the picture, whose size was checked."""
    if data.numel() == 0:
        raise DecodeError(f"{name}: the file is empty (0 bytes).")
    header = read_header(data.numpy().data)
    codec = _whole_codec_of(header, turns)
    if header is not None:
        # torchvision obeys the first segment, whatever its name is; Pillow looks for the name.
        if turns and header.format == "jpeg" and not begins_with_exif(data.numpy().data):
            codec = None
        # Pillow warns by itself.
        pillow.check_size(header, data.numel(), name, warn=codec is not None)
    return codec


def _whole_codec_of(
    header: ImageHeader | None, turns: bool = False
) -> Callable[[Tensor], Tensor] | None:
    """Return the function that decodes such a picture without the GIL; None: Pillow decodes it.

    turns: as its EXIF tag says.
    """
    if header is None or header.format == "png" or not pillow.is_pillows_own(header.format):
        return None
    if kernel.has_codec():
        if turns and header.format == "webp":
            return None
        return lambda data: torch.ops.image.decode_image(data, 3, turns)
    return torchcodec_jpeg() if header.format == "jpeg" and not turns else None


@functools.lru_cache(maxsize=1)
def torchcodec_jpeg() -> Callable[[Tensor], Tensor] | None:
    """Return torchcodec's decoder of JPEGs: bytes to uint8 (3, H, W); None without one.

    It raises RuntimeError for what is not a JPEG.
    """
    try:
        decode_jpeg = importlib.import_module("torchcodec.decoders").decode_jpeg
    # Versions before 0.16 decode no pictures, and need FFmpeg to be imported.
    except unless_of_handler(AttributeError, ImportError, OSError, RuntimeError):
        return None

    def decode(data: Tensor) -> Tensor:
        if not _is_jpeg(data):  # it would skip what else is there
            raise RuntimeError("Unsupported image file.")
        # It turns pictures as their EXIF says, and cannot be asked not to: that is marked as a
        # segment of another kind, which no decoder looks at.
        if places := exif_markers(data.numpy().data):
            data = data.clone()
            data[places] = 0xEF
        image: Tensor = decode_jpeg(data, mode="RGB")
        return image

    return decode


def _is_jpeg(data: Tensor) -> bool:
    return bytes(data[:3].numpy().data) == b"\xff\xd8\xff"


def _sound_jpegs(data: dict[int, Tensor]) -> set[int]:
    """Return which of the JPEGs, by number, are of the common kind that no codec refuses.

    In these, a decoder that skips a part cannot overlook an error there.
    """
    found = ((k, plain_jpeg_scan(content.numpy().data)) for k, content in data.items())
    scans = {k: start for k, start in found if start is not None}
    has_markers = kernel.has_markers([data[k] for k in scans], [*scans.values()])
    return {
        k
        for (k, start), has_marker in zip(scans.items(), has_markers, strict=True)
        if not has_marker or is_scan(data[k].numpy().data[start:-2])
    }


def _is_worth_it(plan: PicturePlan) -> bool:
    num_pixels = plan.size[0] * plan.size[1]
    num_wanted = plan.box[2] * plan.box[3]
    if not kernel.has_codec():
        return num_wanted > 0
    return num_pixels >= _LEAST_PIXELS and 0 < num_wanted <= (1 - _LEAST_SHARE_SAVED) * num_pixels
