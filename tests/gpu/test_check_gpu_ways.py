"""``check-gpu``: races on every other way to the device, other allocators, compiled models, and
what is told at the end."""

from __future__ import annotations

import io
import math
from functools import partial

import pytest
from _lazy_device import FreeAtOnce
from _lazy_gpu import Cuda, as_torchs, gpu, lines_of
from _loader_helpers import no_thread_left

from spdl_torch.check_gpu import allocators, rates, resources, ways
from spdl_torch.check_gpu.gpu import unguarded
from spdl_torch.check_gpu.sheet import Sheet
from spdl_torch.io._transfer import transfer
from spdl_torch.io._transfer.kept import TransferKeeper

__all__ = ["gpu", "no_thread_left"]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

# On the others a tensor's own ``to`` moves it, which is torch's: see _cudart_check.py.
WAYS = [
    *("pipeline_dataset", "transfer_tensor", "transfer_tensor_in_a_pipeline"),
    *("epochs", "persistent_threads", "persistent_processes"),
]


@pytest.fixture
def wrong_ways(gpu, monkeypatch):
    """A function that returns those on which batches were wrong."""
    all_ways = ways.all_ways
    monkeypatch.setattr(
        ways, "all_ways", lambda *args: {name: all_ways(*args)[name] for name in WAYS}
    )

    def found():
        lines = lines_of(partial(ways.check_ways, gpu), num_batches=20, num_bytes=1 << 16)
        assert [name for name, _ in lines] == [f"race_{name}" for name in WAYS]
        return [name.removeprefix("race_") for name, outcome in lines if outcome == "FAIL"]

    return found


@pytest.mark.parametrize("gpu", ["late", 0], indirect=True)
def test_batches_are_right_on_every_way(wrong_ways):
    """However late they are read."""
    assert wrong_ways() == []


def test_races_are_found_on_ways_without_a_guard(wrong_ways):
    """The test before can fail, and so can the check."""
    with unguarded():
        assert wrong_ways() == WAYS


def test_races_in_pinned_memory_are_found_over_epochs(wrong_ways, monkeypatch):
    """In the memory in which batches are made, and that the next epoch begins with."""
    monkeypatch.setattr(transfer, "BatchMemory", FreeAtOnce)
    assert {"epochs", "persistent_threads"} <= {*wrong_ways()}


@pytest.mark.parametrize(
    ("take_back", "outcome"), [(TransferKeeper.take_back, "PASS"), (None, "FAIL")]
)
def test_memory_that_is_not_kept_is_found(gpu, monkeypatch, take_back, outcome):
    """It would be locked in every epoch."""
    monkeypatch.setattr(TransferKeeper, "take_back", take_back or (lambda *_: None))
    check = partial(ways.check_kept_memory, gpu)
    found = lines_of(check, num_batches=20, num_bytes=1 << 16)
    assert found == [("kept_memory_wrong", "PASS"), ("kept_memory_locked_again", outcome)]


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


def test_batches_on_an_allocator_are_checked(gpu, monkeypatch):
    """Packed and made in pinned memory; unguarded they are wrong."""
    with as_torchs(gpu, monkeypatch, allocators):
        found = partial(allocators.found_here, gpu, num_batches=20, num_bytes=1 << 16)
        assert found() == {"wrong": 0, "allocators": []}
        monkeypatch.setattr(Cuda, "memory_snapshot", lambda _: [{"is_expandable": True}])
        with unguarded():
            spoiled = found()
        monkeypatch.setattr(Cuda, "get_allocator_backend", lambda _: "cudaMallocAsync")
        assert found()["allocators"] == ["cuda_malloc_async"]
    assert spoiled["wrong"] > 0
    assert spoiled["allocators"] == ["expandable_segments"]


def test_program_of_the_allocators_runs():
    """Here up to the first question that only a machine with a GPU answers."""
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        exec(allocators.PROGRAM, {"__name__": "__main__"})


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
