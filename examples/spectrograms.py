"""Batches of spectrograms from a folder of sound files, or of videos.

Shows: a dataset that reads a second of each file by ``load_audio``, at one rate and with one
channel, and makes its spectrogram, in a ``DataLoader``. Decoding runs without the GIL for the most
part, so threads do. A file that ends early is filled up with silence; one that cannot be decoded is
left out by the loader, which counts it.

Prints: for every batch its shape and its loudest frequency, then the number of files a second.

    python examples/spectrograms.py --data DIR [--batch-size N] [--num-workers N] [--smoke]
"""

from __future__ import annotations

import argparse
import tempfile
import time
import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spdl_torch import DataLoader
from spdl_torch.io import load_audio

RATE, WINDOW = 16_000, 512
SUFFIXES = {".flac", ".m4a", ".mkv", ".mov", ".mp3", ".mp4", ".ogg", ".opus", ".wav", ".webm"}


class Spectrograms:
    """The logarithm of the power at (frequency, time), of the first second of each file."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        sound = load_audio(self.paths[index], (0, 1), RATE, num_channels=1)[0]
        sound = torch.nn.functional.pad(sound, (0, RATE - len(sound)))
        spectrum = torch.stft(sound, WINDOW, window=torch.hann_window(WINDOW), return_complex=True)
        return spectrum.abs().square().add(1e-10).log10()


def write_tones(folder: Path, num_files: int) -> None:
    """Make WAV files of one tone each."""
    for number in range(num_files):
        times = np.arange(RATE) / RATE
        tone = np.sin(2 * np.pi * 500 * (1 + number % 8) * times)
        with wave.open(str(folder / f"{number:04d}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((20_000 * tone).astype("<i2").tobytes())


def run(folder: Path, batch_size: int, num_workers: int) -> None:
    """Load all files once."""
    dataset = Spectrograms(folder)
    loader = DataLoader(dataset, batch_size, num_workers=num_workers, on_error="skip")
    begin, num_files = time.perf_counter(), 0
    for batch in loader:
        num_files += len(batch)
        loudest = batch.mean((0, 2)).argmax().item() * RATE / WINDOW
        print(f"{tuple(batch.shape)}: loudest at {loudest:.0f} Hz")
    print(f"{num_files / (time.perf_counter() - begin):.0f} files a second")


def main() -> None:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description="Batches of spectrograms.")
    parser.add_argument("--data", type=Path, help="a folder of sound files or videos")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="with a few files of its own")
    options = parser.parse_args()
    if options.data is not None:
        run(options.data, options.batch_size, options.num_workers)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tones(Path(folder), 16 if options.smoke else 512)
        run(Path(folder), options.batch_size, options.num_workers)


if __name__ == "__main__":
    main()
