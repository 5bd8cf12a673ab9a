"""Check that a loader leaves other GPUs alone: a context takes 500 MB of each, on every rank.

The check is a program of its own: in this process, earlier checks have already used device 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..data.dataset import PipelineDataset
from ..loader.dataloader import DataLoader
from ..pipeline.builder import PipelineBuilder
from .programs import json_of
from .races import MEBI, Filled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from .gpu import Gpu
    from .sheet import Sheet

NUM_BATCHES = 20
_PATIENCE_SECONDS = 120.0

PROGRAM = """
import json
from spdl_torch.check_gpu.devices import num_elsewhere
from spdl_torch.check_gpu.gpu import CudaGpu
if __name__ == "__main__":
    print(json.dumps(num_elsewhere(CudaGpu(), {device})))
"""


def check_devices(sheet: Sheet, program: str = PROGRAM) -> None:
    """Load to the last device while the first is current: nothing must appear on any other."""
    last = torch.cuda.device_count() - 1
    if last == 0:
        sheet.skip("devices", "one GPU")
        return
    found = json_of(sheet, "devices", program.format(device=last), _PATIENCE_SECONDS)
    for name, number in (found or {}).items():
        sheet.at_most(f"devices_{name}_elsewhere", number, 0)


def num_elsewhere(gpu: Gpu, device: int) -> dict[str, int]:
    """Return how many batches and new contexts were on other devices, by the way they got there."""
    data = Filled([MEBI] * NUM_BATCHES)
    place: dict[str, Any] = {"device": f"cuda:{device}"}
    source = PipelineBuilder().add_source(range(NUM_BATCHES))
    ways: dict[str, Callable[[], Iterable[Tensor]]] = {
        "inline": lambda: DataLoader(data, num_workers=0, **place),
        "threads": lambda: DataLoader(data, num_workers=2, isolation="thread", **place),
        "processes": lambda: DataLoader(data, num_workers=2, isolation="process", **place),
        "pipeline": lambda: PipelineDataset(source.pipe(data.__getitem__).add_sink(), **place),
    }
    found, known = dict[str, int](), {device}
    for name, batches in ways.items():
        places = [gpu.index_of(batch) for batch in batches()]
        contexts = _devices_in_use()
        wrong = sum(each != device for each in places) + abs(NUM_BATCHES - len(places))
        found[name] = wrong + len(contexts - known)
        known |= contexts
    return found


def _devices_in_use() -> set[int]:
    """Return the devices on which this process has a context."""
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # not in its stubs
    return {index for index in range(torch.cuda.device_count()) if has_context(index)}
