"""The table of types: whose objects cannot change, which hold others, which draw numbers, which
are memory.
"""

from __future__ import annotations

import datetime
import enum
import functools
import logging
import operator
import pathlib
import random
import re
import types
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from typing import get_args

import numpy as np
import torch

PLAIN_VALUES = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), range, slice),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    }
)
"""Data that cannot change. Of these very types: a subclass may run code and keep something."""
_VALUES = PLAIN_VALUES | {
    *(type(Ellipsis), type(NotImplemented), re.Pattern, re.Match, types.GenericAlias),
    *(datetime.timedelta, datetime.timezone, uuid.UUID),
}
_VALUES_BY_NAME = {("decimal", "Decimal"), ("fractions", "Fraction")}
"""Values as well; few programs have any, and both modules take long to import."""
_VALUE_BASES = (
    *(int, float, complex, str, bytes, enum.Enum, pathlib.PurePath),
    *(datetime.date, datetime.time, np.generic, np.dtype),
)
# It may refer to what changes, but is the same for all who use it. A function is not here: the
# variables around it may be one user's own.
_CODE = frozenset(
    {
        *(property, weakref.ref, types.CodeType, types.ModuleType, types.MappingProxyType),
        *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
        *(np.ufunc, type(functools.lru_cache(len))),
        *(operator.attrgetter, operator.itemgetter, operator.methodcaller),
    }
)
_CODE_BASES = (type, logging.Logger)

ARRAYS = (np.ndarray, torch.Tensor, bytearray)
"""Memory that can be written. Arrays of objects hold others as a list does."""
SEQUENCES = (list, tuple, set, frozenset, deque)
"""Containers other than dictionaries."""
Generator = (
    random.Random
    | np.random.Generator
    | np.random.RandomState
    | np.random.BitGenerator
    | torch.Generator
)
GENERATORS = get_args(Generator)
"""What draws random numbers."""


def _is_value(kind: type) -> bool:
    if kind in _VALUES or issubclass(kind, _VALUE_BASES):
        return True
    return (kind.__module__, kind.__qualname__) in _VALUES_BY_NAME


def _is_immutable(kind: type) -> bool:
    return is_value(kind) or kind in _CODE or issubclass(kind, _CODE_BASES)


is_value: Callable[[type], bool] = functools.lru_cache(maxsize=4096)(_is_value)
"""Return whether objects of a type are values that cannot change."""
is_immutable: Callable[[type], bool] = functools.lru_cache(maxsize=4096)(_is_immutable)
"""Return whether objects of a type cannot change, or are code. It is asked for every object."""


def is_memory(tensor: torch.Tensor) -> bool:
    """Return whether shape, strides, type and memory describe a tensor completely."""
    return (
        tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
    )


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether it is torch's own and, as ``is_memory`` says, memory, that of the CPU."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and is_memory(tensor)
