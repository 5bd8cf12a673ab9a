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


def num_wrong(batches, *, on_side_stream=False):
    """How many are wrong when a copy, which stands for a kernel, reads them at the very end."""
    side = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    found = []
    with torch.cuda.stream(side):
        for batch in batches:
            target = torch.zeros(batch.shape, dtype=torch.uint8, pin_memory=True)
            torch.cuda.set_sync_debug_mode("error")  # the loop's thread waits for nothing
            target.copy_(batch, non_blocking=True)
            found.append(target)
            del batch
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    values = [np.unique(target.numpy()).tolist() for target in found]
    return sum(value != [number] for number, value in enumerate(values)) + abs(len(found) - COUNT)


def loaded(**options):
    """Batches of a loader."""
    return DataLoader(Filled(), 1, device="cuda", **options)


@contextmanager
def without(owner, name):
    """Let a function do nothing."""
    with patch.object(owner, name, lambda *args, **kwargs: None):
        yield


def main():
    """Run all."""
    facts = {"device": torch.cuda.get_device_name(), "backend": cuda.CudaBackend.__module__}
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
