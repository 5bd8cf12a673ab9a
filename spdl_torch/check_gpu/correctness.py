"""Check that batches on the device equal those of torch's DataLoader, moved by the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader as TorchLoader, TensorDataset

from ..io._transfer.transfer import Transfer
from ..loader.dataloader import DataLoader

if TYPE_CHECKING:
    from torch import Tensor

    from .gpu import Gpu
    from .sheet import Sheet


def check_batches(gpu: Gpu, sheet: Sheet, device: str = "cuda") -> None:
    """Check tensors of every common dtype and layout, in one batch: they are there, and equal."""
    image = torch.rand(2, 3, 40, 48)
    given: dict[str, Tensor] = {
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "permuted": image.permute(3, 1, 0, 2),
        "holes": image[..., ::3],
        "expanded": image[:1].expand(5, 3, 40, 48),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "conjugate": torch.rand(4, dtype=torch.complex64).conj(),
        "large": torch.arange(1 << 20),
    }
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float64):
        given[str(dtype)] = torch.arange(100).to(dtype)
    transfer = Transfer(device)  # kept: freeing one waits for its copies
    received = transfer.stage(given).receive()
    wrong = 0
    for name, tensor in given.items():
        expected, found = tensor.to(received[name].device, copy=True), received[name]
        wrong += not (_arrived(gpu, expected, found) and expected.stride() == found.stride())
    sheet.at_most("batch_equals_to", wrong, 0)


def check_loaders(gpu: Gpu, sheet: Sheet, device: str = "cuda") -> None:
    """Check the loader's batches, of threads and of processes: they are there, and torch's."""
    data = TensorDataset(torch.arange(96_000.0).view(96, 1000), torch.arange(96))
    expected = list(TorchLoader(data, batch_size=10))
    options: dict[str, Any]
    for name, options in (
        ("0_workers", {"num_workers": 0}),
        ("4_threads", {"num_workers": 4, "isolation": "thread"}),
        ("2_processes", {"num_workers": 2, "isolation": "process"}),
    ):
        found = list(DataLoader(data, batch_size=10, device=device, **options))
        wrong = abs(len(found) - len(expected))
        for batch, other in zip(found, expected, strict=False):
            pairs = zip(other, batch, strict=True)
            wrong += not all(_arrived(gpu, one, two) for one, two in pairs)
        sheet.at_most(f"loader_equals_torchs_{name}", wrong, 0)


def _arrived(gpu: Gpu, expected: Tensor, found: Tensor) -> bool:
    is_there = found.nbytes == 0 or gpu.index_of(found) is not None
    return is_there and same(expected, found)


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, wherever they are, have one type and equal values."""
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
