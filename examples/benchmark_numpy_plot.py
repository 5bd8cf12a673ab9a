"""Draw what benchmark_numpy.py measured: loads a second and CPU time over the number of workers.

Reads its CSV and writes one picture (PNG): threads on the left, processes on the right; loads a
second above, CPU milliseconds a load below; a line for each format and loader, with the 95 %
confidence interval as a bar (cut below a tenth of the mean). Both axes are logarithmic. Prints the
picture's name.

    python examples/benchmark_numpy.py --csv numpy.csv
    python examples/benchmark_numpy_plot.py numpy.csv [--output numpy.png]

``--smoke`` measures a little by itself, draws it and throws both away.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import benchmark_numpy
import matplotlib
from matplotlib import pyplot as plt

matplotlib.use("Agg")  # never opens a window


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="?", help="written by benchmark_numpy.py --csv")
    parser.add_argument("--output", type=Path, help="default: the CSV's name with .png")
    parser.add_argument("--smoke", action="store_true", help="measure a little and draw that")
    options = parser.parse_args()
    if options.csv is None and not options.smoke:
        parser.error("csv: the file that benchmark_numpy.py --csv wrote is needed.")
    return options


POOLS = ("threads", "processes")
METRICS = {"loads_per_second": "loads per second", "cpu_ms_per_load": "CPU time per load (ms)"}
COLOURS = {"torch": "#7f7f7f", "npy": "#0072b2", "npz": "#d55e00", "npz-compressed": "#009e73"}
"""Distinct to the colour-blind, too."""
STYLES = {
    "ours": {"linestyle": "-", "marker": "o"},
    "numpy": {"linestyle": "--", "marker": "s"},
    "torch": {"linestyle": ":", "marker": "^"},
}


class Point(NamedTuple):
    """A mean and its interval, which is NaN for a single repeat."""

    num_workers: int
    mean: float
    low: float
    high: float


def main() -> None:
    """Read the table, draw it, and print where."""
    options = parse()
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "smoke.csv"
            measure_a_little(table)
            draw(read(table), table.with_suffix(".png"))
        return
    draw(read(options.csv), options.output or options.csv.with_suffix(".png"))


def measure_a_little(table: Path) -> None:
    """Write the table that the program measures with ``--smoke``."""
    options = benchmark_numpy.parser().parse_args(["--smoke", "--rounds", "1", "--csv", str(table)])
    benchmark_numpy.main(options)


def read(table: Path) -> dict[tuple[str, str], dict[tuple[str, str], list[Point]]]:
    """Return the points in order, by metric and pool, and in these by format and loader."""
    found: dict[tuple[str, str], dict[tuple[str, str], list[Point]]] = defaultdict(dict)
    with open(table, newline="") as file:
        for line in csv.DictReader(file):
            lines = found[line["metric"], line["pool"]]
            numbers = (float(line[name]) for name in ("mean", "interval_low", "interval_high"))
            point = Point(int(line["num_workers"]), *numbers)
            lines.setdefault((line["format"], line["loader"]), []).append(point)
    for lines in found.values():
        for points in lines.values():
            points.sort()
    return found


def draw(found: dict[tuple[str, str], dict[tuple[str, str], list[Point]]], output: Path) -> None:
    """Write the picture and print its name and size."""
    figure, panels = plt.subplots(
        len(METRICS), len(POOLS), figsize=(11, 9), sharex=True, sharey="row", layout="constrained"
    )
    for row, (metric, label) in zip(panels, METRICS.items(), strict=True):
        for panel, pool in zip(row, POOLS, strict=True):
            draw_panel(panel, found.get((metric, pool), {}))
            panel.set_title(pool)
        row[0].set_ylabel(label)
    for panel in panels[-1]:
        panel.set_xlabel("workers")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("A picture, uint8 (3, 640, 480), and its labels, uint8 (640, 480), from memory")
    figure.savefig(output, dpi=120)
    plt.close(figure)
    print(f"{output}: {output.stat().st_size} bytes")


def draw_panel(panel: plt.Axes, lines: dict[tuple[str, str], list[Point]]) -> None:
    """Draw the lines of one metric and pool."""
    for (saved_as, library), points in lines.items():
        workers = [point.num_workers for point in points]
        colour = COLOURS.get(saved_as)
        label = "torch.load" if library == "torch" else f"{saved_as}, {library}"
        style = STYLES.get(library, {})
        panel.plot(workers, [p.mean for p in points], color=colour, label=label, **style)
        if not any(math.isnan(point.low) for point in points):
            # An interval may reach below 0, where a logarithmic axis has nothing.
            below = [min(p.mean - p.low, p.mean * 0.9) for p in points]
            above = [p.high - p.mean for p in points]
            panel.errorbar(
                workers,
                [p.mean for p in points],
                yerr=(below, above),
                fmt="none",
                ecolor=colour,
                elinewidth=1,
                capsize=4,
                alpha=0.6,
            )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted({point.num_workers for points in lines.values() for point in points})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.grid(visible=True, which="major", alpha=0.3)


if __name__ == "__main__":
    main()
