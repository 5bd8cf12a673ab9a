"""Copies by several threads: the bytes of one thread, whatever the shape."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from _gates import until
from _lazy_device import backends
from hypothesis import given, settings
from hypothesis import strategies as st

from spdl_torch.io import Transfer
from spdl_torch.io._transfer import team, transfer
from spdl_torch.io._transfer.slabs import dense_strides

__all__ = ["backends"]

KIBI = 1 << 10


@pytest.fixture
def small_parts(monkeypatch):
    """Tensors of a few kilobytes are large."""
    monkeypatch.setattr(team, "LEAST_BYTES", KIBI)
    monkeypatch.setattr(team, "_PART_BYTES", KIBI // 4)


def shapes():
    return st.lists(st.integers(1, 40), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    shapes(),
    st.permutations(range(4)),
    st.integers(1, 3),
    st.sampled_from(
        (
            torch.uint8,
            torch.bfloat16,
            torch.float32,
            torch.int64,
            torch.complex128,
            torch.bool,
        )
    ),
)
def test_bytes_are_those_of_one_thread(shape, order, step, dtype):
    """Of tensors with holes, permuted, of every size of element; each byte is written once."""
    source = torch.randint(0, 2, shape).to(dtype)[..., ::step]
    source = source.permute([dim for dim in order if dim < source.ndim])
    target = torch.empty_strided(source.shape, dense_strides(source), dtype=dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(team, "LEAST_BYTES", 0)
        patched.setattr(team, "_PART_BYTES", KIBI // 4)
        parts = team.parts_of(target, source)
        assert sum(part.numel() for part, _ in parts) == source.numel()
        assert team.Team(3).copy(target, source)
    assert torch.equal(target, source)


@pytest.mark.parametrize(
    ("num_threads", "kibi", "is_copied"), [(3, 4, True), (3, 0.5, False), (1, 4, False)]
)
def test_small_tensors_and_small_machines_need_no_team(small_parts, num_threads, kibi, is_copied):
    """The caller copies those itself."""
    source = torch.ones(int(kibi * KIBI), dtype=torch.uint8)
    target = torch.zeros_like(source)
    assert team.Team(num_threads).copy(target, source) is is_copied
    assert bool(target.all()) is is_copied


def test_several_threads_copy_at_once(small_parts, monkeypatch):
    """Each waits in its first part for the others; what was copied is whole."""
    together, names = threading.Barrier(3, timeout=30), set()
    alone = team.copy_alone

    def meeting(target, source):
        if threading.current_thread().name not in names:
            names.add(threading.current_thread().name)
            together.wait()
        alone(target, source)

    monkeypatch.setattr(team, "copy_alone", meeting)
    source = torch.arange(4 * KIBI, dtype=torch.int32)
    target = torch.zeros_like(source)
    assert team.Team(3).copy(target, source)
    assert torch.equal(target, source)
    assert len(names) == 3


def test_error_of_a_helper_is_the_callers(small_parts, monkeypatch):
    """None is lost with its thread."""

    def failing(target, source):
        raise MemoryError("no page")

    monkeypatch.setattr(team, "copy_alone", failing)
    with pytest.raises(MemoryError, match="no page"):
        team.Team(3).copy(torch.zeros(4 * KIBI), torch.ones(4 * KIBI))


@pytest.mark.parametrize(("cores", "num"), [(1, 1), (2, 1), (3, 2), (4, 3), (64, 4)])
def test_one_core_is_left_to_others(monkeypatch, cores, num):
    """And no more threads copy than memory serves."""
    monkeypatch.setattr(team, "whole_cores", lambda: cores)
    assert team.num_useful() == num


def test_batches_of_a_collate_function_of_ones_own_are_packed_by_a_team(
    backends, small_parts, monkeypatch
):
    """In stage(); its threads end with the transfer."""
    monkeypatch.setattr(transfer, "Team", lambda: team.Team(3))
    copies = Transfer("cuda")
    batch = {"x": torch.rand(300, 7).t(), "y": torch.arange(3)}
    received = copies.stage(batch).receive()
    assert torch.equal(received["x"], batch["x"])
    assert received["x"].stride() == batch["x"].stride()
    assert any(thread.name.startswith("spdl-copy") for thread in threading.enumerate())
    del copies, received
    gc.collect()
    until(lambda: not any(t.name.startswith("spdl-copy") for t in threading.enumerate()))
