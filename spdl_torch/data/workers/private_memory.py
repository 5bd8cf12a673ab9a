"""Private copies of the memory of small arrays and tensors.

What views the same memory in the original does so in the copy: a buffer and the tensor that
``torch.from_numpy`` made of it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 64


class TornMemory(Exception):
    """Raised for memory of which a part has already been copied."""


class PrivateMemory:
    """The copies of one worker, by the addresses of their originals."""

    def __init__(self) -> None:
        self._regions: list[tuple[int, int, np.ndarray[Any, Any]]] = []

    def array(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return an array like ``value`` on memory of its own. Raises: TornMemory."""
        origin, own = self._copy_of(*_extent(_root(value)))
        offset = _address(value) - origin
        return np.ndarray(value.shape, value.dtype, own, offset, value.strides)

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor like ``value`` on memory of its own. Raises: TornMemory."""
        storage = value.untyped_storage()
        start = storage.data_ptr()
        origin, own = self._copy_of(start, start + storage.nbytes())
        storage = torch.from_numpy(own[value.data_ptr() - origin :]).untyped_storage()
        return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, value.stride())

    def _copy_of(self, start: int, end: int) -> tuple[int, np.ndarray[Any, Any]]:
        """Return where a region begins, and its copy. The caller keeps the original alive."""
        for first, last, own in self._regions:
            if first <= start and end <= last:
                return first, own
            if start < last and first < end:
                raise TornMemory
        size = end - start
        room = np.empty(size + _ALIGNMENT, np.uint8)
        shift = (start - _address(room)) % _ALIGNMENT  # as the original lies
        own = room[shift : shift + size]
        if size:
            original: Any = (ctypes.c_ubyte * size).from_address(start)
            own[:] = np.frombuffer(original, np.uint8)
        self._regions.append((start, end, own))
        return start, own


def root_bytes(value: np.ndarray[Any, Any] | torch.Tensor) -> int:
    """Return the bytes of the memory that an array or tensor views, which may be more than its
    own."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    start, end = _extent(_root(value))
    return end - start


def _root(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _extent(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return the addresses of an array's first byte and of the one after its last."""
    start = end = _address(array)
    if not array.size:
        return start, end
    for size, stride in zip(array.shape, array.strides, strict=True):
        start += min(0, (size - 1) * stride)
        end += max(0, (size - 1) * stride)
    return start, end + array.itemsize
