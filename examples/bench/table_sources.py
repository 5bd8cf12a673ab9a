"""``sources``: rows and photographs in Parquet files on the disk, and shards behind a web server
that answers 20 ms late and sends 50 MB a second on a connection.

Rows are 20 columns of float32, in batches of 1024. Photographs become 224 x 224, in shuffled
batches of 32. Shards have 64 samples of 512 KiB each, and are read twice with a cache on the disk:
by one thread, as the work is to have them there.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import IterableDataset, get_worker_info

import spdl_torch
from spdl_torch.data.sources import Parquet, TarShards
from spdl_torch.io import load_image_batch

from .passes import measure_pass, samples_of
from .peers import imported, installed
from .recipe import as_it_is, jpegs, photographs
from .report import Goal, Metric
from .shard_server import served
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .tables import BenchOptions

_BATCH = 1024
_PIXELS = 224
_ROWS_A_SECOND = 60_000
_COLUMNS = 20
_FILES = 4
_COPIES = 3  # of each photograph
_SHARD_SAMPLES = 64
_SAMPLE_BYTES = 512 * 1024
_METRICS = (
    Metric("per_second", "samples/s"),
    Metric("again", "2nd epoch, samples/s"),
)


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    found = photographs(options, folder)
    num_rows = samples_of(options, _ROWS_A_SECOND, _BATCH * _FILES)
    num_shards = 2 if options.smoke else 40 if options.full else 10
    (folder / "rows").mkdir()
    (folder / "shards").mkdir()
    if installed("pyarrow"):
        _write_parquet(folder, num_rows, jpegs(found["folder"]))
    for number in range(num_shards):
        with tarfile.open(folder / "shards" / f"{number:03}.tar", "w") as shard:
            for name in range(_SHARD_SAMPLES):
                member = tarfile.TarInfo(f"{name:06}.bin")
                member.size = _SAMPLE_BYTES
                shard.addfile(member, io.BytesIO(os.urandom(_SAMPLE_BYTES)))
    counts = {"rows": num_rows, "shards": num_shards, "photographs": _COPIES * found["files"]}
    return {"data": str(folder), **counts}


def _write_parquet(folder: Path, num_rows: int, photographs: list[str]) -> None:
    pyarrow, parquet = imported("pyarrow"), imported("pyarrow.parquet")
    rng = np.random.default_rng(0)
    for number in range(_FILES):
        columns = rng.random((_COLUMNS, num_rows // _FILES), dtype=np.float32)
        table = pyarrow.table({f"c{place}": column for place, column in enumerate(columns)})
        parquet.write_table(
            table, folder / "rows" / f"{number}.parquet", row_group_size=16 * _BATCH
        )
    pictures = [{"bytes": Path(path).read_bytes(), "path": Path(path).name} for path in photographs]
    pictures *= _COPIES
    table = pyarrow.table({"image": pictures, "label": [*range(len(pictures))]})
    parquet.write_table(table, folder / "photographs.parquet", row_group_size=50)


def measure(contender: Contender, settings: dict[str, Any]) -> Any:
    """Measure one pass over rows or photographs, or two over shards."""
    return contender.run(settings, **contender.arguments)


def _passed(loader: Any, num_samples: int) -> dict[str, float]:
    """Measure a second epoch: the first one compiles and allocates."""
    for _ in range(2):
        figures = measure_pass(lambda: iter(loader), num_samples, _size_of, 4)
    return figures


def _size_of(batch: Any) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[1])


def rows_of_ours(settings: dict[str, Any], *, shuffle: bool) -> dict[str, float]:
    """Our loader over a ``Parquet``."""
    rows: Any = Parquet(Path(settings["data"], "rows"))
    workers = settings["num_workers"]
    loader = spdl_torch.DataLoader(rows, _BATCH, shuffle, num_workers=workers)
    return _passed(loader, settings["rows"])


def rows_of_datasets(settings: dict[str, Any], *, shuffle: bool) -> dict[str, float]:
    """torch's loader over Hugging Face's ``Dataset`` of the same files."""
    num_rows = min(settings["rows"], 32 * _BATCH)  # it takes long
    rows = _hugging_face(settings, "rows/*.parquet").select(range(num_rows))
    workers = settings["num_workers"]
    loader: Any = torch.utils.data.DataLoader(rows, _BATCH, shuffle, num_workers=workers)
    return _passed(loader, num_rows)


def _hugging_face(settings: dict[str, Any], files: str) -> Any:
    datasets = imported("datasets")
    datasets.disable_progress_bars()
    paths, kept = (str(Path(settings["data"], name)) for name in (files, "datasets"))
    return datasets.load_dataset("parquet", data_files=paths, split="train", cache_dir=kept)


class ByHand(IterableDataset[Any]):
    """Record batches of the files, each worker its own ones."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*.parquet"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for file in self.files[first::step]:
            opened = imported("pyarrow.parquet").ParquetFile(file)
            for batch in opened.iter_batches(_BATCH, use_threads=False):
                arrays = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
                copies = (torch.from_numpy(array.copy()) for array in arrays)
                yield dict(zip(batch.schema.names, copies, strict=True))


