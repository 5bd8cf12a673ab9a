"""Measured runs, loaded from a statistics file or from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...whole_files import starts_like_json
from ..store.run_sections import StoredRun
from ..store.stored_run import pipelines_of_file
from .json_file import damaged, is_sqlite, profiles_of, read, report_in, start_of
from .run_page import MeasuredRun
from .sections import first_moment, sections_of_trace

if TYPE_CHECKING:
    import os


def load_runs(
    path: str | os.PathLike[str], *, run_id: int | None = None, pipeline: int | None = None
) -> list[MeasuredRun]:
    """Load every pipeline of a run in a statistics file, or ``pipeline`` alone; or a trace.

    Raises: FileNotFoundError; ValueError: neither of the two, no such run or pipeline, or a trace
        of several ranks.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, and neither a statistics file nor a trace.")
    if not path.exists():
        raise FileNotFoundError(
            f"statistics file or trace {path} does not exist. Give a file that recording, "
            "SQLiteStatsWriter or Profile.write_trace wrote."
        )
    start = start_of(path)
    if not start:
        raise ValueError(f"{path}: the file is empty: nothing was logged to it.")
    if not is_sqlite(start):
        if run_id is not None or pipeline is not None:
            raise ValueError(
                f"{path}: a run and a pipeline are chosen from a statistics file, and this is none."
            )
        if not starts_like_json(path):
            raise ValueError(f"{path}: not a trace in JSON, nor a statistics file.")
        return [load_trace(path)]
    numbers: list[int | None] = [pipeline]
    if pipeline is None:
        numbers = [*pipelines_of_file(path, run_id=run_id)] or [None]
    runs = [StoredRun.open(path, run_id=run_id, pipeline=number) for number in numbers]
    names = [run.label for run in runs] if len(runs) > 1 else [path.name]
    return [MeasuredRun(run.report(), name, run) for run, name in zip(runs, names, strict=True)]


def load_trace(path: str | os.PathLike[str]) -> MeasuredRun:
    """Load a trace of one rank. Raises: FileNotFoundError; ValueError: it is not one."""
    trace = read(path)
    profiles = profiles_of(trace, path)
    with damaged(path):  # what a page needs of it
        sections_of_trace(trace, first_moment(trace))
    if len(profiles) != 1:
        raise ValueError(
            f"{path}: the trace holds {len(profiles)} profiles, one for each file that was "
            "merged. Load those."
        )
    return MeasuredRun(report_in(profiles[0], path), Path(path).name, trace=trace)
