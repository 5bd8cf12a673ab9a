"""Seeds: from an epoch's seed and a sample's position follows the seed of its stream."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Purpose", "StreamKey", "epoch_seed", "mix"]


class Purpose(enum.IntEnum):
    """What a stream is for: streams of one position differ by it."""

    SAMPLE = 0
    COLLATE = 1
    """A batch's collate function; the position is that of its first sample."""
    ITERABLE = 2
    """``iter(dataset)`` on a worker; the position is the worker's number."""


@dataclass(frozen=True, slots=True)
class StreamKey:
    """The random streams of an epoch: from this and a sample's position follows its seed.

    Positions count the samples of this loader's epoch from 0, in the order of its sampler. With
    a sampler that deals samples out to ranks in turn, rank ``rank`` of ``num_replicas`` has every
    ``num_replicas``-th position of the epoch as a whole, so that seeds do not depend on the number
    of ranks: ``start + position * num_replicas + rank``.
    """

    epoch_seed: int
    start: int = 0
    """Samples of the epoch, on all ranks together, before this loader's first."""
    num_replicas: int = 1
    rank: int = 0
    epoch: int = 0
    """The epoch's number, for generators that a dataset owns: their seed is their own."""
    is_seeded: bool = False
    """The user gave ``seed=``, which then seeds these, too."""

    def place_of(self, position: int) -> int:
        """The sample's place in the epoch as a whole, on all ranks."""
        return self.start + position * self.num_replicas + self.rank

    def seed(self, position: int, purpose: Purpose = Purpose.SAMPLE, generator: int = 0) -> int:
        """The seed of one stream; ``generator`` numbers those that draw side by side.

        63 bits, as all of torch's own: a dataset may put ``torch.initial_seed()`` into a tensor.
        Three rounds of splitmix64's finaliser (https://prng.di.unimi.it/splitmix64.c), so that
        neighbours in any of the three share nothing.
        """
        state = mix(mix(self.epoch_seed & _MASK) ^ self.place_of(position))
        return mix(state ^ (purpose + len(Purpose) * generator)) >> 1

    def seeds(self, first: int, count: int, generator: int = 0) -> list[int]:
        """``seed(position, generator=generator)`` of ``count`` samples in a row, in a fifth of the
        time that it takes one by one.
        """
        places = np.arange(count, dtype=np.uint64) * np.uint64(self.num_replicas)
        places += np.uint64(self.place_of(first) & _MASK)
        states = _mix_all(places ^ np.uint64(mix(self.epoch_seed & _MASK)))
        states ^= np.uint64(Purpose.SAMPLE + len(Purpose) * generator)
        seeds: list[int] = (_mix_all(states) >> np.uint64(1)).tolist()
        return seeds


def epoch_seed(seed: int, epoch: int) -> int:
    """The base seed of epoch number ``epoch`` of a loader with this ``seed``.

    63 bits, as torch's own base seeds have, so that adding a worker's number stays in 64.
    """
    return mix(mix(seed & _MASK) ^ epoch) >> 1


_MASK = (1 << 64) - 1


def _mix_all(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """:func:`mix` of unsigned 64-bit integers, which wrap around by themselves."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[Any, Any] = values ^ (values >> np.uint64(31))
    return mixed


def mix(value: int) -> int:
    """splitmix64's finaliser: 64 bits of which each depends on every bit of ``value``."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
