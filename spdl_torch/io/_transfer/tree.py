"""Batches as trees: dicts, lists, tuples, named tuples and dataclasses with tensors in them; and
leaves that bytes and strides do not describe: how each gets to the device.

The owner of the transfer moves those ahead, on the copy stream, where all their memory on the
device can be guarded for the model's stream. What guards it is a ``record_stream`` of each tensor
inside, or of the object itself. Other objects move at the hand-over, on the model's stream; they
are pinned first if they can be, because a copy from pageable memory waits for everything that the
stream had before, which is the model's whole queue.
"""

from __future__ import annotations

import functools
import inspect
from array import array
from collections import UserString
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ...objects.copies import shallow_copy

# Some are sequences, but of nothing that could be moved: visiting each byte of 200 kB would hold
# the GIL for 0.15 s.
_ATOMS = (str, UserString, bytes, bytearray, memoryview, array, range, int, float)


class Leaf:
    """A tensor of a batch, or an object that moves itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


Spots = Leaf | dict[Any, "Spots"]
"""Where the leaves of a batch are: the keys that lead to them, and no others."""


def spots_of(batch: Any) -> Spots:
    """Return where the leaves of ``batch`` are: tensors, and objects that move themselves. Every
    member is visited.

    An object moves itself if it has a ``to`` method, as PyTorch's ``PackedSequence`` and PyG's
    graphs do; mappings that have one are walked all the same.
    """
    if is_leaf(batch):
        return Leaf(batch)
    if batch is None or isinstance(batch, _ATOMS):
        return {}
    return {key: spots for key, value in _members(batch) if (spots := spots_of(value))}


def is_leaf(value: Any) -> bool:
    """Return whether a value is a tensor, or an object that moves itself."""
    if isinstance(value, Tensor):
        return True
    if value is None or isinstance(value, (*_ATOMS, type)):
        return False
    moves_itself = callable(getattr(value, "to", None))
    return moves_itself and (hasattr(value, "pin_memory") or not isinstance(value, Mapping))


def leaves_of(spots: Spots) -> Iterable[Any]:
    """Yield the leaves, in their order."""
    if isinstance(spots, Leaf):
        yield spots.value
    else:
        for inner in spots.values():
            yield from leaves_of(inner)


def spots_where(spots: Spots, function: Callable[[Any], Leaf | None]) -> Spots:
    """Return the spots for which ``function`` returns a leaf: with that one in its place."""
    if isinstance(spots, Leaf):
        return function(spots.value) or {}
    return {key: found for key, inner in spots.items() if (found := spots_where(inner, function))}


def map_spots(batch: Any, spots: Spots, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every tensor of ``batch`` and to every object that moves itself, which
    are at ``spots``. No other member is visited.

    Containers keep their class, and attributes besides their members are kept too. Parts in which
    nothing changed are the same objects in the result.
    """
    if isinstance(spots, Leaf):
        return function(spots.value)
    changed = {}
    for key, inner in spots.items():
        value = inner.value if isinstance(inner, Leaf) else _member(batch, key)
        mapped = map_spots(value, inner, function)
        if mapped is not value:
            changed[key] = mapped
    return _with_members(batch, changed) if changed else batch


def _members(batch: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return batch.items()
    if isinstance(batch, Sequence):
        return enumerate(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return ((f.name, getattr(batch, f.name)) for f in fields(batch) if hasattr(batch, f.name))
    return ()


def _member(batch: Any, key: Any) -> Any:
    return batch[key] if isinstance(batch, Mapping | Sequence) else getattr(batch, key)


def _with_members(batch: Any, changed: dict[Any, Any]) -> Any:
    if isinstance(batch, Mapping):
        return _mapping_with(batch, changed)
    if isinstance(batch, Sequence):
        return _sequence_with(batch, changed)
    # Not built anew: __post_init__ has run, and may want other arguments.
    clone = shallow_copy(batch)
    for name, value in changed.items():
        object.__setattr__(clone, name, value)  # also where the class is frozen
    return clone


def _mapping_with(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    try:
        if isinstance(batch, MutableMapping):
            # Keeps a default factory, attributes, the order of the keys.
            clone = shallow_copy(batch)
            clone.update(changed)
            return clone
        return type(batch)({**batch, **changed})  # type: ignore[call-arg]  # or a TypeError
    except TypeError:  # cannot be copied, or made from a dict
        return {**batch, **changed}


def _sequence_with(batch: Sequence[Any], changed: dict[int, Any]) -> Sequence[Any]:
    members = list(batch)
    for place, value in changed.items():
        members[place] = value
    if type(batch) is list:
        return members
    try:
        if hasattr(batch, "_fields"):  # a named tuple
            return type(batch)(*members)
        if isinstance(batch, MutableSequence):
            clone = shallow_copy(batch)
            for place, value in changed.items():
                clone[place] = value
            return clone
        return type(batch)(members)  # type: ignore[call-arg]  # or a TypeError
    except TypeError:
        return members


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
