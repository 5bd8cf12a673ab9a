"""Photographs to uint8 batches of 32 at 224 x 224 on two workers: images a second, CPU, waiting.

Every row does the same work: read JPEG files, decode them whole, resize them to 224 x 224
(bilinear; antialiased except SPDL's) and put them into batches, on two threads or two worker
processes:

- ours, DataLoader: a dataset whose ``__getitems__`` calls ``spdl_torch.io.load_image_batch``;
- ours, pipeline: the same function as a stage of ``spdl_torch.pipeline``;
- SPDL's ``load_image_batch`` in SPDL's pipeline, with its defaults (bicubic, padded) and as the
  others (bilinear, not padded); the faster one counts;
- torch's DataLoader with Pillow, and with torchvision's codec and uint8 resize, image by image;
- two bare threads that call ``load_image_batch`` in a loop: what no loader can exceed.

Each measurement is one pass in a fresh process. ``images/s`` is the steady state, from the first
batch in hand to the last; ``whole pass`` counts from ``iter()``, with workers starting and ending;
CPU is that of the process and its workers over the whole pass.

Goals: 1.8 times SPDL, 1.6 times torch with Pillow, 1.1 times torch with torchvision, and 0.95 of
the bare threads.

    python examples/benchmark_images.py [--data DIR] [--rounds N] [--json FILE] [--smoke]
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from _bench import (
    Goal,
    Metric,
    Report,
    argument_parser,
    in_fresh_process,
    interleaved,
    jpegs,
    machine,
    photographs,
    run_program,
    spdl_decoder,
)
from torch.utils.data import DataLoader, Dataset

from spdl_torch.bench.images import PIXELS, as_it_is, load_pillow, load_torchvision

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

BATCH = 32
WORKERS = 2
METRICS = (
    Metric(key="images_per_second", heading="images/s"),
    Metric(key="whole_pass", heading="whole pass, images/s"),
    Metric(key="cpu_ms", heading="CPU ms/image", digits=2),
    Metric(key="first_batch_ms", heading="first batch, ms"),
)


def main(options: argparse.Namespace) -> Report:
    """Measure every loader that is installed."""
    num_images = 96 if options.smoke else 1000
    with (
        spdl_decoder() as no_spdl,
        photographs(options.data, 16 if options.smoke else 200) as folder,
    ):
        rows = [row for row in ROWS if not (no_spdl and row.startswith("SPDL"))]
        report = Report(
            title=f"Photographs to batches of {BATCH} at {PIXELS} x {PIXELS}, {WORKERS} workers",
            metrics=METRICS,
            settings=machine(files=len(jpegs(folder)), images=num_images, rounds=options.rounds),
            remarks=[no_spdl] if no_spdl else [],
        )
        measure_one = partial(in_fresh_process, __file__, folder=str(folder), num_images=num_images)
        interleaved(report, rows, options.rounds, lambda row: measure_one(row=row))
    spdl_rows = [row for row in rows if row.startswith("SPDL")]
    best_spdl = max(
        spdl_rows, key=lambda row: report.median(row, "images_per_second"), default=SPDL_BILINEAR
    )
    goal = partial(Goal, metric="images_per_second", row=OURS)
    report.goals = [
        goal(over=best_spdl, at_least=1.8),
        *(goal(over=row) for row in spdl_rows if row != best_spdl),
        goal(over=TORCH_PILLOW, at_least=1.6),
        goal(over=TORCH_TORCHVISION, at_least=1.1),
        goal(over=BARE, at_least=0.95),
        goal(row=OURS_PIPELINE, over=best_spdl),
        goal(row=OURS_PIPELINE, over=BARE),
        goal(metric="cpu_ms", over=BARE),
    ]
    return report


def measure(row: str, folder: str, num_images: int) -> dict[str, float]:
    """One pass over ``num_images``, the files of the folder again and again."""
    from spdl_torch.measuring.machine import cpu_seconds

    torch.set_num_threads(1)  # every loader below does its work on two threads or processes
    files = jpegs(folder)
    paths = [files[index % len(files)] for index in range(num_images)]
    make_batches = ROWS[row](paths)
    gc.collect()  # 100 ms after torch's imports, and else part of some rows' time by chance
    cpu, start = cpu_seconds(), time.perf_counter()
    batches = make_batches()
    num_first = _check(next(batches))
    first = time.perf_counter()
    num_rest = sum(map(_check, batches))
    last = time.perf_counter()
    del batches  # ends the workers, so that their CPU time is known
    assert num_first + num_rest == num_images, f"{num_first=} {num_rest=} {num_images=}"
    return {
        "images_per_second": num_rest / (last - first),
        "whole_pass": num_images / (time.perf_counter() - start),
        "cpu_ms": (cpu_seconds() - cpu) / num_images * 1e3,
        "first_batch_ms": (first - start) * 1e3,
    }


def _check(batch: Any) -> int:
    shape = tuple(batch.shape)
    assert shape[1:] in ((3, PIXELS, PIXELS), (PIXELS, PIXELS, 3)), shape
    return shape[0]


class BatchedPhotographs(Dataset):
    """Photographs that come a batch at a time: one call decodes and resizes all of them."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> torch.Tensor:
        """uint8, shape (N, 224, 224, 3)."""
        return load_batch([self.paths[index] for index in indices])


