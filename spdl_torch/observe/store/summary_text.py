"""The summary of a statistics file as text: SPDL's numbers, and their meaning."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...shown_text import printable
from .query import choose_run
from .stored_run import pipelines_of_file, report_of_file
from .summary import summarize

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from .summary import QueueSummary, TaskSummary

_logger = logging.getLogger("spdl_torch.observe")

_DOUBLE_RULE, _RULE = "=" * 80, "-" * 80


def log_stats_summary(
    db_path: str | os.PathLike[str],
    *,
    run_id: int | None = None,
    write: Callable[[str], object] | None = None,
) -> None:
    """Log the summary of a statistics file at INFO level, or give it to ``write``, as one text:
    first every stage and queue, in the words and the order of SPDL's example program; then the
    report of the last run, or of ``run_id``, for each pipeline in it.

    Raises: FileNotFoundError; ValueError: not a statistics file.
    """
    tasks, queues = summarize(db_path, run_id=run_id)
    lines = ["", *_titled("PIPELINE PERFORMANCE SUMMARY")]
    lines += _section("📊 Task Statistics:", tasks)
    lines += _section("📈 Queue Statistics:", queues)
    if queues:
        lines += _meaning(db_path, choose_run(db_path, run_id))
    # An empty line first, so that a logger's prefix has a line of its own.
    (write or _logger.info)(printable("\n".join(lines)))


def _section(title: str, parts: Sequence[TaskSummary | QueueSummary]) -> list[str]:
    lines = [title, _RULE, ""]
    for part in parts:
        lines += [*part.lines(), ""]
    return lines


def _meaning(db_path: str | os.PathLike[str], run_id: int) -> list[str]:
    lines = _titled(f"WHAT IT MEANS: run {run_id} of {db_path}")
    for pipeline, name in pipelines_of_file(db_path, run_id=run_id).items():
        report = report_of_file(db_path, run_id=run_id, pipeline=pipeline)
        lines += [f"Pipeline {pipeline}{name and f' ({name})'}", str(report), ""]
    return lines


def _titled(title: str) -> list[str]:
    return [_DOUBLE_RULE, title, _DOUBLE_RULE]
