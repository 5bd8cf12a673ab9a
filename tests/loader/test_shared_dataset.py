"""A dataset's large arrays and tensors exist once, however many children have it pickled."""

from __future__ import annotations

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
import torch.utils.data
from _forks import found_in_fork
from _gates import until
from _isolated import nothing_left
from _isolation_data import Contents, Layouts, Table, as_list, mapped_blocks
from _loader_helpers import assert_threads_end

import spdl_torch
from spdl_torch.data.child_process import shared_blocks
from spdl_torch.data.child_process.shared_blocks import SharedBlocks

__all__ = ["nothing_left"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="looks into /proc"),
]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_block_left():
    """Neither a mapping nor a descriptor outlives a test."""
    assert not num_files()
    yield
    assert_threads_end()
    assert not mapped_blocks()
    assert not num_files()


def num_files():
    """The descriptors of shared blocks in this process."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += "spdl-torch-data" in os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own, or another thread's
            continue
    return found


def loader_of(dataset, kind=spdl_torch.DataLoader, **options):
    options = {"num_workers": 2, "collate_fn": as_list, **options}
    return kind(dataset, multiprocessing_context="forkserver", **options)


class Tagged(np.ndarray):
    """A subclass, which pickle handles by itself."""


def contents(folder):
    """Large and small arrays and tensors of every form, and some that are one."""
    array = np.arange(MIB // 2, dtype=np.float32).reshape(512, 1024)
    tensor = torch.arange(MIB // 2).reshape(1024, 512)
    read_only, small_read_only = array.copy(), array[0, :8].copy()
    read_only.flags.writeable = small_read_only.flags.writeable = False
    dates = np.zeros(MIB, dtype="datetime64[s]")
    records = np.zeros(MIB, dtype=[("a", "i4"), ("b", "f8")])
    memory_map = np.memmap(folder / "map", np.uint8, "w+", shape=2 * MIB)
    memory_map[-3:] = 7
    return {
        "array": array,
        "array_again": array,
        "view": array[1:],
        "fortran": np.asfortranarray(array),
        "strided": array[:, ::2],
        "reversed": array[::-1],
        "read_only": read_only,
        "small_read_only": small_read_only,
        "dates": dates,
        "records": records,
        "tagged": array.view(Tagged),
        "memory_map": memory_map,
        "tensor": tensor,
        "tensor_again": tensor,
        "tensor_view": tensor[1:],
        "transposed": tensor.t(),
        "expanded": torch.ones(1, 1024).expand(1024, 1024),
        "half": torch.ones(MIB, dtype=torch.bfloat16),
        "of_array": torch.from_numpy(array.copy()),
        "small": torch.arange(4),
    }


def test_contents_are_those_of_torchs_workers(tmp_path):
    """Types, forms, values, whether they can be written, and which are one."""
    dataset = Contents(**contents(tmp_path))
    ours = list(loader_of(dataset, num_workers=1))
    theirs = list(loader_of(dataset, torch.utils.data.DataLoader, num_workers=1))
    for mine, expected in zip(ours[0][0], theirs[0][0], strict=True):
        assert mine == expected


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support", "ignore:Sparse invariant checks")
def test_sparse_tensors_are_those_of_torchs_workers(context):
    """Of every layout, small and large."""
    dense = torch.arange(36.0).reshape(6, 6)
    dataset = Layouts(
        coo=dense.to_sparse(),
        coo_of_nothing=torch.zeros(3).to_sparse(),
        not_coalesced=torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
        large=torch.ones(MIB // 8).to_sparse(),
        csr=dense.to_sparse_csr(),
        csc=dense.to_sparse_csc(),
        bsr=dense.to_sparse_bsr((2, 3)),
        bsc=dense.to_sparse_bsc((2, 3)),
        strided=dense,
    )
    (expected,) = torch.utils.data.DataLoader(
        dataset, num_workers=1, collate_fn=as_list, multiprocessing_context="forkserver"
    )
    (found,) = spdl_torch.DataLoader(
        dataset, num_workers=1, collate_fn=as_list, multiprocessing_context=context
    )
    assert found == expected == [dataset[0]]


def test_blocks_exist_once_and_writes_stay_in_their_child():
    """All children map one file; none sees what another one wrote, nor does the trainer."""
    dataset = Table()
    found = [sample for (sample,) in loader_of(dataset, rng="worker")]
    pids = {pid for pid, _, _ in found}
    inodes = {inode for _, _, mapped in found for inode in mapped}
    assert len(pids) == 2
    assert len(inodes) == 1
    first_of_each = {pid: before for pid, before, _ in reversed(found)}
    assert set(first_of_each.values()) == {(0, 0)}
    assert dataset.array[0, 0] == dataset.tensor[0] == 0


def test_blocks_lie_in_the_pickle_where_no_descriptor_can_be_given(monkeypatch):
    """The test above would see that there is no file."""
    monkeypatch.setattr(shared_blocks, "CAN_SHARE_BLOCKS", False)
    assert not any(mapped for ((_, _, mapped),) in loader_of(Table()))


def test_arrays_that_are_made_anew_for_each_pickle_exist_once():
    """They are known by what they contain; one that has changed is written again."""
    blocks = SharedBlocks()
    content = np.arange(MIB, dtype=np.uint8)
    first = blocks.put(0, memoryview(content))
    assert blocks.put(0, memoryview(content.copy())) == first
    content[-1] ^= 1
    changed = blocks.put(0, memoryview(content))
    assert changed.offset >= first.offset + first.size
    assert blocks.put(0, memoryview(content)) == changed
    assert blocks.put(1, memoryview(content)) not in (first, changed)
    blocks.close()


@pytest.mark.parametrize("how", ["end", "drop", "error", "killed"])
def test_file_is_freed_however_the_loop_ends(how):
    """The fixture looks; while there are children, the trainer keeps one descriptor."""
    batches = iter(loader_of(Table(), persistent_workers=how == "end"))
    ((pid, _, _),) = next(batches)
    assert num_files() == 1
    if how == "end":
        assert len(list(batches)) == 7
    elif how == "error":
        with pytest.raises(ZeroDivisionError, match="division"):
            deque_of_errors(batches)
    elif how == "killed":
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in {child.pid for child in multiprocessing.active_children()})
        # A new child in its place has the values that the dataset had at iter().
        assert len([sample for (sample,) in batches]) == 7
    del batches


def deque_of_errors(batches):
    """A loop whose step fails."""
    for batch in batches:
        len(batch) / 0


def test_forked_process_keeps_no_block():
    """It starts no child of its parent's pools, and would keep the memory."""
    batches = iter(loader_of(Table()))
    next(batches)
    assert found_in_fork(num_files) == 0
    assert num_files() == 1
    del batches
