"""Which library decodes a JPEG: libjpeg-turbo the part in a crop; else the whole torchvision, or
torchcodec where that has no decoders, or Pillow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import kernel, libjpeg_turbo, torchcodec_jpeg
from .header import is_scan, plain_jpeg_scan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .kernel import PicturePlan

# Looking at the bytes first and reacquiring the GIL once more eat up smaller savings.
_LEAST_SHARE_SAVED = 1 / 8
_LEAST_PIXELS = 96 * 96


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
    has_torchcodec = torchcodec_jpeg.jpeg_decoder() is not None
    return f"torchcodec ({torchcodec_jpeg.library_version()})" if has_torchcodec else "Pillow"


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
    if not kernel.has_codec():
        return num_wanted > 0
    return num_pixels >= _LEAST_PIXELS and 0 < num_wanted <= (1 - _LEAST_SHARE_SAVED) * num_pixels
