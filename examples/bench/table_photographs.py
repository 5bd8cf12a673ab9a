"""``photographs`` and ``crop``: JPEG files to uint8 batches of 32 at 224 x 224."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from . import images
from .images import PIXELS, spdl_decoding
from .loaders import Work, bare_threads, grain_threads, ours, torch_loader
from .passes import measure_loader, samples_of
from .recipe import as_it_is, jpegs, photographs
from .report import Goal
from .tables import LOADER_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .loaders import Batches
    from .tables import BenchOptions

_BATCH = 32
_PER_SECOND = 640


def _prepare(options: BenchOptions, folder: Path, *, crop: bool) -> dict[str, Any]:
    return {
        **photographs(options, folder),
        "crop": crop,
        "batch_size": _BATCH,
        "num_samples": samples_of(options, _PER_SECOND, _BATCH),
    }


def make_work(settings: dict[str, Any], num_samples: int, data: str) -> Work:
    """Return the photographs, by ``data``: ``folder`` (our ImageFolder), ``batched``, or a
    decoder."""
    files = jpegs(settings["folder"])
    paths = [files[index % len(files)] for index in range(num_samples)]
    crop = settings["crop"]
    collate: Callable[[list[Any]], Any] | None = None
    dataset: Any
    if data == "folder":
        dataset = images.our_folder(settings["folder"], num_samples, crop)
    elif data == "batched":
        dataset, collate = images.BatchedPhotographs(paths, crop), as_it_is
    else:
        load = getattr(images, f"load_{data}")
        dataset = images.Photographs(paths, load, crop)
    return Work(
        dataset=dataset,
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
        collate=collate,
        size_of=_size_of,
    )


def _size_of(batch: Any) -> int:
    """Return the size of a batch, of pictures or of pictures and labels; check their shape."""
    pictures = batch[0] if isinstance(batch, list | tuple) else batch
    shape = tuple(pictures.shape)
    assert shape[1:] in ((3, PIXELS, PIXELS), (PIXELS, PIXELS, 3)), shape
    return int(shape[0])


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one pass over the photographs."""
    if contender.decodes_with_spdl:
        contender = replace(contender, run=partial(contender.run, crop=settings["crop"]))
    return measure_loader(contender, settings, make_work)


def _one(name: str, run: Callable[..., Batches], data: str, *needs: str, **more: Any) -> Contender:
    return Contender(name, run, needs, {"data": data}, **more)


_SPDL = "SPDL, default filter"
CONTENDERS = (
    _one("ours", ours, "folder", smoke=True),
    _one("ours, process", partial(ours, isolation="process"), "folder"),
    _one("ours, load_image_batch", ours, "batched"),
    _one("torch, Pillow", torch_loader, "pillow"),
    _one("torch, torchvision", torch_loader, "torchvision"),
    _one("torch, simplejpeg", torch_loader, "simplejpeg", "simplejpeg"),
    _one("torch, our ImageFolder", torch_loader, "folder"),
    _one("SPDL", spdl_decoding, "pillow", "spdl", decodes_with_spdl=True),
    _one(_SPDL, partial(spdl_decoding, default=True), "pillow", "spdl", decodes_with_spdl=True),
    _one("Grain, torchvision", grain_threads, "torchvision", "grain"),
    _one("Grain, simplejpeg", grain_threads, "simplejpeg", "grain", "simplejpeg"),
    _one("bare kernel on threads", bare_threads, "batched"),
)


def _table(name: str, how: str, contenders: tuple[Contender, ...], *goals: Goal) -> Table:
    return Table(
        name=name,
        title=f"Photographs to uint8 batches of {_BATCH}, {how}",
        metrics=LOADER_METRICS,
        contenders=contenders,
        prepare=partial(_prepare, crop=name == "crop"),
        measure=measure,
        peer="torch, Pillow",
        goals=goals,
    )


_goal = partial(Goal, "per_second", "ours")
TABLE = _table(
    "photographs",
    "resized to 224 x 224",
    CONTENDERS,
    _goal("SPDL", at_least=1.95),
    _goal(_SPDL, at_least=1.95),
    _goal("torch, Pillow", at_least=1.75),
    _goal("torch, torchvision", at_least=1.1),
    _goal("torch, simplejpeg", at_least=1.1),
    _goal("Grain, torchvision", at_least=1.1),
    _goal("Grain, simplejpeg", at_least=1.1),
    _goal("bare kernel on threads", at_least=0.97),
)
CROP = _table(
    "crop",
    "RandomResizedCrop to 224 x 224 and flip",
    tuple(one for one in CONTENDERS if one.name != _SPDL),
    _goal("SPDL", at_least=2.2),
    _goal("torch, Pillow", at_least=2.0),
    _goal("torch, torchvision", at_least=1.35),
    _goal("bare kernel on threads"),
    Goal("cpu_ms", "ours", "SPDL", at_most=0.45),
    Goal("cpu_ms", "ours", "torch, Pillow", at_most=0.6),
)
