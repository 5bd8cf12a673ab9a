"""A dataset that is pickled on its way to the workers is in them what it is in torch's."""

import os

import numpy as np
import pytest
import torch
import torch.utils.data
from _isolated import nothing_left
from _isolation_data import Contents, Layouts, as_list

import spdl_torch

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="looks into /proc")

MIB = 1 << 20


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


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support", "ignore:Sparse invariant checks")
def test_sparse_tensors_are_those_of_torchs_workers():
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
    (expected,) = loader_of(dataset, torch.utils.data.DataLoader, num_workers=1)
    (found,) = loader_of(dataset, num_workers=1)
    assert found == expected == [dataset[0]]
