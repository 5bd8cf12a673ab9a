"""Check that what loads runs near the GPU where a machine has several sockets, and measure the
copies from memory that is near it and from memory that is not.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import Dataset

from ..data.dataset import PipelineDataset
from ..data.loader.dataloader import DataLoader
from ..io._transfer import cuda
from ..io._transfer.region import Region, mapped
from ..machine.limits import allowed_cores
from ..machine.numa import nodes
from ..pipeline.builder import PipelineBuilder
from .rates import bare_copies, interleaved

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from .sheet import Sheet

_NUM_SAMPLES = 100
_MOST_WORKERS = 4


def check_nodes(sheet: Sheet, num_bytes: int = 38_500_000, rounds: int = 3) -> None:
    """Check the threads and processes of loaders, and measure both copies."""
    num_nodes = len(nodes())
    if num_nodes < 2:
        sheet.skip("nodes", "one NUMA node, or the system does not say")
        return
    backend = cuda.CudaBackend(cuda.resolve(torch.device("cuda")))
    sheet.note("nodes", num_nodes)
    near = backend.near
    if near is None:
        sheet.skip("nodes_gpu", "the GPU's is unknown, or this process may run on one alone")
        return
    sheet.note("nodes_gpu", near.node)
    sheet.note("nodes_gpu_cores", len(near.cores))
    num_workers = min(_MOST_WORKERS, near.room)
    for name, made in _makers(near.cores, num_workers).items():
        far = sum(int(batch.cpu().sum()) for batch in made) if num_workers else 0
        sheet.at_most(f"nodes_far_{name}", far, 0)
    places = {"near": near.cores, "far": allowed_cores() - near.cores}
    ways = {
        name: partial(bare_copies, _locked(backend, num_bytes, cores))
        for name, cores in places.items()
    }
    for name, rate in interleaved(ways, rounds).items():
        sheet.note(f"copy_{name}_gigabytes_per_second", num_bytes * rate / 1e9)


class _IsFar(Dataset[torch.Tensor]):
    """A sample is 1 if the thread that makes it may run away from those cores."""

    thread_safe = True

    def __init__(self, cores: frozenset[int]) -> None:
        self._cores = cores

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([not os.sched_getaffinity(0) <= self._cores], dtype=torch.uint8)


_PLACES: dict[str, Literal["thread", "process"]] = {"threads": "thread", "processes": "process"}


def _makers(cores: frozenset[int], num_workers: int) -> dict[str, Iterable[Any]]:
    """Return what loads, by its name."""
    data = _IsFar(cores)
    stages = PipelineBuilder().add_source(range(_NUM_SAMPLES))
    stages = stages.pipe(data.__getitem__, concurrency=max(1, num_workers))
    found: dict[str, Iterable[Any]] = {
        name: DataLoader(data, num_workers=num_workers, isolation=isolation, device="cuda")
        for name, isolation in _PLACES.items()
    }
    return {**found, "stages": PipelineDataset(stages.add_sink(), device="cuda")}


def _locked(backend: cuda.CudaBackend, num_bytes: int, cores: frozenset[int]) -> Tensor:
    """Return pinned memory near these cores."""
    return torch.from_numpy(Region(mapped(num_bytes, cores), backend).array(num_bytes))
