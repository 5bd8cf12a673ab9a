"""``check-gpu``: races on every other way to the device, other allocators, compiled models, and
what is told at the end."""

from __future__ import annotations

import io
import math
from functools import partial

import pytest
from _lazy_gpu import as_torchs, gpu, lines_of
from _loader_helpers import no_thread_left

from spdl_torch.check_gpu import allocators, rates, resources
from spdl_torch.check_gpu.sheet import Sheet

__all__ = ["gpu", "no_thread_left"]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# -- allocators ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(json.dumps({'wrong': 0, 'allocators': [setting]}))", "PASS"),
        ("print(json.dumps({'wrong': 1, 'allocators': [setting]}))", "FAIL"),
        ("print(json.dumps({'wrong': 1, 'allocators': []}))", "SKIP"),
        ("1 / 0", "FAIL"),
    ],
)
def test_each_allocator_is_checked_in_a_program(code, outcome):
    """Which has torch's setting; where that has no effect, nothing was checked."""
    program = f"import json, os; setting = os.environ['PYTORCH_CUDA_ALLOC_CONF'][:-1]; {code}"
    check = partial(allocators.check_allocators, program=program)
    assert lines_of(check, allocators={"some": "some!"}) == [("race_some", outcome)]


# -- kernels of others -----------------------------------------------------------------------------


PROMPT = pytest.mark.parametrize("gpu", [{"is_prompt": True}], indirect=True)


class Compiled:
    """A model after ``torch.compile``, which some batches spoil."""

    def __init__(self, model, spoil):
        self.model, self.spoil = model, spoil

    def __call__(self, batch):
        return self.spoil(batch, self.model(batch))


def cannot_capture(batch, found):
    if len(batch) == 2:
        raise RuntimeError("operation failed due to a previous error during capture")
    return found


def cannot_compile(batch, found):
    raise ImportError("no Triton")


@PROMPT
@pytest.mark.parametrize(
    ("spoil", "outcomes"),
    [
        (lambda batch, found: found, ["PASS", "PASS"]),
        (lambda batch, found: found + (len(batch) == 1), ["PASS", "FAIL"]),
        (cannot_capture, ["FAIL", "PASS"]),
        (cannot_compile, ["SKIP"]),
    ],
)
def test_compiled_models_run_beside_a_loader(gpu, monkeypatch, spoil, outcomes):
    """With batches that they meet there; what fails and what is wrong have lines of their own."""
    with as_torchs(gpu, monkeypatch, resources):
        monkeypatch.setattr(
            resources.torch, "compile", lambda model, **_: Compiled(model, spoil), raising=False
        )
        found = lines_of(resources.check_compiled)
    assert [outcome for _, outcome in found] == outcomes


@PROMPT
def test_launches_are_measured(gpu, monkeypatch):
    """Alone, and while memory is locked, which a thread does that ends."""
    with as_torchs(gpu, monkeypatch, rates):
        rates.check_launches(sheet := Sheet(io.StringIO(), {}), num_launches=50)
    names = [line.name for line in sheet.lines]
    kinds = "p50", "p99", "longest"
    states = "idle", "while_locking"
    assert names == [f"launch_{state}_{kind}_microseconds" for state in states for kind in kinds]
    assert all(math.isfinite(line.value) and line.value > 0 for line in sheet.lines)


# -- what is told at the end -----------------------------------------------------------------------


def test_three_figures_are_told_at_the_end():
    """Training, copies, hand-over: each where all that it is made of was measured."""
    sheet = Sheet(io.StringIO(), {})
    assert sheet.three_figures() == []
    sheet.at_most("hand_over_threads_microseconds", 21.4, 40)
    sheet.note("copy_38.5MB_bare_gigabytes_per_second", 25.0)
    sheet.skip("copy_38.5MB_slots_over_bare", "not here")
    hand_over = "hand-over: 21 us of the training thread for a batch"
    assert sheet.three_figures() == [hand_over]
    sheet.at_least("copy_38.5MB_slots_over_bare", 0.97, 0.95)
    for name, rate in (("synthetic", 3000.0), ("ours", 2940.0), ("torch", 1800.0)):
        sheet.note(f"train_{name}_images_per_second", rate)
    assert sheet.three_figures() == [
        "training: 2940 images/s beside the loader, 0.98 of the speed without loading; 1800 with "
        "torch's DataLoader",
        "copies: 24.2 GB/s, 0.97 of bare copies from pinned memory",
        hand_over,
    ]
