"""``check-gpu``'s checks that ask ``torch.cuda`` itself: rates, memory, devices, graphs."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torchvision
from _lazy_device import LazyBackend
from _lazy_gpu import FULL_BYTES, Cuda, Torch, as_torchs, gpu, lines_of
from _loader_helpers import no_thread_left

from spdl_torch import DataLoader
from spdl_torch.check_gpu import devices, races, rates, resources
from spdl_torch.check_gpu.sheet import Sheet
from spdl_torch.data.child_process import worker_process
from spdl_torch.data.child_process.mappings import Mappings
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
@pytest.mark.parametrize(("name", "num_packed"), [("slots", 0), ("pinned", 0), ("pageable", 8)])
def test_copies_begin_where_they_are_said_to(gpu, monkeypatch, name, num_packed):
    """In slots and in torch's pinned memory, which are not packed; pageable memory is."""
    packed, alone = [], transfer.copy_alone

    def noting(target, source):
        packed.append(source.nbytes)
        alone(target, source)

    monkeypatch.setattr(transfer, "copy_alone", noting)
    monkeypatch.setattr(rates, "_num_copies", lambda num_bytes: 5)
    with as_torchs(gpu, monkeypatch, rates):
        rates.staged_copies(1 << 17, rates.SOURCES[name])
    assert packed == [1 << 17] * num_packed


@PROMPT
def test_copies_fail_when_there_are_no_slots(gpu, monkeypatch):
    """They would be packed, and nobody would see it in the rate's name."""
    gpu.device.is_refusing = True
    with (
        as_torchs(gpu, monkeypatch, rates),
        pytest.raises(RuntimeError, match="no pinned memory is free"),
    ):
        rates.staged_copies(1 << 17, rates.SOURCES["slots"])


@PROMPT
def test_copies_say_so_when_staging_fails(gpu, monkeypatch):
    """The thread that stages has an error: it is the check's."""
    monkeypatch.setattr(LazyBackend, "out_of_memory", True)
    with (
        as_torchs(gpu, monkeypatch, rates),
        pytest.raises(torch.OutOfMemoryError, match="lazy device is full"),
    ):
        rates.staged_copies(1000, rates.SOURCES["pageable"])


@PROMPT
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_hand_over_is_the_loops_own_time(gpu, monkeypatch):
    """On threads, in processes, and with torch's loader: its parts and the sum; what is judged is
    the ratio to torch's."""
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
        self._submit_more()

    def _submit_more(self):
        self._look(self.asking)

    def _look(self, times):
        for _ in range(times):
            next(self.clock)


def test_hand_over_is_the_time_within_next(monkeypatch):
    """Of this thread's work, in two parts; what it does before, and the first batches, do not
    count. The iterator has its own methods again in the end."""
    clock = iter(range(0, 10**9, 3_000))  # 3 us a look; the watch's own are two in asking
    monkeypatch.setattr(hand_over.time, "thread_time_ns", lambda: next(clock))
    first = [9] * hand_over.WARM_UP
    batches = Timed(clock, [*first, 1, 2, 3], [*first, 5, 0, 7])
    found = hand_over.hand_overs(batches, 3, lambda: next(clock))
    assert found == [(9.0, 18.0), (12.0, 3.0), (15.0, 24.0)]
    batches = Timed(clock, [*first, 1, 2, 3], [*first, 5, 0, 7])
    found = hand_over.hand_overs(batches, 3, lambda: None, lambda _: next(clock))
    assert found == [(12.0, 18.0), (15.0, 3.0), (18.0, 24.0)]  # moving takes a look, too
    batches = Timed(clock, [*first, 1, 2, 3], [*first, 5, 0, 7])
    found = hand_over.hand_overs(batches, 3, lambda: next(clock))
    assert [each.total_us for each in found] == [27.0, 15.0, 39.0]
    assert set(vars(batches)) == {"clock", "looks", "asking"}


class Filling:
    """A queue that is empty at the first looks."""

    closed = False

    def __init__(self, lengths):
        self.lengths = iter(lengths)

    def __len__(self):
        return next(self.lengths)


def test_hand_over_begins_when_the_batch_is_there():
    """On a busy machine it may come late; what the loop does while it waits is not measured."""
    epoch = SimpleNamespace(outlet=Filling([0, 0, 1]))
    batches = SimpleNamespace(_crew=SimpleNamespace(_epoch=epoch))
    hand_over.wait_for_batch(batches)
    assert next(epoch.outlet.lengths, None) is None
    epoch.outlet = Filling([0])
    epoch.outlet.closed = True  # no more will come
    hand_over.wait_for_batch(batches)


@pytest.mark.parametrize("load", [DataLoader, torch.utils.data.DataLoader])
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


def test_memory_of_a_loop_that_is_far_ahead_is_measured(gpu, monkeypatch):
    """In batches; where nothing holds the loop back it is too much."""
    for outcome in ("PASS", "FAIL"):
        with as_torchs(gpu, monkeypatch, resources):
            found = lines_of(partial(resources.check_memory, gpu), num_batches=20)
        assert found == [("batches_in_device_memory", outcome), ("batches_wrong_far_ahead", "PASS")]
        for known in (gpu.device.blocks, gpu.device.free, gpu.device.guarded):
            known.clear()
        monkeypatch.setattr(transfer, "MOST_BEHIND", 1000)


