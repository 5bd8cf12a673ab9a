"""The plan of a mixture: which source gives its next sample at a position.

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
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..sources._base import seed_of
from .numbers import numbers_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .weights import Shares

    Counts = NDArray[np.int64]

_TICKS = 1 << 24
_LAST_TICK = 1 << 62
MAX_POSITIONS = _LAST_TICK // _TICKS
"""The number of positions that a plan can have."""
BLOCK_LENGTH = 8192
"""The number of positions that are best computed at once: fewer cost nearly as much."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The samples at some positions that follow one another."""

    first: int
    """The position of the first."""
    sources: NDArray[np.int64]
    """The source of each."""
    draws: Counts
    """The number of samples that the source has given before each."""


class MixturePlan:
    """The source at every position, from seed and weights alone."""

    def __init__(self, names: Sequence[str], phases: Sequence[Shares], *seed: int | str) -> None:
        self._num_sources = len(names)
        self._firsts = [phase.first for phase in phases]
        self._phases = [
            _Phase(phase.shares, [seed_of("mix", *seed, number, name) for name in names])
            for number, phase in enumerate(phases)
        ]
        # The number of samples that each source gives before every phase.
        self._before: list[Counts] = [np.zeros(len(names), np.int64)]
        for number, first in enumerate(self._firsts[1:]):
            own = self._phases[number].counts(first - self._firsts[number])
            self._before.append(self._before[-1] + own)

    def counts(self, position: int) -> Counts:
        """Return how many of the samples before ``position`` come from each source: int64, of shape
        (sources,).
        """
        number = self._phase_at(position)
        return self._before[number] + self._phases[number].counts(position - self._firsts[number])

    def segment(self, first: int, length: int = BLOCK_LENGTH) -> Segment:
        """Return the samples at ``length`` positions from ``first`` on, fewer if the weights change
        among them. Raises: IndexError: ``first`` is not a position.
        """
        number = self._phase_at(first)
        local_first = first - self._firsts[number]
        if number + 1 < len(self._phases):
            length = min(length, self._firsts[number + 1] - first)
        sources, draws = self._phases[number].samples(local_first, length)
        return Segment(first, sources, draws + self._before[number][sources])

    def position_of(self, source: int, draw: int) -> int | None:
        """Return the position at which a source gives its sample number ``draw``; None = never."""
        for number, phase in enumerate(self._phases):
            local = phase.position_of(source, draw - int(self._before[number][source]))
            if local is None:
                continue
            position = self._firsts[number] + local
            if number + 1 == len(self._phases) or position < self._firsts[number + 1]:
                return position
        return None

    def sources_drawn(self) -> list[int]:
        """Return the sources whose weight is not always 0."""
        return sorted({number for phase in self._phases for number in phase.sources})

    def check(self, position: int) -> None:
        """Check a position. Raises: IndexError: there is no such position."""
        if not 0 <= position < MAX_POSITIONS:
            raise IndexError(
                f"a mixture's position must be between 0 and {MAX_POSITIONS - 1}, got {position}."
            )

    def _phase_at(self, position: int) -> int:
        self.check(position)
        return bisect_right(self._firsts, position) - 1


class _Phase:
    """A plan with the same weights throughout; positions and ticks begin at 0."""

    def __init__(self, shares: Sequence[float], keys: Sequence[int]) -> None:
        drawn = [number for number, share in enumerate(shares) if share > 0]
        self.sources = drawn
        """The sources that it draws from."""
        self._num_sources = len(shares)
        self._sources = np.array(drawn)
        self._keys = np.array([keys[number] for number in drawn], np.uint64)
        self._stretches = np.array(
            [min(round(_TICKS / shares[number]), _LAST_TICK) for number in drawn], np.int64
        )

    def counts(self, position: int) -> Counts:
        """Return how many of the samples before ``position`` come from each source."""
        begin, before = self._tick_near(position)
        sources, _ = self._samples_from(begin, position - int(before.sum()))
        found = np.bincount(sources, minlength=self._num_sources)
        found[self._sources] += before
        return found

    def samples(self, first: int, length: int) -> tuple[NDArray[np.int64], Counts]:
        """Return the source of each sample at ``length`` positions from ``first`` on, and the
        number that it has in its source.
        """
        begin, before = self._tick_near(first)
        skipped = first - int(before.sum())
        sources, draws = self._samples_from(begin, skipped + length)
        return sources[skipped:], draws[skipped:]

    def _samples_from(self, begin: int, length: int) -> tuple[NDArray[np.int64], Counts]:
        """Return source and number of the first ``length`` samples from a tick on."""
        # Each source is up to one sample behind its share there, and one more here.
        end = begin + (length + 2 * len(self._sources) + 2) * _TICKS
        parts = [self._ticks_between(number, begin, end) for number in range(len(self._sources))]
        ticks = np.concatenate([part[0] for part in parts])
        draws = np.concatenate([part[1] for part in parts])
        sources = np.repeat(self._sources, [len(part[0]) for part in parts])
        # Two sources may give a sample at the same tick: the first of them goes first.
        order = np.argsort(ticks, kind="stable")[:length]
        return sources[order], draws[order]

    def position_of(self, source: int, draw: int) -> int | None:
        """Return the position of sample number ``draw`` of a source; None = there is none."""
        (own,) = np.nonzero(self._sources == source)
        if draw < 0 or not len(own):
            return None
        stretch = int(self._stretches[own[0]])
        if draw >= _LAST_TICK // stretch:
            return None
        ((tick,), _) = self._ticks_between(int(own[0]), draw * stretch, (draw + 1) * stretch)
        before, at = self._counts_before(int(tick)), self._counts_before(int(tick) + 1)
        return int(before.sum() + (at - before)[: own[0]].sum())

    def _tick_near(self, position: int) -> tuple[int, Counts]:
        """Return a tick before which there are at most ``position`` samples and hardly fewer, and
        the number of those of each source that is drawn.
        """
        margin = len(self._sources)
        tick = max(0, position - margin) * _TICKS
        while True:
            before = self._counts_before(tick)
            missing = position - int(before.sum())
            if 0 <= missing <= 4 * margin:
                return tick, before
            # Stretches are rounded to whole ticks, so the guess is wrong far from the start.
            tick = max(0, tick + (missing - margin) * _TICKS)

    def _counts_before(self, tick: int) -> Counts:
        """Return how many samples each source that is drawn gives before ``tick``."""
        whole, rest = np.divmod(np.int64(tick), self._stretches)
        return whole + (self._tick_in(self._keys, whole, self._stretches) < rest)

    def _ticks_between(self, number: int, begin: int, end: int) -> tuple[Counts, Counts]:
        """Return the ticks from ``begin`` to before ``end`` at which a source gives a sample, and
        the numbers of those samples.
        """
        stretch = self._stretches[number]
        draws = np.arange(begin // stretch, (end - 1) // stretch + 1, dtype=np.int64)
        ticks = draws * stretch + self._tick_in(self._keys[number], draws, stretch)
        inside = (ticks >= begin) & (ticks < end)
        return ticks[inside], draws[inside]

    @staticmethod
    def _tick_in(keys: NDArray[np.uint64], draws: Counts, stretches: Counts) -> Counts:
        return (numbers_at(keys, draws) % stretches.astype(np.uint64)).astype(np.int64)
