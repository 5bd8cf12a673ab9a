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


_MOST_QUIET = 8
"""The first batches without a draw after which samples are taken to draw nothing; one is enough
where draws can be seen already. The means of that takes 7 to 15 ms, for which no first batch waits.
"""

_main_thread = threading.main_thread().ident  # cached: the lookup would dominate the cost


def _after_fork() -> None:
    global _main_thread
    _main_thread = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Borrowing:
    """The choice, batch by batch, whether user code draws from the default generator itself.

    That is for the main thread, while the program has no other (but daemons), and where samples
    draw: they are taken to, until looks at the generator after the last sample of some batches have
    shown otherwise. From then on draws are seen.
    """

    def __init__(self, *, are_seen: bool) -> None:
        """``are_seen``: whether draws can be seen without delay."""
        self.is_on = False
        """Whether it is borrowed: whatever may draw begins with it seeded."""
        self.has_drawn = True
        """Whether samples draw, as far as is known. Whoever sees a draw says so. Where they do not,
        and it is not borrowed, there is nothing to choose for a batch."""
        self.looks = True
        """Whether somebody is to look."""
        self._num_quiet = _MOST_QUIET - 1 if are_seen else 0  # batches in which nothing was drawn
        self._is_main = self._is_for_good = False

    def enter(self) -> bool:
        """Begin on the calling thread; return ``is_on``."""
        self._is_main = threading.get_ident() == _main_thread
        if not self._is_main:  # as on all workers
            self.has_drawn = False
        self.is_on = self.has_drawn and self.begin()
        return self.is_on

    def begin(self) -> bool:
        """Choose for a batch that begins; return ``is_on``."""
        may_draw = self._is_main and self.has_drawn
        self.is_on = may_draw and (self._is_for_good or not _others_may_draw())
        return self.is_on

    def note(self, *, has_drawn: bool) -> None:
        """Note what a look at a batch has shown."""
        self._num_quiet += 1
        if has_drawn or self._num_quiet == _MOST_QUIET:
            self.has_drawn, self.looks = has_drawn, False

    def begin_for_good(self) -> bool:
        """Borrow it from now on, as nobody will ever see draws. Return False if this is not the
        main thread, which may not."""
        self.is_on = self.has_drawn = self._is_for_good = self._is_main
        self.looks = False
        return self._is_main


def _others_may_draw() -> bool:
    """Return whether another thread of the program lives that is not a daemon.

    Daemons (progress bars' and loggers' threads, our own) are taken for helpers that draw nothing:
    checking each of their calls would cost every program that has one.
    """
    if threading.active_count() == 1:  # 0.1 µs; going through the threads takes ten times that
        return False
    own = threading.get_ident()
    return any(not each.daemon and each.ident != own for each in threading.enumerate())
