"""The plan of a mixture: which source gives its next sample at a position, and the index of it.

Time runs at ``_TICKS`` ticks a position. A source of share ``w`` gives one sample in every stretch
of ``_TICKS / w`` ticks, at a tick of the stretch that a counter-based random number chooses::

    share 1/2   |   x   | x     |     x |x      |      one in every stretch
    share 1/4   |          x    |  x            |
    positions       0     1  2     3  4  5            all of them in the order of their ticks

So the number of a source's samples before any tick is known without computing earlier ones: it is
the number of whole stretches, plus one if the tick in the current stretch has passed. At no
tick is it more than one sample from the share, and nothing has to be remembered. Everything is
computed in integers, so positions are the same wherever the computation begins.

Where the weights change, a new phase begins with its own time.

A lookup takes a fraction of a microsecond, computing a block of positions more than a thousand
times as long. So blocks are kept: enough for several threads that each read in order, and for
reading in any order if the whole training is not too long.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import index as as_index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..sources._base import seed_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]
    UInt64s = NDArray[np.uint64]

Stop = Literal["first", "all", "never"]
"""The end of a mixture's epoch."""

_TICKS = 1 << 24
_LAST_TICK = 1 << 62
MAX_POSITIONS = _LAST_TICK // _TICKS
"""The number of positions that a plan can have."""
BLOCK_LENGTH = 8192
"""The number of positions that are best computed at once: fewer cost nearly as much."""
_MOST_BLOCKS = 1024  # 8 million positions, at most 34 MB with sources of 2**32 samples together

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_NUM_ROUNDS = 6
_SALTS = [np.uint64(number * 0xD1342543DE82EF95 % 2**64) for number in range(_NUM_ROUNDS)]


def numbers_at(key: int | UInt64s, counters: NDArray[np.int64]) -> UInt64s:
    """Return the random numbers of the stream of ``key`` at ``counters``: uint64, of the same
    shape. They are those of SplitMix64, whose state is a counter: nothing has to be kept or saved.
    """
    mixed = (counters.astype(np.uint64) + np.uint64(1)) * _STEP + np.uint64(key)
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return mixed ^ (mixed >> _SHIFTS[2])


class Shares(NamedTuple):
    """The shares of the sources from one sample of the mixture on."""

    first: int
    """The number of the first sample that they hold for."""
    shares: tuple[float, ...]
    """The shares in the order of the sources; their sum is 1."""


class MixturePlan:
    """The source at every position, from seed and weights alone."""

    def __init__(self, names: Sequence[str], phases: Sequence[Shares], *seed: int | str) -> None:
        self._phases: list[_Phase] = []
        before = np.zeros(len(names), np.int64)
        ends = [*(phase.first for phase in phases[1:]), MAX_POSITIONS]
        for number, ((first, shares), end) in enumerate(zip(phases, ends, strict=True)):
            keys = [seed_of("mix", *seed, number, name) for name in names]
            phase = _Phase(range(first, end), before, shares, keys)
            self._phases.append(phase)
            before = phase.counts(end) if end < MAX_POSITIONS else before
        self.drawn = sorted({source for phase in self._phases for source in phase.drawn})
        """The sources whose weight is not always 0."""

    def counts(self, position: int) -> Int64s:
        """Return how many of the samples before ``position`` come from each source: int64, of shape
        (sources,). Raises: IndexError: there is no such position.
        """
        return self._phase_at(position).counts(position)

    def samples(self, first: int) -> tuple[Int64s, Int64s]:
        """Return the sources of the samples at ``BLOCK_LENGTH`` positions from ``first`` on, and
        the number of samples that the source has given before each. Raises: IndexError: ``first``
        is not a position.
        """
        parts = [self._phase_at(first).samples(first, BLOCK_LENGTH)]
        while (done := sum(len(sources) for sources, _ in parts)) < BLOCK_LENGTH:
            parts.append(self._phase_at(first + done).samples(first + done, BLOCK_LENGTH - done))
        sources, draws = zip(*parts, strict=True)
        return np.concatenate(sources), np.concatenate(draws)

    def end_of_epoch(self, lengths: Sequence[int], stop: Stop) -> int | None:
        """Return the position at which the first of the drawn sources would begin again, or with
        ``"all"`` the last one; None = never.
        """
        is_over = np.any if stop == "first" else np.all

        def has_ended(position: int) -> bool:
            return bool(is_over((self.counts(position) > lengths)[self.drawn]))

        end = bisect_left(range(MAX_POSITIONS), True, key=has_ended)
        return end - 1 if end < MAX_POSITIONS else None

    def check(self, position: int) -> None:
        """Check a position. Raises: IndexError: there is no such position."""
        if not 0 <= position < MAX_POSITIONS:
            raise IndexError(
                f"a mixture's position must be between 0 and {MAX_POSITIONS - 1}, got {position}."
            )

    def _phase_at(self, position: int) -> _Phase:
        self.check(position)
        following = bisect_right(self._phases, position, key=lambda phase: phase.positions.start)
        return self._phases[following - 1]


