"""Transforms and functions that keep no state from one sample to the next: the libraries' own."""

from __future__ import annotations

import collections
import sys
import types
from enum import Enum
from typing import Any

import numpy as np
import torch

__all__ = ["is_stateless"]

_MOST_OBJECTS = 10_000
_VALUES = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), range, slice),
        *(np.ndarray, torch.Tensor, torch.dtype, torch.device, torch.Size, torch.memory_format),
    }
)
_SEQUENCES = (list, tuple, set, frozenset)
_MAPPINGS = (dict, collections.OrderedDict)
_LIBRARIES = ("torch", "torchvision", "spdl_torch")


def is_stateless(function: Any) -> bool:
    """Return whether a transform or loader is None, or torchvision's, ours, or an exact
    ``nn.Sequential``, and holds nothing but the same and data: no function of the user's, not even
    as a hook or an argument.
    """
    waiting, seen = [function], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        held = _held_by(each)
        if held is None or len(seen) > _MOST_OBJECTS:
            return False
        waiting += held
    return True


def _held_by(value: Any) -> list[Any] | None:
    """Return what a known value holds; None = it is not known."""
    kind = type(value)
    if kind in _VALUES or issubclass(kind, np.generic):
        return [] if kind is not np.ndarray or not value.dtype.hasobject else None
    if kind in _SEQUENCES:
        return list(value)
    if kind in _MAPPINGS:
        return [*value, *value.values()]
    if isinstance(value, type | types.FunctionType):
        return [] if _is_libraries(value) else None
    if isinstance(value, Enum):
        return [] if _is_libraries(kind) else None
    return list(vars(value).values()) if _is_transform(kind) else None


def _is_transform(kind: type) -> bool:
    if kind is torch.nn.Sequential:
        return True
    is_ours = kind.__module__ == "spdl_torch.nn"
    return (is_ours or kind.__module__.startswith("torchvision.transforms.")) and _is_libraries(
        kind
    )


def _is_libraries(value: Any) -> bool:
    """Return whether a library has this very class or function under its name: a wrapper, such as
    ``lru_cache``, has that name but is another object.
    """
    module = str(value.__module__)  # of a function that was made by hand it may be None
    if module.partition(".")[0] not in _LIBRARIES:
        return False
    return getattr(sys.modules.get(module), value.__qualname__, None) is value
