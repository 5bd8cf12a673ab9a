"""Audio with a spectrogram, volumes that scipy turns, graphs of different sizes."""

from __future__ import annotations

import wave
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .data import written

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_RATE = 16_000
_CLIPS = 64
_VOLUMES = 8


class Audio(Dataset[Any]):
    """A second of sound from a WAV file, as a log spectrogram."""

    def __init__(self, root: Path, count: int) -> None:
        self.paths = sorted(root.glob("*.wav"))
        self.count = count
        self.window = torch.hann_window(400)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with wave.open(str(self.paths[index % len(self.paths)]), "rb") as file:
            data = file.readframes(file.getnframes())
        sound = torch.from_numpy(np.frombuffer(data, dtype=np.int16).astype(np.float32) / 32768)
        spectrum = torch.stft(sound, 400, 160, window=self.window, return_complex=True)
        return torch.log1p(spectrum.abs().pow(2)), index % 10


class Volumes(Dataset[Any]):
    """A volume of 64 x 64 x 32, turned by a random angle."""

    def __init__(self, root: Path, count: int) -> None:
        self.paths = sorted(root.glob("*.npy"))
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from scipy import ndimage

        volume = np.load(self.paths[index % len(self.paths)])
        angle = np.random.uniform(-15, 15)
        volume = ndimage.rotate(volume, angle, axes=(0, 1), reshape=False, order=1)
        volume = (volume - volume.mean()) / volume.std()
        return torch.from_numpy(volume[None].astype(np.float32)), index % 2


class Graphs(Dataset[Any]):
    """Nodes with features, edges as pairs of numbers; 10 to 40 nodes."""

    def __init__(self, count: int) -> None:
        generator = np.random.default_rng(0)
        self.sizes = generator.integers(10, 41, count).tolist()
        self.features = torch.from_numpy(generator.random((40, 16), dtype=np.float32))
        self.edges = torch.from_numpy(generator.integers(0, 1 << 30, (2, 160)))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        nodes = self.sizes[index]
        edges = self.edges[:, : 4 * nodes] % nodes
        degree = torch.bincount(edges[1], minlength=nodes).float()
        x = torch.cat([self.features[:nodes], degree[:, None]], dim=1)
        return {"x": x, "edge_index": edges, "y": torch.tensor(index % 2)}


def join_graphs(graphs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the graphs of a batch as one, whose parts are not connected."""
    nodes = [len(graph["x"]) for graph in graphs]
    begins = np.cumsum([0, *nodes[:-1]]).tolist()
    return {
        "x": torch.cat([graph["x"] for graph in graphs]),
        "edge_index": torch.cat(
            [graph["edge_index"] + begin for graph, begin in zip(graphs, begins, strict=True)],
            dim=1,
        ),
        "y": torch.stack([graph["y"] for graph in graphs]),
        "batch": torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(nodes)),
    }


def audio(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset at 16 kHz, shuffled."""

    def write(root: Path) -> None:
        root.mkdir()
        noise = np.random.default_rng(0).normal(0, 3000, (_CLIPS, _RATE)).astype(np.int16)
        for number, sound in enumerate(noise):
            with wave.open(str(root / f"{number:03}.wav"), "wb") as file:
                file.setparams((1, 2, _RATE, 0, "NONE", "not compressed"))
                file.writeframes(sound.tobytes())

    return {"dataset": Audio(written(folder / "audio", write), count), "shuffle": True}


def volumes(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset, shuffled."""

    def write(root: Path) -> None:
        root.mkdir()
        generator = np.random.default_rng(0)
        for number in range(_VOLUMES):
            np.save(root / f"{number}.npy", generator.random((64, 64, 32), dtype=np.float32))

    return {"dataset": Volumes(written(folder / "volumes", write), count), "shuffle": True}


def graphs(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset, shuffled, joined by the collate function."""
    return {"dataset": Graphs(count), "shuffle": True, "collate_fn": join_graphs}
