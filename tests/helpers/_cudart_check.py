"""``check-gpu`` over the stand-in for CUDA's runtime: the command, whole, with small batches.

The stand-in runs no kernels: what a kernel would read is copied back, and the device is late by
itself. Exits as the command does.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from _forks import end_at_once
from _inside import look_often

from spdl_torch.check_gpu.command import CheckOptions, Extent, run_check_gpu
from spdl_torch.check_gpu.gpu import CudaGpu


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


def main():
    """Run it."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).standin_set(b"looks", ctypes.c_long(30))  # the model is far behind
    look_often()
    extent = Extent(num_batches=60, most_bytes=1 << 20, workers=(0, 2))
    status = run_check_gpu(CheckOptions(), sys.stdout, sys.stderr, gpu=CopyingGpu(), extent=extent)
    end_at_once(status)  # the stand-in ends with nobody


if __name__ == "__main__":
    main()
