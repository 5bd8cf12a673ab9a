"""``default_collate`` into memory that is given; and what cannot be collated: the sample of a batch
that is unlike the others, or a part of which ``default_collate`` makes no batch.

What is compared is what a sample is made of (types, keys, lengths, shapes), never its values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import (
    collate as torch_collate,
    collate_tensor_fn,
    default_collate_fn_map,
)

from ...objects.members import is_plain_tensor

LARGE_BYTES = 64 * 1024

_TORCHS_TYPES = {
    kind: function
    for kind, function in default_collate_fn_map.copy().items()
    if getattr(function, "__module__", None) == default_collate.__module__
}


def has_torchs_types_only() -> bool:
    """Return whether ``default_collate`` knows torch's own types and no other. Takes 0.2 µs: a
    library may register its types at any time, such as when the first sample imports it.
    """
    return bool(default_collate_fn_map == _TORCHS_TYPES)


def is_torchs_collate(collate_fn: Any) -> bool:
    """Return whether this is ``default_collate`` without types that others have registered so far.

    A user's function for a type could keep views of a batch's memory, about which nobody knows.
    """
    return collate_fn is default_collate and has_torchs_types_only()


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
        **_TORCHS_TYPES,
        torch.Tensor: partial(_stack, memory),
    }

    def collate(samples: Any) -> Any:
        if not has_torchs_types_only():  # somebody has registered others meanwhile
            return cast("Any", default_collate)(samples)
        return torch_collate(samples, collate_fn_map=functions)

    return collate


def _stack(memory: Memory, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack tensors, as torch's collate does in its workers: into memory that is shared."""
    first, size = batch[0], len(batch)
    if is_plain_tensor(first) and size * first.nbytes >= LARGE_BYTES and _can_stack(batch):
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
        and all(is_plain_tensor(each) for each in batch)
    )


def _lie_side_by_side(batch: Any) -> bool:
    """Return whether tensors are, in turn, the rows of a batch that was made as one."""
    first = batch[0]
    start, shape, num_bytes = first.data_ptr(), first.shape, first.nbytes
    return all(
        each.shape == shape and each.is_contiguous() and each.data_ptr() == start + k * num_bytes
        for k, each in enumerate(batch)
    )


_MOST_SAMPLES, _MOST_PARTS, _MOST_DEEP = 4096, 64, 4
"""What is looked at of a batch, of a sample, and within it: an error's text is not worth more."""


def odd_sample(samples: Any) -> str:
    """Name the first sample that is unlike most others, and the part of it; "" = none is.

    Never raises: the user's error is being handled meanwhile.
    """
    try:
        if not isinstance(samples, Sequence) or len(samples) < 3:
            return ""
        parts = [
            {name: _kind(part) for name, part in _parts(sample)}
            for sample in samples[:_MOST_SAMPLES]
        ]
        usual, number = Counter(map(_frozen, parts)).most_common(1)[0]
        if number <= len(parts) // 2 or number == len(parts):
            return ""
        odd = next(n for n, each in enumerate(parts) if _frozen(each) != usual)
        there, elsewhere = parts[odd], dict(usual)
        where = next(
            name for name in (*elsewhere, *there) if there.get(name) != elsewhere.get(name)
        )
    except Exception:  # of the samples' own attributes
        return ""
    here, others = (each.get(where, "nothing") for each in (there, elsewhere))
    return f"sample {odd} of it is unlike most: {where} is {here}, elsewhere {others}"


def _frozen(parts: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(parts.items())


def refused_part(samples: Any) -> str:
    """Name the first part of a sample of which ``default_collate`` makes no batch; "" = there is
    none. Never raises, as ``odd_sample``.
    """
    try:
        number, name, part = next(
            (number, name, part)
            for number, sample in enumerate(samples[:_MOST_SAMPLES])
            for name, part in _parts(sample)
            if not _is_collated(part)
        )
        kind = _kind(part)
    except Exception:  # there is none, or of the samples' own attributes
        return ""
    return f"{name} of sample {number} of it is {kind}, which default_collate does not take"


def _is_collated(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        return part.dtype.kind in "biufc"  # others are no numbers
    return isinstance(part, (Mapping, Sequence, *default_collate_fn_map))


def _parts(value: Any, name: str = "sample", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a sample with their names, the sample itself first."""
    yield name, value
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        inner = [(f"{name}[{key!r}]", value[key]) for key in list(value)[:_MOST_PARTS]]
    elif isinstance(value, list | tuple):
        inner = [(f"{name}[{n}]", each) for n, each in enumerate(value[:_MOST_PARTS])]
    if depth < _MOST_DEEP:
        for each, part in inner:
            yield from _parts(part, each, depth + 1)


def _kind(value: Any) -> str:
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{kind} of shape {tuple(shape)} and type {getattr(value, 'dtype', '?')}"
    return f"{kind} of {len(value)}" if isinstance(value, Mapping | list | tuple) else kind
