"""Whether two runs differ by more than their own intervals do: a permutation test, a bootstrap."""

from __future__ import annotations

import functools
import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_BLOCKS = 20
_MOST_EXACT = 4_000
_RANDOM = 4_000
_RESAMPLES = 2_000

Interval = tuple[int, float]
"""Items and seconds."""


def into_blocks(intervals: Sequence[Interval]) -> list[Interval]:
    """Join consecutive intervals into at most 20 blocks: neighbours are correlated, so more of them
    would not be more evidence.
    """
    if not intervals:
        return []
    size = math.ceil(len(intervals) / _MOST_BLOCKS)
    parts = [intervals[first : first + size] for first in range(0, len(intervals), size)]
    if len(parts) > 1 and len(parts[-1]) < size / 2:  # the rest of a run, much shorter
        parts[-2:] = [[*parts[-2], *parts[-1]]]
    return [(sum(n for n, _ in part), math.fsum(s for _, s in part)) for part in parts]


def num_items(intervals: Sequence[Interval]) -> int:
    """Return the items of all intervals together."""
    return sum(n for n, _ in intervals)


def seconds_per_item(blocks: Sequence[Interval]) -> float:
    """Return the seconds per item; NaN where there is none."""
    total = num_items(blocks)
    return math.fsum(s for _, s in blocks) / total if total else math.nan


def permutation_test(now: Sequence[Interval], then: Sequence[Interval]) -> float:
    """Return the share of all divisions of the blocks into two groups of these sizes that differ in
    seconds per item by at least as large a factor as the runs do.
    """
    import numpy as np

    blocks = np.array([*now, *then], dtype=float)
    groups, is_exact = _divisions(len(blocks), len(now))
    own = blocks[groups].sum(axis=1)
    rest = blocks.sum(axis=0) - own
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.abs(np.log(own[:, 1] / own[:, 0]) - np.log(rest[:, 1] / rest[:, 0]))
    observed = abs(math.log(seconds_per_item(now) / seconds_per_item(then)))
    # A group without any item differs more than any measured factor.
    as_large = int((~(factors < observed * (1 - 1e-9))).sum())
    return as_large / len(groups) if is_exact else (as_large + 1) / (len(groups) + 1)


@functools.cache
def _divisions(total: int, size: int) -> tuple[Any, bool]:
    """Return choices of ``size`` out of ``total`` blocks, shape (number, size), and whether these
    are all; otherwise 4000 of them, drawn with a fixed seed.
    """
    import numpy as np

    if math.comb(total, size) <= _MOST_EXACT:
        return np.array(list(combinations(range(total), size))), True
    generator = np.random.default_rng(0)
    return generator.random((_RANDOM, total)).argsort(axis=1)[:, :size], False


def bootstrap_interval(
    now: Sequence[Interval], then: Sequence[Interval]
) -> tuple[float, float] | None:
    """Return the 95 % interval of the speedup, from resampled blocks of each run."""
    import numpy as np

    generator = np.random.default_rng(0)
    rates = []
    for blocks in (np.array(now, dtype=float), np.array(then, dtype=float)):
        chosen = generator.integers(0, len(blocks), (_RESAMPLES, len(blocks)))
        sums = blocks[chosen].sum(axis=1)
        with np.errstate(divide="ignore"):
            rates.append(sums[:, 0] / sums[:, 1])
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.nanquantile(rates[0] / rates[1], (0.025, 0.975))
    return (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None
