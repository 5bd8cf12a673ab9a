"""Transforms and functions that keep no state from one sample to the next: the libraries' own."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from enum import Enum
from typing import Any

import numpy as np
import torch

from .kinds import PLAIN_VALUES
from .members import Unfinished, members, walk

_MOST_OBJECTS = 10_000
_DATA = PLAIN_VALUES | {torch.Tensor, list, tuple, set, frozenset, dict, OrderedDict}
_LIBRARIES = ("torch", "torchvision", "spdl_torch")


def is_stateless(function: Any) -> bool:
    """Return whether a transform or loader is None, or torchvision's, ours, or an exact
    ``nn.Sequential``, and holds nothing but the same and data: no function of the user's, not even
    as a hook or an argument.
    """
    try:
        found = walk([("", function)], members, _MOST_OBJECTS, values=True)
        return all(_is_known(each) for _, each in found)
    except Unfinished:
        return False


def _is_known(value: Any) -> bool:
    kind = type(value)
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if isinstance(value, type | types.FunctionType):
        return _is_libraries(value)
    if isinstance(value, Enum):
        return _is_libraries(kind)
    return kind in _DATA or issubclass(kind, np.generic) or _is_transform(kind)


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
