"""Names of types for annotations, as ``spdl.io`` has them."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

__all__ = ["ArrayInterface", "CPUBuffer", "CUDAArrayInterface", "CUDABuffer"]

CPUBuffer: TypeAlias = Tensor
"""A batch in host memory: here that is a tensor."""

CUDABuffer: TypeAlias = Tensor
"""A batch on a GPU: here that is a tensor. ``isinstance`` does not tell the two apart;
``tensor.is_cuda`` does."""


@runtime_checkable
class ArrayInterface(Protocol):
    """What NumPy can look into without a copy."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


@runtime_checkable
class CUDAArrayInterface(Protocol):
    """What torch and Numba can look into on a GPU without a copy."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
