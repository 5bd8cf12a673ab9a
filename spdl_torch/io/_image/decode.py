"""One image from encoded bytes to RGB.

torchvision's codecs decode JPEG and still WebP, or torchcodec's JPEG where it has none; every other
format, and whatever they refuse, goes to Pillow, so that every file that Pillow reads is read. Only
if both refuse is it a ``DecodeError``.

PNG is Pillow's too, though torchvision has a codec: that one jumps into freed stack when libpng
reports an error, so one flipped bit in a file kills the process (torchvision 0.29).
"""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from spdl_torch.errors import DecodeError

from .._remote import is_url
from .._source import Source, read_source, source_name
from . import kernel
from .header import ImageHeader, is_jpeg_without_picture, missing_data, read_header
from .torchcodec_jpeg import jpeg_decoder

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor

_K = TypeVar("_K")
_T = TypeVar("_T")


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
    """Decode encoded bytes (uint8, one dimension); ``name`` is for the error.

    Returns and raises as :func:`decode_image`.
    """
    if data.numel() == 0:
        raise DecodeError(f"{name}: the file is empty (0 bytes).")
    header = read_header(_view(data))
    if header is not None:
        _check_size(header, data.numel(), name)
    codec = _codec_of(header, apply_exif_orientation)
    if header is None or codec is None:
        return _decode_with_pillow(data, name, apply_exif_orientation)
    _warn_of_size(header, name)
    try:
        return codec(data)
    except RuntimeError as error:
        return _decode_after(error, data, name, apply_exif_orientation)


def header_size(data: Tensor, name: str) -> tuple[int, int] | None:
    """Height and width of a picture that is decoded with its batch, else None.

    Raises: DecodeError: the header asks for more pixels than allowed or than the bytes can hold.
    """
    header = read_header(_view(data))
    is_jpeg = header is not None and header.format == "jpeg" and _is_pillows_own("jpeg")
    if header is None or not (is_jpeg or _codec_of(header)):
        return None
    _check_size(header, data.numel(), name)
    _warn_of_size(header, name)
    return header.height, header.width


def _codec_of(header: ImageHeader | None, turns: bool = False) -> Callable[[Tensor], Tensor] | None:
    """Return the function that decodes such a picture without the GIL; None: Pillow decodes it.

    turns: as its EXIF tag says.
    """
    if header is None or header.format == "png" or not _is_pillows_own(header.format):
        return None
    if kernel.has_codec():
        if turns and header.format == "webp":
            return None
        return lambda data: torch.ops.image.decode_image(data, 3, turns)
    return jpeg_decoder() if header.format == "jpeg" and not turns else None


def _is_pillows_own(format_name: str) -> bool:
    """Return whether Pillow would open a format by itself, not by what a program registered."""
    from PIL import Image

    opener, _ = Image.OPEN.get(format_name.upper(), (None, None))
    return opener is None or getattr(opener, "__module__", "").startswith("PIL.")


def to_pil(image: Tensor, info: dict[Any, Any] | None = None) -> Image:
    """Return the Pillow image of a picture: uint8, (3, H, W).

    info: what the file says of it, as of :func:`pil_info`.
    """
    from PIL import Image

    result = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    result.info.update(info or {})
    return result


def decode_pil(data: Tensor, name: str) -> Image:
    """Decode encoded bytes to what ``Image.open(file).convert("RGB")`` returns, ``info`` included.

    Raises: as :func:`decode_image`.
    """
    header = read_header(_view(data)) if data.numel() else None
    if _codec_of(header) is not None:
        return to_pil(decode_tensor(data, name), pil_info(data))
    if header is not None:
        _check_size(header, data.numel(), name)
    info: dict[Any, Any] = {}
    if data.numel() == 0:
        return to_pil(decode_tensor(data, name))
    return to_pil(_decode_with_pillow(data, name, exif=False, info=info), info)


