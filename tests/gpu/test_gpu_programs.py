"""Programs of their own on a GPU: how they end, other allocators, contexts on other devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from support.folders import ROOT, TESTS
from support.gpus import CUDA, MEBI, Filled, filled, num_wrong
from support.lazy_device import machine

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.pipeline import PipelineBuilder

PATIENCE_SECONDS = 60

PRELUDE = f"""
import signal, sys
sys.path[:0] = {[str(ROOT), str(TESTS), str(Path(__file__).parent)]!r}
import json, torch
import {Path(__file__).stem} as here
from support.gpus import CudaGpu
from spdl_torch import DataLoader
"""


def started(code, **environ):
    """A program, which is a new process from its start."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )


def found_by(code, **environ):
    """What a program prints last, as JSON."""
    with started(code, **environ) as process:
        try:
            printed, complaint = process.communicate(timeout=2 * PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, complaint
    return json.loads(printed.splitlines()[-1])


LOADS = """
if __name__ == "__main__":
    loader = DataLoader(range(10**9), batch_size=256, num_workers=4, device="cuda", {options})
    batches = iter(loader)
    for _ in range(12):  # as far ahead of the device as a loop can be
        batch = next(batches)
        torch.cuda._sleep(200_000_000)
    print("READY", flush=True)
"""
THREADS = 'isolation="thread"'


@pytest.mark.parametrize(
    ("code", "status", "options"),
    [
        ("", 0, THREADS),
        ("sys.exit(3)", 3, THREADS),
        ("raise KeyError('mine')", 1, THREADS),
        ("while True:\n    batch = next(batches)", -signal.SIGINT, THREADS),
        ("", 0, f"{THREADS}, persistent_workers=True"),
        ("", 0, 'isolation="process"'),
    ],
    ids=["end", "sys.exit", "exception", "Ctrl-C", "persistent workers", "processes"],
)
@pytest.mark.cuda
def test_program_ends_while_a_loader_sends_batches(code, status, options):
    """With its own status, and in silence but for its own error. The kernels that it has launched
    take some seconds; only CUDA itself waits for them."""
    code = LOADS.format(options=options) + textwrap.indent(code, "    ") + "\n"
    with started(code) as process:
        process.stdout.readline()  # READY, or the end of output if it failed
        if status < 0 and process.poll() is None:
            process.send_signal(-status)
        try:
            _, complaint = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == status, complaint
    assert "terminate called" not in complaint
    assert bool(complaint) == (status in (1, -signal.SIGINT))


def found_here(gpu):
    """How many batches were wrong in this process, and what its memory came from."""
    data, wrong = filled(gpu, 100, 4 * MEBI), 0
    options = {"num_workers": 2, "isolation": "thread", "device": "cuda"}
    for batch_size in (None, 1):
        loader = DataLoader(data, batch_size=batch_size, **options)
        wrong += num_wrong(gpu, loader, data.expected())
    return {"wrong": wrong, "allocator": allocator_here()}


def allocator_here():
    """The setting that this process has followed."""
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        return "backend:cudaMallocAsync"
    is_expandable = any(each.get("is_expandable") for each in torch.cuda.memory_snapshot())
    return f"expandable_segments:{is_expandable}"


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
@pytest.mark.cuda
def test_batches_are_whole_on_another_allocator(setting):
    """Which one there is, is settled when a process begins to use CUDA."""
    environ = {"PYTORCH_CUDA_ALLOC_CONF": setting}  # the older name, which every torch knows
    found = found_by("print(json.dumps(here.found_here(CudaGpu())))", **environ)
    if setting != found["allocator"]:
        pytest.skip("this system does not have it")
    assert found["wrong"] == 0


NUM_BATCHES = 20


def num_elsewhere(gpu, device):
    """How many batches and new contexts were on other devices, by the way they got there."""
    data, place = Filled([MEBI] * NUM_BATCHES), {"device": f"cuda:{device}"}
    source = PipelineBuilder().add_source(range(NUM_BATCHES))
    ways = {
        "inline": lambda: DataLoader(data, num_workers=0, **place),
        "threads": lambda: DataLoader(data, num_workers=2, isolation="thread", **place),
        "processes": lambda: DataLoader(data, num_workers=2, isolation="process", **place),
        "pipeline": lambda: PipelineDataset(source.pipe(data.__getitem__).add_sink(), **place),
    }
    found, known = {}, {device}
    for name, batches in ways.items():
        places = [gpu.index_of(batch) for batch in batches()]
        contexts = devices_in_use()
        wrong = sum(each != device for each in places) + abs(NUM_BATCHES - len(places))
        found[name] = wrong + len(contexts - known)
        known |= contexts
    return found


def devices_in_use():
    """On which this process has a context."""
    if machine() is not None:
        return set(machine().used)
    has_context = torch._C._cuda_hasPrimaryContext
    return {index for index in range(torch.cuda.device_count()) if has_context(index)}


@pytest.mark.parametrize("gpu", [{"is_prompt": True}, CUDA], indirect=True)
def test_other_devices_are_left_alone(gpu):
    """A context takes 500 MB. Batches go to the last device, while the first one is current."""
    if machine() is not None:
        found = num_elsewhere(gpu, 3)
    elif last := torch.cuda.device_count() - 1:
        found = found_by(f"print(json.dumps(here.num_elsewhere(CudaGpu(), {last})))")
    else:
        pytest.skip("one GPU")
    assert found == dict.fromkeys(("inline", "threads", "processes", "pipeline"), 0)
