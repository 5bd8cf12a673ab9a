"""Crop boxes and sizes, equal to those of torchvision's transforms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch


class Crop(NamedTuple):
    """A box of a picture, in pixels, and whether to mirror it."""

    top: int
    left: int
    height: int
    width: int
    flip: bool = False
    """Mirror left and right, after the resize."""


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
    top, left, box_height, box_width = random_resized_crop_params(height, width, scale, ratio)
    return Crop(top, left, box_height, box_width, flip is not None and draw_flip(flip))


def draw_flip(probability: float, generator: torch.Generator | None = None) -> bool:
    """Draw one number, as ``RandomHorizontalFlip`` does; None: from torch's global generator."""
    return bool(torch.rand(1, generator=generator) < probability)


def random_resized_crop_params(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator | None = None,
) -> tuple[int, int, int, int]:
    """Draw (top, left, height, width) as torchvision's ``RandomResizedCrop.get_params`` does.

    Same seed of the generator, same box, and it is left in the same state; None: torch's global
    generator, which is torchvision's.
    """
    area = height * width
    log_low, log_high = _float32_logs(*ratio)
    for _ in range(10):
        target_area = area * torch.empty(1).uniform_(*scale, generator=generator).item()
        # The exponential in float32, as torchvision takes it: math.exp rounds differently.
        log_ratio = torch.empty(1).uniform_(log_low, log_high, generator=generator)
        aspect_ratio = log_ratio.exp_().item()
        box_width = round(math.sqrt(target_area * aspect_ratio))
        box_height = round(math.sqrt(target_area / aspect_ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            most = height - box_height + 1, width - box_width + 1
            top, left = (
                int(torch.randint(0, end, size=(1,), generator=generator).item()) for end in most
            )
            return top, left, box_height, box_width
    return _widest_center_box(height, width, min(ratio), max(ratio))


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
