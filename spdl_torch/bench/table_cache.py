"""``cache``: epochs that fill a cache in memory, and epochs that read it.

Every pass loads the same photographs, 224 x 224 pixels each, with the same batches; the sums of the
pixels of each batch have to agree. The ranks are processes, forked after everything is imported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .images import jpegs, photographs
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.synchronize import Barrier

    from ..measuring.reporter import Reporter
    from .tables import BenchOptions

__all__ = ["TABLES"]

_SIDE = 224
_RANK_SIDE = 512  # large, so that the processes' own memory is negligible beside the cache
_BATCH = 32
_NUM_RANKS = 4
_PATIENCE_SECONDS = 600  # for the slowest of the ranks; the others stop when one has failed
_LATE_SECONDS = 0.05
_IN_FLIGHT = 16
_FILES_A_SECOND = 200
_METRICS = (
    Metric(key="first", heading="samples/s before"),
    Metric(key="second", heading="samples/s from the cache"),
    Metric(key="ratio", heading="ratio", digits=2),
    Metric(key="mib", heading="MiB in all ranks", higher_is_better=False, section="Memory"),
    Metric(key="copies", heading="of one copy", digits=2, higher_is_better=False, section="Memory"),
)


class Late:
    """Photographs as tensors of their bytes, from a slow store."""

    thread_safe = True

    def __init__(self, paths: list[str], seconds: float) -> None:
        self.paths = paths
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        """Return uint8, one dimension."""
        import torch

        if self.seconds:
            time.sleep(self.seconds)
        return torch.frombuffer(bytearray(Path(self.paths[index]).read_bytes()), dtype=torch.uint8)


class Decoded:
    """The images of a dataset of bytes, resized."""

    thread_safe = True

    def __init__(self, files: Any) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        """Return uint8, (3, 224, 224)."""
        return decoded(self.files[index])


def decoded(content: Any) -> Any:
    """Decode and resize one photograph."""
    from torchvision.transforms.v2.functional import resize

    from spdl_torch.io import decode_image

    return resize(decode_image(content), [_SIDE, _SIDE])


def encoded(settings: dict[str, Any]) -> dict[str, float]:
    """Measure a cache of the files' bytes."""
    from spdl_torch import ImageFolder

    folder, transform = settings["folder"], _resize()
    _warm_up(ImageFolder(folder, transform), settings)
    return _epochs(lambda: ImageFolder(folder, transform, cache="memory"), settings)


def decoded_samples(settings: dict[str, Any]) -> dict[str, float]:
    """Measure a cache of decoded samples, uint8."""
    _warm_up(_decoded_folder(settings), settings)
    return _epochs(lambda: _cached_folder(settings), settings)


def late_store(settings: dict[str, Any]) -> dict[str, float]:
    """Measure bytes from a store that responds after 50 ms, beside the same files without
    that."""
    from spdl_torch.data import cached

    paths = jpegs(settings["folder"])[: settings["samples"]]
    late = cached(Late(paths, _LATE_SECONDS), "memory", transform=decoded)
    workers = {**settings, "num_workers": _IN_FLIGHT}
    local = Decoded(Late(paths, 0.0))
    _warm_up(local, workers)
    _, filled = _pass(late, workers)
    # Local and cached take turns, so that other programs disturb both alike.
    passes = [(_pass(local, workers), _pass(late, workers)) for _ in range(3)]
    assert all(filled == sums == others for (_, sums), (_, others) in passes), "other pixels"
    local_seconds = min(one for (one, _), _ in passes)
    late_seconds = min(one for _, (one, _) in passes)
    return _figures(len(local), local_seconds, late_seconds)


def ranks(settings: dict[str, Any]) -> dict[str, float]:
    """Measure the memory that four ranks add when they read all decoded samples.

    What the same ranks take for reading the same photographs without a cache does not count.
    """
    _cached_folder(settings, _RANK_SIDE)[0]  # imports, and what is allocated once
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        _NUM_RANKS,
        mp_context=context,
        initializer=_set_meeting,
        initargs=(context.Barrier(_NUM_RANKS, timeout=_PATIENCE_SECONDS),),
    ) as pool:
        readings = list(pool.map(_read_all, [settings] * _NUM_RANKS, range(_NUM_RANKS)))
    files = sum({reading.folder: reading.file_bytes for reading in readings}.values())
    total = files + max(0, sum(reading.grown_bytes for reading in readings))
    return {"mib": total / 2**20, "copies": total / readings[0].copy_bytes}


class _Reading(NamedTuple):
    """The measurements of one rank."""

    grown_bytes: int  # of the rank's own memory and its share of what the ranks share
    folder: str
    file_bytes: int  # of the cache's files in this folder
    copy_bytes: int  # of all samples


_MEETING: list[Barrier] = []  # of the ranks, in each of them


