"""Batches on a device that is as late as CUDA allows: what moves itself or was made there, and
memory that is lent.

What a loader packs is in test_on_a_gpu.py, in the same orders.
"""

from __future__ import annotations

import gc
import os
import pickle
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from _gates import in_thread, result_of
from _lazy_device import LazyDevice, install, machine

from spdl_torch.io import Transfer
from spdl_torch.io._transfer import cuda, slabs, transfer
from spdl_torch.loader import opening
from spdl_torch.loader.backends.jobs import Loaded
from spdl_torch.loader.backends.processes.batch_packing import SlabWriter, unpack
from spdl_torch.loader.backends.processes.shared_memory import Mappings
from spdl_torch.loader.backends.processes.wire import File

LARGE = slabs.SMALL_BYTES


def expect(problems, found, value):
    """One that is read late has only bytes of ``value``; noted if not."""
    if found[0] != bytes([value]) * len(found[0]):
        problems.append(f"batch {value} is wrong")


def judged(device, readings, problems):
    """The problems, when everything has come to its end; readings: what came out, and its value."""
    gc.collect()
    device.drain()
    for found, value in readings:
        expect(problems, found, value)
    return problems


def pinned(value):
    """A batch's part that torch, or a slab of a child, has in locked memory."""
    return cuda.CudaBackend(torch.device("cuda", 0)).pinned(LARGE).fill_(value)


def batch_of(value):
    """What is packed, large and small, and what is copied from where it is."""
    large = torch.full((LARGE,), value, dtype=torch.uint8)
    return [large, large[:9].clone(), pinned(value)]


def done_on_return(device):
    """``transfer_tensor`` is for every stream, which waits for nothing; and it lets go of it."""
    problems, readings = [], []
    for value in range(5):
        batch = transfer.transfer_tensor(batch_of(value), "cuda:0")
        for tensor in batch:
            expect(problems, [bytes(tensor.numpy())], value)
        readings += [(device.read(tensor), value) for tensor in batch]
        late = transfer.transfer_tensor(Pinnable(batch_of(value)[0]), "cuda:0")
        expect(problems, [bytes(late.tensor.numpy())], value)
        del batch, tensor, late
    return judged(device, readings, problems)


class Border:
    """A child's end and the trainer's, in one process."""

    def __init__(self, copies):
        self.writer = SlabWriter()
        self.mappings = Mappings(8, lock=copies.limited(9).region)
        self.num_slabs = 0

    def pass_on(self, batch):
        """The trainer's view of a batch that the child packs."""
        packed = self.writer.pack(batch)
        if packed.size:
            self.num_slabs += 1
            self.mappings.open(packed.slab, packed.size, File(os.dup(self.writer.slab.file)))
        self.writer.sent()
        return unpack(Loaded(0, pickle.loads(pickle.dumps(packed, 5))), self.mappings).batch

    def free(self):
        """What the trainer does not view any more may be written again."""
        self.writer.slabs.freed(self.mappings.freed().slabs, ())


class Graph:
    """Moves itself, as graphs of PyG do, and guards its own memory."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device, non_blocking=False):
        return type(self)(copied(self.tensor, non_blocking))

    def record_stream(self, stream):
        self.tensor.record_stream(stream)


class Plain(torch.Tensor):
    """A tensor of another class, on which torch's functions work as on any."""

    __torch_function__ = torch.nn.Parameter.__torch_function__


class Subclass(Plain):
    """A tensor whose class is its own, and which is not yet on the device."""

    device = torch.device("meta")

    def to(self, device, non_blocking=False):
        return copied(self.as_subclass(torch.Tensor), non_blocking)


class Pinnable:
    """Moves itself, guards nothing, but can be pinned, as torch asks of a batch's own class."""

    def __init__(self, tensor):
        self.tensor = tensor

    def pin_memory(self):
        return type(self)(pinned(0).copy_(self.tensor))

    def to(self, device, *args, **options):
        moved = copied(self.tensor, **options)
        machine().current_stream(0).give(lambda: self)  # torch keeps its pinned memory so long
        return type(self)(moved)


def copied(source, non_blocking=False):
    """The copy, begun on the stream that is current; from any memory but pinned one that waits for
    what the stream had before."""
    device, stream = machine(), machine().current_stream(0)
    is_models = stream not in device.own_streams.values()
    if is_models and not (non_blocking and device.is_locked(source.data_ptr())):
        device.violations.append("the thread that trains waited for the model")
    target = device.empty(source.nbytes)
    if is_models:
        target.record_stream(stream)  # which the allocator knows it for
    device.copy_later(target.data_ptr(), source.data_ptr(), source.nbytes)
    return target


class There(Plain):
    """A tensor that is on the device."""

    is_cuda = True


def made_on_the_device(device):
    """By a worker, on the default stream; the loop works on another one, and lets go at once."""
    readings, copies, sources = [], Transfer("cuda"), [pinned(value) for value in range(12)]
    side = device.Stream(0)
    for value, source in enumerate(sources):
        made = device.empty(LARGE)
        device.copy_later(made.data_ptr(), source.data_ptr(), LARGE)
        staged = on_another_thread(copies.stage, [made.as_subclass(There)])
        del made
        with device.stream(side):
            (batch,) = staged.receive()
            readings.append((device.read(batch), value))
        del staged, batch
        device.step()
    found = judged(device, readings, [])
    sources.clear()
    return found


