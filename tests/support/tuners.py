"""A tuner for tests of what is tuned."""

from __future__ import annotations

import random

import pytest

from spdl_torch.autotune import PerfParams, tuning
from spdl_torch.autotune.tuner import Decision


def auto(begin, **options):
    """``num_workers="auto"`` with these options, so many at first."""
    params = PerfParams(tuning=tuning.Tuning(**options))
    workers = params.loader_options()["num_workers"]
    return type(workers)(begin, params.tuning)


class RandomTuner:
    """Changes a free stage in every window, for no reason."""

    is_settled = True

    def __init__(self, bounds):
        self.bounds = bounds
        self._random = random.Random(0)
        self.num_steps = 0

    def step(self, window):
        self.num_steps += 1
        stage = self._random.choice([*window.free.values()])
        count = self._random.randint(1, min(5, self.bounds.threads))
        return (stage.name, count), [
            Decision(
                stage=stage.name,
                from_count=stage.concurrency,
                to_count=count,
                before=1.0,
                after=2.0,
                reason="gained",
            )
        ]


@pytest.fixture
def at_random(monkeypatch):
    """Options of tuning that never rests, in windows so short that every other batch ends one."""
    monkeypatch.setattr(tuning, "Tuner", RandomTuner)
    return {"window_seconds": 1e-6, "max_threads": 6}
