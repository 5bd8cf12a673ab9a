"""The source of the sample at a position: looked up, and kept for the positions around it.

A lookup takes a fraction of a microsecond, computing a block of them more than a thousand times as
long. So blocks are kept: enough for several threads that each read in order, and for reading in any
order if the whole training is not too long. Once there is no room for more, the first request
within a block computes one position alone, and the second the whole block.
"""

from __future__ import annotations

from collections import deque
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .numbers import shuffled_indices
from .plan import BLOCK_LENGTH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .plan import MixturePlan

    Indices = NDArray[np.int64]

_MOST_BLOCKS = 1024  # 8 million positions, at most 50 MB with sources of less than 2**31 samples
_NUM_RECENT = 64  # recently missed blocks: more than there are threads that read in order


class _Block(NamedTuple):
    sources: memoryview[int]
    indices: memoryview[int]


class Positions:
    """The source of the sample at every position, and the sample's index there.

    Threads may use it at once; a copy for a worker thread is the object itself, and a pickle holds
    no blocks.
    """

    def __init__(
        self, plan: MixturePlan, lengths: Sequence[int], keys: Sequence[int], shuffle: bool
    ) -> None:
        self._plan = plan
        self._lengths = tuple(lengths)
        self._keys = tuple(keys)
        self._shuffle = shuffle
        self._dtypes = _least_dtype(len(lengths) - 1), _least_dtype(max(lengths) - 1)
        self._blocks: dict[int, _Block] = {}
        self._missed: deque[int] = deque(maxlen=_NUM_RECENT)

    def __deepcopy__(self, memo: object) -> Positions:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return Positions, (self._plan, self._lengths, self._keys, self._shuffle)

    def at(self, position: int) -> tuple[int, int]:
        """Return the number of the source, and the index of the sample there.

        Raises: IndexError: there is no such position.
        """
        number, place = divmod(as_index(position), BLOCK_LENGTH)
        block = self._blocks.get(number)
        if block is None:
            self._plan.check(position)
            block = self._found(number)
            if block is None:
                ((source,), (index,)) = self._computed(number * BLOCK_LENGTH + place, 1)
                return source, index
        return block.sources[place], block.indices[place]

    def sources(self, positions: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """Yield the sources of the samples at many positions, in another order."""
        positions = np.sort(positions)
        numbers, firsts = np.unique(positions // BLOCK_LENGTH, return_index=True)
        for number, own in zip(numbers.tolist(), np.split(positions, firsts[1:]), strict=True):
            block = self._blocks.get(number)
            if block is None:
                first, last = int(own[0]), int(own[-1])
                block, own = self._computed(first, last + 1 - first), own - first
            yield np.asarray(block.sources)[own % BLOCK_LENGTH]

    def _found(self, number: int) -> _Block | None:
        """Compute a missing block, keep it and return it; None = compute the one position alone."""
        if len(self._blocks) >= _MOST_BLOCKS:
            if number not in self._missed:
                self._missed.append(number)
                return None
            # Another thread may remove the same one first.
            self._blocks.pop(next(iter([*self._blocks]), -1), None)
        block = self._blocks[number] = self._computed(number * BLOCK_LENGTH, BLOCK_LENGTH)
        return block

    def _computed(self, first: int, length: int) -> _Block:
        sources: list[Indices] = []
        indices: list[Indices] = []
        while length:
            segment = self._plan.segment(first, length)
            sources.append(segment.sources)
            indices.append(self._indices(segment.sources, segment.draws))
            first, length = first + len(segment.sources), length - len(segment.sources)
        parts = zip((sources, indices), self._dtypes, strict=True)
        arrays: list[Any] = [np.concatenate(each).astype(kind) for each, kind in parts]
        views = [memoryview(each) for each in arrays]  # their items are ints, and faster to read
        return _Block(*views)

    def _indices(self, sources: Indices, draws: Indices) -> Indices:
        """Return the index, in its source, of the sample of each draw."""
        indices = np.empty_like(draws)
        for source, length in enumerate(self._lengths):
            own = sources == source
            if not own.any():
                continue
            passes, found = np.divmod(draws[own], length)
            if self._shuffle:
                found = shuffled_indices(self._keys[source], passes, found, length)
            indices[own] = found
        return indices


def _least_dtype(largest: int) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(next(kind for kind in "BHIQ" if largest <= np.iinfo(kind).max))
