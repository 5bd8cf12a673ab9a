"""The process's random generators: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..scopes import scope
from ._differences import path_of_difference

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class States:
    """The states of the process's generators that a dataset could draw from unseen."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> States:
        return cls(random.getstate(), np.random.get_state(legacy=False))

    def changed(self) -> set[str]:
        now = States.now()
        pairs = {"random": (self.python, now.python), "numpy.random": (self.numpy, now.numpy)}
        return {name for name, (a, b) in pairs.items() if path_of_difference(a, b) is not None}


def generator_states() -> tuple[Any, ...]:
    """Return the states of torch's global generator on the CPU, Python's and numpy's."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_generator_states(states: tuple[Any, ...]) -> None:
    """Restore all three."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@scope
def generators_kept() -> Iterator[None]:
    """Restore the generators after the block."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


def seed_all(seed: int, run: int) -> None:
    """Seed torch's generator with ``seed``, the others with both numbers."""
    torch.manual_seed(seed)
    random.seed(f"{seed} {run}")
    np.random.seed((seed + run) & 0xFFFFFFFF)
