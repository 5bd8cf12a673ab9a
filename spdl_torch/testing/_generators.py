"""The process's random generators: torch's, Python's and numpy's."""

from __future__ import annotations

import random

import numpy as np
import torch

from ..data.differences import path_of_difference
from ..objects.generator_states import GeneratorStates


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