def pil_info(source: Tensor | str | os.PathLike[str]) -> dict[Any, Any]:
    """Return the ``info`` of ``Image.open(file).convert("RGB")`` for a picture that was decoded.

    Only the header is read, unless it has a transparent colour, which conversion changes. So of a
    PNG what comes after its pixels is missing.

    source: the encoded bytes, or a file.
    """
    from PIL import Image

    if not isinstance(source, torch.Tensor) and is_url(source):
        source = read_source(source)
    file = io.BytesIO(_view(source)) if isinstance(source, torch.Tensor) else source
    try:
        with Image.open(file, formats=_formats()) as image:
            if image.mode == "RGB" or "transparency" not in image.info:
                info = dict(image.info)
                if image.format == "WEBP":  # of the first picture, which is the only one
                    info = {**info, "timestamp": 0, "duration": 0}
                return info
            return _converted_info(image)
    except Exception:  # of any class; the decoder has made a picture of it
        return {}


def _converted_info(image: Image) -> dict[Any, Any]:
    return dict(image.crop((0, 0, 1, 1)).convert("RGB").info)


# Pillow's own limit; read from Pillow, so that a script that raised it there is obeyed here too.
def _most_pixels() -> int | None:
    from PIL import Image

    return None if Image.MAX_IMAGE_PIXELS is None else 2 * Image.MAX_IMAGE_PIXELS


def _may_be_cut() -> bool:
    from PIL import ImageFile

    return bool(ImageFile.LOAD_TRUNCATED_IMAGES)


def _check_size(header: ImageHeader, num_bytes: int, name: str) -> None:
    size = f"{header.width}x{header.height}"
    if missing_data(header, num_bytes) and not _may_be_cut():
        raise DecodeError(
            f"{name}: truncated or damaged: the header promises {size} pixels, "
            f"too many for {num_bytes} bytes."
        )
    most = _most_pixels()
    if most is not None and header.height * header.width > most:
        raise DecodeError(
            f"{name}: {size} pixels are more than the limit of {most}. If the file is to be "
            f"trusted, raise PIL.Image.MAX_IMAGE_PIXELS (the limit is twice that)."
        )


def _warn_of_size(header: ImageHeader, name: str) -> None:
    """Warn as Pillow does of a picture that Pillow does not open."""
    from PIL import Image

    most, num_pixels = Image.MAX_IMAGE_PIXELS, header.height * header.width
    if most is not None and num_pixels > most:
        warnings.warn(
            f"{name}: {num_pixels} pixels are more than PIL.Image.MAX_IMAGE_PIXELS, {most}: it may "
            "be made to take all memory. If the file is to be trusted, raise that.",
            Image.DecompressionBombWarning,
            stacklevel=3,
        )


def _decode_after(error: RuntimeError, data: Tensor, name: str, exif: bool) -> Tensor:
    """Let Pillow try what torchvision refused; if it refuses too, give torchvision's reason."""
    try:
        return _decode_with_pillow(data, name, exif)
    except DecodeError:
        raise DecodeError(f"{name}: {_reason(error)}") from error


