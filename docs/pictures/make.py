"""Makes the pictures of the documentation, in a minute: ``python docs/pictures/make.py``.

A pipeline reads small files from a store, decodes and batches them for a training step of 30 ms.
The store answers after 10 ms and, from the middle of the run on, after 60. Waits are real, and the
pictures are what ``plot_stats`` draws of the run, what stands in its trace, and its report as
Chromium shows it; without Chromium that picture stays as it is.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torchvision.io import encode_jpeg

from spdl_torch.__main__ import main as run_command
from spdl_torch.io import load_image_batch
from spdl_torch.observe import (
    plot_stats,
    recording,
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


def show_report(db_path: Path, picture: Path) -> None:
    """The beginning of the page, in a browser without a window."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"{picture.name} stays as it is: there is no Chromium")
        return
    page = db_path.with_suffix(".html")
    run_command(["report", str(db_path), "--html", str(page)])
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--window-size=1500,830", "--virtual-time-budget=10000"]
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


def show_pipeline(folder: Path) -> None:
    """Run the pipeline twice: for its statistics, and for a trace of half a second."""
    db_path, trace = folder / "run.db", folder / "trace.json.gz"
    pipeline = builder_of(Store(2 * SECONDS)).build()
    with recording(pipeline, db_path, interval_seconds=0.5):
        train(pipeline)
    plot_stats(db_path, folder)
    shutil.copy(folder / "queue_stats_combined.png", HERE)
    shrink(HERE / "queue_stats_combined.png")
    show_report(db_path, HERE / "report.png")
    with tracing(trace):
        train(builder_of(Store(0.7)).build())
    draw_trace(trace, HERE / "trace.png")
    shrink(HERE / "trace.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        show_pipeline(Path(name))
