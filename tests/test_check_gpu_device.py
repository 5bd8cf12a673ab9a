"""``check-gpu``'s checks that ask ``torch.cuda`` itself: rates, memory, devices, graphs."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from functools import partial

import pytest
import torch
import torchvision
from _lazy_device import LazyBackend
from _lazy_gpu import FULL_BYTES, as_torchs, gpu, lines_of
from _loader_helpers import no_thread_left

from spdl_torch.check_gpu import races, rates, resources
from spdl_torch.check_gpu.sheet import Sheet
from spdl_torch.data.child_process import worker_process
from spdl_torch.data.child_process.shared_memory import Mappings
from spdl_torch.io._transfer import cuda, region, runtime, transfer
from spdl_torch.io._transfer.batch_memory import BatchMemory
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
    return {line.name: line.value for line in sheet._lines}


@PROMPT
def test_copies_are_measured(gpu, monkeypatch):
    """Each way, at each size; ratios of what was measured, and the large sizes have a goal."""
    monkeypatch.setattr(rates, "COPY_MEGABYTES", (0.1, 0.2))
    monkeypatch.setattr(rates, "_LEAST_JUDGED_MEGABYTES", 0.2)
    monkeypatch.setattr(rates, "_num_copies", lambda num_bytes: 5)
    with as_torchs(gpu, monkeypatch, rates):
        rates.check_copies(sheet := Sheet(io.StringIO(), {}), rounds=1)
    found = {line.name: line for line in sheet._lines}
    ways = "bare_gigabytes_per_second", "pinned_over_bare", "pageable_over_bare"
    assert list(found) == [f"copy_{size}MB_{way}" for size in ("0.1", "0.2") for way in ways]
    assert all(math.isfinite(line.value) and line.value > 0 for line in found.values())
    assert {line.limit for line in found.values()} == {"-", ">= 0.95"}
    # From pinned memory the copy begins where the batch is; from pageable it is packed.
    assert gpu.device.num_copied >= 2 * 2 * (rates.WARM_UP + 5)


@PROMPT
def test_copies_say_so_when_staging_fails(gpu, monkeypatch):
    """The thread that stages has an error: it is the check's."""
    monkeypatch.setattr(LazyBackend, "out_of_memory", True)
    with (
        as_torchs(gpu, monkeypatch, rates),
        pytest.raises(torch.OutOfMemoryError, match="lazy device is full"),
    ):
        rates._staged_copies(torch.zeros(1000))


@PROMPT
def test_hand_over_is_the_loops_own_time(gpu, monkeypatch):
    """On threads and in processes."""
    with as_torchs(gpu, monkeypatch, rates):
        found = figures_of(rates.check_hand_over, num_batches=10)
    assert list(found) == ["hand_over_threads_microseconds", "hand_over_processes_microseconds"]
    assert all(value > 0 for value in found.values())


def test_hand_over_is_the_time_within_next(monkeypatch):
    """Of this thread's work; what it does before, and the first batches, do not count."""
    clock = iter(range(0, 10**9, 3_000))
    monkeypatch.setattr(hand_over.time, "thread_time_ns", lambda: next(clock))
    took = [*[9] * hand_over.WARM_UP, 1, 2, 3]  # in looks at the clock

    def batches():
        for looks in took:
            yield [next(clock) for _ in range(looks)]

    found = hand_over.hand_over_microseconds(batches(), 3, lambda: next(clock))
    assert found == [6.0, 9.0, 12.0]


@PROMPT
def test_training_is_measured(gpu, monkeypatch, tmp_path):
    """On a small network: each kind of batches is trained on, and every ratio is there."""
    for name, value in (("BATCH", 4), ("PIXELS", 32), ("WARM_UP", 1), ("usable_cores", lambda: 2)):
        monkeypatch.setattr(rates, name, value)
    monkeypatch.setattr(torchvision.models, "resnet50", small_network)
    write_photographs(tmp_path / "photographs", 8)
    with as_torchs(gpu, monkeypatch, rates):
        found = figures_of(
            rates.check_training, folder=tmp_path / "photographs", rounds=1, seconds=0.05
        )
    kinds = "synthetic", "ours", "ours_isolated", "torch"
    per_second = {kind: found[f"train_{kind}_images_per_second"] for kind in kinds}
    for ours in ("ours", "ours_isolated"):
        for other in ("synthetic", "torch"):
            ratio = per_second[ours] / per_second[other]
            assert found[f"train_{ours}_over_{other}"] == pytest.approx(ratio)
    assert {"step_p50_busy_over_idle", "step_p99_busy_over_idle"} < found.keys()
    assert all(math.isfinite(value) and value > 0 for value in found.values())


def small_network():
    """Pictures in, classes out."""
    pool = torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 10, 3), pool, torch.nn.Flatten())


