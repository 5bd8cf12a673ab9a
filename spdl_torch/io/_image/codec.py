"""The choice of the library that decodes a JPEG."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from . import kernel, libjpeg_turbo, torchcodec_jpeg
from .header import is_scan, plain_jpeg_scan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from .kernel import PicturePlan

Codec: TypeAlias = Literal["auto", "torchvision", "libjpeg-turbo", "torchcodec"]

# Looking at the bytes first and reacquiring the GIL once more eat up smaller savings.
_LEAST_SHARE_SAVED = 1 / 8
_LEAST_PIXELS = 96 * 96


def image_codec(codec: Codec = "auto") -> str:
    """Return the library that decodes JPEGs: ``"torchvision"``, ``"libjpeg-turbo (FILE)"`` or
    ``"torchcodec (VERSION)"``.

    Raises: as :func:`check_codec`.
    """
    if whole_decoder(codec, "image_codec") is not None:
        return f"torchcodec ({torchcodec_jpeg.library_version()})"
    library = region_library(codec)
    return "torchvision" if library is None else f"libjpeg-turbo ({library.path})"


def check_codec(codec: Codec, where: str) -> None:
    """Refuse a codec that is not available.

    Raises: ValueError: no such codec; ImportError: libjpeg-turbo was asked for by name, and no
        library of version 3 was found, or torchcodec, and it is not installed.
    """
    if codec not in get_args(Codec):
        known = ", ".join(map(repr, get_args(Codec)))
        raise ValueError(f"{where}: codec must be one of {known}, got {codec!r}.")
    if codec == "libjpeg-turbo" and libjpeg_turbo.find_library() is None:
        raise ImportError(
            f"{where}: codec='libjpeg-turbo' needs libjpeg-turbo 3, which was not found: "
            "install it from conda-forge, Homebrew or the system, or pip install turbojpeg. "
            "codec='auto' does without."
        )
    whole_decoder(codec, where)


def whole_decoder(codec: Codec, where: str) -> Callable[[Tensor], Tensor] | None:
    """Return the function that decodes JPEGs; None: the batch kernel does, by torchvision.

    Raises: ImportError: torchcodec was asked for, and it is not installed or too old.
    """
    if codec != "torchcodec":
        return None
    try:
        return torchcodec_jpeg.jpeg_decoder()
    except ImportError as error:
        raise ImportError(
            f"{where}: codec='torchcodec' needs torchcodec 0.17 or newer: pip install torchcodec "
            "(the extra torchcodec). codec='auto' does without."
        ) from error


def region_library(codec: Codec) -> libjpeg_turbo.LibJpegTurbo | None:
    """Return the decoder of regions; None: whole pictures are decoded.

    Raises: as :func:`check_codec`.
    """
    check_codec(codec, "image_codec")
    return libjpeg_turbo.find_library() if codec in ("auto", "libjpeg-turbo") else None


def decode_regions(
    library: libjpeg_turbo.LibJpegTurbo, data: list[Tensor], plans: list[PicturePlan]
) -> tuple[list[Tensor], list[PicturePlan]]:
    """Decode the wanted part of JPEGs, and plan for that part.

    What is not worth it, or is in any way unusual, stays as it is for the batch kernel: what
    cannot be decoded as a whole is not decoded in part either.

    Args:
        data: encoded bytes (uint8, one dimension) or decoded pictures (uint8, (3, H, W)).
    """
    wanted = {
        k: content
        for k, (content, plan) in enumerate(zip(data, plans, strict=True))
        if content.dim() == 1 and _is_worth_it(plan)
    }
    contents, fitted = list(data), list(plans)
    for k in sound_jpegs(wanted):
        found = library.decode_region(data[k], plans[k].size, plans[k].box)
        if found is not None:
            contents[k], box = found
            size = contents[k].shape[1], contents[k].shape[2]
            fitted[k] = plans[k]._replace(size=size, box=box)
    return contents, fitted


def sound_jpegs(data: Mapping[int, Tensor]) -> list[int]:
    """Return which of the files are JPEGs of the common kind that no codec refuses.

    In these, a decoder that skips a part cannot overlook an error there.

    Args:
        data: encoded bytes (uint8, one dimension) by number.
    """
    scans = {}
    for k, content in data.items():
        start = plain_jpeg_scan(content.numpy().data)
        if start is not None:
            scans[k] = start
    has_markers = kernel.has_markers([data[k] for k in scans], list(scans.values()))
    return [
        k
        for (k, start), has_marker in zip(scans.items(), has_markers, strict=True)
        if not has_marker or is_scan(data[k].numpy().data[start:-2])
    ]


def _is_worth_it(plan: PicturePlan) -> bool:
    num_pixels = plan.size[0] * plan.size[1]
    num_wanted = plan.box[2] * plan.box[3]
    return num_pixels >= _LEAST_PIXELS and 0 < num_wanted <= (1 - _LEAST_SHARE_SAVED) * num_pixels
