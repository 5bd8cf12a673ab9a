"""``large-photographs``: JPEGs of 12 megapixels to uint8 batches of 4 at 224 x 224.

Rows with ``crop`` draw RandomResizedCrop and flip, as for training; the others resize whole
pictures. The last three columns compare the first pictures with those of the row ``ours``, or
``ours, crop``: whole pictures decoded by the same library, with the same boxes.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from . import images
from .loaders import Work, ours, torch_loader
from .loading import measure_loader, samples_of
from .report import Goal, Metric
from .tables import LOADER_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..measuring.reporter import Reporter
    from .loaders import Batches
    from .tables import BenchOptions

__all__ = ["TABLES"]

_BATCH = 4
_PER_SECOND = 24
_FILES = 12
_BEST_DECIBELS = 99.0  # shown for equal pictures

OURS = "ours"
SCALED = "ours, scaled"
TORCH_PILLOW = "torch, Pillow"


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    with TemporaryDirectory(prefix="spdl-torch-bench-") as temporary:
        folder = options.data
        if folder is None:
            from ..measuring.photographs import write_large_photographs

            folder = Path(temporary)
            write_large_photographs(folder, 2 if options.smoke else _FILES)
        files = images.jpegs(folder)
        num_bytes = sum(len(Path(path).read_bytes()) for path in files)  # in the page cache now
        yield {
            "folder": str(folder),
            "files": len(files),
            "MB a file": round(num_bytes / len(files) / 1e6, 2),
            "batch_size": _BATCH,
            "num_samples": samples_of(options, _PER_SECOND, _BATCH),
            "num_workers": options.num_workers,
            "compared": min(len(files), 2 if options.smoke else _FILES),
        }


def make_work(
    settings: dict[str, Any], num_samples: int, data: str, crop: bool, **options: Any
) -> Work:
    """Return the photographs, by ``data``: ``folder`` (our ImageFolder with ``options``) or a
    decoder."""
    dataset: Any
    if data == "folder":
        dataset = images.our_folder(settings["folder"], num_samples, crop, **options)
    else:
        files = images.jpegs(settings["folder"])
        paths = [files[index % len(files)] for index in range(num_samples)]
        dataset = images.Photographs(paths, getattr(images, f"load_{data}"), crop)
    return Work(
        dataset=dataset,
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
        size_of=images.size_of_pair,
    )


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure one pass over the photographs, and how far the pictures are from whole ones."""
    figures = measure_loader(contender, settings, reporter, make_work)
    crop, compared = contender.arguments["crop"], settings["compared"]
    found = _pictures(make_work(settings, compared, **contender.arguments))
    expected = _pictures(make_work(settings, compared, "folder", crop))
    return {**figures, **_difference(found, expected)}


def _pictures(work: Work) -> Any:
    """Return float32 (N, 3, 224, 224), with boxes and flips from seed 0."""
    import torch

    torch.manual_seed(0)
    samples = [work.dataset[index] for index in range(work.num_samples)]
    pictures = [each[0] if isinstance(each, tuple) else each for each in samples]
    return torch.stack(pictures).float()


def _difference(found: Any, expected: Any) -> dict[str, float]:
    """Return the mean of the pictures' PSNR in decibels; mean and largest difference in levels of
    255."""
    difference = found - expected
    errors = difference.square().flatten(1).mean(1).tolist()
    decibels = [
        min(_BEST_DECIBELS, 10 * math.log10(255**2 / error)) if error else _BEST_DECIBELS
        for error in errors
    ]
    return {
        "psnr": sum(decibels) / len(decibels),
        "mean_level": difference.abs().mean().item(),
        "max_level": difference.abs().max().item(),
    }


def _one(name: str, run: Callable[..., Batches], data: str, **arguments: Any) -> Contender:
    crop = name.endswith(", crop")
    return Contender(
        name=name,
        run=run,
        arguments={"data": data, "crop": crop, **arguments},
        smoke=name in (OURS, SCALED),
    )


_LEVEL = partial(Metric, higher_is_better=False, has_spread=False)
METRICS = (
    *(metric for metric in LOADER_METRICS if metric.key in ("per_second", "cpu_ms", "peak_mib")),
    Metric(key="psnr", heading="PSNR, dB", digits=1, has_spread=False),
    _LEVEL(key="mean_level", heading="mean difference, levels", digits=2),
    _LEVEL(key="max_level", heading="largest", digits=0),
)

_goal = partial(Goal, metric="per_second", row=SCALED)
TABLES = {
    "large-photographs": Table(
        name="large-photographs",
        title=f"Photographs of 12 megapixels to uint8 batches of {_BATCH} at 224 x 224",
        metrics=METRICS,
        contenders=(
            _one(SCALED, ours, "folder", scaled=True),
            _one("ours, scaled, Pillow", ours, "folder", scaled=True, codec="torchvision"),
            _one(OURS, ours, "folder"),
            _one(TORCH_PILLOW, torch_loader, "pillow"),
            _one("torch, Pillow's draft", torch_loader, "drafted"),
            _one("torch, torchvision", torch_loader, "torchvision"),
            _one("torch, our ImageFolder, scaled", torch_loader, "folder", scaled=True),
            _one("ours, scaled, crop", ours, "folder", scaled=True),
            _one("ours, crop", ours, "folder"),
            _one("torch, Pillow, crop", torch_loader, "pillow"),
            _one("torch, torchvision, crop", torch_loader, "torchvision"),
        ),
        prepare=_prepare,
        measure=measure,
        peer=TORCH_PILLOW,
        goals=(
            _goal(over=OURS, at_least=3),
            _goal(over=TORCH_PILLOW, at_least=3),
            _goal(over="torch, Pillow's draft", at_least=1),
            Goal(metric="psnr", row=SCALED, at_least=40),
            _goal(row="ours, scaled, crop", over="ours, crop"),
            _goal(row="ours, scaled, crop", over="torch, Pillow, crop", at_least=3),
        ),
    )
}
