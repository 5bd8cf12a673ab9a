"""Check batches on torch's other allocators of device memory, each in a program of its own: which
one there is, is settled when a process begins to use CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..loader.dataloader import DataLoader
from .programs import json_of
from .races import MEBI, Filled, num_wrong

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .gpu import Gpu
    from .sheet import Sheet

ALLOCATORS = {
    "expandable_segments": "expandable_segments:True",
    "cuda_malloc_async": "backend:cudaMallocAsync",
}
_PATIENCE_SECONDS = 90.0

PROGRAM = """
import json
from spdl_torch.check_gpu.allocators import found_here
from spdl_torch.check_gpu.gpu import CudaGpu
if __name__ == "__main__":
    print(json.dumps(found_here(CudaGpu())))
"""


def check_allocators(
    sheet: Sheet, allocators: Mapping[str, str] = ALLOCATORS, program: str = PROGRAM
) -> None:
    """Drop batches while late kernels read them, where memory comes from each."""
    for name, setting in allocators.items():
        environ = {"PYTORCH_CUDA_ALLOC_CONF": setting}  # the older name, which every torch knows
        found = json_of(sheet, f"race_{name}", program, _PATIENCE_SECONDS, **environ)
        if found is None:
            continue
        if name not in found["allocators"]:
            sheet.skip(f"race_{name}", "this system does not have it")
            continue
        sheet.at_most(f"race_{name}", found["wrong"], 0)


def found_here(
    gpu: Gpu, *, device: str = "cuda", num_batches: int = 100, num_bytes: int = 4 * MEBI
) -> dict[str, object]:
    """Return how many batches were wrong in this process, and what its memory came from."""
    data, wrong = Filled([num_bytes] * num_batches), 0
    for batch_size in (None, 1):
        loader = DataLoader(
            data, batch_size=batch_size, num_workers=2, isolation="thread", device=device
        )
        wrong += num_wrong(gpu, loader, data.expected())
    return {"wrong": wrong, "allocators": _allocators_here()}


def _allocators_here() -> list[str]:
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        return ["cuda_malloc_async"]
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # untyped in torch
    is_expandable = any(segment.get("is_expandable") for segment in segments)
    return ["expandable_segments"] if is_expandable else []
