"""``check-gpu``'s checks that ask ``torch.cuda`` itself: rates, memory, devices, graphs."""

from __future__ import annotations

import functools
import io
import math
import subprocess
import sys

import pytest
import torch
import torchvision
from _lazy_gpu import as_torchs, gpu, lines_of
from _loader_helpers import no_thread_left

from spdl_torch import DataLoader
from spdl_torch.check_gpu import rates, resources
from spdl_torch.check_gpu.sheet import Sheet
from spdl_torch.io._transfer import runtime
from spdl_torch.measuring import hand_over
from spdl_torch.measuring.photographs import write_photographs

__all__ = ["gpu", "no_thread_left"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]

PROMPT = pytest.mark.parametrize("gpu", [{"is_prompt": True}], indirect=True)


def figures_of(check, **options):
    """The names and values of the lines."""
    check(sheet := Sheet(io.StringIO(), {}), **options)
    return {line.name: line.value for line in sheet.lines}


@PROMPT
def test_copies_are_measured(gpu, monkeypatch):
    """Each way, at each size; ratios of what was measured, and the large sizes have a goal."""
    monkeypatch.setattr(rates, "COPY_MEGABYTES", (0.1, 0.2))
    monkeypatch.setattr(rates, "_LEAST_JUDGED_MEGABYTES", 0.2)
    monkeypatch.setattr(rates, "_num_copies", lambda num_bytes: 5)
    with as_torchs(gpu, monkeypatch, rates):
        rates.check_copies(sheet := Sheet(io.StringIO(), {}), rounds=1)
    found = {line.name: line for line in sheet.lines}
    ways = "slots_over_bare", "pinned_over_bare", "pageable_over_bare"
    ways = "bare_gigabytes_per_second", *ways
    assert list(found) == [f"copy_{size}MB_{way}" for size in ("0.1", "0.2") for way in ways]
    assert all(math.isfinite(line.value) and line.value > 0 for line in found.values())
    judged = [name for name, line in found.items() if line.limit == ">= 0.95"]
    assert judged == ["copy_0.2MB_slots_over_bare", "copy_0.2MB_pinned_over_bare"]
    assert gpu.device.num_copied >= 2 * 3 * (rates.WARM_UP + 5)


@PROMPT
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_hand_over_is_the_loops_own_time(gpu, monkeypatch):
    """On threads, in processes, and with torch's loader: its parts and the sum."""
    with as_torchs(gpu, monkeypatch, rates):
        rates.check_hand_over(sheet := Sheet(io.StringIO(), {}), num_batches=10)
    found = {line.name: line for line in sheet.lines}
    parts = ("hand_over", "asking", "next")
    kinds = ("torch", "threads", "processes")
    noted = {f"{part}_{kind}_microseconds": "-" for kind in kinds for part in parts}
    judged = {f"hand_over_{kind}_over_torch": "<= 1" for kind in kinds[1:]}
    assert {name: line.limit for name, line in found.items()} == noted | judged
    assert all(line.value > 0 for line in found.values())
    torchs = found["hand_over_torch_microseconds"].value
    for kind in kinds[1:]:
        ratio = found[f"hand_over_{kind}_microseconds"].value / torchs
        assert found[f"hand_over_{kind}_over_torch"].value == pytest.approx(ratio)


class Timed:
    """An iterator that looks at a clock so often in each ``next``, and so often while it asks."""

    def __init__(self, clock, receiving, asking):
        self.clock = clock
        self.looks = zip(receiving, asking, strict=True)

    def __next__(self):
        receiving, self.asking = next(self.looks)
        self._look(receiving)
        self._fill()

    def _fill(self):
        self._look(self.asking)

    def _look(self, times):
        for _ in range(times):
            next(self.clock)