def on_another_thread(function, *args):
    """What it returns, when the thread has let go of everything."""
    result = result_of(in_thread(function, *args))
    for thread in threading.enumerate():
        if thread.name == "test-helper":
            thread.join()
    return result


def moved_by_themselves(device):
    """Objects and tensors of other classes, which bytes and strides do not describe."""
    readings, problems = [], []
    copies = Transfer("cuda", num_slabs=2)
    for value in range(12):
        parts = [Graph(pinned(value)), pinned(value).as_subclass(Subclass)]
        parts.append(Pinnable(torch.full((LARGE,), value, dtype=torch.uint8)))
        staged = on_another_thread(copies.stage, parts)
        del parts
        graph, tensor, late = staged.receive()
        readings += [(device.read(each), value) for each in (graph.tensor, tensor, late.tensor)]
        del staged, graph, tensor, late
        device.step()
    del copies
    return judged(device, readings, problems)


def moved_by_themselves_from_memory_that_is_lent(device):
    """Whoever begins a copy from it: an object at the hand-over, or the loop, from what it finds in
    an object or in an array. It works on two streams in turn.
    """
    readings, problems = [], []
    copies = Transfer("cuda", num_slabs=2)
    memory, border = copies.batch_memory(9), Border(copies)
    streams = [device.default_stream(0), device.Stream(0)]
    for value in range(24):
        batch = [Pinned(room_in(memory, problems).fill_(value)), room_in(memory, problems)]
        batch[1] = [{"x": batch[1].fill_(value).numpy()}, SimpleNamespace(x=batch[1])][value % 2]
        made = torch.full((LARGE,), value, dtype=torch.uint8)
        batch.append(border.pass_on([Pinned(made), {"x": made.numpy()}]))
        staged = on_another_thread(copies.stage, batch)
        del batch, made
        with device.stream(streams[value // 3 % 2]):
            late, own, (shared, array) = staged.receive()
            found = [each["x"] if isinstance(each, dict) else each.x for each in (own, array)]
            found = [copied(torch.as_tensor(each), non_blocking=True) for each in found]
            found += [late.tensor, shared.tensor]
            readings += [(device.read(each), value) for each in found]
        del staged, late, own, shared, array, found
        device.step()
        border.free()
    if border.num_slabs > transfer.MOST_BEHIND + 6:
        problems.append(f"{border.num_slabs} slabs are in use")
    border.mappings.close()
    del copies, memory, border
    return judged(device, readings, problems)


def room_in(memory, problems):
    """Room for a batch; it is a problem if there is none."""
    memory.begin()
    room = memory.room(LARGE)
    memory.end()
    if room is None:
        problems.append("there is no memory left")
        return torch.empty(LARGE, dtype=torch.uint8)
    return room


class Pinned(Graph):
    """Moves itself, guards nothing, and is pinned by whoever made it; if not, it pins itself."""

    record_stream = None

    def pin_memory(self):
        is_locked = machine().is_locked(self.tensor.data_ptr())
        return self if is_locked else Pinnable(self.tensor).pin_memory()


SCENARIOS = [
    *(done_on_return, made_on_the_device, moved_by_themselves),
    moved_by_themselves_from_memory_that_is_lent,
]


def problems_of(scenario, order, monkeypatch):
    """What went wrong in one run."""
    with monkeypatch.context() as patched:
        install(device := LazyDevice(order), patched.setattr)
        found = scenario(device)
        transfer.shared_transfers.clear()
        gc.collect()
        give_back(device)
        if device.locked:
            found.append(f"{len(device.locked)} pieces of memory are still locked")
        return found + device.violations


def give_back(device):
    """The streams pass one more mark, after which nothing reads memory that was lent."""
    device.is_model_stuck = False
    for _ in range(2):
        Transfer("cuda").stage([]).receive()
        device.drain()
    gc.collect()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_batches_are_right_in_every_order(scenario, monkeypatch):
    """Of copies, kernels and memory that is used again."""
    for order in ("late", "model", *range(3)):
        assert problems_of(scenario, order, monkeypatch) == []


def test_pinned_batches_spoil_no_graph(monkeypatch):
    """``pin_memory=True`` locks pages on the thread that made the batch, while another captures."""
    install(device := LazyDevice(), monkeypatch.setattr)
    pinning = SimpleNamespace(pin_memory=lambda batch, _: pinned(0).copy_(batch))
    monkeypatch.setattr(opening, "_torch_pin_memory", pinning)
    # CudaBackend guards its own call: torch's allocator has no such backend.
    monkeypatch.setattr(cuda.runtime, "captures_unharmed", nullcontext)
    batch = torch.full((LARGE,), 7, dtype=torch.uint8)
    with device.capture():
        found = on_another_thread(opening.pinned, batch, None)
    assert torch.equal(found, batch)
    assert device.is_locked(found.data_ptr())
    assert not device.violations
