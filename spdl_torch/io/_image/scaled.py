"""JPEGs decoded at a half, a quarter or an eighth of their size, where that is large enough.

A JPEG keeps each block of 8 x 8 pixels as 64 frequencies. A decoder that leaves the high ones out
makes 4 x 4, 2 x 2 or 1 pixel of a block and saves most of its work on pictures of many megapixels:
what remains is to read the bits. libjpeg-turbo and Pillow, which carries it, do so with equal
pixels. Pillow resizes the result, because a box of the picture seldom begins at a pixel of the
smaller one, and its resize takes boxes that begin in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .codec import sound_jpegs
from .decode import decode_reduced, decode_tensor, header_size, to_pil
from .libjpeg_turbo import reduced_size

if TYPE_CHECKING:
    from torch import Tensor

    from .kernel import PicturePlan
    from .libjpeg_turbo import Box, LibJpegTurbo

_DENOMINATORS = (8, 4, 2)  # Pillow has no others, and the fast ones of libjpeg-turbo are these


def load_scaled(
    data: dict[int, Tensor], plans: dict[int, PicturePlan], library: LibJpegTurbo | None
) -> tuple[dict[int, Tensor], dict[int, PicturePlan]]:
    """Decode the JPEGs that may be decoded at a reduced size, resize their boxes, plan the rest.

    The size is the smallest whose box still has at least the pixels that the plan resizes to.
    Whatever is not decoded so stays as it is for the batch kernel.

    Args:
        data: encoded bytes (uint8, one dimension) or decoded pictures (uint8, (3, H, W)).
        library: decodes the common JPEGs; None, and for all others: Pillow.

    Returns: the same with resized boxes (uint8, (3, H, W)) in place of the JPEGs' bytes, and the
        plans for these.
    """
    denominators = {k: _denominator_of(data[k], plan) for k, plan in plans.items()}
    reduced = {k: data[k] for k, denominator in denominators.items() if denominator > 1}
    sound = set() if library is None else set(sound_jpegs(reduced))
    data, plans = dict(data), dict(plans)
    for k, content in reduced.items():
        plan = plans[k]
        found = _load_box(content, plan, denominators[k], library if k in sound else None)
        if found is not None:
            data[k] = found
            plans[k] = plan._replace(size=plan.resized, box=(0, 0, *plan.resized))
    return data, plans


def decode_at_least(
    data: Tensor, name: str, least: tuple[int, int], library: LibJpegTurbo | None
) -> Tensor:
    """Decode a picture; a JPEG at the smallest size that has at least this height and width.

    Args:
        data: encoded bytes, uint8 of one dimension.
        name: of the source, for the error.
        least: height and width in pixels.
        library: as for :func:`load_scaled`.

    Returns: uint8, (3, H, W), CPU.
    Raises: as :func:`decode_image`.
    """
    size = header_size(data, name) if data.numel() else None
    if size is not None and is_jpeg(data):
        denominator = _denominator(size, least)
        if denominator > 1:
            sound = library is not None and bool(sound_jpegs({0: data}))
            whole = 0, 0, *reduced_size(size, denominator)
            found = _decode(data, size, whole, denominator, library if sound else None)
            if found is not None:
                return found
    return decode_tensor(data, name)


def _denominator_of(content: Tensor, plan: PicturePlan) -> int:
    if not is_jpeg(content):
        return 1
    return _denominator((plan.box[2], plan.box[3]), plan.resized)


def _denominator(size: tuple[int, int], wanted: tuple[int, int]) -> int:
    """Return the largest number by which a box of ``size`` can be divided and still be as large as
    ``wanted``."""
    fits = (
        each
        for each in _DENOMINATORS
        if size[0] >= wanted[0] * each and size[1] >= wanted[1] * each
    )
    return next(fits, 1)


def is_jpeg(content: Tensor) -> bool:
    """Return whether a tensor holds the bytes of a JPEG, not those of another format or pixels."""
    return content.dim() == 1 and bytes(content[:3].numpy().data) == b"\xff\xd8\xff"


def _load_box(
    content: Tensor, plan: PicturePlan, denominator: int, library: LibJpegTurbo | None
) -> Tensor | None:
    """Return the plan's box out of the smaller picture, resized; None: it cannot be decoded so."""
    (top, left, height, width), d = plan.box, denominator
    outer = top // d, left // d, -(-(top + height) // d), -(-(left + width) // d)
    box = outer[0], outer[1], outer[2] - outer[0], outer[3] - outer[1]
    picture = _decode(content, plan.size, box, denominator, library)
    if picture is None:
        return None
    y, x = top / d - box[0], left / d - box[1]
    resized = to_pil(picture).resize(
        (plan.resized[1], plan.resized[0]),
        _BILINEAR,
        box=(x, y, x + width / d, y + height / d),
    )
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


_BILINEAR = 2  # PIL.Image.Resampling; antialiased, as all of Pillow's are


def _decode(
    content: Tensor,
    size: tuple[int, int],
    box: Box,
    denominator: int,
    library: LibJpegTurbo | None,
) -> Tensor | None:
    """Return the box, in pixels of the smaller picture: by the library, else by Pillow, else
    None."""
    if library is not None:
        found = library.decode_region(content, size, box, denominator)
        if found is not None:
            region, (top, left, height, width) = found
            return region[:, top : top + height, left : left + width]
    whole = decode_reduced(content, size, denominator)
    if whole is None:
        return None
    top, left, height, width = box
    return whole[:, top : top + height, left : left + width]
