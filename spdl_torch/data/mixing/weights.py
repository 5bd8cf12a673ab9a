"""The weights of a mixture: checked, and divided into phases where they change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

Weights = Mapping[str, float] | Mapping[int, Mapping[str, float]]
"""One weight for each source, or such weights for each sample number from which they hold."""


class Shares(NamedTuple):
    """The shares of the sources from one sample of the mixture on."""

    first: int
    """The number of the first sample that they hold for."""
    shares: tuple[float, ...]
    """The shares in the order of the sources; their sum is 1."""


def shares_of(names: Sequence[str], weights: Weights | None) -> tuple[Shares, ...]:
    """Return the phases of a mixture, the first one at sample 0. None = all sources equal.

    Raises: TypeError, ValueError: see the messages.
    """
    if weights is None:
        weights = dict.fromkeys(names, 1.0)
    if not isinstance(weights, Mapping) or not weights:
        raise TypeError(
            "mix: weights must be a dict of one number for each source, or a schedule, a dict of "
            f"such dicts by the sample number from which they hold, got {weights!r:.100}."
        )
    if not any(isinstance(value, Mapping) for value in weights.values()):
        return (Shares(0, _shares(names, weights, "weights")),)
    for first in weights:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(
                f"mix: the keys of a schedule must be numbers of samples >= 0, got {first!r}."
            )
    if 0 not in weights:
        raise ValueError(
            f"mix: a schedule must begin at sample 0, got one that begins at {min(weights)}."
        )
    schedule: Any = weights
    return tuple(
        Shares(first, _shares(names, schedule[first], f"weights[{first}]"))
        for first in sorted(schedule)
    )


def _shares(names: Sequence[str], weights: Any, where: str) -> tuple[float, ...]:
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"mix: {where} must be a dict of one number for each source, got {weights!r:.100}."
        )
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise ValueError(
            f"mix: {where} names {unknown[0]!r}, which is not a source. The sources are "
            f"{', '.join(map(repr, names))}."
        )
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(
            f"mix: {where} has no weight for the source {missing[0]!r}. Give 0 to leave it out."
        )
    values = [_weight(name, weights[name], where) for name in names]
    total = math.fsum(values)
    if not total > 0:
        raise ValueError(f"mix: {where} must have a number above 0, got {dict(weights)!r}.")
    return tuple(value / total for value in values)


def _weight(name: str, value: Any, where: str) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(f"mix: {where}[{name!r}] must be a finite number >= 0, got {value!r}.")
    return weight