class _Phase:
    """The part of a plan in which the weights stay the same. Its ticks begin at 0.

    before: how many samples each source has given before its first position.
    """

    def __init__(
        self, positions: range, before: Int64s, shares: Sequence[float], keys: Sequence[int]
    ) -> None:
        self.positions = positions
        self.drawn = [source for source, share in enumerate(shares) if share > 0]
        """The sources that it draws from."""
        self._before = before
        self._sources = np.array(self.drawn)
        self._keys = np.array([keys[source] for source in self.drawn], np.uint64)
        self._stretches = np.array(
            [min(round(_TICKS / shares[source]), _LAST_TICK) for source in self.drawn], np.int64
        )

    def counts(self, position: int) -> Int64s:
        """Return how many of the samples before ``position`` come from each source."""
        tick, given, missing = self._tick_near(position)
        sources, _ = self._samples_from(tick, missing)
        found = self._before + np.bincount(sources, minlength=len(self._before))
        found[self._sources] += given
        return found

    def samples(self, first: int, length: int) -> tuple[Int64s, Int64s]:
        """Return the source of each sample at ``length`` positions from ``first`` on, or up to the
        phase's end, and the number that it has in its source.
        """
        length = min(length, self.positions.stop - first)
        tick, _, missing = self._tick_near(first)
        sources, draws = self._samples_from(tick, missing + length)
        return sources[missing:], (draws + self._before[sources])[missing:]

    def _samples_from(self, begin: int, length: int) -> tuple[Int64s, Int64s]:
        """Return source and number of the first ``length`` samples from a tick on."""
        # Each source is up to one sample behind its share there, and one more here.
        end = begin + (length + 2 * len(self.drawn) + 2) * _TICKS
        parts = [self._ticks_between(own, begin, end) for own in range(len(self.drawn))]
        ticks, draws = (np.concatenate(each) for each in zip(*parts, strict=True))
        sources = np.repeat(self._sources, [len(own) for own, _ in parts])
        # Two sources may give a sample at the same tick: the first of them goes first.
        order = np.argsort(ticks, kind="stable")[:length]
        return sources[order], draws[order]

    def _tick_near(self, position: int) -> tuple[int, Int64s, int]:
        """Return a tick before which hardly fewer samples than those before ``position`` are given,
        how many each source that is drawn gives before it, and how many are missing.
        """
        position -= self.positions.start
        margin = len(self.drawn)
        tick = max(0, position - margin) * _TICKS
        while True:
            before = self._counts_before(tick)
            missing = position - int(before.sum())
            if 0 <= missing <= 4 * margin:
                return tick, before, missing
            # Stretches are rounded to whole ticks, so the guess is wrong far from the start.
            tick = max(0, tick + (missing - margin) * _TICKS)

    def _counts_before(self, tick: int) -> Int64s:
        """Return how many samples each source that is drawn gives before ``tick``."""
        whole, rest = np.divmod(np.int64(tick), self._stretches)
        return whole + (self._tick_in(self._keys, whole, self._stretches) < rest)

    def _ticks_between(self, own: int, begin: int, end: int) -> tuple[Int64s, Int64s]:
        """Return the ticks from ``begin`` to before ``end`` at which a source gives a sample, and
        the numbers of those samples.
        """
        stretch = self._stretches[own]
        draws = np.arange(begin // stretch, (end - 1) // stretch + 1, dtype=np.int64)
        ticks = draws * stretch + self._tick_in(self._keys[own], draws, stretch)
        inside = (ticks >= begin) & (ticks < end)
        return ticks[inside], draws[inside]

    @staticmethod
    def _tick_in(keys: UInt64s, draws: Int64s, stretches: Int64s) -> Int64s:
        return (numbers_at(keys, draws) % stretches.astype(np.uint64)).astype(np.int64)


class Positions:
    """The sample at every position, as its number in all sources end to end.

    Threads may use it at once; a copy for a worker thread is the object itself, and a pickle holds
    no blocks and nothing that is changed.
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
            block = self._computed(number)
            if len(self._blocks) >= _MOST_BLOCKS:
                # Another thread may remove the same one first.
                self._blocks.pop(next(iter([*self._blocks]), -1), None)
            self._blocks[number] = block
        sample = block[place]
        source = bisect_right(self._firsts, sample) - 1
        return source, sample - self._firsts[source]

    def _computed(self, block: int) -> memoryview[int]:
        """Return the samples of a block: as ints of a view, which are fast to read."""
        sources, draws = self._plan.samples(block * BLOCK_LENGTH)
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


def shuffled_indices(key: int, passes: Int64s, indices: Int64s, length: int) -> Int64s:
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
