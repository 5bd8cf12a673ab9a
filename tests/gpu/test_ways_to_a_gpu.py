"""Batches are whole on every way to the device, in every order of copies, kernels and memory that
is used again: what is packed, moves itself, was made there, or leaves views of lent memory.

Each test runs on a GPU (``pytest -m cuda``), and with less to load on the stand-in for one.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from support.datasets import Made
from support.gpus import (
    CUDA,
    MEBI,
    ORDERS,
    Plain,
    filled,
    is_pinned,
    keep_until_copied,
    moved,
    num_wrong,
    pinned,
)
from support.lazy_device import LazyStream, machine, slabs

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.io import Transfer, batch_storage, transfer_tensor
from spdl_torch.pipeline import PipelineBuilder

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")

THREADS = {"num_workers": 2, "isolation": "thread"}
PROCESSES = {"num_workers": 2, "isolation": "process"}
EPOCHS = 3


class Moving:
    """A batch that moves itself, and says nothing of its memory."""

    def __init__(self, samples):
        (self.bytes,) = samples

    def to(self, device, non_blocking=False):
        return type(self)([moved(self.bytes, non_blocking)])


class Guarding(Moving):
    """One that guards its memory, as graphs of PyG do."""

    def record_stream(self, stream):
        self.bytes.record_stream(stream)


class Pinnable(Moving):
    """One that can be pinned, as torch asks of a batch's own class; who made it may have."""

    def pin_memory(self):
        return self if is_pinned(self.bytes) else PinnedByTorch([pinned(self.bytes)])


class PinnedByTorch(Moving):
    def to(self, device, non_blocking=False):
        found = super().to(device, non_blocking)
        keep_until_copied(self)
        return found


class Subclass(Plain):
    """A tensor whose class is its own, and which is not yet on the device."""

    @property
    def device(self):
        return torch.device("cpu" if machine() is None else "meta")

    def to(self, device, non_blocking=False):
        return moved(self.as_subclass(torch.Tensor), non_blocking)


def guarding(samples):
    """From where it can be copied later, as the others are."""
    return Guarding([pinned(samples[0])])


def subclass(samples):
    return pinned(samples[0]).as_subclass(Subclass)


def pinned_view(samples):
    """Of memory whose beginning, by which torch knows it, the tensor does not have."""
    padded = torch.cat([samples[0][:1], samples[0]])
    return torch.from_numpy(pinned(padded).numpy()[1:])


def array_beside(samples):
    """Beside what is moved the loop finds an array, and begins a copy of its own from it."""
    return {"moved": samples[0], "x": samples[0].numpy()}


def hidden_beside(samples):
    """The same of a tensor in an object of any class."""
    return {"moved": samples[0], "x": SimpleNamespace(x=samples[0])}


def lent(data, collate):
    """A pipeline whose items are made in memory that it lends."""

    def make(index):
        return collate([batch_storage().tensor((data.sizes[index],)).fill_(index % 251)])

    return PipelineDataset(stages(data, make).add_sink(), device="cuda")


def made_on_the_device(gpu, data):
    samples = Made(lambda index: gpu.make(data[index]), len(data))
    return DataLoader(samples, batch_size=None, device="cuda", **THREADS)


def stages(data, make=None):
    return PipelineBuilder().add_source(range(len(data))).pipe(make or data.__getitem__)


def loaded(data, collate=None, **options):
    return DataLoader(data, 1, collate_fn=collate, device="cuda", **options)


def epochs_of(data, **options):
    loader = loaded(data, **options)
    return itertools.chain.from_iterable(loader for _ in range(EPOCHS))


def pipeline_of_calls(data):
    calls = stages(data).pipe(lambda batch: transfer_tensor(batch, "cuda"), output_order="input")
    with calls.add_sink().build(num_threads=2).auto_stop() as pipeline:
        yield from pipeline


def one_by_one(data):
    for index in range(len(data)):
        yield transfer_tensor(data[index], "cuda")


