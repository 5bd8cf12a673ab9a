"""The states of the global generators: Python's, numpy's and torch's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..scopes import scope


class GeneratorStates(NamedTuple):
    """What the generators draw next, in this process or in a child that restores it. None = the
    module is not loaded: it has drawn nothing.
    """

    python: Any
    numpy: Any
    torch: Any

    @classmethod
    def now(cls) -> GeneratorStates:
        """Return the states of the generators that are there, torch's on the CPU."""
        numpy, torch = (sys.modules.get(name) for name in ("numpy", "torch"))
        return cls(
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
            None if torch is None else torch.get_rng_state(),
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy as np

            np.random.set_state(self.numpy)
        if self.torch is not None:
            import torch

            torch.set_rng_state(self.torch)


@scope
def generators_kept() -> Iterator[None]:
    """Restore the generators after the block."""
    states = GeneratorStates.now()
    try:
        yield
    finally:
        states.restore()
