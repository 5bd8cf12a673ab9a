"""``photographs`` and ``crop``: JPEG files to uint8 batches of 32 at 224 x 224."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from . import images
from .image_peers import dali, spdl_decoding, webdataset, write_shards
from .loaders import (
    Work,
    bare_threads,
    grain_threads,
    nodes,
    our_pipeline,
    ours,
    spdl_batches,
    spdl_processes,
    torch_loader,
)
from .loading import measure_loader, samples_of
from .peers import installed
from .report import Goal
from .tables import LOADER_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .loaders import Batches
    from .reporter import Reporter
    from .tables import BenchOptions

_BATCH = 32
_PER_SECOND = 640

OURS = "ours"
TORCH_PILLOW = "torch, Pillow"
TORCH_TORCHVISION = "torch, torchvision"
BARE = "bare kernel on threads"


@contextlib.contextmanager
def _prepare(options: BenchOptions, *, crop: bool) -> Iterator[dict[str, Any]]:
    with (
        images.photographs_for_all(options) as found,
        TemporaryDirectory(prefix="spdl-torch-bench-") as folder,
    ):
        shards = []
        if installed("webdataset") and not options.smoke:
            paths = images.jpegs(found["folder"])
            shards = write_shards(paths, Path(folder), max(4, options.num_workers))
        # Whole batches for each worker: WebDataset's workers each end their own pass.
        share = _BATCH * options.num_workers
        num_samples = samples_of(options, _PER_SECOND, _BATCH) // share * share or share
        yield {
            **found,
            "crop": crop,
            "shards": shards,
            "batch_size": _BATCH,
            "num_samples": num_samples,
            "num_workers": options.num_workers,
        }


def make_work(settings: dict[str, Any], num_samples: int, data: str) -> Work:
    """Return the photographs, by ``data``: ``folder`` (our ImageFolder), ``batched``, or a
    decoder."""
    files = images.jpegs(settings["folder"])
    paths = [files[index % len(files)] for index in range(num_samples)]
    crop = settings["crop"]
    collate: Callable[[list[Any]], Any] | None = None
    dataset: Any
    if data == "folder":
        dataset = images.our_folder(settings["folder"], num_samples, crop)
    elif data == "batched":
        dataset, collate = images.BatchedPhotographs(paths, crop), images.as_it_is
    else:
        load = getattr(images, f"load_{data}")
        dataset = images.Photographs(paths, load, crop)
    return Work(
        dataset=dataset,
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
        collate=collate,
        size_of=images.size_of_pair,
    )


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure one pass over the photographs."""
    extras = {
        spdl_decoding: {"crop": settings["crop"]},
        dali: {"crop": settings["crop"]},
        webdataset: {"crop": settings["crop"], "shards": settings["shards"]},
    }
    function = getattr(contender.run, "func", contender.run)
    run = partial(contender.run, **extras.get(function, {}))
    return measure_loader(replace(contender, run=run), settings, reporter, make_work)


def _one(name: str, run: Callable[..., Batches], data: str, *needs: str, **more: Any) -> Contender:
    options = more.pop("options", {})
    return Contender(
        name=name, run=partial(run, **options), needs=needs, arguments={"data": data}, **more
    )


def _spdl(name: str, **options: Any) -> Contender:
    return _one(name, spdl_decoding, "pillow", "spdl", options=options, decodes_with_spdl=True)


CONTENDERS = (
    _one(OURS, ours, "folder", smoke=True),
    _one("ours, process", ours, "folder", options={"isolation": "process"}),
    _one("ours, auto", ours, "folder", options={"num_workers": "auto"}),
    _one("ours, load_image_batch", ours, "batched"),
    _one("ours, pipeline", our_pipeline, "batched"),
    _one(TORCH_PILLOW, torch_loader, "pillow"),
    _one(TORCH_TORCHVISION, torch_loader, "torchvision"),
    _one("torch, simplejpeg", torch_loader, "simplejpeg", "simplejpeg"),
    _one("torch, our ImageFolder", torch_loader, "folder"),
    _one("torch, Pillow, spawned", torch_loader, "pillow", options={"context": "spawn"}),
    _one("torch, our ImageFolder, spawned", torch_loader, "folder", options={"context": "spawn"}),
    _one(
        "StatefulDataLoader, Pillow",
        torch_loader,
        "pillow",
        "torchdata",
        options={"stateful": True},
    ),
    _one("torchdata.nodes, Pillow", nodes, "pillow", "torchdata"),
    _one("torchdata.nodes, torchvision", nodes, "torchvision", "torchdata"),
    _one(
        "torchdata.nodes, our ImageFolder",
        nodes,
        "folder",
        "torchdata",
        options={"whole_batches": True},
    ),
    _spdl("SPDL"),
    _spdl("SPDL, default filter", default=True),
    _spdl("SPDL, subprocess", subprocess=True),
    _one("SPDL, our ImageFolder", spdl_batches, "folder", "spdl"),
    _one("SPDL, PyTorchDataLoader, Pillow", spdl_processes, "pillow", "spdl"),
    _one("WebDataset, Pillow", webdataset, "pillow", "webdataset"),
    _one("Grain, Pillow", grain_threads, "pillow", "grain"),
    _one("Grain, torchvision", grain_threads, "torchvision", "grain"),
    _one("Grain, simplejpeg", grain_threads, "simplejpeg", "grain", "simplejpeg"),
    _one("DALI", dali, "pillow", "nvidia.dali"),
    _one(BARE, bare_threads, "batched"),
)


def _goals(**bounds: float) -> tuple[Goal, ...]:
    return tuple(
        Goal(metric="per_second", row=OURS, over=over, at_least=bound)
        for over, bound in bounds.items()
    )


def _table(
    name: str, title: str, contenders: tuple[Contender, ...], goals: tuple[Goal, ...]
) -> Table:
    return Table(
        name=name,
        title=title,
        metrics=LOADER_METRICS,
        contenders=contenders,
        prepare=partial(_prepare, crop=name == "crop"),
        measure=measure,
        peer=TORCH_PILLOW,
        goals=goals,
    )


_SPAWNED = Goal(metric="peak_mib", row=OURS, over="torch, Pillow, spawned", at_most=0.45)
TABLES = {
    "photographs": _table(
        "photographs",
        f"Photographs to uint8 batches of {_BATCH}, resized to 224 x 224",
        CONTENDERS,
        (
            *_goals(**{"SPDL": 1.95, "SPDL, default filter": 1.95, TORCH_PILLOW: 1.75}),
            *_goals(**{TORCH_TORCHVISION: 1.1, "torch, simplejpeg": 1.1}),
            *_goals(**{"Grain, torchvision": 1.1, "Grain, simplejpeg": 1.1, BARE: 0.97}),
            _SPAWNED,
        ),
    ),
    "crop": _table(
        "crop",
        f"Photographs to uint8 batches of {_BATCH}, RandomResizedCrop to 224 x 224 and flip",
        tuple(one for one in CONTENDERS if one.name != "SPDL, default filter"),
        (
            *_goals(**{"SPDL": 2.2, TORCH_PILLOW: 2.0, "DALI": 1.5, TORCH_TORCHVISION: 1.35}),
            Goal(metric="cpu_ms", row=OURS, over="SPDL", at_most=0.45),
            Goal(metric="cpu_ms", row=OURS, over=TORCH_PILLOW, at_most=0.6),
            Goal(metric="per_second", row=OURS, over=BARE),
            _SPAWNED,
        ),
    ),
}
