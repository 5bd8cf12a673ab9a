"""Check memory use, and graph capture beside a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..engine.failures import notes_of
from ..io._transfer.region import locked_bytes
from ..loader.dataloader import DataLoader
from .races import KIBI, MEBI, Filled, num_wrong, sizes_between

if TYPE_CHECKING:
    from torch import Tensor

    from .gpu import Gpu
    from .sheet import Sheet


def check_capture(sheet: Sheet, num_graphs: int = 50) -> None:
    """Capture graphs, in the default mode, beside a loader that needs more memory each time."""
    data = Filled([(index + 1) * 64 * 1024 for index in range(num_graphs)])
    loader = DataLoader(data, batch_size=None, num_workers=2, isolation="thread", device="cuda")
    place, result, failed, wrong = torch.zeros(1000, device="cuda"), None, 0, 0
    for number, batch in enumerate(loader):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                result = place + 1
        except RuntimeError:
            failed += 1
            continue
        place.fill_(number)
        graph.replay()
        is_right = float(result.sum()) == 1000 * (number + 1)
        wrong += not (is_right and bool((batch == number % 251).all()))
    sheet.at_most("capture_failed", failed, 0)
    sheet.at_most("capture_wrong", wrong, 0)


_SHAPES = 4
"""Different batches, each of which the compiled model meets, and captures, beside the loader."""


def check_compiled(sheet: Sheet, num_batches: int = 40) -> None:
    """Run a model that torch.compile captures in graphs, beside a loader, with batches that it has
    not met before.
    """
    model = torch.nn.Linear(64, 64, device="cuda").requires_grad_(requires_grad=False)
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False)
    try:
        for _ in range(3):
            compiled(torch.zeros(_SHAPES + 1, 64, device="cuda"))
    except Exception as error:  # no compiler, no Triton: its own exceptions are many
        sheet.skip("compiled", f"torch.compile does not work here: {type(error).__name__}")
        return
    data: Any = [
        torch.full((index % _SHAPES + 1, 64), float(index)) for index in range(num_batches)
    ]
    loader = DataLoader[Any](
        data, batch_size=None, num_workers=2, isolation="thread", device="cuda"
    )
    failed = wrong = 0
    for batch in loader:
        try:
            found = compiled(batch).clone()  # its own memory is used again by the next call
        except RuntimeError:
            failed += 1
            continue
        wrong += not torch.allclose(found, model(batch), rtol=1e-3, atol=1e-3)
    sheet.at_most("compiled_failed", failed, 0)
    sheet.at_most("compiled_wrong", wrong, 0)


def check_full_device(sheet: Sheet) -> None:
    """Ask for more than the device has: the error is torch's, says where, and the loop goes on."""
    size = 2 * torch.cuda.get_device_properties(0).total_memory

    def collate(samples: list[int]) -> torch.Tensor:
        # Expanded: it takes no memory on the host.
        return torch.zeros(1).expand(size) if samples == [1] else torch.tensor(samples)

    data: Any = range(3)
    loader = DataLoader(data, num_workers=1, isolation="thread", device="cuda", collate_fn=collate)
    batches = iter(loader)
    missed = int(next(batches).tolist() != [0])
    try:
        next(batches)
        missed += 1
    except torch.OutOfMemoryError as error:
        notes = notes_of(error)
        missed += not any("in the transfer to cuda" in note for note in notes)
    missed += int(next(batches).tolist() != [2])
    sheet.at_most("full_device_faults", missed, 0)


def check_memory(gpu: Gpu, sheet: Sheet, num_batches: int = 500, num_bytes: int = 4 * MEBI) -> None:
    """Launch faster than the device works, and count the batches that it holds.

    It is asked as each batch arrives. The peak would have in it what the check's own kernels take
    for a moment; what is in use then includes batches that were dropped under their kernels.
    """
    data = Filled([num_bytes] * num_batches)
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # now the allocator takes back what earlier checks have used
    before, held = _active_bytes(), list[int]()

    def seen(batch: Tensor) -> Tensor:
        held.append(_active_bytes())
        return batch

    loader = DataLoader(data, batch_size=None, num_workers=2, isolation="thread", device="cuda")
    wrong = num_wrong(gpu, loader, data.expected(), use=seen)
    sheet.at_most("batches_in_device_memory", (max(held) - before) / num_bytes, 12)
    sheet.at_most("batches_wrong_far_ahead", wrong, 0)


def _active_bytes() -> int:
    return int(torch.cuda.memory_stats()["active_bytes.all.current"])


def check_sizes(
    gpu: Gpu, sheet: Sheet, *, num_batches: int = 1000, most_bytes: int = 16 * MEBI
) -> None:
    """Change the size of the batches: pinned memory grows with the largest one, and stays bounded.

    The bound, in batches of that size plus an eighth and the rounding: two slabs for what is
    packed; for what is made there, three more than may be outstanding, these two included, and one
    for each process.
    """
    data = Filled(sizes_between(64 * KIBI, most_bytes, num_batches))
    largest = max(data.sizes) * 9 / 8 + 64 * KIBI
    workers, outstanding = 2, 4
    options: dict[str, Any]
    for name, most, options in (
        ("packed", 2, {"batch_size": None, "isolation": "thread"}),
        ("made", outstanding + 3, {"batch_size": 1, "isolation": "thread"}),
        ("isolated", outstanding + 3 + workers, {"batch_size": 1, "isolation": "process"}),
    ):
        loader = DataLoader(data, num_workers=workers, device="cuda", **options)
        before, pinned = locked_bytes(), list[int]()

        def seen(batch: Tensor, pinned: list[int] = pinned) -> Tensor:
            pinned.append(locked_bytes())
            return batch

        wrong = num_wrong(gpu, loader, data.expected(), use=seen)
        sheet.at_most(f"sizes_{name}_wrong", wrong, 0)
        sheet.at_most(f"sizes_{name}_pinned_batches", (max(pinned) - before) / largest, most)
