"""``transfer``: how fast batches get from ordinary memory to the GPU, beside a bare pinned copy.

The same batch, 256 uint8 pictures of 224 x 224 with their labels (38.5 MB), goes to the device
again and again, and a short kernel reads each copy. None is started before the clock starts, and
the device has nothing left to do when it stops. ``pinned copy`` copies from one pinned buffer to
one on the device, on a stream of its own, and nothing reads it: what the link can do.

What loading costs a training run on the GPU is measured by ``step``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from pathlib import Path

    from .tables import BenchOptions

BATCH = 256
PIXELS = 224
_BATCHES_A_SECOND = 100
"""Copies for each of ``--seconds``: about what a loop without pinned memory makes."""
_LINK = "pinned copy"


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            "transfer measures copies to a GPU, and torch finds no CUDA device here "
            "(torch.cuda.is_available() is False)."
        )
    return {
        "device": torch.cuda.get_device_name(),
        "batches": 4 if options.smoke else max(30, round(_BATCHES_A_SECOND * options.seconds)),
        "batch_size": 8 if options.smoke else BATCH,
    }


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one way, or the link alone."""
    from .device_copies import make_batch  # imports torch, which the parent does not need

    batch, num_batches = make_batch(settings["batch_size"], PIXELS), settings["batches"]
    seconds = contender.run(batch, num_batches)
    num_bytes = sum(tensor.nbytes for tensor in batch.values())
    return {"gigabytes_per_second": num_batches * num_bytes / seconds / 1e9}


def _link(batch: dict[str, Any], num_batches: int) -> float:
    from .device_copies import copy_alone

    return copy_alone(batch, num_batches)


def _way(name: str, *needs: str) -> Contender:
    def run(batch: dict[str, Any], num_batches: int) -> float:
        from .device_copies import WAYS, seconds_of

        return seconds_of(WAYS[name], batch, num_batches)

    return Contender(name, run, needs, smoke=not needs)


_goal = partial(Goal, "gigabytes_per_second")
TABLES = (
    Table(
        name="transfer",
        title=f"Batches of {BATCH} pictures to the GPU",
        metrics=(Metric("gigabytes_per_second", "GB/s", 2),),
        contenders=(
            Contender(_LINK, _link, smoke=True),
            _way("ours, pinned"),
            _way("ours"),
            _way("SPDL", "spdl"),
            _way("pin and copy"),
            _way("plain"),
        ),
        prepare=_prepare,
        measure=measure,
        peer=_LINK,
        goals=(
            _goal("ours, pinned", _LINK, at_least=0.95),
            _goal("ours", _LINK),
            _goal("ours", "SPDL"),
            _goal("ours", "pin and copy"),
            _goal("ours", "plain"),
        ),
    ),
)
