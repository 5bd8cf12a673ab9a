"""Find what cannot be collated: the sample of a batch that is unlike the others, or a part of which
``default_collate`` makes no batch.

What is compared is what a sample is made of (types, keys, lengths, shapes), never its values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data._utils.collate import default_collate_fn_map

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    except Exception:  # there is none, or of the samples' own attributes
        return ""
    return f"{name} of sample {number} of it is {_kind(part)}, which default_collate does not take"


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
