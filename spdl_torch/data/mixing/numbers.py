"""Random numbers without a history: number ``n`` of a stream follows from its key and ``n`` alone.

Any position of a plan is therefore reached at once, and there is no state to keep or save. The
numbers are those of SplitMix64, whose state is a counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    UInt64s = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_NUM_ROUNDS = 6
_SALTS = [np.uint64(number * 0xD1342543DE82EF95 % 2**64) for number in range(_NUM_ROUNDS)]


def numbers_at(key: int | UInt64s, counters: NDArray[np.int64]) -> UInt64s:
    """Return the numbers of the stream of ``key`` at ``counters``: uint64, of the same shape."""
    mixed = (counters.astype(np.uint64) + np.uint64(1)) * _STEP + np.uint64(key)
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return mixed ^ (mixed >> _SHIFTS[2])


def shuffled_indices(
    key: int, passes: NDArray[np.int64], indices: NDArray[np.int64], length: int
) -> NDArray[np.int64]:
    """Return what each index becomes in its pass: for every pass a permutation of
    ``range(length)``.

    The permutation is computed, not stored: a Feistel cipher over the next power of two, repeated
    for results that are not below ``length``, which takes at most 2 passes on average.
    """
    num_bits = max(2, (length - 1).bit_length())
    keys = numbers_at(key, passes)
    found = indices.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        found[outside] = _encrypted(found[outside], keys[outside], num_bits)
        outside = outside[found[outside] >= np.uint64(length)]
    return found.astype(np.int64)


def _encrypted(values: UInt64s, keys: UInt64s, num_bits: int) -> UInt64s:
    """Return a permutation of the numbers of ``num_bits`` bits, one for each key."""
    width_right = num_bits // 2
    width_left = num_bits - width_right
    left, right = values >> np.uint64(width_right), values & _mask(width_right)
    for number, salt in enumerate(_SALTS):
        # The halves may differ by one bit: each keeps its own width, and they take turns.
        if number % 2 == 0:
            drawn = numbers_at(keys + salt, right.astype(np.int64))
            left = left ^ (drawn & _mask(width_left))
        else:
            drawn = numbers_at(keys + salt, left.astype(np.int64))
            right = right ^ (drawn & _mask(width_right))
    return (left << np.uint64(width_right)) | right


def _mask(width: int) -> np.uint64:
    return np.uint64((1 << width) - 1)
