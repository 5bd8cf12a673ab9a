"""Draw what benchmark_numpy.py measured: loads a second and CPU time over the number of workers.

Reads its CSV and writes one picture (PNG): threads on the left, processes on the right; loads a
second above, CPU milliseconds a load below; a line for each format and loader, with a bar from the
smallest to the largest value. Both axes are logarithmic. Prints the picture's name.

    python examples/benchmark_numpy.py --csv numpy.csv
    python examples/benchmark_numpy_plot.py numpy.csv [--output numpy.png]
    python examples/benchmark_numpy_plot.py --smoke
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections import defaultdict
from pathlib import Path

import benchmark_numpy
import matplotlib
from matplotlib import pyplot as plt

matplotlib.use("Agg")  # never opens a window

POOLS = ("threads", "processes")
METRICS = {"loads_per_second": "loads per second", "cpu_ms_per_load": "CPU time per load (ms)"}
COLOURS = {"torch": "#7f7f7f", "npy": "#0072b2", "npz": "#d55e00", "npz-compressed": "#009e73"}
"""Distinct to the colour-blind, too."""
STYLES = {
    "ours": {"linestyle": "-", "marker": "o"},
    "numpy": {"linestyle": "--", "marker": "s"},
    "torch": {"linestyle": ":", "marker": "^"},
}

Lines = dict[tuple[str, str], list[tuple[float, ...]]]
"""By format and loader, in order: the number of workers, the median, the smallest, the largest."""


def main() -> None:
    """Read the table, draw it, and print where."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="?", help="written by benchmark_numpy.py --csv")
    parser.add_argument("--output", type=Path, help="default: the CSV's name with .png")
    parser.add_argument("--smoke", action="store_true", help="measure a little and draw that")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.csv = Path(folder, "smoke.csv")
            little = ["--smoke", "--csv", str(options.csv)]
            benchmark_numpy.main(benchmark_numpy.parser().parse_args(little))
        if options.csv is None:
            parser.error("csv: the file that benchmark_numpy.py --csv wrote is needed.")
        output = options.output or options.csv.with_suffix(".png")
        draw(read(options.csv), output)
        print(f"{output}: {output.stat().st_size} bytes")


def read(table: Path) -> dict[tuple[str, str], Lines]:
    """Return the lines, by metric and pool."""
    found: dict[tuple[str, str], Lines] = defaultdict(lambda: defaultdict(list))
    with open(table, newline="") as file:
        for row in csv.DictReader(file):
            point = tuple(
                float(row[key]) for key in ("num_workers", "median", "smallest", "largest")
            )
            found[row["metric"], row["pool"]][row["format"], row["loader"]].append(point)
    return found


def draw(found: dict[tuple[str, str], Lines], output: Path) -> None:
    """Write the picture."""
    figure, panels = plt.subplots(
        len(METRICS), len(POOLS), figsize=(11, 9), sharex=True, sharey="row", layout="constrained"
    )
    for row, (metric, label) in zip(panels, METRICS.items(), strict=True):
        for panel, pool in zip(row, POOLS, strict=True):
            draw_panel(panel, found[metric, pool])
            panel.set_title(pool)
        row[0].set_ylabel(label)
    for panel in panels[-1]:
        panel.set_xlabel("workers")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("A picture, uint8 (3, 640, 480), and its labels, uint8 (640, 480), from memory")
    figure.savefig(output, dpi=120)
    plt.close(figure)


def draw_panel(panel: plt.Axes, lines: Lines) -> None:
    """Draw the lines of one metric and pool."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    for (saved_as, library), points in lines.items():
        workers, medians, smallest, largest = zip(*points, strict=True)
        below = [middle - low for middle, low in zip(medians, smallest, strict=True)]
        above = [high - middle for middle, high in zip(medians, largest, strict=True)]
        panel.errorbar(
            workers,
            medians,
            yerr=(below, above),
            label="torch.load" if library == "torch" else f"{saved_as}, {library}",
            color=COLOURS[saved_as],
            capsize=4,
            **STYLES[library],
        )
        panel.set_xticks(workers, [f"{count:.0f}" for count in workers])
    panel.grid(visible=True, which="major", alpha=0.3)


if __name__ == "__main__":
    main()
