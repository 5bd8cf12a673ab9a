"""Put samples into groups within a budget: full packs, or batches of similar length.

Both ways return the places of the samples in the order of their groups, and the number of samples
up to the end of each group. Sizes are from 1 to the budget.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Sizes = NDArray[np.integer]

_MOST_SIZES = 1 << 16  # different sizes that first-fit tells apart
_STEPS_PER_OCTAVE = 8


def packed(sizes: Sizes, budget: int) -> tuple[NDArray[np.int64], list[int]]:
    """Group samples whose sizes together are within the budget: first-fit decreasing.

    Each pack takes the largest sample that still fits, until none does. The samples of a size are a
    count and a place in the sorted order, so a step is one lookup in a table of sizes; of samples
    of one size, those that came first are taken first.
    """
    unit = -(-budget // _MOST_SIZES)  # large sizes are rounded up to units of 1/65536 of the budget
    capacity = budget // unit
    units = np.minimum(-(-sizes // unit), capacity)
    by_size = np.argsort(units, kind="stable")
    counts = np.bincount(units, minlength=capacity + 1)
    following = (np.cumsum(counts) - counts).tolist()  # the place of the next sample of each size
    left = counts.tolist()
    # For each size, the largest up to it that has samples left; 0 = none. A size that runs out
    # points down, and each lookup shortens the path of the next one.
    down = np.maximum.accumulate(np.where(counts, np.arange(capacity + 1), 0)).tolist()
    places: list[int] = []
    ends: list[int] = []
    while len(places) < len(sizes):
        space = capacity
        while space:
            size = space
            while (lower := down[size]) != size:
                down[size] = down[lower]
                size = lower
            if not size:
                break
            number = min(left[size], space // size)
            first = following[size]
            places.extend(range(first, first + number))
            following[size] = first + number
            left[size] -= number
            if not left[size]:
                down[size] = size - 1
            space -= number * size
        ends.append(len(places))
    return by_size[np.array(places, np.int64)], ends


def bucketed(sizes: Sizes, budget: int) -> tuple[NDArray[np.int64], list[int]]:
    """Group samples of similar size: the largest of a group, times their number, is within the
    budget, as in a batch that is padded to its longest sample. Sizes may have several dimensions:
    (samples, dimensions).
    """
    if sizes.ndim > 1:
        return _bucketed_by_shape(sizes, budget)
    by_size = np.argsort(sizes, kind="stable")[::-1]
    ordered = sizes[by_size].tolist()
    ends: list[int] = []
    end = 0
    while end < len(ordered):
        end = min(len(ordered), end + budget // ordered[end])
        ends.append(end)
    return by_size.astype(np.int64), ends


def _bucketed_by_shape(shapes: Sizes, budget: int) -> tuple[NDArray[np.int64], list[int]]:
    """Group samples of similar shape: the largest of each dimension, times one another and the
    number of samples, is within the budget.

    Samples are sorted by all dimensions but the last in steps of an eighth of an octave, then by
    the last: so those of one group differ by little in every dimension.
    """
    steps = np.floor(np.log2(shapes[:, :-1]) * _STEPS_PER_OCTAVE)
    order = np.lexsort((shapes[:, -1], *steps.T[::-1]))[::-1]
    ends: list[int] = []
    largest, number = (0,) * shapes.shape[1], 0
    for place, shape in enumerate(shapes[order].tolist()):
        joined = tuple(map(max, largest, shape))
        if number and math.prod(joined) * (number + 1) > budget:
            ends.append(place)
            joined, number = tuple(shape), 0
        largest, number = joined, number + 1
    if number:
        ends.append(len(order))
    return order.astype(np.int64), ends
