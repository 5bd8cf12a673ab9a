"""Crop boxes and sizes, equal to those of torchvision's transforms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from . import kernel


class Crop(NamedTuple):
    """A box of a picture, in pixels, and whether to mirror it."""

    top: int
    left: int
    height: int
    width: int
    flip: bool = False
    """Mirror left and right, after the resize."""


Generators: TypeAlias = list[torch.Generator] | kernel.Seeds | None
"""One for each picture, or its seed; None = torch's global one, for one picture after the other."""

CropFunction: TypeAlias = Callable[[int, int], Crop]
"""Gets a picture's height and width in pixels, returns the box to load."""


def checked_crop(crop: Crop, height: int, width: int) -> Crop:
    """Return the crop. Raises: ValueError: it is outside a picture of that size, in pixels."""
    top, left, box_height, box_width = crop[:4]
    inside = 0 <= top < top + box_height <= height and 0 <= left < left + box_width <= width
    if not inside:
        raise ValueError(f"crop returned {crop}, outside the picture of {height=}, {width=}.")
    return crop


def random_resized_crop(
    height: int,
    width: int,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float | None = 0.5,
) -> Crop:
    """Draw the box and the flip of torchvision's ``RandomResizedCrop`` + ``RandomHorizontalFlip``.

    The numbers come from torch's global generator, in torchvision's order.

    Args:
        scale: bounds of the box's share of the picture's area, 0-1.
        ratio: bounds of the box's width over its height.
        flip: probability of a flip; None draws no number for it.
    """
    return random_crops([(height, width)], scale, ratio, flip)[0]


def draw_flip(probability: float, generator: torch.Generator | None = None) -> bool:
    """Draw one number, as ``RandomHorizontalFlip`` does; None: from torch's global generator."""
    return bool(torch.rand(1, generator=generator) < probability)


def random_crops(
    sizes: Sequence[tuple[int, int]],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    flip: float | None,
    generators: Generators = None,
) -> list[Crop]:
    """Draw the boxes and flips of many pictures in one call: see :func:`random_resized_crop`.

    sizes: height and width of each picture.
    """
    probability = -1.0 if flip is None else _float32(flip)
    drawn = kernel.draw_boxes(list(sizes), scale, _float32_logs(*ratio), probability, generators)
    return [
        Crop(*box)
        if box[2]  # its height
        else Crop(*_widest_center_box(*size, min(ratio), max(ratio)), flip=box[4])
        for size, box in zip(sizes, drawn, strict=True)
    ]


@functools.lru_cache(maxsize=16)
def _float32(number: float) -> float:
    """Return what a float32 is compared with where torch compares it with ``number``."""
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()


@functools.lru_cache(maxsize=16)
def _float32_logs(low: float, high: float) -> tuple[float, float]:
    logs = torch.log(torch.tensor((low, high), dtype=torch.float32, device="cpu"))
    return logs[0].item(), logs[1].item()


def _widest_center_box(
    height: int, width: int, low: float, high: float
) -> tuple[int, int, int, int]:
    """Return the largest centred box whose ratio lies within the bounds."""
    box_height, box_width = height, width
    if width / height < low:
        box_height = round(width / low)
    elif width / height > high:
        box_width = round(height * high)
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def resized_size(
    height: int, width: int, size: tuple[int, ...], max_size: int | None
) -> tuple[int, int]:
    """Return the height and width after torchvision's ``Resize(size, max_size=max_size)``.

    ``size`` of one number is the shorter edge: 480x640 with (256,) -> 256x341.
    """
    if len(size) == 2:
        return size[0], size[1]
    short, long = min(height, width), max(height, width)
    new_short, new_long = size[0], int(size[0] * long / short)
    if max_size is not None and new_long > max_size:
        new_short, new_long = int(max_size * new_short / new_long), max_size
    return (new_long, new_short) if width <= height else (new_short, new_long)


def center_crop_window(
    height: int, width: int, crop_height: int, crop_width: int
) -> tuple[int, int]:
    """Return top and left of torchvision's ``CenterCrop``; negative where it pads with zeros."""
    return _center(height, crop_height), _center(width, crop_width)


def _center(length: int, crop_length: int) -> int:
    if crop_length > length:
        return -((crop_length - length) // 2)
    return round((length - crop_length) / 2)
