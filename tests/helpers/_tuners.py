"""A tuner for tests of what is tuned."""

from __future__ import annotations

import random

import pytest

from spdl_torch.autotune import PerfParams, tuning
from spdl_torch.autotune.tuner import Decision


def auto(options):
    """``num_workers="auto"`` with these options."""
    return PerfParams.auto(**options).loader_options()["num_workers"]


class RandomTuner:
    """Changes every free stage in every window, for no reason."""

    is_settled = True

    def __init__(self, bounds):
        self.bounds = bounds
        self._random = random.Random(0)
        self.num_steps = 0

    def step(self, window):
        self.num_steps += 1
        free = window.free.values()
        counts = {stage.name: self._random.randint(1, 5) for stage in free}
        decisions = tuple(
            Decision(
                stage=stage.name,
                from_count=stage.concurrency,
                to_count=counts[stage.name],
                before=1.0,
                after=2.0,
                reason="gained",
            )
            for stage in free
        )
        return counts, decisions


@pytest.fixture
def at_random(monkeypatch):
    """Options of tuning that never rests, in windows so short that every other batch ends one."""
    monkeypatch.setattr(tuning, "Tuner", RandomTuner)
    return {"window_seconds": 1e-6, "write": None, "max_threads": 6, "num_cores": 2}
