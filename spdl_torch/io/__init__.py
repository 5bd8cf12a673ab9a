"""Bytes to tensors without the GIL: images, videos, arrays, and the way to the GPU.

Names are imported when they are first used: what decodes videos needs PyAV, what decodes images
does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spdl_torch.io._decode import decode_image
    from spdl_torch.io._geometry import Crop, random_resized_crop, random_resized_crop_params
    from spdl_torch.io._images import image_loader, load_image, load_image_batch
    from spdl_torch.io._source import Source

__all__ = [
    "Crop",
    "Source",
    "decode_image",
    "image_loader",
    "load_image",
    "load_image_batch",
    "random_resized_crop",
    "random_resized_crop_params",
]

_HOMES = {
    "_decode": ("decode_image",),
    "_geometry": ("Crop", "random_resized_crop", "random_resized_crop_params"),
    "_images": ("image_loader", "load_image", "load_image_batch"),
    "_source": ("Source",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value  # from now on without this detour
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