def _set_meeting(barrier: Barrier) -> None:
    _MEETING.append(barrier)


def _read_all(settings: dict[str, Any], rank: int) -> _Reading:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getppid())}
    os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(_NUM_RANKS))
    count = settings["samples"]
    # First a part of its own, as a sampler gives it; then what the other ranks have made.
    indices = [(number + rank * count // _NUM_RANKS) % count for number in range(count)]
    dataset, plain = _cached_folder(settings, _RANK_SIDE), _decoded_folder(settings, _RANK_SIDE)
    for index in indices * 2:  # until the allocator has what decoding needs
        plain[index]
    dataset[indices[0]]
    before = _bytes_when_all_are_here()
    copy_bytes = sum(dataset[index][0].numel() for index in indices)
    grown = _bytes_when_all_are_here() - before
    folder = dataset._store.folder
    file_bytes = sum(512 * os.stat(entry.path).st_blocks for entry in os.scandir(folder))
    return _Reading(grown, folder, file_bytes, copy_bytes)


def _bytes_when_all_are_here() -> int:
    """Return this rank's memory at a moment when no rank works; pages that ranks share are divided
    among them."""
    (meeting,) = _MEETING
    meeting.wait()
    found = _private_bytes()
    meeting.wait()
    return found


def _private_bytes() -> int:
    """Return the bytes of this process alone, plus its share of what it shares with others."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _epochs(make: Callable[[], Any], settings: dict[str, Any]) -> dict[str, float]:
    filling, reading = [], []
    for _ in range(3):  # in turns, so that other programs disturb both alike
        dataset = make()
        filling.append(_pass(dataset, settings))
        reading.append(_pass(dataset, settings))
    assert len({tuple(sums) for _, sums in filling + reading}) == 1, "the cache has other pixels"
    first, second = (min(seconds for seconds, _ in each) for each in (filling, reading))
    return _figures(settings["samples"], first, second)


def _figures(count: int, first: float, second: float) -> dict[str, float]:
    return {"first": count / first, "second": count / second, "ratio": first / second}


def _pass(dataset: Any, settings: dict[str, Any]) -> tuple[float, list[int]]:
    """Return the seconds of an epoch, and a checksum of each batch."""
    from torch.utils.data import Subset

    from spdl_torch import DataLoader

    part = Subset(dataset, range(settings["samples"]))
    workers = settings["num_workers"]
    loader = DataLoader(part, batch_size=_BATCH, num_workers=workers, isolation="thread")
    sums = []
    start = time.perf_counter()
    for batch in loader:
        images = batch[0] if isinstance(batch, list | tuple) else batch
        sums.append(zlib.crc32(images.contiguous().numpy()))
    return time.perf_counter() - start, sums


def _warm_up(dataset: Any, settings: dict[str, Any]) -> None:
    _pass(dataset, {**settings, "samples": min(settings["samples"], 2 * _BATCH)})


def _cached_folder(settings: dict[str, Any], side: int = _SIDE) -> Any:
    from spdl_torch.data import cached

    return cached(_decoded_folder(settings, side), "memory")


def _decoded_folder(settings: dict[str, Any], side: int = _SIDE) -> Any:
    from spdl_torch import ImageFolder
    from spdl_torch.io import image_loader

    return ImageFolder(settings["folder"], _resize(side), loader=image_loader)


def _resize(side: int = _SIDE) -> Any:
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize((side, side)), v2.ToImage()])


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure all epochs of one kind of cache."""
    import torch

    torch.set_num_threads(1)
    reporter.phase("measuring", 0)
    figures: dict[str, float] = contender.run(settings)
    return figures


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    wanted = 16 if options.smoke else round(_FILES_A_SECOND * options.seconds)
    with photographs(options.data, wanted) as folder:
        samples = min(wanted, len(jpegs(folder)))
        workers = options.num_workers
        yield {"folder": str(folder), "samples": samples, "num_workers": workers}


TABLES = {
    "cache": Table(
        name="cache",
        title=f"Photographs of {_SIDE} x {_SIDE} from a cache in memory",
        metrics=_METRICS,
        contenders=(
            Contender(name="ours, encoded", run=encoded, smoke=True),
            Contender(name="ours, decoded", run=decoded_samples, smoke=True),
            Contender(name="ours, late store over local files", run=late_store, smoke=True),
            Contender(name="ours, 4 ranks", run=ranks, smoke=True),
        ),
        prepare=_prepare,
        measure=measure,
        goals=(
            Goal(metric="ratio", row="ours, encoded", at_least=1.0),
            Goal(metric="ratio", row="ours, decoded", at_least=3.0),
            Goal(metric="ratio", row="ours, late store over local files", at_least=0.95),
            Goal(metric="copies", row="ours, 4 ranks", at_most=1.1),
        ),
    )
}
