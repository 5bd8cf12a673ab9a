"""The process's random generators: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..data.differences import path_of_difference


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


def seed_all(seed: int, run: int) -> None:
    """Seed torch's generator with ``seed``, the others with both numbers."""
    torch.manual_seed(seed)
    random.seed(f"{seed} {run}")
    np.random.seed((seed + run) & 0xFFFFFFFF)
