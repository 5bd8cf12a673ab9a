"""Batches that are read late and dropped at once, with torch's own allocator; see ``_cudart.cpp``.

Prints as JSON how many of them were wrong, on machines and streams that differ.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import torch
from _forks import end_at_once
from _inside import look_often
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.check_gpu.gpu import STREAMS, CudaGpu
from spdl_torch.engine import threads as thread_group
from spdl_torch.io import Transfer, batch_storage, transfer_tensor
from spdl_torch.io._transfer import cuda, slabs
from spdl_torch.pipeline import PipelineBuilder

if TYPE_CHECKING:
    import numpy as np

MEBI = 1 << 20
LARGE = slabs.SMALL_BYTES
COUNT = 16

STAND_IN = ctypes.CDLL(None)
SWITCHES = {"looks": 1, "memory": 8 << 30, "registers": 1}
FAR = {"looks": 30}
"""The model is far behind: nothing that it was given is done because somebody looked."""


@contextmanager
def machine(**switches):
    """A machine that differs in something."""
    for name, value in switches.items():
        STAND_IN.standin_set(name.encode(), ctypes.c_long(value))
    try:
        yield
    finally:
        torch.cuda.synchronize()
        for name in switches:
            STAND_IN.standin_set(name.encode(), ctypes.c_long(SWITCHES[name]))


# -- batches, each of one value --------------------------------------------------------------------


def filled(value, num_bytes=LARGE):
    return torch.full((num_bytes,), value, dtype=torch.uint8)


class Filled(Dataset):
    """Samples of one value each."""

    thread_safe = True

    def __init__(self, grows=0, make=filled):
        self.grows, self.make = grows, make

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.make(index, LARGE + self.grows * index)


@dataclass
class Moving:
    """Moves itself, and says nothing of its memory."""

    images: torch.Tensor

    def to(self, device, non_blocking=False):
        return type(self)(self.images.to(device, non_blocking=non_blocking))


class Pinnable(Moving):
    """One that can be pinned."""

    def pin_memory(self):
        return type(self)(self.images.pin_memory())


class Pair(NamedTuple):
    """A tuple that moves itself."""

    images: torch.Tensor
    label: int

    def to(self, device, non_blocking=False):
        return Pair(self.images.to(device, non_blocking=non_blocking), self.label)


class Dict(dict):
    """A dict that moves itself, and can be pinned."""

    def to(self, device, non_blocking=False):
        return Dict({k: v.to(device, non_blocking=non_blocking) for k, v in self.items()})

    def pin_memory(self):
        return Dict({k: v.pin_memory() for k, v in self.items()})


class Kept(NamedTuple):
    """Leaves an array with the host, which views the same memory as a tensor that moves."""

    array: np.ndarray
    tensor: torch.Tensor

    @classmethod
    def of(cls, tensor):
        return cls(tensor.numpy(), tensor)


class Image(torch.Tensor):
    """A subclass, as of torchvision's tv_tensors."""


def moving_batch(samples):
    return Moving(torch.stack(samples))


def sparse_batch(samples):
    (values,) = samples
    indices = torch.arange(len(values))[None]
    return torch.sparse_coo_tensor(indices, values, check_invariants=False, is_coalesced=True)


def image_batch(samples):
    return torch.stack(samples).as_subclass(Image)


def array_batch(samples):
    return Kept.of(torch.stack(samples))


def pair_of(value, num_bytes):
    return Pair(filled(value, num_bytes), value)


def dict_of(value, num_bytes):
    return Dict(images=filled(value, num_bytes))


def in_storage(kind, value):
    """An op that asks for memory that can be copied from."""
    room = batch_storage().tensor((LARGE,))
    return kind(room.fill_(value))


# -- ways to the device ----------------------------------------------------------------------------


def staged():
    """Batches that were packed."""
    copies = Transfer("cuda")
    for value in range(COUNT):
        yield copies.stage(filled(value)).receive()


def staged_pinned(kind=torch.Tensor):
    """Batches in pinned memory, which are copied from where they are."""
    copies = Transfer("cuda", num_slabs=2)
    for value in range(COUNT):
        memory = cuda.CudaBackend(torch.device("cuda", 0)).pinned(LARGE).fill_(value)
        yield copies.stage(memory.as_subclass(kind)).receive()
        del memory


def transferred(kind=Moving):
    """One call each; a stream that waits for nothing may read what it returns."""
    stream = torch.cuda.Stream()
    for value in range(COUNT):
        moved = images_of(transfer_tensor(kind(filled(value)), "cuda"))
        found = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(stream):
            found.copy_(moved, non_blocking=True)
        stream.synchronize()
        yield found.to("cuda")


