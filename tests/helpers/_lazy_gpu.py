"""``check-gpu``'s device, on the one that is not a GPU; and ``torch.cuda`` of its code, there too.

What it asks of ``torch`` on ``"cuda"`` is done on the host. Graphs are replayed for real: each
operation that was captured is done again.
"""

from __future__ import annotations

import gc
import io
import time
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from _gates import PATIENCE_SECONDS, in_thread, result_of
from _lazy_device import LazyDevice, TorchWith, install, rings
from _loader_helpers import loader_threads
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spdl_torch.check_gpu.sheet import Sheet
from spdl_torch.io import Transfer
from spdl_torch.io._transfer import cuda, transfer


class LazyGpu:
    """The stand-in, as the checks use a device. It is late by itself."""

    launches = True

    def __init__(self, device):
        self.device = device

    def values(self, totals):
        self.device.drain()
        return [float(np.frombuffer(found[0], np.uint8).sum()) for found in totals]

    def index_of(self, tensor):
        try:
            return self.device.block_of(tensor).device
        except StopIteration:  # the host's
            return None


@pytest.fixture
def gpu(request, monkeypatch):
    """A device, as late as may be unless another order is given."""
    options = getattr(request, "param", "late")
    options = options if isinstance(options, dict) else {"order": options}
    install(device := LazyDevice(**options), monkeypatch.setattr)
    yield LazyGpu(device)
    for ring in tuple(rings):
        ring.rest()
    transfer.shared_transfers.clear()
    gc.collect()
    for thread in loader_threads():  # they hold memory that is to be freed on this device
        thread.join(PATIENCE_SECONDS)


def lines_of(check, **options):
    """What a check prints: (name, outcome) of each line."""
    check(sheet := Sheet(out := io.StringIO(), {}), **options)
    found = [(line.split()[0], line.split()[-1]) for line in out.getvalue().splitlines()]
    outcomes = {outcome for _, outcome in found}
    assert sheet.has_passed == ("PASS" in outcomes and "FAIL" not in outcomes)
    return found


class Cuda:
    """``torch.cuda`` as programs know it, which is more than transfers use."""

    def __init__(self, device):
        self.machine = device

    def __getattr__(self, name):
        return getattr(self.machine, name)

    def Stream(self):
        return self.machine.Stream(0)

    def Event(self, *, enable_timing):
        return Moment()

    def synchronize(self):
        self.machine.drain()

    def CUDAGraph(self):
        return Operations()

    @contextmanager
    def graph(self, operations):
        with self.machine.capture(), operations:
            result_of(in_thread(stage_beside))  # what a loader may do meanwhile
            yield
        if self.machine.violations:
            self.machine.violations.clear()
            raise RuntimeError("operation failed due to a previous error during capture")


def stage_beside():
    """A transfer of its own, from its memory to its end."""
    Transfer("cuda").stage(torch.ones(1)).synchronize()


class Moment:
    """An event that takes the time."""

    def record(self):
        self.seconds = time.perf_counter()

    def elapsed_time(self, later):
        return (later.seconds - self.seconds) * 1e3


class Operations(TorchDispatchMode):
    """What is captured; ``replay`` does it again, into the same tensors."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.done.append((out, function, args, kwargs or {}))
        return out

    def replay(self):
        for out, function, args, kwargs in self.done:
            out.copy_(function(*args, **kwargs))


class OnHost(TorchFunctionMode):
    """What asks for ``"cuda"`` gets the host; ``pin_memory`` locks."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.device:  # what is asked for by that name is the loader's affair
            return function(*args, **(kwargs or {}))
        kwargs = {key: _host(value) for key, value in (kwargs or {}).items()}
        if function is torch.Tensor.pin_memory:
            backend = cuda.CudaBackend(torch.device("cuda", 0))
            pinned = backend.pinned(args[0].nbytes).view(args[0].dtype).view(args[0].shape)
            return pinned.copy_(args[0])
        return function(*map(_host, args), **kwargs)


def _host(value):
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class Torch(TorchWith):
    """torch, for a module whose device is this one."""

    def __init__(self, device):
        super().__init__(device, Cuda(device))

    def autocast(self, *_, **__):
        return nullcontext()

    def compile(self, model, **_):
        return model


@contextmanager
def as_torchs(gpu, monkeypatch, module):
    """The module's torch finds this device."""
    monkeypatch.setattr(module, "torch", Torch(gpu.device))
    with OnHost():
        yield