def decode_reduced(data: Tensor, size: tuple[int, int], denominator: int) -> Tensor | None:
    """Decode a JPEG at a half, a quarter or an eighth of its size, by Pillow's ``draft``.

    Args:
        data: encoded bytes, uint8 of one dimension.
        size: the picture's height and width in pixels, as its header says.
        denominator: 2, 4 or 8.

    Returns: uint8, (3, H, W), H and W rounded up. None: Pillow cannot decode it at that size.
    """
    # Not Image.open, which warns of large pictures: their size has been checked.
    from PIL.JpegImagePlugin import JpegImageFile

    height, width = size
    try:
        with JpegImageFile(io.BytesIO(_view(data))) as image:
            if image.size != (width, height):
                return None
            image.draft(None, (max(1, width // denominator), max(1, height // denominator)))
            if image.size != (-(-width // denominator), -(-height // denominator)):
                return None
            pixels = _rgb_of(image)
    except Exception:  # of any class; decoding the whole picture reports what is wrong
        return None
    return torch.from_numpy(pixels).permute(2, 0, 1)


_STARTS_PROGRAMS = frozenset({"EPS"})
"""Formats that Pillow leaves to another program (Ghostscript), which no data set should start."""


def _formats(data: Tensor | None = None) -> list[str]:
    """Return all formats that Pillow knows, those of plugins that the program registered too.

    data: without JPEG where it is one without a picture: Pillow's parser would walk through all of
        it, byte by byte and with the GIL.
    """
    from PIL import Image

    Image.init()
    left_out = {*_STARTS_PROGRAMS}
    if data is not None and is_jpeg_without_picture(_view(data)) and _is_pillows_own("jpeg"):
        left_out.add("JPEG")
    return [known for known in Image.ID if known not in left_out]


def _decode_with_pillow(
    data: Tensor, name: str, exif: bool, info: dict[Any, Any] | None = None
) -> Tensor:
    """Decode by Pillow.

    info: filled with that of the picture in RGB.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    formats = _formats(data)
    try:
        with Image.open(io.BytesIO(_view(data)), formats=formats) as image:
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
    except Exception as error:
        if isinstance(error, UnidentifiedImageError):
            start = bytes(_view(data[:8]))
            if start[:4] in (b"%!PS", b"\xc5\xd0\xd3\xc6"):
                raise DecodeError(
                    f"{name}: an EPS, which Pillow leaves to Ghostscript; no other program is "
                    "started for an image. Convert it to another format."
                ) from error
            if "JPEG" not in formats:
                raise DecodeError(f"{name}: a JPEG with a damaged or truncated header.") from error
            raise DecodeError(f"{name}: not an image: it starts with {start!r}.") from error
        raise DecodeError(f"{name}: {_reason(error)}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1)


# The size of a strip; most pictures of a data set are a single one, which needs no copy.
_STRIP_PIXELS = 1 << 22


def _rgb_of(image: Image) -> NDArray[np.uint8]:
    """Return (H, W, 3), filled in strips: Pillow would hold a whole picture several times over, 10
    bytes a pixel or 1.7 GB for a GIF of 169 megapixels, which may be a file of 389 bytes.
    """
    import numpy as np

    image.load()  # an ICO may turn out to have another size than it said
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    num_rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        bottom = min(top + num_rows, image.height)
        strip = image.crop((0, top, image.width, bottom)) if num_rows < image.height else image
        pixels[top:bottom] = np.asarray(_to_8_bit(strip).convert("RGB"))
    return pixels


def _to_8_bit(image: Image) -> Image:
    """Reduce 16-bit gray to its high byte: ``convert("RGB")`` would saturate it to white."""
    if not image.mode.startswith("I;16"):
        return image
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _view(data: Tensor) -> memoryview:
    return data.numpy().data


def _reason(error: Exception) -> str:
    """Return the codec's message without the place in its source; the type's name if there is
    none."""
    text = re.sub(r"^.*\.(?:cpp|h|cc):\d+, ", "", str(error).partition("\n")[0])
    return text or type(error).__name__


def decode_all(
    keys: Iterable[_K],
    decode: Callable[[_K], _T],
    *,
    num_given: int,
    strict: bool,
    bad: tuple[type[Exception], ...] = (DecodeError,),
) -> dict[_K, _T]:
    """Return what ``decode`` returns for each key; unless ``strict``, without those for which it
    raises one of ``bad``.

    num_given: the images of the batch, for the error.
    Raises: DecodeError: none is left.
    """
    decoded: dict[_K, _T] = {}
    errors: list[Exception] = []
    for key in keys:
        try:
            decoded[key] = decode(key)
        except bad as error:
            if strict:
                raise
            errors.append(error)
    if not decoded:
        raise DecodeError(
            f"none of the {num_given} images can be decoded; one of the reasons: {errors[0]}"
        ) from errors[0]
    return decoded
