"""``arrays``: files of a picture, uint8 (3, 640, 480), and its labels, uint8 (640, 480).

Two npy files, or one npz archive that holds both, deflated; from the page cache into batches.
"""

from __future__ import annotations

import contextlib
import io
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from .loaders import Work, bare_threads, ours, spdl_batches, spdl_items, torch_loader
from .loading import measure_loader, samples_of
from .peers import imported, spdl_decoder
from .report import Goal
from .tables import LOADER_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..measuring.reporter import Reporter
    from .tables import BenchOptions

__all__ = ["HEIGHT", "TABLES", "WIDTH", "Arrays", "encode", "picture_and_labels"]

HEIGHT, WIDTH = 640, 480
_BATCH = 16
_FILES = 32
_PER_SECOND = {"npy": 600, "npz": 300}


class Arrays:
    """Files that ``library`` reads: numpy, SPDL or ours."""

    thread_safe = True

    def __init__(self, folder: str, kind: str, library: str, num_samples: int) -> None:
        self.paths = sorted(map(str, Path(folder).glob(f"*.{kind}")))
        self.kind = kind
        self.library = library
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return picture and labels as tensors."""
        import torch

        found = self.load(index)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])

    def load(self, index: int) -> tuple[Any, Any]:
        """Return the same as arrays; writable, as torch wants them."""
        if self.kind == "npz":
            path = self.paths[index % len(self.paths)]
            archive = self._open(path, "npz")
            return archive["image"], archive["label"]
        first = index * 2 % len(self.paths)
        return self._open(self.paths[first], "npy"), self._open(self.paths[first + 1], "npy")

    def _open(self, path: str, kind: str) -> Any:
        if self.library == "numpy":
            return imported("numpy").load(path)
        module = "spdl.io" if self.library == "SPDL" else "spdl_torch.io"
        content = bytearray(Path(path).read_bytes())  # a view of bytes could not be written to
        return getattr(imported(module), f"load_{kind}")(content)


def picture_and_labels(*, noise: int = 0) -> dict[str, Any]:
    """Return a smooth picture, uint8 (3, 640, 480), and a map of labels, uint8 (640, 480).

    Random bytes would not do: they cannot be compressed. ``noise`` adds up to that many levels to
    every pixel, which makes it as hard to compress as a photograph (3) or nearly so (1).
    """
    import numpy as np

    rng = np.random.default_rng(0)
    picture = np.stack([_field(rng) for _ in range(3)])
    picture += rng.integers(-noise, noise + 1, picture.shape)
    return {
        "image": picture.clip(0, 255).astype(np.uint8),
        "label": (_field(rng) // 32).astype(np.uint8),
    }


def encode(saved_as: str, arrays: dict[str, Any]) -> list[bytes]:
    """Return the arrays as files: one for each if it is ``npy``, else one for all.

    saved_as: ``npy``, ``npz`` or ``npz-compressed``.
    """
    import numpy as np

    if saved_as == "npy":
        return [_written(np.save, array) for array in arrays.values()]
    return [_written(np.savez if saved_as == "npz" else np.savez_compressed, **arrays)]


def _written(save: Callable[..., object], *arrays: Any, **named: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


def _field(rng: Any) -> Any:
    """Return random numbers from 0 to 255 on a coarse grid, interpolated linearly."""
    import numpy as np

    rows, columns = 8, 6
    grid = rng.integers(0, 256, (rows, columns)).astype(float)
    down, across = np.linspace(0, rows - 1, HEIGHT), np.linspace(0, columns - 1, WIDTH)
    tall = np.stack([np.interp(down, range(rows), line) for line in grid.T], axis=1)
    return np.stack([np.interp(across, range(columns), line) for line in tall])


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    import numpy as np

    with (
        spdl_decoder(options.wants_spdl) as no_spdl,
        TemporaryDirectory(prefix="spdl-torch-bench-") as folder,
    ):
        arrays = picture_and_labels(noise=1)
        for number in range(2 if options.smoke else _FILES):
            np.savez_compressed(Path(folder) / f"{number:03}.npz", **arrays)
            for place, name in enumerate(("image", "label")):
                np.save(Path(folder) / f"{number:03}-{place}.npy", arrays[name])
        yield {
            "folder": folder,
            "no_spdl_decoder": no_spdl,
            "num_workers": options.num_workers,
            "batch_size": _BATCH,
            **{kind: samples_of(options, rate, _BATCH) for kind, rate in _PER_SECOND.items()},
        }


def make_work(settings: dict[str, Any], num_samples: int, kind: str, library: str) -> Work:
    """Return files of one kind, read by one library."""
    return Work(
        dataset=Arrays(settings["folder"], kind, library, num_samples),
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
        size_of=_size_of,
    )


def _size_of(batch: Sequence[Any]) -> int:
    assert tuple(batch[0].shape[1:]) == (3, HEIGHT, WIDTH), batch[0].shape
    return len(batch[1])


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure one pass over the files of the contender's kind."""
    one = {**settings, "num_samples": settings[contender.arguments["kind"]]}
    return measure_loader(contender, one, reporter, make_work)


def _contenders(kind: str) -> Iterator[Contender]:
    for name, run, library, needs in (
        ("ours, threads", ours, "ours", ()),
        ("ours, process", partial(ours, isolation="process"), "ours", ()),
        ("ours, load with numpy", ours, "numpy", ()),
        ("torch, numpy", torch_loader, "numpy", ()),
        ("torch, our functions", torch_loader, "ours", ()),
        ("torch, numpy, spawned", partial(torch_loader, context="spawn"), "numpy", ()),
        ("SPDL, items", spdl_items, "SPDL", ("spdl",)),
        ("SPDL, batches", spdl_batches, "SPDL", ("spdl",)),
        ("bare threads", bare_threads, "ours", ()),
    ):
        yield Contender(
            name=f"{kind}: {name}",
            run=run,
            needs=needs,
            decodes_with_spdl=library == "SPDL",
            arguments={"kind": kind, "library": library},
            smoke=kind == "npy" and name in ("ours, threads", "torch, numpy"),
        )


def _goals(kind: str) -> tuple[Goal, ...]:
    goal = partial(Goal, metric="per_second", row=f"{kind}: ours, threads")
    return (
        goal(over=f"{kind}: torch, numpy"),
        goal(over=f"{kind}: SPDL*"),
        goal(over=f"{kind}: bare threads"),
    )


TABLES = {
    "arrays": Table(
        name="arrays",
        title=f"npy files and deflated npz archives of 1.2 MB to batches of {_BATCH}",
        metrics=LOADER_METRICS,
        contenders=(*_contenders("npy"), *_contenders("npz")),
        prepare=_prepare,
        measure=measure,
        goals=(*_goals("npy"), *_goals("npz")),
    )
}
