"""What the tests of pipelines share."""

import sys

import pytest
from support.gates import FakeClock


@pytest.fixture
def clock(monkeypatch):
    """The engine's clock, which stands still until the test lets time pass."""
    clock = FakeClock()
    engine = [name for name in sys.modules if name.startswith("spdl_torch.engine.")]
    clock.install(monkeypatch, *(sys.modules[name] for name in engine))
    return clock