class Photographs(Dataset):
    """Photographs that come one at a time, made by ``load``."""

    def __init__(self, paths: Sequence[str], load: Callable[[str], torch.Tensor]) -> None:
        self.paths = paths
        self.load = load

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.load(self.paths[index])


def load_batch(paths: Sequence[str]) -> torch.Tensor:
    """Our batch kernel."""
    from spdl_torch.io import load_image_batch

    return load_image_batch(paths, width=PIXELS, height=PIXELS)


def groups(paths: Sequence[str]) -> Iterator[list[str]]:
    """The paths, 32 at a time."""
    remaining = iter(paths)
    while group := list(itertools.islice(remaining, BATCH)):
        yield group


def our_loader(paths: Sequence[str], num_workers: int = WORKERS) -> Callable[[], Iterator[Any]]:
    """Our DataLoader."""
    import spdl_torch

    loader = spdl_torch.DataLoader(
        BatchedPhotographs(paths), BATCH, num_workers=num_workers, collate_fn=as_it_is
    )
    load_batch(paths[:1])  # the kernel is compiled when it is first used
    return lambda: iter(loader)


def our_pipeline(paths: Sequence[str]) -> Callable[[], Iterator[Any]]:
    """Our engine, written as for SPDL's."""
    from spdl_torch.pipeline import PipelineBuilder

    load_batch(paths[:1])
    builder = PipelineBuilder().add_source(list(groups(paths)))
    builder.pipe(load_batch, concurrency=WORKERS, output_order="input").add_sink(3)
    return lambda: _items(builder.build(num_threads=WORKERS))


def spdl_pipeline(
    paths: Sequence[str], *, bilinear: bool, num_workers: int = WORKERS
) -> Callable[[], Iterator[Any]]:
    """SPDL's engine and decoder."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    options: dict[str, Any] = {"width": PIXELS, "height": PIXELS}
    if bilinear:
        options["filter_desc"] = spdl.io.get_video_filter_desc(
            scale_width=PIXELS,
            scale_height=PIXELS,
            scale_algo="bilinear",
            scale_mode=None,
            pix_fmt="rgb24",
        )

    def load(group: list[str]) -> torch.Tensor:
        return spdl.io.to_torch(spdl.io.load_image_batch(group, **options))

    builder = PipelineBuilder().add_source(list(groups(paths)))
    builder.pipe(load, concurrency=num_workers, output_order="input").add_sink(3)
    return lambda: _items(builder.build(num_threads=num_workers))


def _items(pipeline: Any) -> Iterator[Any]:
    with pipeline.auto_stop():
        yield from pipeline


def torch_loader(
    paths: Sequence[str], *, load: Callable[[str], torch.Tensor], num_workers: int = WORKERS
) -> Callable[[], Iterator[Any]]:
    """torch's DataLoader, its worker processes forked."""
    loader = DataLoader(
        Photographs(paths, load), BATCH, num_workers=num_workers, multiprocessing_context="fork"
    )
    load(paths[0])  # imports; the forked workers find them done
    return lambda: iter(loader)


def bare_threads(paths: Sequence[str]) -> Callable[[], Iterator[Any]]:
    """Two threads that share an iterator; all that is waited for is the end."""
    load_batch(paths[:1])
    return partial(bare_batches, paths, load_batch)


def bare_batches(
    paths: Sequence[str], load: Callable[[list[str]], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The batches that ``load`` makes, by two threads."""
    remaining, lock = groups(paths), threading.Lock()
    done: list[torch.Tensor] = []
    first = threading.Event()

    def work() -> None:
        while True:
            with lock:
                group = next(remaining, None)
            if group is None:
                return
            done.append(load(group))
            first.set()

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    first.wait()
    yield done[0]
    for thread in threads:
        thread.join()
    yield from done[1:]


OURS = "ours, DataLoader"
OURS_PIPELINE = "ours, pipeline"
SPDL_BILINEAR = "SPDL, bilinear"
TORCH_PILLOW = "torch + Pillow"
TORCH_TORCHVISION = "torch + torchvision"
BARE = "bare threads"
ROWS: dict[str, Callable[[Sequence[str]], Callable[[], Iterator[Any]]]] = {
    OURS: our_loader,
    OURS_PIPELINE: our_pipeline,
    "SPDL, default": partial(spdl_pipeline, bilinear=False),
    SPDL_BILINEAR: partial(spdl_pipeline, bilinear=True),
    TORCH_PILLOW: partial(torch_loader, load=load_pillow),
    TORCH_TORCHVISION: partial(torch_loader, load=load_torchvision),
    BARE: bare_threads,
}


if __name__ == "__main__":
    run_program(main, argument_parser(__doc__, rounds=5), child=measure)
