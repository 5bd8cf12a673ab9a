"""Which device is meant on which thread, who packs, what is asked of CUDA where there is none."""

from __future__ import annotations

import mmap
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from _gates import in_thread, result_of
from _gpus import pinned
from _isolated import bits, isolated, nothing_left
from _isolation_data import Images
from _lazy_device import LazyDevice, backends, install, machine
from _loader_helpers import ThreadLoader as DataLoader, no_thread_left
from hypothesis import given, settings, strategies as st

from spdl_torch import PipelineDataset
from spdl_torch.io import Transfer, transfer_tensor
from spdl_torch.io._transfer import cuda
from spdl_torch.io._transfer.slabs import copy_alone
from spdl_torch.loader import opening
from spdl_torch.pipeline import PipelineBuilder

__all__ = ["backends", "no_thread_left", "nothing_left"]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64]
LARGE = 1 << 17


def large(value):
    """An item that one thread would not copy alone if torch did it."""
    return torch.full((LARGE,), float(value))


# -- which device ----------------------------------------------------------------------------------


def place_of_a_stage(backends):
    """Where ``transfer_tensor`` sends in a pipeline that this thread starts."""
    builder = PipelineBuilder().add_source(range(3)).pipe(large).pipe(transfer_tensor)
    assert [int(item[0]) for item in builder.add_sink().build()] == [0, 1, 2]
    return backends[-1].place.index


def test_stage_sends_to_the_device_of_who_starts_the_pipeline(backends, monkeypatch):
    """Not to the one that is current on every new thread."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    machine().set_device_index(2)
    assert place_of_a_stage(backends) == 2
    assert machine().used == {2}


# -- what the child has written ------------------------------------------------------------------


def where_pinned_batches_are(monkeypatch):
    """Whether ``pin_memory=True`` without a device gives views of slabs, and the batches."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned_as_by_torch)
    are_in_slabs, found = [], []
    for batch in isolated(Images(12), 4, seed=1, pin_memory=True):
        found.append(bits(batch))
        del batch["index"], batch["draws"]
        are_in_slabs.append(num_mapped_slabs_at(batch["image"].data_ptr()))
    return are_in_slabs, found


def pinned_as_by_torch(tensor, device=None):
    """What is locked already stays where it is; the rest is copied into memory of torch's."""
    return tensor if machine().is_locked(tensor.data_ptr()) else tensor.clone()


def num_mapped_slabs_at(address):
    """1 if that is an address of a slab."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        lines = [line.split() for line in file if "spdl-torch-slab" in line]
    ends = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    return sum(start <= address < end for start, end in ends)


def test_pinned_batches_are_not_in_memory_that_the_child_writes(backends, monkeypatch):
    """The loop may copy them without waiting and let them go."""
    are_in_slabs, found = where_pinned_batches_are(monkeypatch)
    assert are_in_slabs == [0, 0, 0]
    assert found == [bits(batch) for batch in DataLoader(Images(12), 4, num_workers=2, seed=1)]


def test_pinned_batches_spoil_no_graph(monkeypatch):
    """``pin_memory=True`` locks pages on the thread that made the batch, while another captures."""
    install(device := LazyDevice(), monkeypatch.setattr)
    pinning = SimpleNamespace(pin_memory=lambda batch, _: pinned(batch))
    monkeypatch.setattr(opening, "_torch_pin_memory", pinning)
    # CudaBackend guards its own call: torch's allocator has no such backend.
    monkeypatch.setattr(cuda.runtime, "captures_unharmed", nullcontext)
    batch = torch.full((LARGE,), 7, dtype=torch.uint8)
    with device.capture():
        found = result_of(in_thread(opening.pinned, batch, None))
    assert torch.equal(found, batch)
    assert device.is_locked(found.data_ptr())
    assert not device.violations


# -- who packs -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.sampled_from([*DTYPES, torch.complex64, torch.complex128]),
    st.permutations(range(3)),
    st.sets(st.sampled_from(["holes", "expanded", "conjugated"])),
)
def test_copy_is_torchs(dtype, order, kinds):
    """For every size of an entry and any strides, also where it is too large for one thread, and
    where its bits are not its numbers."""
    source = torch.randint(0, 2, (7, 80, 121)).to(dtype).permute(order)
    if "holes" in kinds:
        source = source[:, :, ::2]
    if "expanded" in kinds:
        source = source[None].expand(3, *source.shape)
    if dtype.is_complex:
        source = (source * (1 + 2j)).conj() if "conjugated" in kinds else source
        source = source.imag if "expanded" in kinds else source
    target = torch.zeros(source.shape, dtype=source.dtype)
    target = target.transpose(0, -1).contiguous().transpose(0, -1)
    copy_alone(target, source)
    assert torch.equal(target, source)


def torchs_copies(monkeypatch):
    """The thread and the size of each copy by torch, while a pipeline's items go to the device."""
    sizes, copy = [], torch.Tensor.copy_

    def copied(tensor, source, *args):
        sizes.append((threading.current_thread().name, source.numel()))
        return copy(tensor, source, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    builder = PipelineBuilder().add_source(range(3)).pipe(lambda k: (large(k), large(k)[:8]))
    items = list(PipelineDataset(builder.add_sink(), device="cuda"))
    assert [int(item[0][-1]) for item in items] == [0, 1, 2]
    return sizes


def test_packing_wakes_no_team(backends, monkeypatch):
    """The cores are those of the stages, and one thread copies as fast as memory lets it."""
    assert torchs_copies(monkeypatch) == [("spdl-transfer-0", 8)] * 3


# -- where there is no CUDA ----------------------------------------------------------------------


@pytest.fixture
def no_questions(monkeypatch):
    """Whoever asks for CUDA fails."""

    def asked():
        raise AssertionError("CUDA is asked for")

    for name in ("is_available", "current_device", "device_count", "cudart"):
        monkeypatch.setattr(torch.cuda, name, asked)


@pytest.mark.parametrize("load", [isolated, DataLoader])
def test_cuda_is_not_asked_for_when_batches_stay_on_the_host(load, no_questions):
    """It takes time, and in a process that will be forked it must not be touched."""
    assert len(list(load(Images(8), 4, num_workers=1))) == 2


def test_error_says_why_a_forked_process_has_no_cuda(monkeypatch):
    """There is a GPU, and advice to leave it out would be wrong."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match=r"'cuda:1' cannot be .* forked .* \"spawn\" or \"forks"):
        transfer_tensor(large(1), "cuda:1")


def test_memory_is_used_when_its_pages_cannot_be_locked(backends):
    """And the error is forgotten: torch would raise it for the next kernel of the same thread."""
    transfer, device = Transfer("cuda"), machine()
    device.is_refusing = True
    region = transfer.limited(1).region(mmap.mmap(-1, 4096))
    assert not region.is_locked
    assert device.last_error == 0
    assert region.array(10).tolist() == [0] * 10