def loaded(dataset=None, epochs=1, **options):
    """Batches of a loader; of several epochs the last one's."""
    loader = DataLoader(Filled() if dataset is None else dataset, 1, device="cuda", **options)
    for _ in range(epochs - 1):
        for batch in itertools.islice(loader, COUNT // 2):
            torch.zeros_like(images_of(batch)).copy_(images_of(batch), non_blocking=True)
    yield from loader


def of_pipeline(op):
    """Batches of a pipeline with one op."""
    stages = PipelineBuilder().add_source(range(COUNT)).pipe(op).add_sink(1)
    yield from PipelineDataset(stages, device="cuda")


def images_of(batch):
    """What was moved; what was not, the loop moves."""
    if isinstance(batch, torch.nn.utils.rnn.PackedSequence):
        return batch.data
    if isinstance(batch, Kept):
        return torch.from_numpy(batch.array).to("cuda", non_blocking=True)
    if isinstance(batch, dict):
        return batch["images"]
    tensor = getattr(batch, "images", batch)
    return tensor.values() if tensor.is_sparse else tensor


THREADS = {"num_workers": 2, "isolation": "thread"}
FORKED = {"num_workers": 2, "isolation": "process", "multiprocessing_context": "fork"}

WAYS = {
    "packed": staged,
    "pinned": staged_pinned,
    "pinned subclass": partial(staged_pinned, Image),
    "transfer_tensor": partial(transferred, lambda tensor: {"images": tensor}),
    "transfer_tensor, pinned": partial(transferred, Pinnable),
    "pipeline": partial(of_pipeline, filled),
    "pipeline, in storage": partial(of_pipeline, partial(in_storage, torch.Tensor.contiguous)),
    "pipeline, array": partial(of_pipeline, partial(in_storage, Kept.of)),
    "pipeline, moves itself": partial(of_pipeline, partial(in_storage, Moving)),
    "inline": partial(loaded, num_workers=0),
    "inline, NamedTuple.to": partial(loaded, Filled(make=pair_of), num_workers=0),
}
for seat, options in (("threads", THREADS), ("processes", FORKED)):
    seated = partial(loaded, **options)
    WAYS |= {
        seat: seated,
        f"{seat}, epochs": partial(seated, epochs=3),
        f"{seat}, persistent": partial(seated, epochs=3, persistent_workers=True),
        f"{seat}, growing": partial(seated, Filled(grows=LARGE)),
        f"{seat}, dataclass.to": partial(seated, collate_fn=moving_batch),
        f"{seat}, NamedTuple.to": partial(seated, Filled(make=pair_of)),
        f"{seat}, NamedTuple.to, epochs": partial(seated, Filled(make=pair_of), epochs=3),
        f"{seat}, dict.to and pin_memory": partial(seated, Filled(make=dict_of)),
        f"{seat}, array": partial(seated, collate_fn=array_batch),
        f"{seat}, subclass": partial(seated, collate_fn=image_batch),
        f"{seat}, sparse": partial(seated, collate_fn=sparse_batch),
        f"{seat}, sequence": partial(seated, collate_fn=pack_sequence),
    }

FEW = [
    *("packed", "pinned subclass", "pipeline, moves itself"),
    *("threads", "processes, NamedTuple.to"),
]
"""For a machine on which less may go wrong than where the model is far behind."""

MAKES_WAIT = ("transfer_tensor", "pageable", "pipeline, moves itself", "array")
"""Ways on which the thread may wait for the device."""


@contextmanager
def no_waiting(*, allowed):
    """torch raises where this program waits for the device, on any thread, or would have to."""
    torch.cuda.set_sync_debug_mode("default" if allowed else "error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def num_wrong(batches, *, stream=None, may_wait=False):
    """How many are wrong when a copy, which stands for a kernel, reads them at the very end."""
    found, remaining = [], iter(batches)
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        while True:
            with no_waiting(allowed=may_wait):
                batch = next(remaining, None)
            if batch is None:
                break
            source = images_of(batch)
            target = torch.zeros(source.numel(), dtype=torch.uint8, pin_memory=True)
            target.copy_(source.as_subclass(torch.Tensor).reshape(-1), non_blocking=True)
            del batch, source
            found.append(target)
    torch.cuda.synchronize()
    is_wrong = [not bool((target == number).all()) for number, target in enumerate(found)]
    return sum(is_wrong) + abs(len(found) - COUNT)


def wrong_of(name, **options):
    """Of the batches that come on a way."""
    found = num_wrong(WAYS[name](), may_wait=may_wait(name), **options)
    gc.collect()
    return found


def may_wait(name):
    """Whether it is known that something there is moved from memory that is not pinned."""
    return any(each in name for each in MAKES_WAIT) or name.endswith("dataclass.to")


# -- the tables ------------------------------------------------------------------------------------


def streams():
    """The kinds on which a trainer may work."""
    gpu, found = CudaGpu(), {}
    for kind in STREAMS:
        with gpu.on_stream(kind):
            found[kind] = torch.cuda.current_stream()
    return found


def wrong():
    """How many batches are wrong, on machines that differ and on streams of each kind."""
    table = {}
    for setting, switches in {"near": {}, "unregistered": {"registers": 0, **FAR}}.items():
        with machine(**switches):
            table[setting] = {name: wrong_of(name) for name in FEW}
    with machine(**FAR):
        table["far"] = {name: wrong_of(name) for name in WAYS}
    for kind, stream in streams().items():
        with machine(**FAR):
            names = ("packed", "threads", "threads, NamedTuple.to")
            table[kind] = {name: wrong_of(name, stream=stream) for name in names}
    return table


def out_of_memory():
    """What a loop gets on a device that is too small for what it keeps, and how it goes on."""
    torch.cuda.empty_cache()
    with machine(memory=64 * MEBI):
        loader = iter(DataLoader(Filled(grows=MEBI), 1, device="cuda", **THREADS))
        kept, notes = [], []
        while True:
            try:
                kept.append(next(loader, None))
            except torch.OutOfMemoryError as error:
                notes = error.__notes__
                break
        num_kept, kept = len(kept), []
        num_lost = 1
        while (batch := _next_or_none(loader)) is None:  # made while the loop had not let go yet
            num_lost += 1
        found = {"kept": num_kept, "notes": notes, "lost": num_lost}
        return {**found, "next": int(batch.cpu()[0, 0])}


def _next_or_none(loader):
    """Not if the device was full when it was copied."""
    try:
        return next(loader)
    except torch.OutOfMemoryError:
        return None


def calls_of_the_first(device, **options):
    """How often the first device was asked for something while the second is in use."""
    torch.cuda.synchronize(0)
    gc.collect()
    with torch.cuda.device(1):
        before = STAND_IN.standin_calls(0)
        for batch in DataLoader(Filled(), 1, device=device, **options):
            assert batch.device == torch.device("cuda", 1), batch.device
        return STAND_IN.standin_calls(0) - before


def locks_of_epochs(options):
    """How often each of four epochs locks pages."""
    loader, found = DataLoader(Filled(), 1, device="cuda", **options), []
    for _ in range(4):
        before = STAND_IN.standin_locks()
        assert num_wrong(iter(loader)) == 0
        gc.collect()
        found.append(STAND_IN.standin_locks() - before)
    return found


def locks():
    """The same without workers, on threads, and in processes that stay."""
    persistent = {**FORKED, "persistent_workers": True}
    seats = {"none": {"num_workers": 0}, "threads": THREADS, "persistent": persistent}
    return {seat: locks_of_epochs(options) for seat, options in seats.items()}


class away(torch.cuda.device):
    """Chooses no device, but on the thread that trains."""

    def __init__(self, device):
        is_trainer = threading.current_thread() is threading.main_thread()
        super().__init__(device if is_trainer else -1)


def main():
    """Run all."""
    torch.set_num_threads(1)  # its team would wait for work, which takes the cores
    gc.freeze()  # what was imported is not looked through after each way
    facts = {"device": torch.cuda.get_device_name(), "backend": cuda.CudaBackend.__module__}
    torchs = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    kinds = streams()
    facts["is_torchs"] = {kind: each.cuda_stream in torchs for kind, each in kinds.items()}
    look_often()
    facts["calls_of_the_first"] = [
        calls_of_the_first(device, **options)
        for device in ("cuda", "cuda:1")
        for options in (THREADS, FORKED)
    ]
    with patch.object(thread_group, "_taken_over", []), patch.object(torch.cuda, "device", away):
        facts["calls_without_a_device"] = calls_of_the_first("cuda:1", **THREADS)
    facts["locks"] = locks()
    facts["wrong"] = wrong()
    facts["reserved"] = torch.cuda.memory_reserved() / MEBI
    facts["out_of_memory"] = out_of_memory()
    print(json.dumps(facts), flush=True)
    end_at_once()  # the stand-in ends with nobody


if __name__ == "__main__":
    sys.exit(main())