def test_hand_over_is_the_time_within_next(monkeypatch):
    """Of this thread's work, in two parts: with what moves the batch, and with the wait before."""
    clock = iter(range(0, 10**9, 3_000))  # 3 us a look; the watch's own are two in asking
    monkeypatch.setattr(hand_over.time, "thread_time_ns", lambda: next(clock))
    for move, parts in (
        (None, [(9.0, 18.0), (12.0, 3.0), (15.0, 24.0)]),
        (lambda _: next(clock), [(12.0, 18.0), (15.0, 3.0), (18.0, 24.0)]),  # a look, too
    ):
        first = [9] * hand_over.WARM_UP
        batches = Timed(clock, [*first, 1, 2, 3], [*first, 5, 0, 7])
        found = hand_over.hand_overs(batches, 3, lambda: next(clock), move)
        assert found == parts
        assert [each.total_us for each in found] == [sum(pair) for pair in parts]
        assert set(vars(batches)) == {"clock", "looks", "asking"}


@pytest.mark.parametrize(
    "load",
    [DataLoader, functools.partial(DataLoader, isolation="process"), torch.utils.data.DataLoader],
    ids=["threads", "processes", "torch"],
)
def test_requests_are_distinguished(load):
    """In our iterators, and in torch's: they ask on this thread, by a method of that name."""
    batches = iter(load(list(range(60)), num_workers=2))
    took = hand_over.hand_overs(batches, 5, lambda: None)
    assert min(each.asking_us for each in took) > 0
    assert min(each.receiving_us for each in took) > 0


@PROMPT
def test_training_is_measured(gpu, monkeypatch, tmp_path):
    """On a small network: each kind of batches is trained on, and every ratio is there."""
    for name, value in (("BATCH", 4), ("PIXELS", 32), ("WARM_UP", 1), ("whole_cores", lambda: 2)):
        monkeypatch.setattr(rates, name, value)
    monkeypatch.setattr(torchvision.models, "resnet50", small_network)
    write_photographs(tmp_path / "photographs", 8)
    with as_torchs(gpu, monkeypatch, rates):
        found = figures_of(
            rates.check_training, folder=tmp_path / "photographs", rounds=1, seconds=0.05
        )
    kinds = "synthetic", "ours", "torch"
    per_second = {kind: found[f"train_{kind}_images_per_second"] for kind in kinds}
    alone = {kind: found[f"load_{kind}_images_per_second"] for kind in kinds[1:]}
    assert found["load_ours_over_torch"] == pytest.approx(alone["ours"] / alone["torch"])
    for other in ("synthetic", "torch"):
        line = found[f"train_ours_over_{other}"]
        ratio = per_second["ours"] / per_second[other]
        if isinstance(line, str):  # the cores are the limit, and the line says how far they go
            assert other == "synthetic"
            assert line.startswith(f"({ratio:.3g}; loading alone reaches ")
        else:
            assert line == pytest.approx(ratio)
    assert {"step_p50_busy_over_idle", "step_p99_busy_over_idle"} < found.keys()
    figures = [value for value in found.values() if not isinstance(value, str)]
    assert all(math.isfinite(value) and value > 0 for value in figures)


def small_network():
    """Pictures in, classes out."""
    pool = torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 10, 3), pool, torch.nn.Flatten())


@PROMPT
def test_graphs_are_captured_beside_a_loader(gpu, monkeypatch):
    """And replayed; where the loader's calls are not kept apart, captures fail."""
    for outcome in ("PASS", "FAIL"):
        with as_torchs(gpu, monkeypatch, resources):
            found = lines_of(resources.check_capture, num_graphs=4)
        assert found == [("capture_failed", outcome), ("capture_wrong", "PASS")]
        monkeypatch.setattr(runtime, "cuda_library", lambda: None)  # as without CUDA's runtime


HANGS = """
import ctypes
from spdl_torch.check_gpu.command import ended_by_force
with ended_by_force(0.2):
    ctypes.PyDLL(None).sleep(60)  # with the GIL
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there sleep has another name")
def test_program_ends_when_what_hangs_keeps_the_interpreter():
    """With the status that says so, and where it was."""
    options = {"capture_output": True, "text": True, "timeout": 50}
    ended = subprocess.run([sys.executable, "-c", HANGS], check=False, **options)
    assert ended.returncode == 1
    assert 'File "<string>", line 5' in ended.stderr