WAYS = {
    "moves_itself_threads": lambda _, data: loaded(data, Moving, **THREADS),
    "moves_itself_processes": lambda _, data: loaded(data, Moving, **PROCESSES),
    "guards_itself": lambda _, data: loaded(data, guarding, **THREADS),
    "subclass": lambda _, data: loaded(data, subclass, **THREADS),
    "pinned_late": lambda _, data: loaded(data, Pinnable, **THREADS),
    "pinned_pipeline": lambda _, data: lent(data, Pinnable),
    "pinned_processes": lambda _, data: loaded(data, Pinnable, **PROCESSES),
    "pinned_view": lambda _, data: loaded(data, pinned_view, **THREADS),
    "copied_processes": lambda _, data: DataLoader(data, None, device="cuda", **PROCESSES),
    "loops_own": lambda _, data: map(moved, DataLoader(data, None, pin_memory=True, **PROCESSES)),
    "array_pipeline": lambda _, data: lent(data, array_beside),
    "array_processes": lambda _, data: loaded(data, array_beside, **PROCESSES),
    "hidden_pipeline": lambda _, data: lent(data, hidden_beside),
    "pipeline_dataset": lambda _, data: PipelineDataset(stages(data).add_sink(), device="cuda"),
    "transfer_tensor": lambda _, data: one_by_one(data),
    "transfer_tensor_in_a_pipeline": lambda _, data: pipeline_of_calls(data),
    "epochs": lambda _, data: epochs_of(data, **THREADS),
    "persistent_threads": lambda _, data: epochs_of(data, **THREADS, persistent_workers=True),
    "persistent_processes": lambda _, data: epochs_of(data, **PROCESSES, persistent_workers=True),
    "made_on_the_device": made_on_the_device,
}
STREAMS = {"made_on_the_device": ["side"], "pinned": ["default", "side"]}
STREAMS |= dict.fromkeys(("array", "hidden"), STREAMS["pinned"])


def tensor_of(batch):
    """What the kernel reads; the loop moves what was not moved."""
    if isinstance(batch, dict):
        return moved(torch.as_tensor(getattr(batch["x"], "x", batch["x"])))
    return getattr(batch, "bytes", batch)


@pytest.mark.usefixtures("pins")
@pytest.mark.parametrize("gpu", [*ORDERS, CUDA], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_batches_are_whole_on_every_way(gpu, way):
    """Objects that move themselves, pipelines, single calls, several epochs, and a dataset that is
    on the device already. What can be pinned is: then who trains waits for no copy."""
    data = filled(gpu, 100, 4 * MEBI)
    wrong = num_wrong(
        gpu,
        WAYS[way](gpu, data),
        data.expected() * (EPOCHS if way.startswith(("epochs", "persistent")) else 1),
        streams=STREAMS.get(way) or STREAMS.get(way.partition("_")[0], ["default"]),
        use=tensor_of,
    )
    assert wrong == 0
    if machine() is not None:
        assert machine().violations == []
        assert machine().num_waits == 0 or not way.startswith("pinned")


@pytest.mark.usefixtures("pins")
@pytest.mark.parametrize("gpu", [*ORDERS, CUDA], indirect=True)
@pytest.mark.parametrize("kind", [torch.cat, Moving, Pinnable])
def test_transferred_tensor_is_there_for_every_stream(gpu, kind):
    """Which waits for nothing; also where it has moved by itself."""
    data, batches, totals = filled(gpu, 20, MEBI), [], []
    for index in range(len(data)):
        batches.append(tensor_of(transfer_tensor(kind([data[index]]), "cuda")))
        with gpu.on(gpu.stream("side")):
            totals.append(gpu.total(batches[-1]))
    assert gpu.values(totals) == data.expected()


@pytest.mark.usefixtures("pins")
@pytest.mark.parametrize(
    ("gpu", "owner", "guard"),
    [
        pytest.param("cuda", torch.Tensor, "record_stream", marks=CUDA.marks),
        ("late", torch.Tensor, "record_stream"),
        ("model", LazyStream, "wait_event"),
        ("late", slabs.Slab, "wait"),
    ],
    indirect=["gpu"],
)
def test_race_is_found_where_the_guard_is_missing(gpu, owner, guard, monkeypatch):
    """Of the allocator, of the reader, of the slab: a check that cannot fail proves nothing. One
    find is proof; where other programs use the GPU, it may take several tries."""
    monkeypatch.setattr(owner, guard, lambda *_: None)
    data, transfer = filled(gpu, 100, MEBI), Transfer("cuda")

    def received():
        for index in range(len(data)):
            yield transfer.stage(data[index]).receive()

    assert any(num_wrong(gpu, received(), data.expected()) for _ in range(5))
