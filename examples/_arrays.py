"""What the benchmarks of arrays load: a picture and its labels, saved in one format or another."""

from __future__ import annotations

import io

import numpy as np
import torch

from spdl_torch.bench.table_arrays import HEIGHT, WIDTH
from spdl_torch.bench.table_arrays import picture_and_labels as sample

__all__ = ["HEIGHT", "WIDTH", "encode", "sample"]


def encode(kind: str, arrays: dict[str, np.ndarray]) -> list[bytes]:
    """The arrays as files of that kind: one for each if it is ``npy``, else one for all.

    Kinds: ``torch`` (torch.save of a dict of tensors), ``npy``, ``npz``, ``npz-compressed``.
    """
    if kind == "npy":
        return [_written(np.save, array) for array in arrays.values()]
    if kind == "torch":
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return [_written(lambda file: torch.save(tensors, file))]
    return [_written(np.savez if kind == "npz" else np.savez_compressed, **arrays)]


def _written(save, *arrays, **named) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()
