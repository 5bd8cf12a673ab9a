"""Keep what a sampler gave as it was when it was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_MUTABLE = (list, dict, set, bytearray, np.ndarray, torch.Tensor)


def unshared(index: Any) -> Any:
    """Return an index that the sampler cannot change any more.

    A sampler may yield one list, array or tensor again and again and change it in between. Loaded
    at once, each batch has its own indices; so it must in whatever loads later.
    """
    kind = type(index)
    if kind is list:
        inner = type(index[0]) if index else int
        if inner is int or not issubclass(inner, _MUTABLE):
            return index.copy()
        return [unshared(each) for each in index]
    if kind is torch.Tensor:
        return index.clone()
    if kind is np.ndarray or kind is dict or kind is set or kind is bytearray:
        return index.copy()
    return index
