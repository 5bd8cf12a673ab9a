"""Memory reused for every batch, the values of ``storage=``; and types of memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..checks import check_whole
from ..scopes import scope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Room = Callable[[int], Tensor | None]


class Storage(Protocol):
    """Memory for a batch."""

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in it: uint8, shape ``shape``, contiguous."""
        ...


class CPUStorage:
    """A block of host memory. Each use overwrites the last: consume or copy the tensor in it before
    you use the storage again.

    Args:
        size: in bytes.
        pin_memory: lock its pages, so that a GPU copies from it without the CPU.

    Raises: RuntimeError: ``pin_memory`` where torch finds no CUDA; ValueError: ``size`` < 1.
    """

    def __init__(self, size: int, pin_memory: bool = True) -> None:
        check_whole("cpu_storage", size=size)
        if pin_memory and not torch.cuda.is_available():
            raise RuntimeError(
                "cpu_storage: pinned memory needs CUDA, and torch finds none here. Pass "
                "pin_memory=False."
            )
        self.size = int(size)
        """The size in bytes."""
        self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """Return the beginning of the memory as a tensor: uint8, shape ``shape``, contiguous.

        Raises: ValueError: the storage is too small.
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


cpu_storage = CPUStorage
"""A block of host memory to reuse as ``storage=``."""


class BatchStorage:
    """The memory that a loader offers, on this thread, for the batch that is being made: the batch
    needs no further copy to where the loader takes it. Ordinary memory if it offers none.

    While a dataset's ``__getitems__`` or an op of a pipeline runs for a loader with ``device=``,
    that memory is pinned, and the batch is copied to the device from there; in a worker process it
    is shared with the process that trains. Anywhere else it is ordinary memory. Each tensor has
    memory of its own, which is used again when nothing views it any more.

    A dataset may return views of the batch as its samples, ``list(zip(frames.unbind(), labels))``:
    torch's ``default_collate`` then finds them side by side, and copies nothing. Return tensors,
    not arrays: from an array, a loop could begin copies to the device that nobody waits for.
    """

    def __repr__(self) -> str:
        return "<BatchStorage: the memory that a loader offers>"

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """Return memory of its own: uint8, shape ``shape``, contiguous."""
        memory = room_in_batch(math.prod(shape))
        return room_for(shape, None) if memory is None else memory.view(shape)


batch_storage = BatchStorage
"""A ``storage=`` in which a batch needs no further copy to where a loader takes it."""


def room_in_batch(num_bytes: int) -> Tensor | None:
    """Return memory that a loader offers on this thread: uint8, one dimension; None: no offer."""
    return None if _of_thread.room is None else _of_thread.room(num_bytes)


@scope
def batch_room(room: Room) -> Iterator[None]:
    """Offer ``room(num_bytes)``, bytes or None, for batches that this thread makes."""
    before, _of_thread.room = _of_thread.room, room
    try:
        yield
    finally:
        _of_thread.room = before


class _OfThread(threading.local):
    room: Room | None = None


_of_thread = _OfThread()


def room_for(shape: tuple[int, ...], storage: Storage | None) -> Tensor:
    """Return memory for a batch: uint8, CPU, contiguous; in ``storage``, if given."""
    if storage is not None:
        return storage.tensor(shape)
    return torch.empty(shape, dtype=torch.uint8, device="cpu")


def to_torch(buffer: Any) -> Tensor:
    """Return an array as a tensor, without a copy where possible.

    Args:
        buffer: a tensor, a NumPy array, or an object with DLPack or the array interface.

    Returns: a tensor on the same memory; a copy where that is read-only or has negative strides,
        which tensors do not support.
    """
    if isinstance(buffer, Tensor):
        return buffer
    if not isinstance(buffer, np.ndarray) and hasattr(buffer, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(buffer)
    array = np.asarray(buffer)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def to_numpy(buffer: Any) -> NDArray[Any]:
    """Return an array as a NumPy array on the same memory.

    Args:
        buffer: a tensor on the CPU, a NumPy array, or an object with the array interface.

    Raises: TypeError: a tensor on another device, or an object without an array.
    """
    if isinstance(buffer, Tensor):
        return buffer.detach().numpy()
    if not isinstance(buffer, np.ndarray) and not hasattr(buffer, "__array_interface__"):
        raise TypeError(
            f"to_numpy: expected a tensor or what has __array_interface__, got "
            f"{type(buffer).__name__}."
        )
    return np.asarray(buffer)


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
