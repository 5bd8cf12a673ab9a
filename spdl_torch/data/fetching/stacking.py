"""``default_collate`` into memory that is given."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import (
    collate_numpy_array_fn,
    collate_tensor_fn,
    default_collate_fn_map,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LARGE_BYTES", "Memory", "collate_arrays", "collate_into", "is_plain"]

LARGE_BYTES = 64 * 1024


class Memory(Protocol):
    """Memory in which batches are made, so that they need not be copied into it."""

    def begin(self) -> None:
        """Begin a batch on this thread."""
        ...

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """Return memory for a tensor of the thread's batch: uint8, one dimension; None = use other
        memory.
        """
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in what ``room`` gave for the thread's batch."""
        ...

    def end(self) -> None:
        """Let go of the thread's batch, which is complete."""
        ...


def collate_into(memory: Memory) -> Callable[[Any], Any]:
    """Return ``default_collate`` that stacks large tensors into memory of the batch, where there is
    room; those that already lie there side by side stay where they are.
    """
    functions: dict[Any, Callable[..., Any]] = {
        **default_collate_fn_map,
        torch.Tensor: partial(_stack, memory),
        np.ndarray: collate_arrays,
    }
    return partial(torch_collate, collate_fn_map=functions)


def _stack(memory: Memory, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors, as torch's collate does in its workers: into memory that is shared."""
    first, size = batch[0], len(batch)
    if size * first.nbytes >= LARGE_BYTES and _can_stack(batch):
        if memory.holds(first) and _lie_side_by_side(batch):
            strides = first.numel(), *first.stride()
            shape = (size, *first.shape)
            whole: torch.Tensor = first.as_strided(shape, strides, first.storage_offset())
            return whole
        room = memory.room(size * first.nbytes)
        if room is not None:
            out = room.view(first.dtype).view(size, *first.shape)
            return torch.stack(batch, 0, out=out)
    stacked: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    return stacked


def _can_stack(batch: Any) -> bool:
    """Return whether ``torch.stack`` gives the same bits into memory that is given to it."""
    return (
        set(map(type, batch)) == {torch.Tensor}
        and len({each.dtype for each in batch}) == 1
        and all(is_plain(each) for each in batch)
    )


def _lie_side_by_side(batch: Any) -> bool:
    """Return whether tensors are, in turn, the rows of a batch that was made as one."""
    first = batch[0]
    start, shape, num_bytes = first.data_ptr(), first.shape, first.nbytes
    return all(
        each.shape == shape and each.is_contiguous() and each.data_ptr() == start + k * num_bytes
        for k, each in enumerate(batch)
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether shape, strides, type and bytes describe the tensor completely."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_nested)
        and not tensor.__dict__
    )


def collate_arrays(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """Collate arrays as torch does, read-only ones included."""
    return collate_numpy_array_fn(
        [_writable(each) for each in batch], collate_fn_map=collate_fn_map
    )


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view that can be written, where numpy allows that."""
    if not array.flags.writeable:
        try:
            array = array.view()
            array.flags.writeable = True
        except ValueError:  # its memory is not ours to write
            pass
    return array
