"""Pictures of a statistics file: every stage and queue over time, and what held them back.

Needs matplotlib, the extra ``plot``; a display is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from ...whole_files import whole_file
from .bottleneck import find_bottlenecks
from .data import load
from .draw import draw
from .panels import QUEUE_PANELS, TASK_PANELS

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from .data import Recording

FileFormat = Literal["png", "svg", "pdf"]

_PICTURES = {"tasks": (TASK_PANELS, "Stages"), "queues": (QUEUE_PANELS, "Queues")}


def plot_stats(
    db_path: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    stages: Sequence[str] | None = None,
    start_time: float | str | None = None,
    end_time: float | str | None = None,
    run_id: int | None = None,
    file_format: FileFormat = "png",
) -> list[Path]:
    """Draw two pictures, ``task_stats_combined`` and ``queue_stats_combined``; return their paths.

    A picture for which the chosen stages have no statistics (a source has only a queue) is left
    out.

    Args:
        db_path: the statistics file; the run may still go on.
        output_dir: created if it does not exist; pictures of the same name are overwritten.
        stages: as logged (``0:1:decode[10]``) or without the numbers (``decode``); None = all.
        start_time, end_time: bounds of the drawn intervals, both inclusive: seconds since 1970;
            text in ISO 8601 (``2026-01-31 12:00``, local time unless it says otherwise); or time
            after the run's start, as the pictures show it (``+90``, ``+1.5min``, ``+2h``).
        run_id: None = the last run in the file that has statistics.
        file_format: ``png``, ``svg`` or ``pdf``.
    Raises: FileNotFoundError; ModuleNotFoundError: matplotlib is not installed; ValueError: not a
        statistics file, no such run or stage, no interval in that time; OSError: ``output_dir``
        cannot be written to.
    """
    if file_format not in get_args(FileFormat):
        raise ValueError(f"plot_stats: file_format must be png, svg or pdf, got {file_format!r}.")
    folder = Path(output_dir)
    recording = _loaded(db_path, stages, start_time, end_time, run_id)
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[Path, Literal["tasks", "queues"]] = {}
    if recording.tasks:
        kinds[folder / f"task_stats_combined.{file_format}"] = "tasks"
    if recording.queues:
        kinds[folder / f"queue_stats_combined.{file_format}"] = "queues"
    for path, kind in kinds.items():
        with whole_file(path) as file:
            _figure(kind, recording).savefig(file, format=file_format, dpi=110)
    return list(kinds)


def plot_task_stats(
    db_path: str | os.PathLike[str],
    *,
    stages: Sequence[str] | None = None,
    start_time: float | str | None = None,
    end_time: float | str | None = None,
    run_id: int | None = None,
) -> Figure:
    """Return a figure with the rates of tasks and of failures, and task times (mean, p90, p99).

    Arguments and errors as for :func:`plot_stats`. Save it with ``savefig``.
    """
    return _figure("tasks", _loaded(db_path, stages, start_time, end_time, run_id))


def plot_queue_stats(
    db_path: str | os.PathLike[str],
    *,
    stages: Sequence[str] | None = None,
    start_time: float | str | None = None,
    end_time: float | str | None = None,
    run_id: int | None = None,
) -> Figure:
    """Return a figure with throughput, occupancy, and waits of puts and gets (mean, p90, p99) of
    each queue.

    Arguments and errors as for :func:`plot_stats`. Save it with ``savefig``.
    """
    return _figure("queues", _loaded(db_path, stages, start_time, end_time, run_id))


def _figure(kind: Literal["tasks", "queues"], recording: Recording) -> Figure:
    series = recording.tasks if kind == "tasks" else recording.queues
    if not series:
        raise ValueError(f"{recording.where}: the chosen stages have no figures of {kind}.")
    panels, heading = _PICTURES[kind]
    findings = find_bottlenecks(recording)
    return draw(recording, series, panels, heading=heading, findings=findings)


def _loaded(
    db_path: str | os.PathLike[str],
    stages: Sequence[str] | None,
    start_time: float | str | None,
    end_time: float | str | None,
    run_id: int | None,
) -> Recording:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Plots need matplotlib, which is not installed: pip install matplotlib (the extra "
            "plot)."
        ) from error
    return load(db_path, stages=stages, start_time=start_time, end_time=end_time, run_id=run_id)
