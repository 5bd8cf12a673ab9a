"""The random generators: the process's (torch's, Python's and numpy's), those that user code keeps,
and those that samples or workers have in common."""

from __future__ import annotations

import random
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..loader.backends.worker_thread import acting_as_worker
from ..loader.differences import path_of_difference
from ..loader.rng.owned import (
    OwnedGenerators,
    ids_of_the_process,
    set_state,
    state_digest,
    state_of,
)
from ..objects.copies import deep_copy
from ..objects.generator_states import GeneratorStates
from ..objects.kinds import GENERATORS
from ..objects.members import text_of
from ..scopes import scope
from ._members import reached

if TYPE_CHECKING:
    from collections.abc import Iterator


def changed_since(before: GeneratorStates) -> set[str]:
    """Name the generators, of those that a dataset could draw from unseen, whose state differs."""
    now = GeneratorStates.now()
    pairs = {"random": (before.python, now.python), "numpy.random": (before.numpy, now.numpy)}
    return {name for name, (a, b) in pairs.items() if path_of_difference(a, b) is not None}


def seed_all(seed: int, run: int) -> None:
    """Seed torch's generator with ``seed``, the others with both numbers."""
    torch.manual_seed(seed)
    random.seed(f"{seed} {run}")
    np.random.seed((seed + run) & 0xFFFFFFFF)


_MOST_ITEMS = 16


class OwnGenerators:
    """The generators that a dataset and a collate_fn lead to, by the expression for each:
    attributes, variables around functions, and default arguments.

    ``without``: the ids of those to leave out, besides the process's own.
    """

    def __init__(self, *roots: Any, without: frozenset[int] = frozenset()) -> None:
        excepted = ids_of_the_process() | without
        self._found: dict[str, Any] = {
            text_of(path): value
            for path, value in reached(zip(("dataset", "collate_fn"), roots, strict=False))
            if isinstance(value, GENERATORS) and id(value) not in excepted
        }

    def digests(self) -> dict[str, int]:
        """Return a number for the state of each."""
        return {path: state_digest(generator) for path, generator in self._found.items()}

    def changed(self, before: dict[str, int]) -> list[str]:
        """Name those whose state differs from ``before``."""
        return [
            f"{path} (another state of a {type(self._found[path]).__name__})"
            for path, digest in self.digests().items()
            if digest != before[path]
        ]

    @scope
    def kept(self) -> Iterator[None]:
        """Restore all of them after the block."""
        states = {path: state_of(generator) for path, generator in self._found.items()}
        try:
            yield
        finally:
            for path, state in states.items():
                set_state(self._found[path], state)


def alike_on_workers(dataset: Any, *, seeds_transforms: bool) -> list[str]:
    """Name the generators from which two workers of an iterable dataset draw the same numbers for
    their items: each worker has a copy in the same state.

    Draws for the first item do not count, nor those for less than half of the items: workers that
    shuffle a list in the same way, before each takes its share, must draw alike.

    seeds_transforms: whether the loader seeds the generators of transforms for every item.
    """
    moved: list[dict[str, set[int]]] = []
    for number in range(2):
        try:
            own = deep_copy(dataset)
        except Exception:  # what cannot be copied cannot be looked at twice
            return []
        seeded = OwnedGenerators(own).found if seeds_transforms else ()
        generators = OwnGenerators(own, without=frozenset(id(each) for _, each in seeded))
        # A generator outside the copy is the same object for both: each begins with it as it is.
        with generators.kept(), acting_as_worker(number, 2, 0, own):
            states = [generators.digests() for _ in islice(iter(own), _MOST_ITEMS)]
        moved.append(_drawn_for_most(states))
    first, second = moved
    return [path for path in first if first[path] & second.get(path, set())]


def _drawn_for_most(states: list[dict[str, int]]) -> dict[str, set[int]]:
    """Return the states after the later items, of the generators that most of them draw from."""
    steps = list(pairwise(states))
    drawn = {
        path: [after[path] for before, after in steps if before[path] != after[path]]
        for path in (states[0] if states else ())
    }
    return {path: set(each) for path, each in drawn.items() if 2 * len(each) > len(steps)}
