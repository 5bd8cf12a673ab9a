"""``check-gpu``: frames of videos, copied to the device and decoded there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from _lazy_device import LazyBackend
from _lazy_gpu import gpu, lines_of
from _loader_helpers import no_thread_left

pytest.importorskip("av")

from spdl_torch.check_gpu import clips
from spdl_torch.io import load_clip
from spdl_torch.io._video import torchcodec_video

__all__ = ["gpu", "no_thread_left"]

CLIPS = [f"clips_torchcodec_{name}" for name in ("one", "batch", "video")]


def clips_found(gpu, monkeypatch, decoded, version="0.17.0+cu130"):
    """The lines about clips, with frames of a function in the place of torchcodec's decoder."""
    monkeypatch.setattr(torchcodec_video, "loaded_version", lambda: version)
    monkeypatch.setattr(torchcodec_video, "decoded_frames", decoded)
    return lines_of(partial(clips.check_clips, gpu))


def no_frames(*_):
    """A video that torchcodec does not take."""


@pytest.mark.parametrize(("off_by", "outcome"), [(1, "PASS"), (9, "FAIL")])
def test_clips_are_compared(gpu, monkeypatch, off_by, outcome):
    """Those that are copied with the CPU's; those of the GPU within some levels."""

    def decoded(source, seconds, tick, size, *_):
        width, height = size or (None, None)
        frames = load_clip(
            source, lambda info: seconds, width=width, height=height, resize="antialias"
        ).frames
        shifted = (frames.int() + off_by).clamp(0, 255).to(torch.uint8)
        return gpu.device.empty(shifted.nbytes).view(shifted.shape).copy_(shifted)

    found = clips_found(gpu, monkeypatch, decoded)
    assert found == [("clips_copied", "PASS"), *((name, outcome) for name in CLIPS)]


def test_clips_that_are_not_copied_are_found(gpu, monkeypatch):
    """The test before can fail; the memory there has other bytes."""
    monkeypatch.setattr(LazyBackend, "copy", lambda *_: None)
    found = clips_found(gpu, monkeypatch, no_frames)
    assert found[0] == ("clips_copied", "FAIL")


def test_clips_of_torchcodec_are_skipped_where_it_has_no_cuda(gpu, monkeypatch):
    """And with CUDA it has to take a common video."""
    found = clips_found(gpu, monkeypatch, no_frames, version="0.17.0+cpu")
    assert found == [("clips_copied", "PASS"), ("clips_torchcodec", "SKIP")]
    assert clips_found(gpu, monkeypatch, no_frames)[1] == ("clips_torchcodec", "FAIL")