def test_memory_of_the_checks_own_kernels_is_not_the_loaders(gpu, monkeypatch):
    """A sum of bytes as floats makes a copy of eight times the batch for a moment."""
    total, taken = gpu.total, []

    def summed(tensor):
        block = gpu.device.empty(8 * tensor.nbytes)
        taken.append(Cuda(gpu.device).memory_stats()["active_bytes.all.current"])
        del block
        return total(tensor)

    monkeypatch.setattr(gpu, "total", summed)
    with as_torchs(gpu, monkeypatch, resources):
        found = lines_of(partial(resources.check_memory, gpu), num_batches=20)
    assert found[0] == ("batches_in_device_memory", "PASS")
    assert max(taken) > 12 * 4 * (1 << 20)


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
        monkeypatch.setattr(runtime, "cuda_library", lambda: None)  # as without CUDA's runtime


WAYS_TO_A_DEVICE = ("inline", "threads", "processes", "pipeline")


@pytest.fixture
def elsewhere(gpu, monkeypatch):
    """What the check of the devices finds, in a program that has used none."""

    def found():
        gpu.device.used.clear()
        with as_torchs(gpu, monkeypatch, devices):
            return devices.num_elsewhere(gpu, 3)

    return found


@PROMPT
def test_last_device_is_loaded_to(elsewhere):
    """Alone, on every way."""
    assert elsewhere() == dict.fromkeys(WAYS_TO_A_DEVICE, 0)


@PROMPT
def test_loader_that_sends_elsewhere_is_found(elsewhere, monkeypatch):
    """By its batches, and by the device that it uses."""
    monkeypatch.setattr(devices, "DataLoader", ToTheFirst)
    assert elsewhere()["inline"] == devices.NUM_BATCHES + 1


@PROMPT
def test_context_on_another_device_is_found(elsewhere, monkeypatch):
    """Though every batch is where it shall be: pages are locked where the thread is."""

    def lock_pages(self, address, num_bytes):
        return self.machine.cudaHostRegister(address, num_bytes, 0) == 0

    monkeypatch.setattr(LazyBackend, "lock_pages", lock_pages)
    assert elsewhere() == {**dict.fromkeys(WAYS_TO_A_DEVICE, 0), "inline": 1}


class ToTheFirst(devices.DataLoader):
    """A loader that does not listen."""

    def __init__(self, data, **options):
        super().__init__(data, **{**options, "device": "cuda:0"})


PROGRAM = "# {device}\nprint('a word'); "
OUTCOMES = {
    """print('{{"inline": 0, "threads": 2}}')""": [
        ("devices_inline_elsewhere", "PASS"),
        ("devices_threads_elsewhere", "FAIL"),
    ],
    "1 / 0": [("devices", "FAIL")],
}


@pytest.mark.parametrize(("code", "lines"), OUTCOMES.items())
def test_devices_are_checked_in_a_program(gpu, monkeypatch, code, lines):
    """Each way has its line; a program that fails is one, too."""
    with as_torchs(gpu, monkeypatch, devices):
        assert lines_of(devices.check_devices, program=PROGRAM + code) == lines


def test_program_of_the_devices_runs():
    """Here up to the first question that only a machine with a GPU answers."""
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        exec(devices.PROGRAM.format(device=1), {"__name__": "__main__"})


def test_one_device_is_not_checked(gpu, monkeypatch):
    """There is no other one to see anything on."""
    monkeypatch.setattr(gpu.device, "num_devices", 1)
    with as_torchs(gpu, monkeypatch, devices):
        assert lines_of(devices.check_devices) == [("devices", "SKIP")]


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is not built for CUDA")
def test_stand_in_offers_only_what_torch_has(gpu):
    """Code that asks torch for another name fails here as it would on a GPU."""
    offered = Torch(gpu.device)
    gpu.device._primary_context_devices = gpu.device.invented = list
    for module, name in (
        *((offered.cuda, "_primary_context_devices"), (offered._C, "invented")),
        *((offered.cuda.cudart(), "invented"), (offered.accelerator, "invented")),
        (runtime.cuda_library(), "invented"),
    ):
        with pytest.raises(AttributeError, match=f"has no {name}"):
            getattr(module, name)
    for stand_in in (Cuda, Torch):
        of_torch = torch.cuda if stand_in is Cuda else torch
        names = {name for name in vars(stand_in) if not name.startswith("__")}
        assert [name for name in names if not hasattr(of_torch, name)] == []


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

    def __init__(self, *args):
        super().__init__(*args)
        self.kept = []

    def grow(self, most_pieces):
        super().grow(100 * most_pieces)

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
    # And it is free when nothing views it, whoever may read it.
    monkeypatch.setattr(backend, "lend", lambda owner, _, free: weakref.finalize(owner, free))
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
