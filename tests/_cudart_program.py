"""Batches that are read late and dropped at once, with torch's own allocator; see ``_cudart.cpp``.

Prints as JSON how many of them were wrong: as the code is, and with each of its guards out of work.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data import Dataset

from spdl_torch import DataLoader
from spdl_torch.check_gpu.gpu import STREAMS, CudaGpu
from spdl_torch.io import Transfer
from spdl_torch.io._transfer import cuda, slabs

MEBI = 1 << 20
COUNT = 40


class Filled(Dataset):
    """Samples of one value each."""

    thread_safe = True

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.full((MEBI,), index, dtype=torch.uint8)


def staged(count):
    """Batches that were packed."""
    copies = Transfer("cuda")
    for value in range(count):
        yield copies.stage(torch.full((1, MEBI), value, dtype=torch.uint8)).receive()


@contextmanager
def no_waiting():
    """torch raises where this program waits for the device, on any thread, or would have to."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def num_wrong(batches, *, on_side_stream=False):
    """How many are wrong when a copy, which stands for a kernel, reads them at the very end."""
    side = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    found, remaining = [], iter(batches)
    with torch.cuda.stream(side):
        while True:
            target = torch.zeros((1, MEBI), dtype=torch.uint8, pin_memory=True)
            with no_waiting():
                batch = next(remaining, None)
                if batch is None:
                    break
                target.copy_(batch, non_blocking=True)
                del batch
            found.append(target)
    torch.cuda.synchronize()
    values = [np.unique(target.numpy()).tolist() for target in found]
    return sum(value != [number] for number, value in enumerate(values)) + abs(len(found) - COUNT)


class MovesLate:
    """Moves itself at the hand-over, from memory that is not pinned."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return type(self)(self.tensor.to(device))


def complaint(content):
    """What torch says when such a batch is received; "" if nothing."""
    batch = Transfer("cuda").stage(content)
    try:
        with no_waiting():
            batch.receive()
    except RuntimeError as error:
        return str(error)
    return ""


def loaded(**options):
    """Batches of a loader."""
    return DataLoader(Filled(), 1, device="cuda", **options)


def is_torchs():
    """Whether the streams on which ``check-gpu`` trains are among those that torch hands out."""
    gpu, handles = CudaGpu(), {}
    for kind in STREAMS:
        with gpu.on_stream(kind):
            handles[kind] = torch.cuda.current_stream().cuda_stream
    torchs = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    return {kind: handle in torchs for kind, handle in handles.items()}


@contextmanager
def without(owner, name):
    """Let a function do nothing."""
    with patch.object(owner, name, lambda *args, **kwargs: None):
        yield


def main():
    """Run all."""
    facts = {"device": torch.cuda.get_device_name(), "backend": cuda.CudaBackend.__module__}
    facts["is_torchs"] = is_torchs()
    facts["wrong"] = {
        "packed": num_wrong(staged(COUNT)),
        "packed, side stream": num_wrong(staged(COUNT), on_side_stream=True),
        "inline": num_wrong(loaded(num_workers=0)),
        "threads": num_wrong(loaded(num_workers=2, isolation="thread")),
        "processes": num_wrong(
            loaded(num_workers=2, isolation="process", multiprocessing_context="forkserver"),
            on_side_stream=True,
        ),
    }
    pageable = torch.ones(1)
    facts["complaints"] = [complaint(each) for each in (pageable, MovesLate(pageable))]
    facts["reserved"] = torch.cuda.memory_reserved() / MEBI
    facts["without"] = {}
    for owner, name in (
        (torch.Tensor, "record_stream"),
        (torch.cuda.Stream, "wait_event"),
        (slabs.Slab, "wait"),
    ):
        with without(owner, name):
            facts["without"][name] = num_wrong(staged(COUNT))
            torch.cuda.synchronize()
    print(json.dumps(facts), flush=True)
    os._exit(0)  # the stand-in ends with nobody


if __name__ == "__main__":
    sys.exit(main())
