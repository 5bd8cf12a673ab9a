"""What the benchmarks share: fresh processes, interleaved rounds, medians, ratios, tables.

A benchmark has *rows* (a loader) and *metrics* (images a second). Every row is measured once a
round, so that a machine that grows slower does so for all of them, and ratios are taken within a
round, then their median over the rounds.

Imports no torch at its top: workers that are spawned import it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from spdl_torch.bench.images import jpegs, photographs
from spdl_torch.bench.peers import installed, left_out, machine, spdl_decoder
from spdl_torch.bench.report import Goal, Metric, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Goal",
    "Metric",
    "Report",
    "argument_parser",
    "in_fresh_process",
    "installed",
    "interleaved",
    "jpegs",
    "left_out",
    "machine",
    "photographs",
    "run_program",
    "spdl_decoder",
]

_SECONDS_BETWEEN_SAMPLES = 0.1
_LAST_WORDS = 4000
"""Characters of a failed process's messages that are shown; the peers can be talkative."""


_OTHERS = Metric(key="other_cores", heading="others' cores", digits=1)


def argument_parser(description: str, *, rounds: int, data: bool = True) -> argparse.ArgumentParser:
    """The options that all benchmarks have; ``data`` adds ``--data DIR``."""
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
    measure: Callable[[argparse.Namespace], Report],
    parser: argparse.ArgumentParser,
    child: Callable[..., Mapping[str, float]] | None = None,
) -> None:
    """The main function of every benchmark: print the report and write its JSON.

    ``child`` does what :func:`in_fresh_process` asks for, in the process that it starts.
    """
    if child is not None and sys.argv[1:2] == ["--child"]:
        from spdl_torch.measuring.lifeline import end_with_the_parent

        end_with_the_parent()
        answer = child(**json.loads(sys.argv[2]))
        print(f"\n{json.dumps(answer)}", flush=True)
        return
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
    """Measure every row once a round, every other round backwards, so that none has one place.

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


def in_fresh_process(program: str, **request: object) -> dict[str, float]:
    """What ``program``'s ``child`` answers to the request, in a process of its own.

    Adds ``peak_bytes``, the largest memory of the process and its workers that was seen.
    An exception here, Ctrl-C included, kills them all.

    Raises: RuntimeError: it ended without an answer; the message ends with what it printed.
    """
    from spdl_torch.measuring.memory import tree_bytes

    command = [sys.executable, program, "--child", json.dumps(request)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams = {"stdin": subprocess.PIPE, "stdout": out, "stderr": err}
        with subprocess.Popen(command, **streams, start_new_session=True) as child:
            try:
                peak = _watch(child, tree_bytes) if request.get("watch_memory") else 0.0
                status = child.wait()
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)  # its workers, if it left any
        err.seek(0)
        if status:
            printed = err.read()[-_LAST_WORDS:]
            raise RuntimeError(f"{request}: ended with status {status}:\n{printed}")
        out.seek(0)
        answer: dict[str, float] = json.loads(out.read().splitlines()[-1])
    return answer if not peak else {**answer, "peak_bytes": peak}


def _watch(child: subprocess.Popen[bytes], tree_bytes: Callable[[int], float | None]) -> float:
    peak = 0.0
    while child.poll() is None:
        peak = max(peak, tree_bytes(child.pid) or 0.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_SECONDS_BETWEEN_SAMPLES)
    return peak
