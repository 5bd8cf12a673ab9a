"""A device that is not a GPU, in CUDA's place, for the real ``CudaBackend``: late and merciless.

What is given to a stream is only noted, and done when somebody waits for it, or in any order that
streams and events allow. Memory that is freed is the next to be given out, at once, unless it was
recorded for a stream that has not come so far. Host memory that is unlocked is overwritten. So
whoever reads without waiting, writes too early or lets go too early gets wrong bytes.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spdl_torch.io._transfer import cuda, slabs, transfer
from support.gates import PATIENCE_SECONDS, spdl_threads, until

HOST = torch.device("cpu")
POISON = 0xDD
GLOBAL, RELAXED = 0, 2  # modes of a thread while another one captures a graph


class LazyDevice:
    """Streams, events and memory of all the devices of a machine; ``torch.cuda`` of the backend.

    order: in which things are done before somebody waits for them. "late": none is. "model": what
        the model's streams were given, as soon as that may be. A number: the seed of any other.
    is_prompt: a stream of no backend does at once what it is given, and so what that
    waits for, as if the trainer looked at each batch that it is handed.
    """

    num_devices = 4

    def __init__(self, order="late", *, is_prompt=False):
        self.lock = threading.RLock()
        self.is_prompt = is_prompt
        self.order = order
        self.rng = random.Random(order)
        self.streams = []
        self.default_streams = [LazyStream(self, n) for n in range(self.num_devices)]
        self.own_streams = {}  # made by CUDA's runtime, by their numbers
        self.pools = {}  # streams that are handed out in turn
        self.capturing = None  # the thread that captures a graph
        self.is_model_stuck = False  # its kernels never end
        self.is_refusing = False  # to lock any more memory
        self.last_error = 0
        self.blocks = []
        self.free = []
        self.guarded = []
        self.views = []  # that may live, and their blocks
        self.locked = {}  # address -> size, of host memory
        self.torchs = []  # what torch has locked
        self.copies = []  # that are not done
        self.num_copied = 0
        self.num_waits = 0  # of who trains, for a copy from memory that is not locked
        self.violations = []
        self.used = set()  # devices that have a context now
        self.waiting = threading.Event()
        self.waiters = set()  # threads that waited for the device, or asked whether to
        self.of_thread = threading.local()

    # As torch.cuda.

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return self.num_devices

    def current_device(self):
        return getattr(self.of_thread, "device", 0)

    def set_device_index(self, device):
        self.of_thread.device = index_of(device)
        self.used.add(index_of(device))

    @contextmanager
    def device(self, device):
        before, self.of_thread.device = self.current_device(), index_of(device)
        try:
            yield
        finally:
            self.of_thread.device = before

    def current_stream(self, device):
        chosen = getattr(self.of_thread, "streams", {})
        return chosen.get(index_of(device), self.default_streams[index_of(device)])

    def _cuda_getCurrentStream(self, index):
        return id(self.current_stream(index or 0)), index, 1

    def is_current_stream_capturing(self):
        return self.capturing is threading.current_thread()

    @contextmanager
    def stream(self, stream):
        before = dict(getattr(self.of_thread, "streams", {}))
        self.of_thread.streams = {**before, stream.index: stream}
        try:
            with self.device(stream.index):
                yield
        finally:
            self.of_thread.streams = before

    def Stream(self, device=0, priority=0):
        """As torch's: of each priority there are 32."""
        place = index_of(device), priority
        if place not in self.pools:
            self.pools[place] = cycle([LazyStream(self, place[0]) for _ in range(32)])
        return next(self.pools[place])

    def ExternalStream(self, handle, device):
        stream = self.own_streams[handle]
        assert stream.index == index_of(device)
        return stream

    def default_stream(self, device):
        return self.default_streams[index_of(device)]

    def synchronize(self, device=None):
        self.touch("the device was waited for")
        self.used.add(self.current_device())
        self.drain()

    def Event(self, *, blocking):
        assert blocking, "who waits shall sleep"
        return LazyEvent(self)

    # As the functions of CUDA's runtime that torch has no call for.

    def cudaThreadExchangeStreamCaptureMode(self, mode):
        self.used.add(self.current_device())  # as any call may
        before = getattr(self.of_thread, "capture_mode", GLOBAL)
        given = behind(mode, ctypes.c_int)
        self.of_thread.capture_mode, given.value = given.value, before
        return 0

    def cudaStreamCreateWithFlags(self, stream, flags):
        assert flags == 1, "it must not wait for the default stream"
        self.touch("a stream was made")
        number = 1000 + len(self.own_streams)
        self.own_streams[number] = LazyStream(self, self.current_device())
        behind(stream, ctypes.c_void_p).value = number
        return 0

    def cudaGetLastError(self):
        error, self.last_error = self.last_error, 0
        return error

    @contextmanager
    def capture(self):
        """This thread captures a graph, in the default mode."""
        self.capturing = threading.current_thread()
        try:
            yield
        finally:
            self.capturing = None

    def touch(self, what):
        """Something is asked of CUDA that would spoil a capture on any thread."""
        if self.capturing and getattr(self.of_thread, "capture_mode", GLOBAL) != RELAXED:
            self.violations.append(f"a capture was spoiled: {what}")

    def ask(self, what):
        """This thread waits for an event, or asks whether to."""
        self.touch(what)
        self.waiters.add(threading.current_thread().name)
        self.used.add(self.current_device())

    # As those that it has.

    def cudart(self):
        return Offered(getattr(torch._C, "_cudart", None), self)

    def cudaHostRegister(self, address, num_bytes, flags):
        self.touch("pages were locked")
        if self.is_refusing:
            self.last_error = 2
            return 2
        self.used.add(self.current_device())
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        self.touch("pages were unlocked")
        self.used.add(self.current_device())
        size = self.locked.pop(address, None)
        if size is None or not is_mapped(address, size):
            self.violations.append("memory was unlocked that was not there any more")
            return
        with self.lock:
            for copy in self.copies:
                if address <= copy.source < address + size:
                    self.violations.append("memory was unlocked under a copy")
                    copy.source = 0
            ctypes.memset(address, POISON, size)

    def pinned(self, num_bytes):
        """Memory that the process keeps."""
        self.touch("pinned memory was allocated")
        self.torchs.append(memory := np.full(num_bytes, POISON, np.uint8))
        self.locked[memory.ctypes.data] = num_bytes
        return torch.from_numpy(memory)

    def is_locked(self, address):
        locked = self.locked.copy()  # in one step: meanwhile a finalizer may unlock some
        return any(start <= address < start + size for start, size in locked.items())

    def empty(self, num_bytes):
        """The block that was freed last, if it has that size, with what it had in it."""
        self.touch("memory was allocated")
        size = max(512, -(-num_bytes // 512) * 512)
        with self.lock:
            self.settle()
            for block, marks in tuple(self.guarded):
                if all(mark.is_done for mark in marks):
                    self.guarded.remove((block, marks))
                    self.free.append(block)
            here = [b for b in self.free if b.device == self.current_device()]
            block = next((b for b in reversed(here) if len(b.bytes) == size), None)
            if block is None:
                block = Block(size, self.current_device())
                self.blocks.append(block)
            else:
                self.free.remove(block)
        view = block.bytes[:num_bytes]
        self.views.append((weakref.ref(view), block))
        return torch.from_numpy(view)

    def settle(self):
        """Guard the blocks that were freed, before a stream gets more to do."""
        with self.lock:
            freed = [(view, block) for view, block in self.views if view() is None]
            for view, block in freed:
                self.views.remove((view, block))
                marks = [stream.mark() for stream in block.users]
                block.users.clear()
                self.guarded.append((block, marks))

    def block_of(self, tensor):
        address = tensor.data_ptr()
        return next(b for b in self.blocks if b.address <= address < b.address + len(b.bytes))

    def read(self, tensor):
        """A kernel on the current stream that reads a tensor; returns where the bytes will be. As
        on a GPU it has the address alone.
        """
        found = []
        address, size = tensor.data_ptr(), tensor.nbytes
        self.current_stream(0).give(lambda: found.append(ctypes.string_at(address, size)))
        return found

    def copy_later(self, target, source, num_bytes):
        """A copy on the current stream, of addresses."""
        copy = SimpleNamespace(target=target, source=source, num_bytes=num_bytes)
        with self.lock:
            self.copies.append(copy)
        self.current_stream(self.current_device()).give(lambda: self._copy(copy))

    @property
    def num_given(self):
        """Copies, done or not."""
        return self.num_copied + len(self.copies)

    def _copy(self, copy):
        self.copies.remove(copy)
        self.num_copied += 1
        if copy.source:
            ctypes.memmove(copy.target, copy.source, copy.num_bytes)

    def step(self):
        """Perhaps something is done meanwhile."""
        with self.lock:
            if self.order == "model":
                for stream in self.default_streams:
                    while stream.can_go_on():
                        stream.do_one()
            while isinstance(self.order, int) and self.rng.random() < 0.5:
                stream = self.rng.choice(self.streams)
                if stream.can_go_on():
                    stream.do_one()

    def drain(self):
        """Everything is done, in an order that may be."""
        with self.lock:
            while any(stream.work for stream in self.streams):
                ready = [stream for stream in self.streams if stream.work and stream.can_go_on()]
                self.rng.choice(ready).do_one()


class LazyStream:
    """Does its work in order, some time."""

    def __init__(self, device, index):
        self.machine = device
        self.index = index
        self.work = deque()
        device.streams.append(self)

    def give(self, work):
        with self.machine.lock:
            self.machine.settle()
            self.work.append(work)
            if self.machine.is_prompt:
                self.mark()
        self.machine.step()

    def mark(self):
        """The point behind everything that was given so far."""
        machine = self.machine
        with machine.lock:
            mark = Mark(self)
            self.work.append(mark)
            if machine.is_prompt and self not in machine.own_streams.values():
                self.do_until(mark)
            return mark

    def synchronize(self):
        """Wait for all that it has."""
        self.machine.waiters.add(threading.current_thread().name)
        self.do_until(self.mark())

    def wait_event(self, event):
        if event.mark is not None:
            self.give(event.mark)

    def can_go_on(self):
        if not self.work or self.is_stuck:
            return False
        return not self.is_waiting or self.work[0].is_done

    @property
    def is_waiting(self):
        """For another stream."""
        return isinstance(self.work[0], Mark) and self.work[0].stream is not self

    @property
    def is_stuck(self):
        return self.machine.is_model_stuck and self in self.machine.default_streams

    def do_one(self):
        work = self.work.popleft()
        if isinstance(work, Mark):
            work.is_done = True
        else:
            work()

    def do_until(self, mark):
        """No more than that, here and where it is waited for."""
        with self.machine.lock:
            while not mark.is_done:
                if self.is_waiting:
                    self.work[0].stream.do_until(self.work[0])
                self.do_one()


class Mark:
    """A point in a stream's work; in that of another stream, which goes on when it is reached."""

    def __init__(self, stream):
        self.stream = stream
        self.is_done = False


class LazyEvent:
    """Waiting for it does the work before it, once the gate is open."""

    def __init__(self, device):
        self.machine = device
        self.mark = None

    def record(self, stream):
        self.mark = stream.mark()
        self.machine.step()

    def query(self):
        """After a no, what it was asked for is done, unless the model is stuck."""
        self.machine.ask("an event was looked at")
        if self.mark is None or self.mark.is_done:
            return True
        self.machine.waiting.set()
        if not self.mark.stream.is_stuck:
            self.mark.stream.do_until(self.mark)
        return False

    def synchronize(self):
        self.machine.ask("an event was waited for")
        if self.mark is not None:
            self.mark.stream.do_until(self.mark)


class Block:
    """Device memory, which stays where it is and is given out over and over."""

    def __init__(self, size, device):
        self.device = device
        self.bytes = np.full(size, 0xAB, np.uint8)
        self.address = self.bytes.ctypes.data
        self.users = set()


class LazyBackend(cuda.CudaBackend):
    """The real one, but for memory and copies, which torch has for CUDA alone."""

    out_of_memory = False

    def __init__(self, place, stream=cuda.PER_THREAD_STREAM):
        super().__init__(place, stream)
        self.place, self.stream = place, stream
        self.machine = machine()
        self.slab_sizes = []
        self.copy_sizes = []
        self.handed_over = []
        """The thread of each hand-over, and the addresses of its blocks."""

    def pinned(self, num_bytes):
        self.slab_sizes.append(num_bytes)
        return super().pinned(num_bytes)

    def torchs_pinned(self, num_bytes):
        self.slab_sizes.append(num_bytes)
        return self.machine.pinned(num_bytes)

    def unlock_pages(self, address):
        if machine() is self.machine:  # otherwise the test is over
            super().unlock_pages(address)

    def is_pinned(self, tensor):
        self.machine.used.add(self.machine.current_device())
        return self.machine.is_locked(tensor.data_ptr())

    def empty(self, num_bytes):
        assert self.is_current(), "device memory must come from the copy stream's pool"
        if self.out_of_memory:
            raise torch.OutOfMemoryError("the lazy device is full")
        return self.machine.empty(num_bytes)

    def copy(self, target, source):
        assert self.is_current(), "copies belong on the copy stream"
        assert self.is_pinned(source), "only pinned memory can be copied from without waiting"
        assert target.stride() == source.stride()
        self.copy_sizes.append(target.nbytes)
        self.machine.copy_later(target.data_ptr(), source.data_ptr(), target.nbytes)

    def is_current(self):
        return self.machine.current_stream(self.place) is self.own_stream

    def hand_over(self, event, blocks):
        tensors = [each for each in blocks if isinstance(each, torch.Tensor)]
        pointers = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        self.handed_over.append((threading.current_thread(), pointers))
        return super().hand_over(event, blocks)


def behind(reference, kind):
    """The variable that a function of a C library was given by reference."""
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents


def take_until_far_behind(batches, device):
    """Take batches of a loader until its owner waits for the model, which is stuck."""
    device.is_model_stuck = True
    for _ in range(transfer.MOST_BEHIND + 1):
        next(batches)
    # It may have looked before the last hand-over; then it is ahead by all that it may be.
    most = transfer.MOST_BEHIND + 3
    until(lambda: device.waiting.is_set() or device.num_given == most)
    if not device.waiting.is_set():
        next(batches)
    assert device.waiting.wait(PATIENCE_SECONDS)


class LazyRing(slabs.SlabRing):
    """One that waits for nothing any more when a test is over."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        rings.add(self)

    def rest(self):
        for slab in self._slabs:
            slab.wait()

    def __del__(self, is_exiting=sys.is_finalizing):
        if not is_exiting() and machine() is not None:
            super().__del__()


rings = weakref.WeakSet()


class Offered:
    """A stand-in for a module of torch, which offers only names that torch has, too: code that asks
    for another one would find it here, and on no GPU."""

    def __init__(self, real, stand_in):
        self._real, self._stand_in = real, stand_in

    def __getattr__(self, name):
        if torch.version.cuda is not None:
            getattr(self._real, name)
        return getattr(self._stand_in, name)


class TorchWith:
    """torch with another ``torch.cuda``, whose devices are the accelerators."""

    def __init__(self, device):
        self.machine = device
        self.cuda = Offered(torch.cuda, device)
        self.accelerator = Offered(torch.accelerator, device)
        self._C = Offered(torch._C, device)

    def __getattr__(self, name):
        return getattr(torch, name)


def index_of(device):
    """Of a torch.device or a number."""
    return device if isinstance(device, int) else (device.index or 0)


def is_mapped(address, size):
    """Whether the memory is there."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            start, end = (int(each, 16) for each in line.split(maxsplit=1)[0].split("-"))
            if start <= address < end:
                return address + size <= end
    return False


def machine():
    """The one that is installed; None when a test is over."""
    return getattr(cuda.torch, "machine", None)


def install(device, patch=setattr, backend=LazyBackend):
    """Put it in place of CUDA, for transfers that are made from now on."""
    patch(cuda, "torch", TorchWith(device))
    patch(cuda, "_own_streams", {})
    patch(cuda, "_streams", {})
    patch(cuda, "_readers", {})
    patch(cuda, "cuda_library", lambda: Offered(ctypes.PyDLL(None), device))
    patch(cuda, "CudaBackend", backend)
    patch(transfer, "shared_transfers", {})
    patch(slabs, "SlabRing", LazyRing)
    # Objects that move themselves, and tensors that are not plain, are where they shall be.
    patch(transfer.Transfer, "device", property(lambda self: HOST))
    patch(torch.Tensor, "record_stream", _record_stream)


def _record_stream(tensor, stream):
    machine().block_of(tensor).users.add(stream)


@pytest.fixture
def backends(monkeypatch):
    """In place of CUDA, with a trainer that looks at each batch: the backends that are made."""
    made = []

    class Noted(LazyBackend):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    install(LazyDevice(is_prompt=True), monkeypatch.setattr, Noted)
    yield made
    put_to_rest()


def put_to_rest():
    """Let nothing be under way any more when torch's own CUDA is back in its place: whoever goes
    later would wait for it there."""
    for thread in spdl_threads():
        if "transfer" in thread.name:
            thread.join(0.2)
    for ring in tuple(rings):
        ring.rest()
