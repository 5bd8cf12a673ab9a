"""Find the place where two nested values differ, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from ..objects.members import GENERATORS
from .rng.owned import state_of


def first_difference(expected: list[list[Any]], got: list[list[Any]]) -> str | None:
    """Return which batch of which epoch differs, and where in it; None: none differs."""
    for epoch, (ours, theirs) in enumerate(zip(expected, got, strict=True)):
        if (found := differing_batch(ours, theirs)) is not None:
            return f"epoch {epoch}, {found}"
        if len(ours) != len(theirs):
            return f"epoch {epoch} has {len(theirs)} batches in place of {len(ours)}"
    return None


def differing_batch(expected: list[Any], got: list[Any]) -> str | None:
    """Return which batch differs, and where in it; None: none does, as far as there are both."""
    for number, (a, b) in enumerate(zip(expected, got, strict=False)):
        path = path_of_difference(a, b)
        if path is not None:
            return f"batch {number} differs{path}"
    return None


def path_of_difference(a: Any, b: Any, *, loosely: bool = False) -> str | None:
    """Return where two nested values differ, as `` at [0][3]``; None: nowhere.

    loosely: the keys of a dictionary have no order, and objects without an ``__eq__`` of their own
    are alike.
    """
    if a is b:
        return None
    inside = partial(path_of_difference, loosely=loosely)
    if type(a) is not type(b):
        return f": {type(b).__name__} in place of {type(a).__name__}"
    if isinstance(a, torch.Tensor):
        return _tensors_differ(a, b)
    if isinstance(a, GENERATORS):
        same = inside(state_of(a), state_of(b)) is None
        return None if same else f": another state of {type(a).__name__}"
    if isinstance(a, np.ndarray) and a.dtype == object:
        a, b = a.tolist(), b.tolist()
    if isinstance(a, np.ndarray):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f": {b.dtype}{list(b.shape)} in place of {a.dtype}{list(a.shape)}"
        return _rows_differ(np.atleast_1d(a), np.atleast_1d(b), lambda rows: rows.tobytes())
    if isinstance(a, Mapping):
        if a.keys() != b.keys() or not (loosely or list(a) == list(b)):
            return f": the keys are {list(b)} in place of {list(a)}"
        return _nested(inside, ((f"[{key!r}]", a[key], b[key]) for key in a))
    if isinstance(a, Sequence) and not isinstance(a, str | bytes):
        if len(a) != len(b):
            return f": {len(b)} elements in place of {len(a)}"
        return _nested(
            inside, ((f"[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True)))
        )
    kind: Any = type(a)
    has_no_eq = kind.__eq__ is object.__eq__
    if has_no_eq and loosely:
        return None
    if is_dataclass(a) or (has_no_eq and hasattr(a, "__dict__")):
        return _nested(inside, ((f".{name}", *values) for name, *values in _attributes(a, b)))
    return None if a == b or (a != a and b != b) else f": {b!r} in place of {a!r}"


def _attributes(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    names = [field.name for field in fields(a)] if is_dataclass(a) else {**vars(a), **vars(b)}
    return [(name, getattr(a, name, None), getattr(b, name, None)) for name in names]


def _nested(inside: Callable[[Any, Any], str | None], parts: Iterable[Any]) -> str | None:
    for step, a, b in parts:
        path = inside(a, b)
        if path is not None:
            inner = path.removeprefix(" at ")
            return f" at {step}{inner}"
    return None


def _tensors_differ(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return f": {b.dtype}{list(b.shape)} in place of {a.dtype}{list(a.shape)}"
    if a.layout is not torch.strided:  # as pickle takes it apart: indices and values
        parts: list[Any] = [cast("Any", each).__reduce_ex__(4) for each in (a, b)]
        same = path_of_difference(*parts) is None
        return None if same else f": other entries of a {a.layout} tensor"
    ours, theirs = (t.detach().cpu().resolve_conj().resolve_neg().contiguous() for t in (a, b))
    if a.ndim == 0:
        return None if _bits(ours) == _bits(theirs) else f": {b.item()!r} in place of {a.item()!r}"
    return _rows_differ(ours, theirs, _bits)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _rows_differ(ours: Any, theirs: Any, bits: Callable[[Any], bytes]) -> str | None:
    if bits(ours) == bits(theirs):
        return None
    rows = (slice(i, i + 1) for i in range(len(ours)))
    return f" at [{next(row.start for row in rows if bits(ours[row]) != bits(theirs[row]))}]"