def rows_by_hand(settings: dict[str, Any]) -> dict[str, float]:
    """torch's loader over pyarrow's record batches."""
    dataset, workers = ByHand(str(Path(settings["data"], "rows"))), settings["num_workers"]
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
    return _passed(loader, settings["rows"])


class OurPhotographs:
    """Photographs in a ``Parquet``."""

    thread_safe = True

    def __init__(self, path: str) -> None:
        self.rows = Parquet(path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a batch: uint8 (N, 224, 224, 3), and the labels."""
        rows = self.rows.__getitems__(indices)
        contents = [row["image"]["bytes"] for row in rows]
        pictures = load_image_batch(contents, width=_PIXELS, height=_PIXELS)
        return pictures, torch.tensor([int(row["label"]) for row in rows])


def photographs_of_ours(settings: dict[str, Any]) -> dict[str, float]:
    """Our loader."""
    dataset: Any = OurPhotographs(f"{settings['data']}/photographs.parquet")
    workers = settings["num_workers"]
    loader = spdl_torch.DataLoader(dataset, 32, True, num_workers=workers, collate_fn=as_it_is)
    return _passed(loader, settings["photographs"])


def photographs_of_datasets(settings: dict[str, Any]) -> dict[str, float]:
    """torch's loader over Hugging Face's ``Dataset``, with torchvision's transforms."""
    from torchvision.transforms import v2

    steps = v2.Compose([v2.Resize((_PIXELS, _PIXELS)), v2.PILToTensor()])

    def transform(rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "image": [steps(image.convert("RGB")) for image in rows["image"]]}

    dataset = _hugging_face(settings, "photographs.parquet")
    dataset = dataset.cast_column("image", imported("datasets").Image()).with_transform(transform)
    workers = settings["num_workers"]
    loader: Any = torch.utils.data.DataLoader(dataset, 32, True, num_workers=workers)
    return _passed(loader, settings["photographs"])


def _shards(
    settings: dict[str, Any], make: Callable[[list[str], str], Iterable[Any]]
) -> dict[str, float]:
    """Read the shards twice. ``make``: of the URLs and a folder for the cache, returns an epoch."""
    data, figures = Path(settings["data"], "shards"), {}
    num_samples = settings["shards"] * _SHARD_SAMPLES
    with served(str(data)) as address, tempfile.TemporaryDirectory(dir=data.parent) as kept:
        urls = [f"{address}/{path.name}" for path in sorted(data.glob("*.tar"))]
        for epoch in ("per_second", "again"):
            start = time.perf_counter()
            count = sum(len(sample["bin"]) == _SAMPLE_BYTES for sample in make(urls, kept))
            figures[epoch] = count / (time.perf_counter() - start)
            assert count == num_samples, f"{count=} {num_samples=}"
    return figures


def shards_of_ours(settings: dict[str, Any]) -> dict[str, float]:
    """Our ``TarShards``."""
    return _shards(settings, lambda urls, kept: TarShards(urls, cache=kept))


def shards_of_webdataset(settings: dict[str, Any]) -> dict[str, float]:
    """WebDataset, which downloads by curl."""
    make = partial(imported("webdataset").WebDataset, shardshuffle=False)
    return _shards(settings, lambda urls, kept: make(urls, cache_dir=kept))


TABLE = Table(
    name="sources",
    title="Rows and photographs in Parquet, and shards over HTTP with a cache",
    metrics=_METRICS,
    contenders=(
        Contender("rows, ours", rows_of_ours, ("pyarrow",), {"shuffle": False}, smoke=True),
        Contender("rows, ours, shuffled", rows_of_ours, ("pyarrow",), {"shuffle": True}),
        Contender("rows, datasets", rows_of_datasets, ("datasets",), {"shuffle": False}),
        Contender("rows, datasets, shuffled", rows_of_datasets, ("datasets",), {"shuffle": True}),
        Contender("rows, pyarrow by hand", rows_by_hand, ("pyarrow",)),
        Contender("photographs, ours", photographs_of_ours, ("pyarrow",), smoke=True),
        Contender("photographs, datasets", photographs_of_datasets, ("datasets",)),
        Contender("shards, ours", shards_of_ours, smoke=True),
        Contender("shards, webdataset", shards_of_webdataset, ("webdataset",)),
    ),
    prepare=_prepare,
    measure=measure,
    goals=(
        Goal("per_second", "rows, ours", "rows, datasets", at_least=3),
        Goal("per_second", "rows, ours, shuffled", "rows, datasets, shuffled", at_least=3),
        Goal("per_second", "rows, ours", "rows, pyarrow by hand", at_least=0.9),
        Goal("per_second", "photographs, ours", "photographs, datasets", at_least=1.8),
        Goal("per_second", "shards, ours", "shards, webdataset", at_least=1.0),
        Goal("again", "shards, ours", "shards, webdataset", at_least=1.0),
    ),
    seconds=(2.0, 6.0),
)
