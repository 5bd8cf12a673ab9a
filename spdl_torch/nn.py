"""Modules for the start of a model, which run where the model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

__all__ = ["ToFloat"]


class ToFloat(nn.Module):
    """Turn uint8 images into what a model takes: floats, scaled to 0-1 and normalised, in
    channels_last memory, by one kernel.

    The first module of a model: ``nn.Sequential(ToFloat(mean, std), resnet50())``. Images then
    travel to the device as bytes, a quarter of the size of floats. The values are those of
    torchvision's ``v2.ToDtype(dtype, scale=True)`` and ``v2.Normalize(mean, std)``, up to rounding:
    within 1e-6 in float32, and those of float32 rounded in shorter types.

    It has no parameters and nothing in its ``state_dict()``, so checkpoints fit models with and
    without it. ``half()``, ``bfloat16()`` and ``to(dtype)`` leave it as it is: its result has
    ``dtype``. Works under ``torch.compile`` and autocast. No gradient flows to the images.

    Args:
        mean: of each channel, in units of the scaled image (0-1); None, as ``std``: the image is
            scaled only.
        std: the standard deviation of each channel, in the same units.
        dtype: of the result, a floating-point type. None: autocast's, where that is on for the
            device of the images, otherwise float32.
    Raises: ValueError: one of mean and std alone.
    """

    _scale: Tensor
    _shift: Tensor

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if (mean is None) != (std is None):
            raise ValueError(f"ToFloat needs mean and std, or neither, got {mean=}, {std=}.")
        self.mean = None if mean is None else tuple(map(float, mean))
        self.std = None if std is None else tuple(map(float, std))
        self.dtype = dtype
        self._set_constants(None)

    def forward(self, images: Tensor) -> Tensor:
        """Return the images as floats.

        Args:
            images: uint8, shape (N, C, H, W), on any device.
        Returns: the same shape, in ``dtype`` and channels_last memory, on the same device.
        Raises: TypeError: the images are not uint8.
        """
        if images.dtype is not torch.uint8:
            raise TypeError(
                f"ToFloat takes images of bytes, torch.uint8, got {images.dtype}. Leave ToTensor, "
                "ToDtype and Normalize out of the transform, or ToFloat out of the model."
            )
        dtype = self.dtype or _autocast_dtype(images.device.type)
        if torch.compiler.is_compiling():
            # The compiler fuses this; it would not keep the layout of an `out`.
            result = torch.addcmul(self._shift, images, self._scale)
            return result.to(dtype, memory_format=torch.channels_last)
        result = torch.empty(
            images.shape, dtype=dtype, device=images.device, memory_format=torch.channels_last
        )
        # One kernel: it reads bytes, computes in float32 and writes the result's type.
        return torch.addcmul(self._shift, images, self._scale, out=result)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Casts are meant for weights: the constants only follow them to another device.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        self._set_constants(self._scale.device)
        return self

    def _set_constants(self, device: torch.device | None) -> None:
        """Set scale and shift: image * scale + shift is (image / 255 - mean) / std."""
        mean, std = (
            torch.tensor(values, dtype=torch.float64, device="cpu").view(-1, 1, 1)
            for values in (self.mean or [0.0], self.std or [1.0])
        )
        for name, value in (("_scale", 1 / (255 * std)), ("_shift", -mean / std)):
            self.register_buffer(name, value.to(device, torch.float32), persistent=False)


def _autocast_dtype(device_type: str) -> torch.dtype:
    if torch.compiler.is_compiling():  # torch 2.9's compiler cannot ask is_autocast_available
        is_available = device_type != "meta"
    else:
        is_available = torch.amp.is_autocast_available(device_type)
    if is_available and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return torch.float32
