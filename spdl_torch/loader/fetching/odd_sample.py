"""Find the sample of a batch that is unlike the others: most often the one that cannot be collated.

What is compared is what a sample is made of (types, keys, lengths, shapes), never its values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_SAMPLES, _MOST_PARTS, _MOST_DEEP = 4096, 64, 4
"""What is looked at of a batch, of a sample, and within it: an error's text is not worth more."""


def odd_sample(samples: Any) -> str:
    """Name the first sample that is unlike most others, and the part of it; "" = none is.

    Never raises: the user's error is being handled meanwhile.
    """
    try:
        if not isinstance(samples, Sequence) or len(samples) < 3:
            return ""
        parts = [dict(_parts(sample)) for sample in samples[:_MOST_SAMPLES]]
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


def _parts(value: Any, name: str = "sample", depth: int = 0) -> list[tuple[str, str]]:
    """Return the names of a sample's parts and what each is, the sample itself first."""
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None:
        return [(name, f"{kind} of shape {tuple(shape)} and type {getattr(value, 'dtype', '?')}")]
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        kind = f"{kind} of {len(value)}"
        inner = [(f"{name}[{key!r}]", value[key]) for key in list(value)[:_MOST_PARTS]]
    elif isinstance(value, list | tuple):
        kind = f"{kind} of {len(value)}"
        inner = [(f"{name}[{n}]", each) for n, each in enumerate(value[:_MOST_PARTS])]
    found = [(name, kind)]
    if depth < _MOST_DEEP:
        for each, part in inner:
            found += _parts(part, each, depth + 1)
    return found
