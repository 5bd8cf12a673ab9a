"""Write a folder of JPEGs that cost a decoder what ImageNet's photographs cost it.

What decoding costs depends on two things: the number of pixels and the number of bytes. Both
are made to resemble ImageNet (mean 0.2 megapixels and 110 KB), and the pictures have what
makes a photograph compress as it does: a 1/f spectrum, soft light, sharp outlines, fine texture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import numpy.typing as npt

    Field = npt.NDArray[np.float32]
    Pixels = npt.NDArray[np.uint8]
    Mask = npt.NDArray[np.bool_]

NUM_CLASSES = 10

SIZES = (
    (500, 375, 30),
    (500, 333, 20),
    (500, 500, 8),
    (375, 500, 8),
    (333, 500, 6),
    (400, 300, 6),
    (500, 400, 3),
    (320, 240, 4),
    (240, 180, 4),
    (350, 263, 3),
    (160, 120, 1),
    (600, 450, 2),
    (800, 600, 3),
    (1280, 960, 2),
)
"""(width, height, photographs in 100), after 200 training photographs of ImageNet-1k."""

_JPEG_QUALITY = 88
_FIELD_PIXELS = 1024
_NUM_FIELDS = 3


def write_photographs(
    folder: Path,
    count: int,
    *,
    seed: int = 0,
    num_classes: int = NUM_CLASSES,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Write ``count`` JPEGs as ``folder/class_<n>/<index>.jpg``; the same seed, the same pixels.

    As in ImageNet one in 33 is grey, and three in four keep their colours at full resolution.
    ``progress`` is called with the number of photographs written so far.
    """
    fields = Fields(seed)
    for label in range(min(count, num_classes)):
        (folder / f"class_{label}").mkdir(parents=True, exist_ok=True)
    for index in range(count):
        path = folder / f"class_{index % num_classes}" / f"{index:05d}.jpg"
        image = Image.fromarray(photograph(fields, index))
        if index % 33 == 32:
            image = image.convert("L")
        subsampling = "4:2:0" if index % 4 == 3 else "4:4:4"
        image.save(path, quality=_JPEG_QUALITY, subsampling=subsampling)
        progress(index + 1)


class Fields:
    """Noise that tiles without a seam; every photograph is cut from it (one FFT for all)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = np.random.default_rng(seed)
        self.rough = [_noise(rng, slope=1.1) for _ in range(_NUM_FIELDS)]
        self.smooth = [_noise(rng, slope=2.0) for _ in range(_NUM_FIELDS)]
        self.grain = rng.standard_normal((_FIELD_PIXELS, _FIELD_PIXELS), dtype=np.float32)


def photograph(fields: Fields, index: int) -> Pixels:
    """Paint photograph number ``index``: light, a few objects that hide each other, texture.

    Returns: uint8, shape (H, W, 3).
    """
    rng = np.random.default_rng([fields.seed, index])
    weights = np.array([weight for _, _, weight in SIZES])
    width, height, _ = SIZES[rng.choice(len(SIZES), p=weights / weights.sum())]
    texture = rng.uniform(0.3, 3.3)  # some photographs are all grass, some all sky
    luma = 120 + 45 * _cut(fields.smooth, rng, height, width)
    luma += 20 * texture * _cut(fields.rough, rng, height, width)
    chroma = [16 * _cut(fields.smooth, rng, height, width) for _ in range(2)]
    for _ in range(rng.integers(3, 9)):
        inside = _outline(rng, height, width)
        surface = rng.uniform(40, 210) + 28 * texture * _cut(fields.rough, rng, height, width)
        luma = np.where(inside, surface, luma)
        tints = rng.uniform(-35, 35, size=2)
        chroma = [np.where(inside, tint, c) for tint, c in zip(tints, chroma, strict=True)]
    chroma = [c + 3 * texture * _cut(fields.rough, rng, height, width) for c in chroma]
    luma += 6 * texture * _cut([fields.grain], rng, height, width)
    blue, red = chroma
    rgb = np.stack((luma + 1.4 * red, luma - 0.34 * blue - 0.71 * red, luma + 1.77 * blue), axis=2)
    return rgb.clip(0, 255).astype(np.uint8)


def _noise(rng: np.random.Generator, *, slope: float) -> Field:
    """Return a periodic field with amplitude spectrum 1/f**slope, mean 0 and deviation 1."""
    down = np.fft.fftfreq(_FIELD_PIXELS)[:, None]
    across = np.fft.rfftfreq(_FIELD_PIXELS)[None, :]
    frequency = np.hypot(down, across)
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(rng.standard_normal((_FIELD_PIXELS, _FIELD_PIXELS)))
    field = np.fft.irfft2(spectrum / frequency**slope)
    noise: Field = (field / field.std()).astype(np.float32)
    return noise


def _cut(fields: list[Field], rng: np.random.Generator, height: int, width: int) -> Field:
    """Return a window of ``height`` x ``width`` at a random place, wrapping around the border."""
    field = fields[rng.integers(len(fields))]
    top, left = rng.integers(_FIELD_PIXELS, size=2)
    rows = (np.arange(height) + top) % _FIELD_PIXELS
    columns = (np.arange(width) + left) % _FIELD_PIXELS
    window: Field = field[rows[:, None], columns]
    return window


def _outline(rng: np.random.Generator, height: int, width: int) -> Mask:
    """Return the inside of an ellipse or, half of the time, one side of a slanted line."""
    down = np.linspace(-1, 1, height, dtype=np.float32)[:, None] - rng.uniform(-0.9, 0.9)
    across = np.linspace(-1, 1, width, dtype=np.float32)[None, :] - rng.uniform(-0.9, 0.9)
    angle = rng.uniform(0, 2 * np.pi)
    along = np.cos(angle) * across + np.sin(angle) * down
    beside = np.cos(angle) * down - np.sin(angle) * across
    if rng.random() < 0.5:
        inside: Mask = along > 0.6
    else:
        long, short = rng.uniform(0.15, 0.7, size=2)
        inside = (along / long) ** 2 + (beside / short) ** 2 < 1
    return inside
