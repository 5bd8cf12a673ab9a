"""Check that nothing writes into a batch that was dropped while its kernels wait.

Every batch has one number in all its bytes. A delayed kernel adds them up; by then the loop has
long dropped the batch, and the loader has moved on. With the guard disabled, the same check has to
find wrong sums: a check that cannot fail proves nothing.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from ..io._transfer.transfer import Transfer
from ..loader.dataloader import DataLoader
from .gpu import STREAMS, unguarded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from .gpu import Gpu, StreamKind
    from .sheet import Sheet

KIBI = 1 << 10
MEBI = 1 << 20
_SELF_TESTS = 5


class Filled(Dataset[torch.Tensor]):
    """Sample ``k`` is a tensor of ``sizes[k]`` bytes, each of them ``k`` modulo 251."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.sizes[index],), index % 251, dtype=torch.uint8)

    def expected(self) -> list[float]:
        """Return the sum of each sample."""
        return [float(index % 251 * size) for index, size in enumerate(self.sizes)]


def sizes_between(least: int, most: int, count: int) -> list[int]:
    """Return sizes in bytes, as many between 1 and 2 MB as between 10 and 20; the same each time.

    Half of them repeat the one before: memory is used again where sizes are equal.
    """
    rng, sizes = random.Random(count), list[int]()
    for number in range(count):
        size = int(least * (most / least) ** rng.random())
        sizes.append(sizes[-1] if number % 2 else size)
    return sizes


def num_wrong(
    gpu: Gpu,
    batches: Iterable[Tensor],
    expected: Sequence[float],
    *,
    stream: StreamKind = "default",
    use: Callable[[Tensor], Tensor] | None = None,
) -> int:
    """Return how many batches were wrong when a delayed kernel read them, or missing.

    use: called with each batch, for the tensor that the kernel reads; None = the batch.
    """
    totals: list[Any] = []
    with gpu.on_stream(stream):
        for batch in batches:
            gpu.make_late()
            totals.append(gpu.total(batch if use is None else use(batch)))
            del batch
        found = gpu.values(totals)
    wrong = sum(one != other for one, other in zip(found, expected, strict=False))
    return wrong + abs(len(expected) - len(found))


def check_races(
    gpu: Gpu,
    sheet: Sheet,
    *,
    device: str = "cuda",
    num_batches: int = 2000,
    most_bytes: int = 64 * MEBI,
    workers: Sequence[int] = (0, 4, 16),
) -> None:
    """Check loaders without workers and with threads, on every kind of stream."""
    share = max(1, num_batches // (len(STREAMS) * len(workers)))
    data = Filled(sizes_between(64 * KIBI, most_bytes, share))
    for stream in STREAMS:
        for num_workers in workers:
            loader = _loader(data, num_workers, isolation="thread", device=device)
            wrong = num_wrong(gpu, loader, data.expected(), stream=stream)
            sheet.at_most(f"race_drop_{stream}_{num_workers}_workers", wrong, 0)
            # Batches of one sample, which are made in pinned memory that is soon used again.
            loader = _loader(data, num_workers, batch_size=1, isolation="thread", device=device)
            wrong = num_wrong(gpu, loader, data.expected(), stream=stream)
            sheet.at_most(f"race_pinned_{stream}_{num_workers}_workers", wrong, 0)


def check_isolation(
    gpu: Gpu, sheet: Sheet, *, num_batches: int = 200, num_bytes: int = 4 * MEBI
) -> None:
    """Check batches from processes, which write into memory that the GPU copies from: batches whose
    samples are copied there, batches that are made there, and those that the loop itself copies.
    """
    data = Filled([num_bytes] * num_batches)
    ways: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor] | None]] = {
        "device": ({"device": "cuda"}, None),
        "device_made": ({"device": "cuda", "batch_size": 1}, None),
        "pin_memory": ({"pin_memory": True}, gpu.move),
    }
    for name, (options, use) in ways.items():
        loader = _loader(data, 2, isolation="process", **options)
        wrong = num_wrong(gpu, loader, data.expected(), use=use)
        sheet.at_most(f"race_isolation_{name}", wrong, 0)


def check_self_test(gpu: Gpu, sheet: Sheet, device: str = "cuda") -> None:
    """Check that the race is found where the guard is missing. One find is proof; where other
    programs use the GPU, it may take several tries.
    """
    data = Filled([MEBI] * 100)
    transfer = Transfer(device)
    wrong = 0
    with unguarded():
        for _ in range(_SELF_TESTS):
            staged = (transfer.stage(data[index]).receive() for index in range(len(data)))
            wrong = num_wrong(gpu, staged, data.expected())
            if wrong:
                break
    sheet.at_least("race_self_test", wrong, 1)


def _loader(data: Filled, num_workers: int, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(data, **{"batch_size": None, "num_workers": num_workers, **options})
