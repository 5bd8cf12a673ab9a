"""Write a folder of JPEGs that cost a decoder what ImageNet's photographs cost it.

What decoding costs depends on the number of pixels and the number of bytes. Both are ImageNet's
(means of 0.2 megapixels and 105 KB): soft light and colours, with a texture of noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

_LONG, _SHORT = 500, 400  # pixels of the edges
_CELL = 25  # pixels from one random colour to the next
_TEXTURE = 14.0  # its deviation, of 256 levels: with it the files are as large as ImageNet's
_JPEG_QUALITY = 88


def write_photographs(folder: Path, count: int, *, seed: int = 0, num_classes: int = 10) -> None:
    """Write ``count`` JPEGs as ``folder/class_<n>/<index>.jpg``; the same seed, the same pixels.

    One in four is upright; as in ImageNet three in four keep their colours at full resolution.
    """
    for label in range(min(count, num_classes)):
        (folder / f"class_{label}").mkdir(parents=True, exist_ok=True)
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        width, height = (_LONG, _SHORT) if index % 4 else (_SHORT, _LONG)
        colours = rng.integers(256, size=(height // _CELL, width // _CELL, 3), dtype=np.uint8)
        light = Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)
        texture = rng.normal(scale=_TEXTURE, size=(height, width, 1))
        pixels = (np.asarray(light) + texture).clip(0, 255).astype(np.uint8)
        path = folder / f"class_{index % num_classes}" / f"{index:05d}.jpg"
        subsampling = "4:2:0" if index % 4 == 3 else "4:4:4"
        Image.fromarray(pixels).save(path, quality=_JPEG_QUALITY, subsampling=subsampling)
