"""The parts that measuring programs share: interleaved rounds, medians, ratios, tables.

``python -m spdl_torch bench`` measures loaders; these programs have options that its tables
lack, and print the same reports. ``spdl_torch.bench`` is not a public interface: run a copy of such
a program with the release that it came with. A program has *rows* (a loader) and *metrics* (images
a second). Every row is measured once a round, so that a machine that grows slower does so for all
of them, and ratios are taken within a round, then their median over the rounds.

Imports no torch at its top: workers that are spawned import it again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from spdl_torch.bench.images import photographs
from spdl_torch.bench.peers import installed, left_out, machine
from spdl_torch.bench.report import Goal, Metric, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Goal",
    "Metric",
    "Report",
    "argument_parser",
    "installed",
    "interleaved",
    "left_out",
    "machine",
    "photographs",
    "run_program",
]

_OTHERS = Metric(key="other_cores", heading="others' cores", digits=1)


def argument_parser(description: str, *, rounds: int, data: bool = True) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have; ``data`` adds ``--data DIR``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny amounts; figures mean nothing")
    parser.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value to FILE")
    if data:
        parser.add_argument(
            "--data",
            type=Path,
            metavar="DIR",
            help="a folder with one folder of JPEGs per class (default: photographs made for the "
            "occasion, removed at the end)",
        )
    return parser


def run_program(
    measure: Callable[[argparse.Namespace], Report], parser: argparse.ArgumentParser
) -> None:
    """Run a benchmark: print the report and write its JSON."""
    options = parser.parse_args()
    if options.smoke:
        options.rounds = 1
    report = measure(options)
    if options.smoke:
        report.remarks.append("Smoke run: too little was measured for the figures to mean much.")
    print(report.text())
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=2) + "\n")


def interleaved(
    report: Report,
    rows: Sequence[str],
    rounds: int,
    measure: Callable[[str], Mapping[str, float]],
) -> None:
    """Measure every row once a round, in reverse order every other round, so that none keeps its
    place.

    Adds a column: how many cores other programs kept busy meanwhile, on average.
    """
    from spdl_torch.measuring.machine import OtherPrograms

    for number in range(rounds):
        for row in rows if number % 2 == 0 else reversed(rows):
            print(f"round {number + 1}/{rounds}: {row}", file=sys.stderr, flush=True)
            others = OtherPrograms()
            figures = dict(measure(row))
            busy = others.cores()
            report.add(row, figures if busy is None else {**figures, _OTHERS.key: busy})
    report.metrics = [*report.metrics, _OTHERS]
    report.rows = {row: report.rows[row] for row in rows}
