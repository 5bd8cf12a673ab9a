"""Pictures of a statistics file: every stage and queue over time, and what held them back.

Needs matplotlib, the extra ``plot``; a display is not needed.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..whole_files import whole_file
from .page.charts import Curve, Panel, draw
from .store.stored_run import StoredRun
from .verdict.figures import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

    from .store.entries import EventLogEntry
    from .store.stored_run import Row
    from .verdict.figures import Figure

_VIEWS = {"tasks": "task_stats", "queues": "queue_stats"}
_HEADINGS = {"tasks": "Stages", "queues": "Queues"}
_OLDEST_GENERATION = 2
_KINDS: dict[str, Any] = {"ave": "mean", "p90": "p90", "p99": "p99"}
_ORDER = ("count", "ratio", "s")
"""The order of panels, by the unit of what they show."""


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
    with StoredRun.opened(db_path, run_id) as run:
        pictures = drawn_part(run, stages, start_time, end_time)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, picture in pictures.items():
        paths.append(folder / f"{_VIEWS[kind]}_combined.png")
        with whole_file(paths[-1]) as file:
            picture.savefig(file, format="png", dpi=110)
    return paths


def drawn_part(
    run: StoredRun,
    stages: Sequence[str] | None = None,
    start_time: float | str | None = None,
    end_time: float | str | None = None,
    pipelines: Collection[int] | None = None,
) -> dict[str, Picture]:
    """Return a part of a run as pictures, of the ``tasks`` and of the ``queues`` where there are
    any; arguments and errors as for :func:`plot_stats`. ``pipelines``: those to draw; None = all.
    """
    groups = {kind: _by_stage(run.rows(f"* FROM {view}")) for kind, view in _VIEWS.items()}
    names: dict[Any, set[str]] = defaultdict(set)  # of each stage and its queue
    rows: list[Row] = []
    for key, those in (item for of_kind in groups.values() for item in of_kind.items()):
        rows += those
        for row in those:
            names[key] |= {row["name"], row["name"].removesuffix("_queue"), row["label"]}
    if not rows:  # the views show nothing of what they cannot read
        raise ValueError(f"{run.path} is damaged: its intervals have no rows of stages or queues.")
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
    # Of each kind the intervals of a stage by its number, which is its colour in both pictures.
    series: dict[str, dict[int, list[Row]]] = {}
    for kind, of_kind in groups.items():
        cut = {
            number: [row for row in of_kind.get(key, ()) if begin <= row["timestamp"] <= end]
            for number, key in enumerate(keys)
            if stages is None or names[key] & {*stages}
        }
        series[kind] = {number: those for number, those in cut.items() if those}
    drawn = [row for each in series.values() for those in each.values() for row in those]
    if not drawn:
        times = [row["timestamp"] - origin for row in rows]
        raise ValueError(
            f"{_where(run)}: no interval of the chosen stages ends between start_time and "
            f"end_time. Its intervals end from +{min(times):.3f} s to +{max(times):.3f} s after "
            "its start."
        )
    # The bottleneck is found with stages that are left out, too.
    part = replace(run, begin=begin, end=end)
    verdicts = {number: part.report(number).verdict for number in part.pipelines()}
    blamed = {(number, each.stage) for number, each in verdicts.items()}
    sentences = [
        f"Pipeline {number}: {each.finding}" if len(verdicts) > 1 else each.finding
        for number, each in verdicts.items()
    ]
    span = (
        min(row["timestamp"] - row["elapsed"] for row in drawn) - origin,
        max(row["timestamp"] for row in drawn) - origin,
    )
    collections = collections_of(part.events, origin)
    pictures = {}
    for kind, of_stages in series.items():
        if of_stages:
            last = [those[-1] for those in of_stages.values()]
            marked = {row["name"] for row in last if (row["pipeline"], row["label"]) in blamed}
            pictures[kind] = draw(
                _panels(kind, of_stages, origin),
                collections,
                span,
                heading=f"{_HEADINGS[kind]}\n{run.described(origin)}",
                sentences=sentences,
                marked=frozenset(marked),
            )
    return pictures


def _panels(kind: str, series: Mapping[int, Sequence[Row]], origin: float) -> list[Panel]:
    """Return the panels of a picture, in which each stage has a curve for every figure."""
    own = [each for each in FIGURES if each.panel and each.of.startswith(kind.removesuffix("s"))]
    figures: dict[str, list[Figure]] = defaultdict(list)
    for each in sorted(own, key=lambda each: _ORDER.index(each.unit)):
        figures[each.panel].append(each)
    return [
        Panel(
            label=label,
            curves=[
                Curve(
                    name=rows[-1]["name"],  # a change of concurrency changes it
                    kind=_KINDS.get(each.column[:3], "mean"),
                    colour=number,
                    begin=rows[0]["timestamp"] - rows[0]["elapsed"] - origin,
                    times=[row["timestamp"] - origin for row in rows],
                    values=[_value_of(row, each) for row in rows],
                )
                for number, rows in series.items()
                for each in those
            ],
            is_percentage=those[0].unit == "ratio",
        )
        for label, those in figures.items()
    ]


def _by_stage(rows: Iterable[Row]) -> dict[Any, list[Row]]:
    """Return the rows of each stage, whose name as logged changes with its concurrency, by keys in
    the order of the pipeline; names of another form come first, in alphabetical order."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        key = row["pipeline"], row["stage_number"], row["label"]
        groups[(-1, 0, row["name"].removesuffix("_queue")) if None in key else key].append(row)
    return groups


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


def _value_of(row: Row, figure: Figure) -> float:
    value = float(row[figure.column])
    if figure.unit == "ratio":
        return 100.0 * value
    if figure.unit == "count":  # intervals differ in length, and the last one is short
        return value / row["elapsed"] if row["elapsed"] else math.nan
    num_timed = row["num_tasks"] - row["num_failures"] if "num_tasks" in row else row["num_items"]
    return 1e3 * value if num_timed else math.nan


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
