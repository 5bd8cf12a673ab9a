"""The functions that transfer: which device is meant on which thread, who packs, which stream
copies, what is asked of CUDA where there is none."""

from __future__ import annotations

import gc
import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support.datasets import Images
from support.gates import in_thread, result_of
from support.gpus import pinned
from support.isolated import isolated, nothing_left
from support.lazy_device import LazyDevice, install, machine
from support.loaders import ThreadLoader as DataLoader

from spdl_torch import UnsupportedOptionError
from spdl_torch.io import (
    CUDAConfig,
    Transfer,
    cuda_config,
    transfer_buffer,
    transfer_tensor,
    transfer_tensor_h2d,
)
from spdl_torch.io._transfer import cuda
from spdl_torch.io._transfer.slabs import copy_alone
from spdl_torch.loader import opening
from spdl_torch.pipeline import PipelineBuilder

__all__ = ["nothing_left"]

LARGE = 1 << 17


def large(value):
    """An item that one thread would not copy alone if torch did it."""
    return torch.full((LARGE,), float(value))


def test_stage_sends_to_the_device_of_who_starts_the_pipeline(backends, monkeypatch):
    """Not to the one that is current on every new thread."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    machine().set_device_index(2)
    builder = PipelineBuilder().add_source(range(3)).pipe(large).pipe(transfer_tensor)
    assert [int(item[0]) for item in builder.add_sink().build()] == [0, 1, 2]
    assert backends[-1].place.index == 2
    assert machine().used == {2}


def test_pinned_batches_spoil_no_graph(monkeypatch):
    """``pin_memory=True`` locks pages on the thread that made the batch, while another captures."""
    install(device := LazyDevice(), monkeypatch.setattr)

    def pin_memory(batch, _):
        with monkeypatch.context() as torchs:
            # CudaBackend guards its own call: torch's allocator has no such backend.
            torchs.setattr(cuda, "captures_unharmed", nullcontext)
            return pinned(batch)

    monkeypatch.setattr(opening, "_torch_pin_memory", SimpleNamespace(pin_memory=pin_memory))
    batch = torch.full((LARGE,), 7, dtype=torch.uint8)
    with device.capture():
        found = result_of(in_thread(opening.pinned, batch, None))
    assert torch.equal(found, batch)
    assert device.is_locked(found.data_ptr())
    assert not device.violations


@pytest.mark.usefixtures("pins")
def test_transfers_spoil_no_graph(backends):
    """Streams are made, pages locked, copies and the model waited for, memory freed."""

    def transfer():
        copies = Transfer("cuda:1", num_slabs=1)
        locked = pinned(torch.ones(LARGE, dtype=torch.uint8))
        for _ in range(10):  # more than the model may be behind
            copies.stage([torch.ones(1), locked]).receive()
        copies.stage([torch.ones(1)]).synchronize()
        del copies, locked
        gc.collect()

    with machine().capture():
        result_of(in_thread(transfer))
    assert not machine().violations


@given(
    st.sampled_from(["uint8", "bool", "bfloat16", "float32", "int64", "complex64", "complex128"]),
    st.permutations(range(3)),
    st.sets(st.sampled_from(["holes", "expanded", "conjugated"])),
)
def test_copy_is_torchs(dtype, order, kinds):
    """For every size of an entry and any strides, also where it is too large for one thread, and
    where its bits are not its numbers."""
    source = torch.randint(0, 2, (7, 80, 121)).to(getattr(torch, dtype)).permute(order)
    if "holes" in kinds:
        source = source[:, :, ::2]
    if "expanded" in kinds:
        source = source[None].expand(3, *source.shape)
    if source.is_complex():
        source = (source * (1 + 2j)).conj() if "conjugated" in kinds else source
        source = source.imag if "expanded" in kinds else source
    target = torch.zeros(source.shape, dtype=source.dtype)
    target = target.transpose(0, -1).contiguous().transpose(0, -1)
    copy_alone(target, source)
    assert torch.equal(target, source)


@pytest.mark.parametrize("load", [isolated, DataLoader])
def test_cuda_is_not_asked_for_when_batches_stay_on_the_host(load, monkeypatch):
    """It takes time, and in a process that will be forked it must not be touched."""
    for name in ("is_available", "current_device", "device_count", "cudart"):
        monkeypatch.delattr(torch.cuda, name)  # whoever asks fails
    assert len(list(load(Images(8), 4, num_workers=1))) == 2


def test_memory_is_used_when_its_pages_cannot_be_locked(backends):
    """And the error is forgotten: torch would raise it for the next kernel of the same thread."""
    transfer, device = Transfer("cuda"), machine()
    device.is_refusing = True
    region = transfer.limited(1).region(mmap.mmap(-1, 4096))
    assert not region.is_locked
    assert device.last_error == 0
    assert region.array(10).tolist() == [0] * 10


def test_transfer_tensor_shares_a_ring_between_threads(backends):
    """One stream and one set of slabs for a device, whichever threads call."""
    calls = [in_thread(transfer_tensor, torch.full((3,), k), "cuda:0") for k in range(6)]
    assert [result_of(call).tolist() for call in calls] == [[k] * 3 for k in range(6)]
    transfer_tensor_h2d(torch.ones(1), torch.device("cuda"))
    transfer_tensor(torch.ones(1), 0)
    transfer_tensor(torch.ones(1), cuda_config(0))
    assert len(backends) == 1
    transfer_tensor(torch.ones(1), cuda_config(0, stream=0))
    assert [(backend.place.index, backend.stream) for backend in backends] == [(0, 2), (0, 0)]


@pytest.mark.parametrize(
    ("rank", "num_devices", "device"), [("3", 4, 3), (None, 4, 0), ("3", 1, 0), ("3", 2, None)]
)
def test_transfer_tensor_goes_to_the_device_of_the_rank(
    backends, monkeypatch, rank, num_devices, device
):
    """As SPDL does: LOCAL_RANK says which. Where a launcher shows each rank one device, that is its
    own; otherwise there is none."""
    monkeypatch.setattr(LazyDevice, "num_devices", num_devices)
    monkeypatch.setenv("LOCAL_RANK", rank) if rank else monkeypatch.delenv("LOCAL_RANK", False)
    if device is None:
        with pytest.raises(RuntimeError, match="LOCAL_RANK is 3, but torch sees 2 CUDA devices"):
            transfer_tensor(torch.ones(1))
    else:
        transfer_tensor(torch.ones(1), num_caches=2)
        assert [backend.place.index for backend in backends] == [device]


def test_transfer_tensor_leaves_the_batch_when_the_device_is_the_cpu():
    """A script runs on a machine without CUDA; CUDA is not asked for."""
    batch = {"x": torch.ones(2), "n": "name"}
    assert transfer_tensor(batch, "cpu") is batch


@pytest.mark.parametrize(
    "buffer",
    [np.arange(6).reshape(2, 3), np.broadcast_to(np.arange(3), (2, 3)), torch.ones(2, 3), [1, 2]],
    ids=["array", "read-only", "tensor", "list"],
)
def test_transfer_buffer_takes_arrays_and_tensors(backends, buffer):
    """Equal in dtype and values."""
    received = transfer_buffer(buffer, device_config=cuda_config(1))
    assert backends[0].place.index == 1
    assert received.tolist() == (buffer if isinstance(buffer, list) else buffer.tolist())


def test_cuda_config_is_called_as_spdls():
    """Positional or by name; torch's own allocator, which SPDL's users pass, is the one in use."""
    pair = (torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete)
    config = cuda_config(1, 2, pair)
    assert config == cuda_config(device_index=1, allocator=pair) == CUDAConfig(1, 2, pair)
    assert config.device == torch.device("cuda", 1)
    with pytest.raises(AttributeError, match="cannot assign"):
        config.device_index = 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cuda_config(0, 2, (max, min)), UnsupportedOptionError, "allocator must be None"),
        (lambda: cuda_config("0"), TypeError, "device_index must be an int, got '0'"),
        (lambda: cuda_config(-1), ValueError, "device_index must be >= 0, got -1"),
        (lambda: Transfer("mps"), UnsupportedOptionError, "Transfer: device must be .* got 'mps'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(call, error, message):
    """Before anything is loaded."""
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("torchs", "message"),
    [
        ({"is_available": False}, "'cuda:1' needs CUDA, and torch finds none here"),
        # There is a GPU, and advice to leave it out would be wrong.
        ({"_is_in_bad_fork": True}, '\'cuda:1\' cannot be .* forked .* "spawn" or "forkserver"'),
        ({"is_available": True, "device_count": 1}, "'cuda:1' does not exist: torch sees 1 CUDA"),
    ],
)
def test_error_says_why_there_is_no_such_device(monkeypatch, torchs, message):
    """And what to do instead."""
    for name, answer in torchs.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    for call in (
        lambda: Transfer("cuda:1"),
        lambda: transfer_tensor(torch.ones(1), "cuda:1"),
        lambda: transfer_buffer(np.ones(1), device_config=cuda_config(1)),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.parametrize("makes_streams", [True, False], ids=["CUDA", "ROCm"])
def test_copy_stream_is_one_a_device_and_nobody_elses(backends, monkeypatch, makes_streams):
    """Memory that the allocator keeps for it is found again by the next epoch. torch hands out 32
    streams of a priority in turn: ours is none of them, however many a program makes."""
    if not makes_streams:
        monkeypatch.setattr(cuda, "cuda_library", lambda: None)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    stream = cuda.CudaBackend(first).own_stream
    assert cuda.CudaBackend(first).own_stream is stream
    assert cuda.CudaBackend(second).own_stream is not stream
    assert stream not in [cuda.torch.cuda.Stream(0) for _ in range(80)]
    with cuda.captures_unharmed():
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.skipif(torch.version.cuda is None, reason="torch is not built for CUDA")
def test_runtime_is_torchs_own():
    """Its functions are found, and called as they are declared; without a GPU they refuse."""
    assert cuda.cuda_library() is not None
    assert cuda.new_stream() is None
    with cuda.captures_unharmed():
        pass
