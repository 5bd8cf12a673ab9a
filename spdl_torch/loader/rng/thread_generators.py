"""The generators of a thread that runs user code: its own, with the place for which each was last
seeded, and whether torch's default one may stand in.

Python's and numpy's are made at the first draw: numpy's takes most of a millisecond.
"""

from __future__ import annotations

import _random
import os
import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from .keys import PYTHON, TORCH

if TYPE_CHECKING:
    from .keys import BatchSeeds


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


_MOST_UNSEEN, _BATCH_UNSEEN = 2_000, 8
"""The samples of a program after which draws are looked for the first time: seeding for as many
takes 4 ms, and the means of seeing draws 7 to 15, which would keep the first batch waiting. A batch
counts for some more, for which the generator's own state is kept and restored."""
_num_unseen = 0

_main_thread = threading.main_thread().ident  # cached: the lookup would dominate the cost


def _after_fork() -> None:
    global _main_thread
    _main_thread = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Borrowing:
    """The choice, batch by batch, whether samples draw from the default generator itself.

    That is for the main thread, while the program has no other (but daemons), and where samples do
    draw: in the first batch in which that can be seen, or in any later one.
    """

    def __init__(self) -> None:
        self.is_on = False
        """Whether each sample of this batch begins with the default generator seeded."""
        self.looks = False
        """Whether draws are looked for in this batch."""
        self.has_drawn = True
        """Whether a sample has drawn, as far as is known. Whoever sees a draw says so. Where none
        has, and none is seeded, there is nothing to choose for a batch."""
        self.is_blind = False
        """Whether nobody sees draws yet, so that all that may draw begins with it seeded."""
        self._is_main = self._has_looked = self._is_keyless = False

    def enter(self, *, are_seen: bool) -> None:
        """Begin on the calling thread. ``are_seen``: whether draws can be seen without delay."""
        self._is_main = threading.get_ident() == _main_thread
        if not self._is_main:  # as on all workers
            self.is_blind = self.is_on = self.looks = self.has_drawn = False
        elif are_seen:
            self.is_blind = self._is_keyless
        else:
            self.is_blind = self._may_be_blind()

    def begin(self, *, are_seen: bool) -> None:
        """Choose for a batch that begins."""
        if not self._is_main:
            return
        self.is_blind = self._is_keyless if are_seen else self._may_be_blind()
        self.note_unseen(_BATCH_UNSEEN)
        self.is_on = self.is_blind or (self.has_drawn and not _others_may_draw())
        self.looks = self.is_on and not self.is_blind and not self._has_looked
        if self.looks:
            self.has_drawn, self._has_looked = False, True  # until the first draw

    def note_unseen(self, num_samples: int) -> None:
        """Count samples for which it is seeded."""
        global _num_unseen
        if self.is_blind:
            _num_unseen += num_samples

    def stay_blind(self) -> bool:
        """Borrow it for good, as nobody will ever see draws. Return False if this is not the main
        thread, which may not."""
        self.is_on = self.is_blind = self._is_keyless = self._is_main
        self.looks = False
        return self._is_main

    def _may_be_blind(self) -> bool:
        return _num_unseen < _MOST_UNSEEN and not _others_may_draw()


def _others_may_draw() -> bool:
    """Return whether another thread of the program lives that is not a daemon.

    Daemons (progress bars' and loggers' threads, our own) are taken for helpers that draw nothing:
    checking each of their calls would cost every program that has one.
    """
    if threading.active_count() == 1:  # 0.1 µs; going through the threads takes ten times that
        return False
    own = threading.get_ident()
    return any(not each.daemon and each.ident != own for each in threading.enumerate())