def test_memory_of_a_loop_that_is_far_ahead_is_measured(gpu, monkeypatch):
    """In batches; where nothing holds the loop back it is too much."""
    for outcome in ("PASS", "FAIL"):
        with as_torchs(gpu, monkeypatch, resources):
            found = lines_of(partial(resources.check_memory, gpu), num_batches=20)
        assert found == [("batches_in_device_memory", outcome), ("batches_wrong_far_ahead", "PASS")]
        for known in (gpu.device.blocks, gpu.device.free, gpu.device.guarded):
            known.clear()
        monkeypatch.setattr(transfer, "MOST_BEHIND", 1000)


class Small(LazyBackend):
    """A device that can be full."""

    def empty(self, num_bytes):
        if num_bytes > FULL_BYTES:
            raise torch.OutOfMemoryError("the device is full")
        return super().empty(num_bytes)


@PROMPT
def test_device_that_is_full_is_tried(gpu, monkeypatch):
    """The error has a note, and the loop goes on; where nothing says so, that is a fault."""
    monkeypatch.setattr(cuda, "CudaBackend", Small)
    for place, outcome in ((torch.device("cuda", 0), "PASS"), (torch.device("cpu"), "FAIL")):
        monkeypatch.setattr(transfer.Transfer, "device", property(lambda _, place=place: place))
        with as_torchs(gpu, monkeypatch, resources):
            assert lines_of(resources.check_full_device) == [("full_device_faults", outcome)]


@PROMPT
def test_graphs_are_captured_beside_a_loader(gpu, monkeypatch):
    """And replayed; where the loader's calls are not kept apart, captures fail."""
    for outcome in ("PASS", "FAIL"):
        with as_torchs(gpu, monkeypatch, resources):
            found = lines_of(resources.check_capture, num_graphs=4)
        assert found == [("capture_failed", outcome), ("capture_wrong", "PASS")]
        monkeypatch.setattr(runtime, "_library", lambda: None)  # as without CUDA's runtime


def test_last_device_is_loaded_to(gpu, monkeypatch):
    """Alone; a loader that sends elsewhere is found. With one device there is nothing to see."""
    check = partial(resources.check_devices, gpu)
    with as_torchs(gpu, monkeypatch, resources):
        assert lines_of(check) == [("devices_wrong", "PASS")]
        with monkeypatch.context() as patched:
            patched.setattr(resources, "DataLoader", ToTheFirst)
            assert lines_of(check) == [("devices_wrong", "FAIL")]
        monkeypatch.setattr(gpu.device, "num_devices", 1)
        check(sheet := Sheet(io.StringIO(), {}))
        assert [line.outcome for line in sheet._lines] == ["SKIP"]


class ToTheFirst(resources.DataLoader):
    """A loader that does not listen."""

    def __init__(self, data, **options):
        super().__init__(data, **{**options, "device": "cuda:0"})


SIZES = ("packed", "made", "isolated")


def sizes_found(gpu, monkeypatch):
    with as_torchs(gpu, monkeypatch, resources):
        check = partial(resources.check_sizes, gpu)
        return dict(lines_of(check, num_batches=60, most_bytes=1 << 18))


def test_pinned_memory_is_measured_while_sizes_change(gpu, monkeypatch):
    """And the batches are right, on each way."""
    found = sizes_found(gpu, monkeypatch)
    assert found == {f"sizes_{way}_{what}": "PASS" for way in SIZES for what in WHATS}


WHATS = ("wrong", "pinned_batches")


class Greedy(BatchMemory):
    """Locks new memory for each batch, and keeps it."""

    def __init__(self, locker, most_pieces):
        super().__init__(locker, 100 * most_pieces)
        self.kept = []

    def _take(self, num_bytes):
        self.kept += [*self._free, *self._freed]
        self._free.clear()
        self._freed.clear()
        return super()._take(num_bytes)


def test_pinned_memory_that_grows_is_found(gpu, monkeypatch):
    """The test before can fail, and so can the check."""
    monkeypatch.setattr(transfer, "BatchMemory", Greedy)
    found = sizes_found(gpu, monkeypatch)
    assert [name for name, outcome in found.items() if outcome == "FAIL"] == [
        "sizes_made_pinned_batches"
    ]


def isolation_found(gpu):
    check = partial(races.check_isolation, gpu)
    return dict(lines_of(check, num_batches=40, num_bytes=1 << 16))


@pytest.mark.parametrize("gpu", ["late", "model"], indirect=True)
def test_batches_of_processes_are_right(gpu):
    """Copied there, made there, and copied by the loop from memory that is not locked."""
    ways = ("device", "device_made", "pin_memory")
    assert isolation_found(gpu) == {f"race_isolation_{way}": "PASS" for way in ways}


def test_slabs_that_are_locked_for_a_loop_that_copies_are_found(gpu, monkeypatch):
    """The race that corrupts silently: the loop's own copy reads a slab that is written again."""
    backend = cuda.CudaBackend(torch.device("cuda", 0))

    def locking(most_held, *, lock=None):
        return Mappings(most_held, lock=lock or (lambda memory: region.Region(memory, backend)))

    monkeypatch.setattr(worker_process, "Mappings", locking)
    found = isolation_found(gpu)
    assert found["race_isolation_pin_memory"] == "FAIL"
    assert found["race_isolation_device"] == "PASS"


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
