"""Transfers on a real GPU alone, besides what test_on_a_gpu.py and test_gpu_programs.py run there
and on the stand-in for one."""

from __future__ import annotations

import pytest
import torch
from support.loaders import ThreadLoader as DataLoader
from torch.nn.utils.rnn import pack_sequence
from torchvision import tv_tensors

from spdl_torch.io import Transfer, cuda_config, transfer_tensor

pytestmark = pytest.mark.cuda

MEBI = 1 << 20
LATE = 5_000_000
"""GPU clock cycles, some milliseconds: how late kernels run behind their launch."""


def test_copy_is_waited_for_on_a_busy_link():
    """A copy that takes long (1 GiB) is complete for the kernel that reads its end."""
    transfer = Transfer("cuda")
    big = torch.zeros(1 << 28)
    for k in range(1, 5):
        big[-1] = k
        assert transfer.stage(big).receive()[-1].item() == k


def test_reserved_memory_is_flat_over_epochs():
    """What one epoch's copies used is found again by the next: they share a stream."""
    data = [torch.full((MEBI,), float(k)) for k in range(8)]
    loader = DataLoader(data, batch_size=None, num_workers=1, device="cuda")

    def reserved_after_an_epoch():
        for batch in loader:
            batch.sum()
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    first = max(reserved_after_an_epoch() for _ in range(3))
    assert max(reserved_after_an_epoch() for _ in range(40)) <= first + 8 * 4 * MEBI


def test_copy_stream_may_be_the_users_own():
    """As SPDL's ``cuda_config(stream=)``."""
    stream = torch.cuda.Stream()
    config = cuda_config(device_index=0, stream=stream.cuda_stream)
    for k in range(20):
        assert transfer_tensor(torch.full((MEBI,), float(k)), config).sum().item() == k * MEBI


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_thread_that_trains_never_waits_for_the_device(num_workers):
    """With tensors, subclasses, packed sequences and objects that move themselves."""
    data = [
        [
            torch.full((MEBI,), float(k)),
            tv_tensors.Image(torch.full((3, 64, 64), k, dtype=torch.uint8)),
            pack_sequence([torch.full((3,), float(k))]),
            torch.eye(3).mul(k).to_sparse(),
            Pinnable(torch.full((MEBI,), float(k))),
        ]
        for k in range(50)
    ]
    sums = []
    batches = iter(DataLoader(data, batch_size=None, num_workers=num_workers, device="cuda"))
    for _ in range(50):
        # Staging waits for copies, which is the owner's business if there is one.
        torch.cuda.set_sync_debug_mode("error" if num_workers else "default")
        try:
            batch = next(batches)
            torch.cuda._sleep(LATE)
            plain, image, packed, sparse, own = batch
            sums += [plain.sum(), image.double().sum(), packed.data.sum(), own.tensor.sum()]
            sums.append(sparse.values().sum())
            assert isinstance(image, tv_tensors.Image)
            del batch, plain, image, packed, sparse, own
        finally:
            torch.cuda.set_sync_debug_mode("default")
    expected = [value for k in range(50) for value in (k * MEBI, k * 12288, 3 * k, k * MEBI, 3 * k)]
    assert [float(each) for each in sums] == expected


class Pinnable:
    """Moves itself, and can be pinned before."""

    def __init__(self, tensor):
        self.tensor = tensor

    def pin_memory(self):
        return Pinnable(self.tensor.pin_memory())

    def to(self, device, non_blocking=False):
        return Pinnable(self.tensor.to(device, non_blocking=non_blocking))
