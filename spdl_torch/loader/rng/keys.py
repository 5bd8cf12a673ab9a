"""Derive the seed of a sample's stream from the epoch's seed and the sample's position, and the
seeds of all streams from which one worker draws for a batch, or beside it; and the generators of
its thread that are seeded so, each with the place for which it last was.

Python's and numpy's are made at the first draw: numpy's takes most of a millisecond.
"""

from __future__ import annotations

import _random
import enum
import random
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker


class Purpose(enum.IntEnum):
    """The purpose of a stream: streams of one position differ by it."""

    SAMPLE = 0
    COLLATE = 1
    """A batch's collate function; the position is that of its first sample."""
    ITERABLE = 2
    """``iter(dataset)`` on a worker; the worker's number stands in place of a position."""


_NUM_PURPOSES = len(Purpose)  # once: it is a call of Python's each time


class StreamKey(NamedTuple):
    """The key of an epoch's random streams: with a sample's position it gives the stream's seed.

    Positions count the samples of this loader's epoch from 0, in the order of its sampler. With
    a sampler that deals samples out to ranks in turn, rank ``rank`` of ``num_replicas`` has every
    ``num_replicas``-th position of the epoch as a whole, so that seeds do not depend on the number
    of ranks: ``start + position * num_replicas + rank``.
    """

    epoch_seed: int
    start: int = 0
    """The number of samples of the epoch, on all ranks together, before this loader's first."""
    num_replicas: int = 1
    rank: int = 0
    epoch: int = 0
    """The epoch's number, for generators that a dataset owns, which have their own seeds."""
    is_seeded: bool = False
    """Whether the user gave ``seed=``, which then seeds those generators too."""
    number_of_pass: int | None = None
    """The pass that workers' copies of a ``PipelineDataset`` begin; None = not to be told."""

    def place_of(self, position: int) -> int:
        """Return the sample's place in the whole epoch, on all ranks."""
        return self.start + position * self.num_replicas + self.rank

    def seed(self, position: int, purpose: Purpose = Purpose.SAMPLE, generator: int = 0) -> int:
        """Return the seed of one stream; ``generator`` numbers torch's, Python's and numpy's.

        It has 63 bits, like all of torch's own: a dataset may put ``torch.initial_seed()`` into a
        tensor. Three rounds of splitmix64's finaliser (https://prng.di.unimi.it/splitmix64.c) make
        the seeds of neighbours independent.
        """
        state = mix(mix(self.epoch_seed & _MASK) ^ self.place_of(position))
        return mix(state ^ (purpose + _NUM_PURPOSES * generator)) >> 1

    def seeds(self, first: int, count: int, generator: int = 0) -> list[int]:
        """Return ``seed(position, generator=generator)`` for ``count`` consecutive samples, in a
        fifth of the time of single calls.
        """
        places = np.arange(count, dtype=np.uint64) * np.uint64(self.num_replicas)
        places += np.uint64(self.place_of(first) & _MASK)
        states = _mix_all(places ^ np.uint64(mix(self.epoch_seed & _MASK)))
        states ^= np.uint64(Purpose.SAMPLE + _NUM_PURPOSES * generator)
        seeds: list[int] = (_mix_all(states) >> np.uint64(1)).tolist()
        return seeds


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the base seed of epoch number ``epoch`` of a loader with this ``seed``.

    It has 63 bits, like torch's own base seeds, so adding a worker's number stays within 64.
    """
    return mix(mix(seed & _MASK) ^ epoch) >> 1


_MASK = (1 << 64) - 1


def _mix_all(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Apply :func:`mix` to an array of unsigned 64-bit integers, whose arithmetic wraps around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[Any, Any] = values ^ (values >> np.uint64(31))
    return mixed


def mix(value: int) -> int:
    """Return splitmix64's finaliser: 64 bits, each of which depends on every bit of ``value``."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


# Places in a batch, beside those of its samples.
WORKER, ITERABLE, COLLATE = -3, -2, -1

# The numbers of the three generators of a stream.
TORCH, PYTHON, NUMPY = range(3)


class BatchSeeds:
    """The seeds for the batch that is being made; before the first batch, of the worker's stream.

    number: the worker's.
    """

    def __init__(self, key: StreamKey, number: int) -> None:
        self.key = key
        self.first = 0
        """The position in the epoch of the batch's first sample."""
        self.num_samples = 0
        self._number = number
        self.of_generators: dict[int, list[int]] = {}
        """Those of all its samples by generator, once they are needed."""

    def of_samples(self, generator: int) -> list[int]:
        """Return those of all samples of the batch."""
        seeds = self.of_generators.get(generator)
        if seeds is None:
            seeds = self.key.seeds(self.first, self.num_samples, generator)
            self.of_generators[generator] = seeds
        return seeds

    def seed(self, place: int, generator: int) -> int:
        """Return that of a generator at a place."""
        if 0 <= place < self.num_samples:  # a dataset that draws does so for every sample
            return self.of_samples(generator)[place]
        if place >= 0:
            return self.key.seed(self.first + place, Purpose.SAMPLE, generator)
        if place == COLLATE:
            return self.key.seed(self.first, Purpose.COLLATE, generator)
        if place == ITERABLE:
            return self.key.seed(self._number, Purpose.ITERABLE, generator)
        return self.key.epoch_seed + self._number

    def for_numpy(self, place: int) -> Any:
        """Return that of numpy's generator, whose seeds have words of 32 bits."""
        if place == WORKER:
            generate = cast("Any", torch_worker)._generate_state
            return generate(self.key.epoch_seed, self._number)
        # One word: 1.3 µs, against 8.7 µs for two.
        return self.seed(place, NUMPY) & 0xFFFFFFFF


class TorchStream:
    """The thread's generator of torch or, for a while, torch's default one in its place."""

    __slots__ = ("_own", "at", "generator", "is_default")

    def __init__(self) -> None:
        self.generator = self._own = torch.Generator()
        self.is_default = False
        """Whether torch's default generator stands in."""
        self.at: int | None = None
        """The place in the batch for which it was seeded; None = it is to be seeded."""

    def take_default(self) -> None:
        """Draw from torch's default generator from here on."""
        self.generator, self.is_default = torch.default_generator, True

    def leave_default(self) -> None:
        """Draw from the thread's own generator from here on."""
        self.generator, self.is_default, self.at = self._own, False, None

    def seed(self, place: int, seeds: BatchSeeds) -> None:
        """Seed the generator for a place."""
        self.generator.manual_seed(seeds.seed(place, TORCH))
        self.at = place


class PythonStream:
    """The thread's generator of ``random``."""

    __slots__ = ("at", "generator")
    generator: random.Random

    def __init__(self) -> None:
        self.at: int | None = None

    def seed(self, place: int, seeds: BatchSeeds) -> None:
        """Seed the generator for a place."""
        if not hasattr(self, "generator"):
            self.generator = random.Random(0)
        generator = self.generator
        _random.Random.seed(generator, seeds.seed(place, PYTHON))  # its own method takes longer
        generator.gauss_next = None  # type: ignore[attr-defined]  # Random's, without a type
        self.at = place


class NumpyStream:
    """The thread's generator of ``numpy.random``."""

    __slots__ = ("at", "generator")
    generator: np.random.RandomState

    def __init__(self) -> None:
        self.at: int | None = None

    def seed(self, place: int, seeds: BatchSeeds) -> None:
        """Seed the generator for a place."""
        if not hasattr(self, "generator"):
            self.generator = np.random.RandomState(0)
        self.generator.seed(seeds.for_numpy(place))
        self.at = place
