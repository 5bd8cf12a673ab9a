"""A run in progress, shown in the terminal: the verdict so far, and the last intervals."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ...shown_text import printable, printable_line
from .entries import PROBES_EVENT
from .interval_rows import COLLECTION_EVENTS, rows_by_stage
from .query import query_event_stats, query_queue_stats, query_task_stats, run_row
from .schema import reading
from .stored_run import pipelines_of_file, report_of_file, unit_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_CLEAR = "\x1b[H\x1b[2J\x1b[3J"  # to the top left, clear the screen and what scrolled off it
_MOST_INTERVALS = 40
_MOST_EVENTS, _LONGEST = 5, 200
_BARS = "▁▂▃▄▅▆▇█"
_LEAST_SILENCE, _INTERVALS_OF_SILENCE = 60.0, 3
"""Seconds, and intervals, without figures after which the process is looked for. A container may
have this machine's name and process ids of its own: its runs seem gone, but go on writing."""

_SILENT = (PROBES_EVENT, *COLLECTION_EVENTS)


def watch(
    path: str | os.PathLike[str],
    *,
    run_id: int | None,
    interval_seconds: float,
    once: bool,
    out: TextIO,
) -> None:
    """Show a run until it has ended or its process is gone; on a terminal each frame replaces the
    one before, elsewhere a frame is written when something has changed. Blocks; Ctrl-C ends it.

    run_id: None = the last run in the file, which may change meanwhile.
    Raises: FileNotFoundError; ValueError: not a statistics file, or no such run.
    """
    is_terminal = out.isatty() and not once
    before = None
    while True:
        frame, state = frame_of(path, run_id=run_id)
        if is_terminal or state != before:
            out.write(f"{_CLEAR if is_terminal else ''}{frame}\n")
            out.flush()
        before = state
        if once or state[-1] is not None:
            return
        time.sleep(interval_seconds)


def frame_of(
    path: str | os.PathLike[str], *, run_id: int | None = None, now: float | None = None
) -> tuple[str, tuple[int, int, float | None]]:
    """Return a frame, and what it depends on: the run, its number of entries, and its end, as far
    as it is known.
    """
    run = _run(path, run_id)
    now = time.time() if now is None else now
    last = max(run["started"], run["newest"] or 0.0)
    patience = max(_LEAST_SILENCE, _INTERVALS_OF_SILENCE * (run["longest"] or 0.0))
    is_gone = run["ended"] is None and now - last > patience and _is_gone(run)
    state = run["run_id"], run["num_entries"], last if is_gone else run["ended"]
    title = f"{Path(path).name}, run {run['run_id']}, rank {run['rank']} of {run['world_size']}"
    age = "" if run["newest"] is None else f", last figures {_duration(now - last)} ago"
    if is_gone:
        found = f"killed: its process {run['pid']} is gone from this machine{age}"
    elif run["ended"] is None:
        found = f"running for {_duration(now - run['started'])}{age}"
    else:
        found = f"ended after {_duration(run['ended'] - run['started'])}"
    lines = [f"{title}: {found}"]
    if run["newest"] is None:
        return "\n".join([*lines, "No figures were logged to it yet."]), state
    pipelines = pipelines_of_file(path, run_id=run["run_id"])
    named: list[tuple[int | None, str]] = [*pipelines.items()] or [(None, "")]
    for number, name in named:
        heading = f"PIPELINE {number} {name}".rstrip() if len(pipelines) > 1 else name
        lines += ["", *([heading] if heading else [])]
        lines += _of_pipeline(path, run["run_id"], number)
    lines += _events(path, run["run_id"], run["started"])
    return printable("\n".join(lines)), state


