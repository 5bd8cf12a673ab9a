"""Memory that is reused for every batch: the values of ``storage=``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CPUStorage", "cpu_storage", "room_for"]


class CPUStorage:
    """A block of host memory. What is written into it replaces what was there, so a tensor in it is
    to be used up, or copied, before the storage is used again.
    """

    def __init__(self, size: int, pin_memory: bool) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._memory.numel()

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """Return the beginning of the memory: uint8 of that shape, contiguous.

        Raises: ValueError: it is too small.
        """
        needed = math.prod(shape)
        if needed > self.size:
            raise ValueError(
                f"storage: {needed} bytes are needed for uint8 {shape}, got {self.size}. Make it "
                f"with cpu_storage({needed})."
            )
        return self._memory[:needed].view(shape)

    def __repr__(self) -> str:
        kind = "pinned" if self._memory.is_pinned() else "pageable"
        return f"<CPUStorage of {self.size} bytes, {kind}>"


def cpu_storage(size: int, pin_memory: bool = True) -> CPUStorage:
    """Take a block of host memory, to be given as ``storage=`` over and over.

    Args:
        size: in bytes.
        pin_memory: page-locked, so that a GPU copies from it by itself.

    Raises: RuntimeError: ``pin_memory`` where torch finds no CUDA; ValueError: ``size`` < 1.
    """
    if size < 1:
        raise ValueError(f"cpu_storage: size must be >= 1 byte, got {size}.")
    if pin_memory and not torch.cuda.is_available():
        raise RuntimeError(
            "cpu_storage: pinned memory needs CUDA, and torch finds none here. Pass "
            "pin_memory=False."
        )
    return CPUStorage(size, pin_memory)


def room_for(shape: tuple[int, ...], storage: CPUStorage | None) -> Tensor:
    """Return memory for a batch: uint8, CPU, contiguous; in ``storage``, if given."""
    if storage is not None:
        return storage.tensor(shape)
    return torch.empty(shape, dtype=torch.uint8, device="cpu")
