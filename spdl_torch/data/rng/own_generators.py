"""The generators of a thread that runs user code, and the place for which each was last seeded.

Python's and numpy's are made at the first draw: numpy's takes most of a millisecond.
"""

from __future__ import annotations

import _random
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .batch_seeds import PYTHON, TORCH

if TYPE_CHECKING:
    from .batch_seeds import BatchSeeds


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

    def state(self) -> torch.Tensor:
        """Return the generator's state."""
        return self.generator.get_state()

    def go_on(self, place: int, state: torch.Tensor) -> None:
        """Go on with the stream of a place where it was left."""
        self.generator.set_state(state)
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

    def state(self) -> Any:
        """Return the generator's state."""
        return self.generator.getstate()

    def go_on(self, place: int, state: Any) -> None:
        """Go on with the stream of a place where it was left."""
        self.generator.setstate(state)
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

    def state(self) -> Any:
        """Return the generator's state."""
        return self.generator.get_state()

    def go_on(self, place: int, state: Any) -> None:
        """Go on with the stream of a place where it was left."""
        self.generator.set_state(state)
        self.at = place