def _run(path: str | os.PathLike[str], run_id: int | None) -> dict[str, Any]:
    query = (
        "SELECT run.*, count(w.timestamp) AS num_entries, max(w.timestamp) AS newest, "
        "max(w.elapsed) AS longest FROM run "
        "LEFT JOIN (SELECT run_id, timestamp, elapsed FROM task_stats UNION ALL "
        "SELECT run_id, timestamp, elapsed FROM queue_stats) w USING (run_id) GROUP BY run_id "
        "ORDER BY run_id"
    )
    with reading(path) as connection:
        runs = {row["run_id"]: dict(row) for row in connection.execute(query)}
    if not runs:
        raise ValueError(f"{path}: no run was logged to it.")
    if run_id is None:
        run_id = max(runs)
    if run_id not in runs:
        there = ", ".join(map(str, runs))
        raise ValueError(f"{path}: run must be one of the file's ({there}), got {run_id}.")
    for column, what in (("newest", "a timestamp"), ("longest", "an interval")):
        value = runs[run_id][column]
        if not isinstance(value, float | None):
            raise ValueError(f"{path} is damaged: {what} is {value!r:.50}.")
    return runs[run_id] | run_row(path, run_id)


def _is_gone(run: Mapping[str, Any]) -> bool:
    """Return whether the process of a run does not exist; False where that cannot be known."""
    if os.name != "posix" or run["host"] != socket.gethostname():
        return False
    try:
        os.kill(run["pid"], 0)  # asks, and sends nothing
    except ProcessLookupError:
        return True
    except (OverflowError, PermissionError, TypeError):  # another user's, or a damaged file
        return False
    return False


def _of_pipeline(path: str | os.PathLike[str], run_id: int, number: int | None) -> list[str]:
    report = report_of_file(path, run_id=run_id, pipeline=number)
    queues = rows_by_stage(query_queue_stats(path, run_id=run_id, pipeline=number))
    sink = sorted(queues.items())[-1][1][:_MOST_INTERVALS][::-1]
    waits = [_ratio(row["get_wait_time"], row["elapsed"]) for row in sink]
    rates = [_ratio(row["num_items"], row["elapsed"]) for row in sink]
    lines = [str(report), ""]
    lines.append(f"waiting    {_bars(waits, 1.0)}  {min(1.0, waits[-1]):.0%} in the last interval")
    rate = f"{rates[-1]:,.1f} {unit_of(report)}/s"
    lines.append(f"delivered  {_bars(rates, max(rates))}  {rate} in the last one")
    tasks = rows_by_stage(query_task_stats(path, run_id=run_id, pipeline=number))
    width = max((len(label) for *_, label in tasks), default=0)
    for (*_, label), newest_first in sorted(tasks.items()):
        rows = newest_first[:_MOST_INTERVALS][::-1]
        busy = [_ratio(row["busy_time"], row["elapsed"] * row["concurrency"]) for row in rows]
        lines.append(f"busy       {_bars(busy, 1.0)}  {label:{width}}  {min(1.0, busy[-1]):.0%}")
    return lines


def _events(path: str | os.PathLike[str], run_id: int, started: float) -> list[str]:
    events = [
        event for event in query_event_stats(path, run_id=run_id) if event.event_name not in _SILENT
    ]
    shown = events[-_MOST_EVENTS:]
    lines = [""] if shown else []
    for event in shown:
        known = {key: value for key, value in event.details.items() if value not in ("", None)}
        details = ", ".join(f"{key} {value}" for key, value in known.items())
        text = f"+{event.timestamp - started:.1f} s  {event.event_name}: {details}"[:_LONGEST]
        lines.append(printable_line(text))  # keys and errors are the user's
    left_out = len(events) - len(shown)
    return [*lines, *([f"and {left_out:,} events before"] if left_out else [])]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _bars(values: Sequence[float], top: float) -> str:
    """Return a bar for each value, from the oldest interval to the last."""
    last = len(_BARS) - 1
    return "".join(_BARS[min(last, round(last * _ratio(value, top)))] for value in values)


def _duration(seconds: float) -> str:
    seconds = max(0, round(seconds))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
