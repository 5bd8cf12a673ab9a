"""The seeds of the streams from which one worker draws for a batch, or beside it."""

from __future__ import annotations

from typing import Any, cast

from torch.utils.data._utils import worker as torch_worker

from .keys import Purpose, StreamKey

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
        self._of_samples: dict[int, list[int]] = {}  # by generator, once one is needed

    def begin(self, key: StreamKey, first: int) -> None:
        """Begin a batch."""
        self.key, self.first, self.num_samples = key, first, 0
        if self._of_samples:
            self._of_samples = {}

    def of_samples(self, generator: int) -> list[int]:
        """Return those of all samples of the batch."""
        seeds = self._of_samples.get(generator)
        if seeds is None:
            seeds = self.key.seeds(self.first, self.num_samples, generator)
            self._of_samples[generator] = seeds
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
