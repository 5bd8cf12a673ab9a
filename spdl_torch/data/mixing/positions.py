"""The source of the sample at a position and its index there: looked up, and kept.

A lookup takes a fraction of a microsecond, computing a block of them more than a thousand times as
long. So blocks are kept: enough for several threads that each read in order, and for reading in any
order if the whole training is not too long. Once there is no room for more, the first request
within a block computes one position alone, and the second the whole block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate
from operator import index as as_index
from typing import TYPE_CHECKING, Any

import numpy as np

from .plan import BLOCK_LENGTH, numbers_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .plan import MixturePlan, UInt64s

    Indices = NDArray[np.int64]

_MOST_BLOCKS = 1024  # 8 million positions, at most 34 MB with sources of 2**32 samples together
_NUM_RECENT = 64  # recently missed blocks: more than there are threads that read in order
_NUM_ROUNDS = 6
_SALTS = [np.uint64(number * 0xD1342543DE82EF95 % 2**64) for number in range(_NUM_ROUNDS)]


class Positions:
    """The sample at every position, as its number in all sources end to end.

    Threads may use it at once; a copy for a worker thread is the object itself, and a pickle holds
    no blocks.
    """

    def __init__(
        self, plan: MixturePlan, lengths: Sequence[int], keys: Sequence[int], *, shuffle: bool
    ) -> None:
        self._plan = plan
        self._lengths = tuple(lengths)
        self._keys = tuple(keys)
        self._shuffle = shuffle
        self._firsts = [0, *accumulate(lengths)]  # the number of each source's first sample
        self._dtype = next(d for d in "BHIQ" if self._firsts[-1] <= np.iinfo(d).max)
        self._blocks: dict[int, memoryview[int]] = {}
        self._missed: deque[int] = deque(maxlen=_NUM_RECENT)

    def __deepcopy__(self, memo: object) -> Positions:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}

    def at(self, position: int) -> tuple[int, int]:
        """Return the number of the source, and the index of the sample there.

        Raises: IndexError: there is no such position.
        """
        number, place = divmod(as_index(position), BLOCK_LENGTH)
        block = self._blocks.get(number)
        if block is None:
            self._plan.check(position)
            block = self._found(number)
        sample = block[place] if block else self._computed(number * BLOCK_LENGTH + place, 1)[0]
        source = bisect_right(self._firsts, sample) - 1
        return source, sample - self._firsts[source]

    def counts(self, positions: NDArray[Any]) -> Indices:
        """Return how many of the samples at these positions come from each source."""
        positions = np.sort(positions)
        numbers, firsts = np.unique(positions // BLOCK_LENGTH, return_index=True)
        counts = np.zeros(len(self._lengths), np.int64)
        for number, own in zip(numbers.tolist(), np.split(positions, firsts)[1:], strict=True):
            block = self._blocks.get(number) or self._computed(number * BLOCK_LENGTH, BLOCK_LENGTH)
            samples = np.asarray(block)[own % BLOCK_LENGTH]
            counts += np.histogram(samples, self._firsts)[0]
        return counts

    def _found(self, number: int) -> memoryview[int] | None:
        """Compute a missing block, keep it and return it; None = compute the one position alone."""
        if len(self._blocks) >= _MOST_BLOCKS:
            if number not in self._missed:
                self._missed.append(number)
                return None
            # Another thread may remove the same one first.
            self._blocks.pop(next(iter([*self._blocks]), -1), None)
        block = self._blocks[number] = self._computed(number * BLOCK_LENGTH, BLOCK_LENGTH)
        return block

    def _computed(self, first: int, length: int) -> memoryview[int]:
        """Return the samples at ``length`` positions: as ints of a view, which are fast to read."""
        sources, draws = self._plan.samples(first, length)
        samples = np.empty_like(draws)
        for source, length in enumerate(self._lengths):
            own = sources == source
            if own.any():
                passes, indices = np.divmod(draws[own], length)
                if self._shuffle:
                    indices = shuffled_indices(self._keys[source], passes, indices, length)
                samples[own] = self._firsts[source] + indices
        small: Any = samples.astype(self._dtype)
        return memoryview(small)


def shuffled_indices(key: int, passes: Indices, indices: Indices, length: int) -> Indices:
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
