"""``check-gpu`` over the stand-in for CUDA's runtime: the command, whole, with small batches.

The stand-in runs no kernels: what a kernel would read is copied back, and the device is late by
itself. Afterwards, as JSON, on which ways to the device batches are wrong where a guard is missing.
Exits as the command does.
"""

from __future__ import annotations

import ctypes
import io
import json
import sys
from unittest.mock import patch

import torch
from _forks import end_at_once
from _inside import look_often

from spdl_torch.check_gpu import ways
from spdl_torch.check_gpu.command import CheckOptions, Extent, run_check_gpu
from spdl_torch.check_gpu.gpu import CudaGpu, unguarded
from spdl_torch.check_gpu.sheet import Sheet
from spdl_torch.io._transfer import cuda, readers


class CopyingGpu(CudaGpu):
    """Reads by copies alone."""

    launches = False

    def make_late(self):
        """Do nothing."""

    def total(self, tensor):
        """Start a copy to the host."""
        found = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        return found.copy_(tensor.view(-1), non_blocking=True)

    def values(self, totals):
        """Wait, and add up what was copied."""
        torch.cuda.synchronize()
        return [float(total.sum(dtype=torch.float64)) for total in totals]


class FreeWhenUnviewed(readers.Readers):
    """Asks nobody but those who view it."""

    def _end(self, loan):
        loan.give_back()


def wrong_ways():
    """Those on which batches are wrong."""
    sheet = Sheet(io.StringIO(), {})
    ways.check_ways(CopyingGpu(), sheet, num_batches=16, num_bytes=1 << 16)
    return [line.name for line in sheet.lines if line.outcome == "FAIL"]


def without_guards():
    """The same without the allocator's guard, and without that of locked memory."""
    with unguarded():
        found = {"record_stream": wrong_ways()}
    with patch.object(cuda, "Readers", FreeWhenUnviewed), patch.object(cuda, "_readers", {}):
        return {**found, "Readers": wrong_ways()}


def main():
    """Run it."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).standin_set(b"looks", ctypes.c_long(30))  # the model is far behind
    look_often()
    extent = Extent(num_batches=60, most_bytes=1 << 20, workers=(0, 2))
    status = run_check_gpu(CheckOptions(), sys.stdout, sys.stderr, gpu=CopyingGpu(), extent=extent)
    print(json.dumps(without_guards()), flush=True)
    end_at_once(status)  # the stand-in ends with nobody


if __name__ == "__main__":
    main()
