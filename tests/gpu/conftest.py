"""For all of this room."""

import pytest
from support.gpus import gpu
from support.lazy_device import backends

__all__ = ["backends", "gpu"]


@pytest.fixture(params=[False, True], ids=["pins_where_made", "pins_at_hand_over"])
def pins(request, monkeypatch):
    """Where batches get into pinned memory."""
    for module in ("transfer", "kept"):
        name = f"spdl_torch.io._transfer.{module}.PINS_AT_HAND_OVER"
        monkeypatch.setattr(name, request.param)
    return request.param
