"""``check-gpu``: frames of videos, copied to the device."""

from __future__ import annotations

from functools import partial

import pytest
from _lazy_device import LazyBackend
from _lazy_gpu import gpu, lines_of
from _loader_helpers import no_thread_left

pytest.importorskip("av")

from spdl_torch.check_gpu import clips

__all__ = ["gpu", "no_thread_left"]


def test_clips_are_compared(gpu):
    """Those that are copied with the CPU's."""
    assert lines_of(partial(clips.check_clips, gpu)) == [("clips_copied", "PASS")]


def test_clips_that_are_not_copied_are_found(gpu, monkeypatch):
    """The test before can fail; the memory there has other bytes."""
    monkeypatch.setattr(LazyBackend, "copy", lambda *_: None)
    assert lines_of(partial(clips.check_clips, gpu)) == [("clips_copied", "FAIL")]
