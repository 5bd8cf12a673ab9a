"""Which library decodes a picture. One chain decides, by what is installed and what is wanted:

    of a JPEG, a reduced size                       Pillow
    of a common JPEG, a part                        libjpeg-turbo 3, where it is installed
    a whole JPEG                                    torchvision
    a whole JPEG, where torchvision has no decoders torchcodec
    everything else                                 Pillow

What one refuses is left to the next, so every file that Pillow reads is read, and only if all
refuse is it a ``DecodeError``. The pixels do not depend on who decodes; all but Pillow do so
without the GIL.

A JPEG keeps each block of 8 x 8 pixels as 64 frequencies. A decoder that leaves the high ones out
makes 4 x 4, 2 x 2 or 1 pixel of a block and saves most of its work on pictures of many megapixels:
what remains is to read the bits.

PNG is Pillow's too, though torchvision has a codec: that one jumps into freed stack when libpng
reports an error, so one flipped bit in a file kills the process (torchvision 0.29). WebP is, as
Pillow decodes it without the GIL, too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler

from .._source import Source, read_source, source_name
from . import kernel, libjpeg_turbo, pillow
from .header import exif_markers, jpeg_size

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from .kernel import PicturePlan

# Looking at the bytes first and reacquiring the GIL once more eat up smaller savings.
_LEAST_SHARE_SAVED = 1 / 8
_LEAST_PIXELS = 96 * 96

_TORCHCODEC = "torchcodec_ns::decode_jpeg"


def decode_image(src: Source, *, apply_exif_orientation: bool = False) -> Tensor:
    """Decode one image to RGB; the content decides the format, not the name.

    JPEG by torchvision's codec, without the GIL; every other format that Pillow opens, of
    animations the first frame, by Pillow, formats of plugins that the program registered too. Only
    EPS is refused, for which Pillow starts another program. Equal to Pillow's
    ``convert("RGB")``: alpha is dropped, not blended; CMYK is converted without a profile. One
    exception: 16-bit gray keeps the high byte, where Pillow saturates.

    Args:
        src: path, bytes, uint8 tensor of one dimension, or binary file object.
        apply_exif_orientation: turn and mirror the picture as its EXIF tag says, by Pillow.

    Returns: uint8, shape (3, H, W), CPU, rows of RGB pixels in memory (channels_last).
    Raises:
        DecodeError: not an image, truncated, damaged, or larger than Pillow's
            ``Image.MAX_IMAGE_PIXELS`` allows (twice that many pixels, as in Pillow).
        OSError: the path cannot be read.
        DecompressionBombWarning: Pillow's, where it decodes, if the program made it an error.
    """
    return decode_tensor(
        read_source(src), source_name(src), apply_exif_orientation=apply_exif_orientation
    )


def decode_tensor(data: Tensor, name: str, *, apply_exif_orientation: bool = False) -> Tensor:
    """Decode a whole picture from encoded bytes (uint8, one dimension); ``name`` is for the error.

    Returns and raises as :func:`decode_image`.
    """
    refusal, size = None, header_size(data, name)
    # torchvision, if it turns, obeys the first segment that may be EXIF, whatever its name is.
    codec = None if size is None or apply_exif_orientation else _whole_codec()
    if codec is not None:
        try:
            return codec(data)
        except unless_of_handler(RuntimeError) as error:
            refusal = error
    try:
        return pillow.to_tensor(pillow.open_rgb(data, name, exif=apply_exif_orientation))
    except DecodeError:
        if refusal is None:
            raise
        raise DecodeError(f"{name}: {pillow.reason(refusal)}") from refusal


def decode_pil(data: Tensor, name: str) -> Image:
    """Decode encoded bytes to what ``Image.open(file).convert("RGB")`` returns, ``info`` included.

    Raises: as :func:`decode_image`.
    """
    if header_size(data, name) is None or _whole_codec() is None:
        return pillow.open_rgb(data, name)
    image = pillow.to_pil(decode_tensor(data, name))
    image.info.update(pillow.jpeg_info(data))
    return image


def header_size(data: Tensor, name: str) -> tuple[int, int] | None:
    """Return height and width of a picture that is decoded after its box is known, else None.

    Raises: DecodeError: the header asks for more pixels than allowed.
    """
    size = jpeg_size(data.numpy().data)
    if size is not None:
        pillow.check_size(*size, name)
    return size


def prepared(
    content: Tensor, plan: PicturePlan, name: str, *, scaled: bool, decoder: str | None
) -> tuple[Tensor, PicturePlan]:
    """Decode what the batch kernel does not, and plan for what that gives: the part in the plan's
    box of common JPEGs and, if ``scaled``, reduced sizes; if the kernel has no decoder, the rest.

    What is not worth it, or is in any way unusual, stays as it is for the kernel's decoder.

    content: encoded bytes (uint8, one dimension) or a decoded picture (uint8, (3, H, W)).
    decoder: the kernel's, of :func:`kernels_decoder`.
    Raises: DecodeError: without ``decoder``: it cannot be decoded, or has another size than its
        plan. RuntimeError: it is not for that decoder.
    """
    if content.dim() == 1 and _is_jpeg(content):
        found, size = _reduced(content, plan) if scaled else None, plan.resized
        library = libjpeg_turbo.find_library()
        if found is None and library is not None and _is_worth_it(plan):
            found, size = library.decode_region(content, plan.size, plan.box), plan.box[2:]
        if found is not None:
            return found, plan._replace(size=size, box=(0, 0, *size))
    if decoder == _TORCHCODEC and content.dim() == 1:
        content = _for_torchcodec(content)
    if decoder is None and content.dim() == 1:
        content = decode_tensor(content, name)
    if decoder is None and content.shape[1:] != plan.size:
        raise DecodeError(
            f"{name}: the header says height and width {plan.size}, the codec gave "
            f"{tuple(content.shape[1:])}."
        )
    return content, plan


def _reduced(data: Tensor, plan: PicturePlan) -> Tensor | None:
    """Return the plan's box of a JPEG that is decoded at a reduced size; None: it is not large
    enough, or cannot be decoded so.
    """
    (_, _, height, width), resized = plan.box, plan.resized
    # Pillow has no others.
    fits = (d for d in (8, 4, 2) if height >= resized[0] * d and width >= resized[1] * d)
    denominator = next(fits, 1)
    return None if denominator == 1 else pillow.decode_reduced(data, plan, denominator)


def kernels_decoder() -> str | None:
    """Return the operator by which the batch kernel decodes JPEGs; None: it takes pixels alone."""
    if kernel.has_codec():
        return "image::decode_image"
    return _TORCHCODEC if kernel.is_extension() and torchcodec_jpeg() is not None else None


def _whole_codec() -> Callable[[Tensor], Tensor] | None:
    """Return the function that decodes a whole JPEG without the GIL; None: Pillow decodes it."""
    if kernel.has_codec():
        return lambda data: torch.ops.image.decode_image(data, 3, False)
    return torchcodec_jpeg()


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

    return lambda data: decode_jpeg(_for_torchcodec(data), mode="RGB")


def _for_torchcodec(data: Tensor) -> Tensor:
    """Return bytes of which torchcodec makes what others do; RuntimeError: they are no JPEG's."""
    if not _is_jpeg(data):  # it would skip what else is there
        raise RuntimeError("Unsupported image file.")
    # It turns pictures as their EXIF says, and cannot be asked not to: that is marked as a segment
    # of another kind, which no decoder looks at.
    if places := exif_markers(data.numpy().data):
        data = data.clone()
        data[places] = 0xEF
    return data


def _is_jpeg(data: Tensor) -> bool:
    return bytes(data[:3].numpy().data) == b"\xff\xd8\xff"


def _is_worth_it(plan: PicturePlan) -> bool:
    num_pixels = plan.size[0] * plan.size[1]
    num_wanted = plan.box[2] * plan.box[3]
    if kernels_decoder() is None:
        return num_wanted > 0
    return num_pixels >= _LEAST_PIXELS and 0 < num_wanted <= (1 - _LEAST_SHARE_SAVED) * num_pixels
