"""A device for the transfer's tests that is no GPU, with a copy stream that is as late as can be.

Its memory is host memory full of rubbish. A copy is only noted when it is begun, and done when
somebody waits for an event behind it. So whoever reads a batch without waiting, or packs a slab
anew before the copies out of it are done, gets wrong bytes, every time.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from spdl_torch.io._transfer import cuda, transfer

PATIENCE_SECONDS = 10


class LazyBackend:
    """Does what ``CudaBackend`` does, at the last moment."""

    out_of_memory = False

    def __init__(self, place, stream=cuda.PER_THREAD_STREAM, *, use="copy"):
        self.use = use
        self.place = place
        self.stream = stream
        self.device = torch.device("cpu")
        self.lock = threading.RLock()
        self.pending = []
        self.num_done = 0
        self.slab_sizes = []
        self.copy_sizes = []
        self.pinned_pointers = set()
        self.handed_over = []
        """The thread of each hand-over, and the addresses of its blocks."""
        self.on_stream = threading.local()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.num_model_waits = 0

    def use_on_this_thread(self):
        pass

    def lock_pages(self, address, num_bytes):
        return False

    def unlock_pages(self, address):
        pass

    def pinned(self, num_bytes):
        self.slab_sizes.append(num_bytes)
        slab = torch.empty(num_bytes, dtype=torch.uint8)
        self.pinned_pointers.add(slab.data_ptr())
        return slab

    def is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.pinned_pointers

    @contextmanager
    def on_copy_stream(self):
        self.on_stream.inside = True
        try:
            yield
        finally:
            self.on_stream.inside = False

    def empty(self, num_bytes):
        assert self.on_stream.inside, "device memory must come from the copy stream's pool"
        if self.out_of_memory:
            raise torch.OutOfMemoryError("the lazy device is full")
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def copy(self, target, source):
        assert self.on_stream.inside, "copies belong on the copy stream"
        assert self.is_pinned(source), "only pinned memory can be copied from without waiting"
        with self.lock:
            self.copy_sizes.append(target.nbytes)
            self.pending.append((target, source))

    def record(self):
        with self.lock:
            return LazyEvent(self, self.num_done + len(self.pending))

    def hand_over(self, event, blocks):
        self.run_until(event.position)
        pointers = [block.untyped_storage().data_ptr() for block in blocks]
        self.handed_over.append((threading.current_thread(), pointers))
        return ModelEvent(self)

    def run_until(self, position):
        """Do the work before an event, in order."""
        with self.lock:
            while self.num_done < position:
                target, source = self.pending.pop(0)
                target.copy_(source)
                self.num_done += 1


class LazyEvent:
    """Waiting for it does the work before it, once the backend's gate is open."""

    def __init__(self, backend, position):
        self.backend = backend
        self.position = position

    def synchronize(self):
        if not self.backend.gate.is_set():
            self.backend.waiting.set()
            assert self.backend.gate.wait(PATIENCE_SECONDS), "the test forgot to open the gate"
        self.backend.run_until(self.position)


class ModelEvent:
    """The point that the receiver's stream was at when a batch was handed over."""

    def __init__(self, backend):
        self.backend = backend

    def synchronize(self):
        self.backend.num_model_waits += 1


@pytest.fixture
def backends(monkeypatch):
    """In place of CUDA: the backends that are made, in order."""
    made = []

    def make(place, stream=cuda.PER_THREAD_STREAM, **options):
        made.append(LazyBackend(place, stream, **options))
        return made[-1]

    monkeypatch.setattr(cuda, "CudaBackend", make)
    monkeypatch.setattr(cuda, "resolve", lambda device: torch.device("cuda", device.index or 0))
    monkeypatch.setattr(transfer, "_shared", {})
    return made
