"""Programs of their own on a GPU: how they end, other allocators, contexts on other devices.

Each runs on a GPU (``pytest -m cuda``), and on the stand-in for one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import _warm
import pytest
import torch
from _folders import HELPERS, ROOT
from _gpus import CUDA, MEBI, Filled, filled, num_wrong

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.pipeline import PipelineBuilder

ANYWHERE = pytest.mark.parametrize("device", ["stand-in", CUDA])
PATIENCE_SECONDS = 60

PRELUDE = f"""
import signal, sys
sys.path[:0] = {[str(ROOT), str(HELPERS), str(Path(__file__).parent)]!r}
import json, torch
import _gpus, {Path(__file__).stem} as here
from spdl_torch import DataLoader
"""
DEVICES = {"cuda": "gpu = _gpus.CudaGpu()\n", "stand-in": "gpu = _gpus.stand_in(here)\n"}


def started(device, code, **environ):
    """A program, which has the device as ``gpu``. On a GPU it is a new process from its start."""
    command = ["-W", "ignore", "-c", PRELUDE + DEVICES[device] + code]
    env = {**os.environ, **environ}
    if device != "cuda":
        return _warm.start(command, env=env, ends_whole=True)
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def found_by(device, code, **environ):
    """What a program prints last, as JSON."""
    with started(device, code, **environ) as process:
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
        here.torch.cuda._sleep(200_000_000)
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
@ANYWHERE
def test_program_ends_while_a_loader_sends_batches(device, code, status, options):
    """With its own status, and in silence but for its own error. The kernels that it has launched
    take some seconds; only CUDA itself waits for them."""
    code = LOADS.format(options=options) + textwrap.indent(code, "    ") + "\n"
    with started(device, code) as process:
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
    return {"wrong": wrong, "allocators": allocators_here()}


def allocators_here():
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        return ["cuda_malloc_async"]
    is_expandable = any(each.get("is_expandable") for each in torch.cuda.memory_snapshot())
    return ["expandable_segments"] if is_expandable else []


@pytest.mark.parametrize(
    ("device", "name", "setting"),
    [
        ("stand-in", "expandable_segments", "expandable_segments:True"),
        pytest.param(
            *("cuda", "expandable_segments", "expandable_segments:True"), marks=CUDA.marks
        ),
        pytest.param(*("cuda", "cuda_malloc_async", "backend:cudaMallocAsync"), marks=CUDA.marks),
    ],
)
def test_batches_are_whole_on_another_allocator(device, name, setting):
    """Which one there is, is settled when a process begins to use CUDA."""
    environ = {"PYTORCH_CUDA_ALLOC_CONF": setting}  # the older name, which every torch knows
    found = found_by(device, "print(json.dumps(here.found_here(gpu)))", **environ)
    if name not in found["allocators"]:
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
    has_context = torch._C._cuda_hasPrimaryContext
    return {index for index in range(torch.cuda.device_count()) if has_context(index)}


@ANYWHERE
def test_other_devices_are_left_alone(device):
    """A context takes 500 MB of each, on every rank. Batches go to the last device, while the first
    one is current."""
    last = 3 if device == "stand-in" else torch.cuda.device_count() - 1
    if last == 0:
        pytest.skip("one GPU")
    found = found_by(device, f"print(json.dumps(here.num_elsewhere(gpu, {last})))")
    assert found == dict.fromkeys(("inline", "threads", "processes", "pipeline"), 0)
