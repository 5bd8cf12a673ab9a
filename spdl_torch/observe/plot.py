"""Pictures of a statistics file: every stage and queue over time, and what held them back.

Needs matplotlib, the extra ``plot``; a display is not needed.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..whole_files import whole_file
from .page.charts import Curve, Panel, draw
from .store.file import query_queue_stats, query_task_stats
from .store.stored_run import StoredRun, by_stage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .store.entries import EventLogEntry

Row: TypeAlias = "Mapping[str, Any]"

_HEADINGS = {"tasks": "Stages", "queues": "Queues"}
_OLDEST_GENERATION = 2
_TIMES = {"mean": "ave", "p90": "p90", "p99": "p99"}

# The label of each panel, and the columns of its curves: a count is shown as a rate.
_PANELS: dict[str, dict[str, dict[str, str]]] = {
    "tasks": {
        "tasks\n(1/s)": {"mean": "num_tasks"},
        "failures\n(1/s)": {"mean": "num_failures"},
        "task time\n(ms)": {kind: f"{prefix}_time" for kind, prefix in _TIMES.items()},
    },
    "queues": {
        "throughput (QPS)\n(items/s)": {"mean": "num_items"},
        "occupancy\n(% of the time)": {"mean": "occupancy_rate"},
        "put: wait for room\n(ms)": {k: f"{p}_put_time" for k, p in _TIMES.items()},
        "get: wait for an item\n(ms)": {k: f"{p}_get_time" for k, p in _TIMES.items()},
    },
}


def plot_stats(
    db_path: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    stages: Sequence[str] | None = None,
    start_time: float | str | None = None,
    end_time: float | str | None = None,
    run_id: int | None = None,
) -> list[Path]:
    """Draw two pictures, ``task_stats_combined.png`` and ``queue_stats_combined.png``; return their
    paths.

    A picture for which the chosen stages have no statistics (a source has only a queue) is left
    out.

    Args:
        db_path: the statistics file; the run may still go on.
        output_dir: created if it does not exist; pictures of the same name are overwritten.
        stages: as logged (``0:1:decode[10]``) or without the numbers (``decode``); None = all.
        start_time, end_time: bounds of the drawn intervals, both inclusive: seconds since 1970, or
            as text after the run's start: ``+90``.
        run_id: None = the last run in the file that has statistics.
    Raises: FileNotFoundError; ModuleNotFoundError: matplotlib is not installed; ValueError: not a
        statistics file, no such run or stage, no interval in that time; OSError: ``output_dir``
        cannot be written to.
    """
    folder = Path(output_dir)
    drawn = drawn_part(db_path, stages, start_time, end_time, run_id)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, name in (("tasks", "task_stats"), ("queues", "queue_stats")):
        if drawn.series[kind]:
            paths.append(folder / f"{name}_combined.png")
            with whole_file(paths[-1]) as file:
                drawn.figure(kind).savefig(file, format="png", dpi=110)
    return paths


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnPart:
    """The part of a run to draw."""

    run: StoredRun
    """All of the run in that time, also stages that are left out: the bottleneck is found with
    them."""
    origin: float
    """The moment from which time counts: seconds since 1970."""
    series: Mapping[str, Mapping[int, Sequence[Row]]]
    """Of ``tasks`` and ``queues``: the intervals of each stage, oldest first, by its number in the
    order of the pipeline."""

    def figure(self, kind: str) -> Figure:
        """Return the picture of the tasks, or of the queues."""
        series = self.series[kind]
        rows = [row for each in self.series.values() for those in each.values() for row in those]
        begin = min(row["timestamp"] - row["elapsed"] for row in rows) - self.origin
        end = max(row["timestamp"] for row in rows) - self.origin
        panels = [
            Panel(
                label=label,
                curves=[
                    self._curve(each, column, line, number)
                    for number, each in series.items()
                    for line, column in columns.items()
                ],
                is_percentage="%" in label,
            )
            for label, columns in _PANELS[kind].items()
        ]
        verdicts = {number: self.run.report(number).verdict for number in self.run.pipelines()}
        blamed = {(number, each.stage) for number, each in verdicts.items()}
        last = [those[-1] for those in series.values()]
        return draw(
            panels,
            collections_of(self.run.events, self.origin),
            (begin, end),
            heading=f"{_HEADINGS[kind]}\n{self.run.described(self.origin)}",
            sentences=[
                f"Pipeline {number}: {each.finding}" if len(verdicts) > 1 else each.finding
                for number, each in verdicts.items()
            ],
            marked=frozenset(
                row["name"] for row in last if (row["pipeline"], row["label"]) in blamed
            ),
        )

    def _curve(self, rows: Sequence[Row], column: str, kind: Any, number: int) -> Curve:
        return Curve(
            name=rows[-1]["name"],  # a change of concurrency changes it
            kind=kind,
            colour=number,
            begin=rows[0]["timestamp"] - rows[0]["elapsed"] - self.origin,
            times=[row["timestamp"] - self.origin for row in rows],
            values=[_value_of(row, column) for row in rows],
        )


def drawn_part(
    db_path: str | os.PathLike[str],
    stages: Sequence[str] | None = None,
    start_time: float | str | None = None,
    end_time: float | str | None = None,
    run_id: int | None = None,
    pipelines: Collection[int] | None = None,
) -> DrawnPart:
    """Read the part to draw; arguments and errors as for :func:`plot_stats`. ``pipelines``: those
    to draw; None = all."""
    run = StoredRun.read(db_path, run_id)
    run_id = run.facts["run_id"]
    groups = {
        "tasks": by_stage(query_task_stats(db_path, run_id=run_id)[::-1]),
        "queues": by_stage(query_queue_stats(db_path, run_id=run_id)[::-1]),
    }
    names: dict[Any, set[str]] = defaultdict(set)  # of each stage and its queue
    rows: list[Row] = []
    for key, those in (item for of_kind in groups.values() for item in of_kind.items()):
        rows += those
        for row in those:
            names[key] |= {row["name"], row["name"].removesuffix("_queue"), row["label"]}
    # Entries may be older than the run that logs them, if they were copied from elsewhere or the
    # clock was set back. Elapsed time is never negative.
    origin = min([run.facts["started"], *(row["timestamp"] - row["elapsed"] for row in rows)])
    begin = -math.inf if start_time is None else _moment(start_time, "start_time", origin)
    end = math.inf if end_time is None else _moment(end_time, "end_time", origin)
    keys = sorted(names)
    for stage in stages or ():
        if not any(stage in names[key] for key in keys):
            labels = ", ".join(dict.fromkeys(key[-1] for key in keys))
            raise ValueError(f"{_where(run)}: no stage {stage!r}; it has {labels}.")
    if pipelines is not None:
        keys = [key for key in keys if key[0] in pipelines]
    series: dict[str, dict[int, list[Row]]] = {}
    for kind, of_kind in groups.items():
        cut = {
            number: [row for row in of_kind.get(key, ()) if begin <= row["timestamp"] <= end]
            for number, key in enumerate(keys)
            if stages is None or names[key] & {*stages}
        }
        series[kind] = {number: those for number, those in cut.items() if those}
    if not any(series.values()):
        times = [row["timestamp"] - origin for row in rows]
        raise ValueError(
            f"{_where(run)}: no interval of the chosen stages ends between start_time and "
            f"end_time. Its intervals end from +{min(times):.3f} s to +{max(times):.3f} s after "
            "its start."
        )
    return DrawnPart(run=StoredRun.read(db_path, run_id, begin, end), origin=origin, series=series)


def collections_of(events: Iterable[EventLogEntry], origin: float) -> list[tuple[float, float]]:
    """Pair each ``gc_start`` of a full collection with its ``gc_stop``, oldest first.

    One whose start or stop is not in the file is left out. Without a generation, as other programs
    log them, collections count as full.
    """
    begun: float | None = None
    found = []
    for event in events:
        if event.details.get("generation", _OLDEST_GENERATION) == _OLDEST_GENERATION:
            if event.event_name == "gc_start":
                begun = event.timestamp - origin
            elif event.event_name == "gc_stop" and begun is not None:
                found.append((begun, event.timestamp - origin))
                begun = None
    return found


def _value_of(row: Row, column: str) -> float:
    if column == "occupancy_rate":
        return float(100.0 * row[column])
    if column.startswith("num_"):  # intervals differ in length, and the last one is short
        return float(row[column] / row["elapsed"]) if row["elapsed"] else math.nan
    is_of_tasks = "num_tasks" in row
    num_timed = row["num_tasks"] - row["num_failures"] if is_of_tasks else row["num_items"]
    return float(1e3 * row[column]) if num_timed else math.nan


def _where(run: StoredRun) -> str:
    return f"{run.path}, run {run.facts['run_id']}"


def _moment(value: float | str, name: str, origin: float) -> float:
    """Return a bound of the time span in seconds since 1970."""
    try:
        seconds = float(value)
    except ValueError as error:
        raise ValueError(
            f"{name} must be seconds since 1970, or after the run's start like +90, got {value!r}."
        ) from error
    return origin + seconds if str(value).startswith("+") else seconds
