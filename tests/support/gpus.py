"""The devices of tests that run on a GPU and here: CUDA's, and the stand-in for one.

``gpu`` is what a test asks of its device.
"""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from spdl_torch.io._transfer import cuda, transfer
from support.gates import PATIENCE_SECONDS
from support.lazy_device import LazyDevice, LazyStream, install, machine, rings
from support.loaders import loader_threads

STREAMS = ("default", "side", "external")
"""On which a program trains: torch's own, another of torch's, one that torch did not make."""

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
ORDERS = ("late", "model", 0)
ANYWHERE = pytest.mark.parametrize("gpu", ["late", CUDA], indirect=True)
PROMPT = pytest.mark.parametrize("gpu", [{"is_prompt": True}, CUDA], indirect=True)
"""The same for whoever looks at what has arrived: on the host nobody waits for the stand-in."""
ON_CUDA = pytest.mark.parametrize("gpu", [CUDA], indirect=True)

KIBI, MEBI = 1 << 10, 1 << 20
_LATE_CYCLES = 4_000_000  # some 2 ms


class CudaGpu:
    """The current CUDA device."""

    def __init__(self):
        self._foreign = None  # one is enough: it is never destroyed

    def extent(self, num_batches, num_bytes):
        """How much a test loads."""
        return num_batches, num_bytes

    def make_late(self):
        """Delay everything queued on the current stream from now on by a few milliseconds."""
        torch.cuda._sleep(_LATE_CYCLES)

    def total(self, tensor):
        """Launch a kernel on the current stream that adds up a tensor, and return at once."""
        return tensor.sum(dtype=torch.float64)

    def values(self, totals):
        """Wait for all that was launched; return what the kernels found."""
        torch.cuda.synchronize()
        return [float(total) for total in totals]

    def make(self, tensor):
        """What a worker makes on the device."""
        return tensor.to("cuda", non_blocking=True)

    def index_of(self, tensor):
        """The number of the device that has the tensor; None = the host."""
        return tensor.device.index

    def stream(self, kind):
        """One on which a program trains; None = torch's own."""
        if kind == "default":
            return None
        return torch.cuda.Stream() if kind == "side" else self._foreign_stream()

    def on(self, stream):
        """A context in which that stream is current."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def _foreign_stream(self):
        """A stream that torch knows by its handle alone."""
        if self._foreign is None:
            handle = cuda.new_stream()
            if handle is None:  # CUDA's runtime makes none for us: pass off one of torch's as such
                handle = torch.cuda.Stream().cuda_stream
            self._foreign = torch.cuda.ExternalStream(handle)
        return self._foreign


class LazyGpu:
    """The stand-in. It is late by itself."""

    def __init__(self, device):
        self.device = device
        self.made_of = []

    def extent(self, num_batches, num_bytes):
        return min(num_batches, 20), min(num_bytes, 128 * KIBI)

    def make_late(self):
        self.device.step()

    def total(self, tensor):
        return self.device.read(tensor)

    def values(self, totals):
        self.device.drain()
        return [float(np.frombuffer(found[0], np.uint8).sum()) for found in totals]

    def make(self, tensor):
        self.made_of.append(tensor)
        target = self.device.empty(tensor.nbytes)
        self.device.copy_later(target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return target.as_subclass(There)

    def index_of(self, tensor):
        try:
            return self.device.block_of(tensor).device
        except StopIteration:  # the host's
            return None

    def stream(self, kind):
        if kind == "default":
            return None
        return self.device.Stream(0) if kind == "side" else LazyStream(self.device, 0)

    def on(self, stream):
        return nullcontext() if stream is None else self.device.stream(stream)


class Plain(torch.Tensor):
    """A tensor of another class, on which torch's functions work as on any."""

    __torch_function__ = torch.nn.Parameter.__torch_function__


class There(Plain):
    """A tensor that is on the stand-in."""

    is_cuda = True


def moved(tensor, non_blocking=True):
    """``tensor.to("cuda")``, as a training loop or an object of its own calls it: a copy on the
    stream that is current. From locked pages it is done later; from others before this returns, and
    so after all that the stream had."""
    device = machine()
    if device is None:
        return tensor.to("cuda", non_blocking=non_blocking)
    stream, target = device.current_stream(0), device.empty(tensor.nbytes)
    is_loops = stream not in device.own_streams.values()
    if is_loops:
        target.record_stream(stream)  # which the allocator knows it for
    if non_blocking and device.is_locked(tensor.data_ptr()):
        device.copy_later(target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        device.num_waits += is_loops
        device.drain()
        target.copy_(tensor.view(-1))
    return target


def is_pinned(tensor):
    """Whether a copy from a tensor is done later."""
    device = machine()
    return tensor.is_pinned() if device is None else device.is_locked(tensor.data_ptr())


def pinned(tensor):
    """``tensor.pin_memory()``."""
    if machine() is None:
        return tensor.pin_memory()
    locked = cuda.CudaBackend(torch.device("cuda", 0)).pinned(tensor.nbytes)
    return locked.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def keep_until_copied(owner):
    """Torch keeps pinned memory of its own as long as copies from it are under way."""
    if (device := machine()) is not None:
        device.current_stream(0).give(lambda: owner)


@pytest.fixture
def gpu(request, monkeypatch):
    """A device: CUDA's, or the stand-in, as late as may be unless another order is given."""
    options = getattr(request, "param", "late")
    if options == "cuda":
        # Transfers of functions that copy by themselves end with the test, and their threads too.
        monkeypatch.setattr(transfer, "shared_transfers", {})
        yield CudaGpu()
        return
    options = options if isinstance(options, dict) else {"order": options}
    install(device := LazyDevice(**options), monkeypatch.setattr)
    yield LazyGpu(device)
    for ring in tuple(rings):
        ring.rest()
    transfer.shared_transfers.clear()
    gc.collect()
    for thread in loader_threads():  # they hold memory that is to be freed on this device
        thread.join(PATIENCE_SECONDS)


class Filled(Dataset):
    """Sample ``k`` is a tensor of ``sizes[k]`` bytes, each of them ``k`` modulo 251."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return torch.full((self.sizes[index],), index % 251, dtype=torch.uint8)

    def expected(self):
        """The sum of each sample."""
        return [float(index % 251 * size) for index, size in enumerate(self.sizes)]


def filled(gpu, num_batches, num_bytes):
    """So many samples of one size."""
    num_batches, num_bytes = gpu.extent(num_batches, num_bytes)
    return Filled([num_bytes] * num_batches)


def num_wrong(gpu, batches, expected, *, streams=("default",), use=None):
    """How many batches were wrong when a delayed kernel read them, or missing.

    Every batch has one number in all its bytes. A delayed kernel adds them up; by then the loop has
    long dropped the batch, and the loader has moved on. It trains on these streams in turn. use:
    called with each batch, for the tensor that the kernel reads; None = the batch.
    """
    totals, batches, no_more = [], iter(batches), object()
    streams = [gpu.stream(kind) for kind in streams]
    for number in itertools.count():
        with gpu.on(streams[number // 3 % len(streams)]):
            batch = next(batches, no_more)
            if batch is no_more:
                break
            gpu.make_late()
            totals.append(gpu.total(batch if use is None else use(batch)))
            del batch
    found = gpu.values(totals)
    wrong = sum(one != other for one, other in zip(found, expected, strict=False))
    return wrong + abs(len(expected) - len(found))
