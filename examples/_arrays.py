"""What the benchmarks of arrays load: a picture and its labels, saved in one format or another."""

from __future__ import annotations

import io

import numpy as np
import torch

__all__ = ["HEIGHT", "WIDTH", "encode", "sample"]

HEIGHT, WIDTH = 640, 480
_CELLS = 8, 6


def sample(*, noise: int = 0) -> dict[str, np.ndarray]:
    """A smooth picture, uint8 (3, 640, 480), and a map of labels, uint8 (640, 480).

    Random bytes would not do, they cannot be compressed. ``noise`` adds up to that many levels to
    every pixel, which makes it as hard to compress as a photograph (3) or nearly so (1).
    """
    rng = np.random.default_rng(0)
    picture = np.stack([_field(rng) for _ in range(3)])
    picture += rng.integers(-noise, noise + 1, picture.shape)
    return {
        "image": picture.clip(0, 255).astype(np.uint8),
        "label": (_field(rng) // 32).astype(np.uint8),
    }


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


def _field(rng: np.random.Generator) -> np.ndarray:
    """Random numbers from 0 to 255 on a coarse grid, and straight lines between them."""
    grid = rng.integers(0, 256, _CELLS).astype(float)
    rows, columns = (np.linspace(0, n - 1, m) for n, m in zip(_CELLS, (HEIGHT, WIDTH), strict=True))
    tall = np.stack([np.interp(rows, range(_CELLS[0]), line) for line in grid.T], axis=1)
    return np.stack([np.interp(columns, range(_CELLS[1]), line) for line in tall])


def _written(save, *arrays, **named) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()
