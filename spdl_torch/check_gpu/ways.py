"""Races on the other ways to the device: objects that move themselves, pipelines, single calls,
several epochs, and a dataset that is on the device already."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data.dataset import PipelineDataset
from ..io._transfer.region import locked_regions
from ..io._transfer.transfer import transfer_tensor
from ..loader.dataloader import DataLoader
from ..pipeline.builder import PipelineBuilder
from .races import MEBI, Filled, num_wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .gpu import Gpu, StreamKind
    from .sheet import Sheet

EPOCHS = 3


@dataclass
class Moving:
    """A batch that moves itself, and says nothing of its memory."""

    bytes: Tensor

    def to(self, device: Any, non_blocking: bool = False) -> Moving:
        """Move to a device."""
        return Moving(self.bytes.to(device, non_blocking=non_blocking))


def moving(samples: list[Tensor]) -> Moving:
    """Collate, as a trainer's own collate_fn."""
    return Moving(torch.cat(samples))


class OnDevice(Dataset[Tensor]):
    """Samples that are on the device when a worker has made them."""

    thread_safe = True

    def __init__(self, gpu: Gpu, data: Filled) -> None:
        self._gpu, self._data = gpu, data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Tensor:
        return self._gpu.move(self._data[index])


class Way(NamedTuple):
    """A way to the device."""

    batches: Callable[[], Iterable[Any]]
    use: Callable[[Any], Tensor] | None = None
    stream: StreamKind = "default"
    epochs: int = 1


def check_ways(
    gpu: Gpu,
    sheet: Sheet,
    *,
    device: str = "cuda",
    num_batches: int = 100,
    num_bytes: int = 4 * MEBI,
) -> None:
    """Check batches that are dropped while late kernels read them, on each way."""
    data = Filled([num_bytes] * num_batches)
    for name, way in all_ways(gpu, data, device).items():
        wrong = num_wrong(
            gpu, way.batches(), data.expected() * way.epochs, stream=way.stream, use=way.use
        )
        sheet.at_most(f"race_{name}", wrong, 0)


def all_ways(gpu: Gpu, data: Filled, device: str) -> dict[str, Way]:
    """Return them by their names."""
    threads: dict[str, Any] = {"num_workers": 2, "isolation": "thread", "device": device}
    processes = {**threads, "isolation": "process"}

    def stages() -> PipelineBuilder[int, Tensor]:
        return PipelineBuilder().add_source(range(len(data))).pipe(data.__getitem__)

    def epochs_of(**options: Any) -> Iterable[Tensor]:
        loader = DataLoader(data, batch_size=1, **options)
        return itertools.chain.from_iterable(loader for _ in range(EPOCHS))

    def pipeline_of_calls() -> Iterable[Any]:
        calls = stages().pipe(lambda batch: transfer_tensor(batch, device), output_order="input")
        with calls.add_sink().build(num_threads=2).auto_stop() as pipeline:
            yield from pipeline

    return {
        "moves_itself_threads": Way(
            lambda: DataLoader(data, 1, collate_fn=moving, **threads), _bytes_of
        ),
        "moves_itself_processes": Way(
            lambda: DataLoader(data, 1, collate_fn=moving, **processes), _bytes_of
        ),
        "pipeline_dataset": Way(lambda: PipelineDataset(stages().add_sink(), device=device)),
        "transfer_tensor": Way(
            lambda: (transfer_tensor(data[n], device) for n in range(len(data)))
        ),
        "transfer_tensor_in_a_pipeline": Way(pipeline_of_calls),
        "epochs": Way(lambda: epochs_of(**threads), epochs=EPOCHS),
        "persistent_threads": Way(
            lambda: epochs_of(**threads, persistent_workers=True), epochs=EPOCHS
        ),
        "persistent_processes": Way(
            lambda: epochs_of(**processes, persistent_workers=True), epochs=EPOCHS
        ),
        "made_on_the_device": Way(
            lambda: DataLoader(OnDevice(gpu, data), batch_size=None, **threads), stream="side"
        ),
    }


def _bytes_of(batch: Moving) -> Tensor:
    return batch.bytes


def check_kept_memory(
    gpu: Gpu, sheet: Sheet, *, device: str = "cuda", num_batches: int = 50, num_bytes: int = MEBI
) -> None:
    """Check that an epoch begins with the pinned memory of the one before it."""
    data = Filled([num_bytes] * num_batches)
    loader = DataLoader(data, batch_size=1, num_workers=2, isolation="thread", device=device)
    wrong, seen = 0, [set[int](), set[int]()]
    for regions in seen:

        def look(batch: Tensor, regions: set[int] = regions) -> Tensor:
            regions.update(locked_regions())
            return batch

        wrong += num_wrong(gpu, loader, data.expected(), use=look)
    first, second = seen
    sheet.at_most("kept_memory_wrong", wrong, 0)
    # The two slabs grow when a batch is first packed into them, and a piece may be made later.
    sheet.at_most("kept_memory_locked_again", len(second - first), 3)
