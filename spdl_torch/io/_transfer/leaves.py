"""Leaves of a batch that bytes and strides do not describe: how each gets to the device.

The owner of the transfer moves them ahead, on the copy stream, where all their memory on the device
can be guarded for the model's stream. What guards it is a ``record_stream`` of each tensor inside,
or of the object itself. Other objects move at the hand-over, on the model's stream; they are pinned
first if they can be, because a copy from pageable memory waits for everything that the stream had
before, which is the model's whole queue.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


class Recordable(Protocol):
    """A tensor, or an object that holds tensors and records them all."""

    def record_stream(self, stream: Any, /) -> Any:
        """Keep the memory, once freed, until the work then queued on the stream is done."""
        ...


def is_plain(leaf: Any) -> bool:
    """Return whether bytes and strides describe a leaf completely."""
    return (
        type(leaf) is Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_nested)
    )


def move(leaf: Any, device: torch.device) -> Any:
    """Move a leaf by its own ``to``, without waiting if that takes ``non_blocking``."""
    if _takes_non_blocking(type(leaf)):  # type: ignore[arg-type]  # classes can be hashed
        return leaf.to(device, non_blocking=True)
    return leaf.to(device)


@functools.lru_cache(maxsize=256)
def _takes_non_blocking(leaf_class: type) -> bool:
    if issubclass(leaf_class, Tensor):
        return True
    try:
        parameters = inspect.signature(leaf_class.to).parameters.values()  # type: ignore[attr-defined]  # or an AttributeError
    except (AttributeError, TypeError, ValueError):  # no signature, or the instance's own method
        return False
    return any(p.name == "non_blocking" or p.kind is p.VAR_KEYWORD for p in parameters)


def goes_ahead(leaf: Any) -> bool:
    """Return whether a leaf can be moved before anyone knows the stream that will use it."""
    if isinstance(leaf, Tensor):
        # With gradients, the move belongs to the graph of the thread that trains.
        return not leaf.requires_grad and _tensors_in(leaf) is not None
    return isinstance(leaf, PackedSequence) or callable(getattr(leaf, "record_stream", None))


def can_be_pinned(leaf: Any) -> bool:
    """Return whether a leaf is an object that pins itself, as torch's ``pin_memory=True`` asks."""
    return not isinstance(leaf, Tensor) and callable(getattr(leaf, "pin_memory", None))


def memory_of(moved: Any) -> Sequence[Recordable]:
    """Return the tensors that hold the memory of a leaf that went ahead."""
    if isinstance(moved, Tensor):
        return _tensors_in(moved) or []
    if isinstance(moved, PackedSequence):  # the sizes of the steps stay with the host
        return [each for each in moved if isinstance(each, Tensor) and each.device.type != "cpu"]
    return [moved]


def _tensors_in(tensor: Tensor) -> list[Tensor] | None:
    """Return the plain dense tensors in a tensor; None where not all of them can be found."""
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that wraps others
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
    elif tensor.is_quantized or tensor.is_nested:
        return None
    elif tensor.layout is torch.strided:
        # torch's own method: a subclass might do with its tensors what it likes.
        return [tensor.as_subclass(Tensor)]
    elif tensor.layout is torch.sparse_coo:
        inner = [tensor._indices(), tensor._values()]
    elif tensor.layout in _BY_ROWS:
        inner = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in _BY_COLUMNS:
        inner = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        return None
    found = [_tensors_in(each) for each in inner]
    if any(each is None for each in found):
        return None
    return [tensor for each in found for tensor in each or ()]
