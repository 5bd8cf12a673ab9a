"""Types for annotations, named as in ``spdl.io``."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

CPUBuffer: TypeAlias = Tensor
"""A batch in host memory; here a tensor."""

CUDABuffer: TypeAlias = Tensor
"""A batch on a GPU; here a tensor. ``tensor.is_cuda`` distinguishes the two, ``isinstance`` does
not."""


@runtime_checkable
class ArrayInterface(Protocol):
    """An object that NumPy can view without a copy."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


@runtime_checkable
class CUDAArrayInterface(Protocol):
    """An object on a GPU that torch and Numba can view without a copy."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
