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
from PIL.Image import Resampling

from .pillow import decode_reduced, to_pil

if TYPE_CHECKING:
    from torch import Tensor

    from .kernel import PicturePlan
    from .libjpeg_turbo import LibJpegTurbo

    Size = tuple[int, int]
    """Height and width, in pixels."""


def denominator_for(size: Size, wanted: Size) -> int:
    """Return the largest of 8, 4 and 2 by which a box of ``size`` can be divided and still be as
    large as ``wanted``; 1 = none of them. Pillow has no others, nor libjpeg-turbo fast ones.
    """
    fits = (d for d in (8, 4, 2) if size[0] >= wanted[0] * d and size[1] >= wanted[1] * d)
    return next(fits, 1)


def load_scaled_box(
    data: Tensor, plan: PicturePlan, denominator: int, library: LibJpegTurbo | None
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
        whole = decode_reduced(data, plan.size, d)
        if whole is None:
            return None
        picture = whole[:, first_row:end_row, first_column:end_column]
    y, x = top / d - first_row, left / d - first_column
    resized = to_pil(picture).resize(
        plan.resized[::-1], Resampling.BILINEAR, box=(x, y, x + width / d, y + height / d)
    )
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
