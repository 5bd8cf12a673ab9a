"""What the benchmarks share: fresh processes, interleaved rounds, medians, ratios, tables.

A benchmark has *rows* (a loader) and *metrics* (images a second). Every row is measured once a
round, so that a machine that grows slower does so for all of them, and ratios are taken within a
round, then their median over the rounds.

Imports nothing but the standard library at its top: workers that are spawned import it again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One column of the table."""

    key: str
    heading: str
    """With the unit."""
    digits: int = 0


_OTHERS = Metric(key="other_cores", heading="others' cores", digits=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A figure to reach: the metric of ``row``, or its ratio to the same metric of ``over``."""

    metric: str
    row: str
    over: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        return f"{self.metric}: {self.row}" + (f" / {self.over}" if self.over else "")

    def bound(self) -> str:
        """The goal in words; empty where the figure is only told."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:.3g}"

    def is_reached(self, value: float) -> bool | None:
        """None where there is nothing to reach."""
        if self.at_least is not None:
            return value >= self.at_least
        return None if self.at_most is None else value <= self.at_most


@dataclass(kw_only=True, slots=True)
class Report:
    """What was measured: for every row and metric one value a round."""

    title: str
    metrics: Sequence[Metric]
    settings: Mapping[str, object]
    rows: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, row: str, values: Mapping[str, float]) -> None:
        """The values of one more round."""
        series = self.rows.setdefault(row, {})
        for key, value in values.items():
            series.setdefault(key, []).append(value)

    def median(self, row: str, metric: str) -> float:
        """Over the rounds."""
        return median(self.rows[row][metric])

    def values_of(self, goal: Goal) -> list[float]:
        """One value a round; empty if a row of the goal was not measured."""
        values = self.rows.get(goal.row, {}).get(goal.metric, [])
        if goal.over is None:
            return values
        others = self.rows.get(goal.over, {}).get(goal.metric, [])
        return [value / other for value, other in zip(values, others, strict=False)]

    def text(self) -> str:
        """The tables, for people."""
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        lines = [self.title, settings, "", *self._row_lines(), ""]
        lines += [line for goal in self.goals if (line := self._goal_line(goal))]
        return "\n".join([*lines, *self.remarks])

    def as_json(self) -> dict[str, object]:
        """The same for programs, with the values of every round."""
        return {
            "title": self.title,
            "settings": dict(self.settings),
            "rows": {
                row: {key: _summary(values) for key, values in series.items()}
                for row, series in self.rows.items()
            },
            "ratios": [
                {
                    "name": str(goal),
                    **_summary(values),
                    "goal": goal.bound() or None,
                    "reached": goal.is_reached(median(values)),
                }
                for goal in self.goals
                if (values := self.values_of(goal))
            ],
            "remarks": self.remarks,
        }

    def _row_lines(self) -> list[str]:
        cells = [["", *(metric.heading for metric in self.metrics)]]
        for row, series in self.rows.items():
            texts = [_cell(series.get(metric.key, []), metric.digits) for metric in self.metrics]
            cells.append([row, *texts])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in cells
        ]
        return [lines[0], "-" * len(lines[0]), *lines[1:]]

    def _goal_line(self, goal: Goal) -> str:
        values = self.values_of(goal)
        if not values:
            return ""
        digits = 2 if median(values) >= 1 else 3
        text = f"{goal!s:<78} {_cell(values, digits)}"
        reached = goal.is_reached(median(values))
        if reached is not None:
            text += f"  goal {goal.bound()}: {'reached' if reached else 'MISSED'}"
        return text


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
    from spdl_torch.demo.machine import OtherPrograms

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
    from spdl_torch.demo.memory import tree_bytes

    command = [sys.executable, program, "--child", json.dumps(request)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True) as child:
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


def installed(module: str) -> bool:
    """Whether a peer is there."""
    return importlib.util.find_spec(module) is not None


def left_out(module: str, name: str) -> str:
    """The line that says why a peer's rows are missing."""
    return f"{name} ({module}) is not installed, so it is left out: pip install 'spdl-torch[bench]'"


def machine(**more: object) -> dict[str, object]:
    """What the figures were measured on."""
    from spdl_torch.demo.machine import usable_cores

    return {
        "cores": usable_cores(),
        "Python": platform.python_version(),
        **{name: found for name in ("torch", "torchvision", "spdl") if (found := _version(name))},
        **more,
    }


@contextlib.contextmanager
def spdl_decoder() -> Iterator[str | None]:
    """Let fresh processes find the FFmpeg that SPDL's decoder needs; yields why it cannot be used.

    The machine's own FFmpeg comes first. Without one, the FFmpeg in PyAV's wheel serves: its
    libraries bear other names, so they are linked under the names that SPDL looks for.
    """
    if not installed("spdl"):
        yield left_out("spdl", "SPDL")
        return
    before = os.environ.get("LD_LIBRARY_PATH")
    with tempfile.TemporaryDirectory(prefix="spdl-torch-bench-") as links:
        try:
            if not _spdl_decodes():
                libraries = _pyav_libraries()
                for library in libraries.glob("lib*-*.so.*"):
                    name, _, numbers = library.name.partition(".so.")
                    link = f"{name.rpartition('-')[0]}.so.{numbers.partition('.')[0]}"
                    (Path(links) / link).symlink_to(library)
                os.environ["LD_LIBRARY_PATH"] = os.pathsep.join((links, str(libraries)))
            yield None if _spdl_decodes() else "SPDL found no FFmpeg, so it is left out."
        finally:
            if before is None:
                os.environ.pop("LD_LIBRARY_PATH", None)
            else:
                os.environ["LD_LIBRARY_PATH"] = before


def _spdl_decodes() -> bool:
    code = "import spdl.io.lib; spdl.io.lib._import_libspdl()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def _pyav_libraries() -> Path:
    found = importlib.util.find_spec("av")
    return Path(found.origin if found and found.origin else "").parent.with_name("av.libs")


@contextlib.contextmanager
def photographs(folder: Path | None, count: int) -> Iterator[Path]:
    """The user's folder of photographs, or ``count`` of our own; read once, so they are cached."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            from spdl_torch.demo.photographs import write_photographs

            temporary = tempfile.TemporaryDirectory(prefix="spdl-torch-bench-")
            folder = Path(stack.enter_context(temporary))
            write_photographs(folder, count)
        for path in jpegs(folder):
            Path(path).read_bytes()
        yield folder


def jpegs(folder: Path | str) -> list[str]:
    """The JPEGs of a folder of class folders, sorted.

    Raises: SystemExit: there are none.
    """
    paths = sorted(map(str, Path(folder).glob("*/*")))
    found = [path for path in paths if path.lower().endswith((".jpg", ".jpeg"))]
    if not found:
        raise SystemExit(f"--data: {folder} must hold one folder of JPEGs per class, found none.")
    return found


def _watch(child: subprocess.Popen[bytes], tree_bytes: Callable[[int], float | None]) -> float:
    peak = 0.0
    while child.poll() is None:
        peak = max(peak, tree_bytes(child.pid) or 0.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_SECONDS_BETWEEN_SAMPLES)
    return peak


def _summary(values: Sequence[float]) -> dict[str, object]:
    return {
        "median": median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def _cell(values: Sequence[float], digits: int) -> str:
    """The median, and the spread if there is one."""
    if not values:
        return "-"
    text = f"{median(values):,.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):,.{digits}f}..{max(values):,.{digits}f})"
    return text


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
