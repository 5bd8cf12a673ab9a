"""A report's part of a page: its sentences, and the table of its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...shown_text import shown_seconds
from ..page.content import Column, Table, Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.statistics import PipelineStats, StageStats
    from .verdict import Verdict
    from .what_if import Prediction

_COLUMNS = (
    Column("stage"),
    Column(""),
    Column("workers", "count", "Threads, or processes with one thread each."),
    Column("busy", "percent", "Share of the workers' time inside the op."),
    Column(
        "CPU/wall", "percent", "CPU time over wall time inside the op; far below 100 %: it waits."
    ),
    Column("wait in", "percent", "Share of the workers' time without an item to work on."),
    Column("wait out", "percent", "Share of the workers' time without room for the result."),
    Column("mean ms", "ms", "Mean time of a call that succeeded."),
    Column("p50 ms", "ms", "Half of the calls take less."),
    Column("p90 ms", "ms", "Nine of ten calls take less."),
    Column("p99 ms", "ms", "99 of 100 calls take less."),
    Column("tasks", "count", "Calls of the op."),
    Column("items/s", "rate", "Calls a second."),
    Column("at most/s", "rate", "Calls a second if the workers never waited."),
    Column("queue held", "percent", "Share of the time in which the queue after it held an item."),
    Column("failed", "count", "Calls that raised."),
    Column("dropped", "count", "Calls that returned None."),
)


def sentences(verdict: Verdict, gain: str, checks: str, elapsed: float) -> list[Text]:
    """Return the verdict, what to do and the gain to expect, the notes and the checks."""
    return [
        Text(word="VERDICT", text=verdict.finding, tone="verdict"),
        Text(word="ACTION", text=f"{verdict.action}{gain}", tone="action"),
        *(Text(word="note", text=remark) for remark in verdict.remarks),
        Text(word="checks", text=f"{checks}; over {shown_seconds(elapsed)}."),
    ]


def data_lines(stats: PipelineStats) -> list[str]:
    """Return a line for each kind of dataset statistics: those whose names begin alike."""
    kinds: dict[str, list[str]] = {}
    for name, value in stats.data.items():
        kind, _, what = name.partition("/")
        number = f"{value:,}" if isinstance(value, int) else f"{value:.2%}"
        kinds.setdefault(kind, []).append(f"{what} {number}")
    return [f"{kind}: {', '.join(figures)}" for kind, figures in kinds.items()]


def stage_table(stats: PipelineStats, bottleneck: str | None, notes: Sequence[str]) -> Table:
    """Return the table of the stages; ``notes``: a word on each."""
    names = [stage.name for stage in stats.stages]
    return Table(
        title="Stages",
        columns=_COLUMNS,
        rows=[
            _row(stage, stats.elapsed, note)
            for stage, note in zip(stats.stages, notes, strict=True)
        ],
        marked=names.index(bottleneck) if bottleneck in names else None,
    )


_PREDICTION_COLUMNS = (
    Column("what if"),
    Column("at most/s", "rate", "Batches of loading and training together."),
    Column("gain", "text", "Over the present settings."),
    Column("then limited by", "text", "Or why it cannot be known."),
    Column("assuming that"),
)


def prediction_table(predictions: Sequence[Prediction]) -> list[Table]:
    """Return the table of what other settings would give, if there is any prediction."""
    if not predictions:
        return []
    rows = [
        (
            each.setting,
            each.high,
            None if each.gain is None else f"{100 * each.gain:+.0f} %",
            each.limit or f"cannot be known: {each.reason}",
            each.assumption,
        )
        for each in predictions
    ]
    return [Table(title="What if", columns=_PREDICTION_COLUMNS, rows=rows)]


def _row(stage: StageStats, elapsed: float, note: str) -> tuple[object, ...]:
    tasks = stage.tasks
    is_timed = tasks.num_tasks > tasks.num_failures
    times = tasks.ave_time, tasks.p50_time, tasks.p90_time, tasks.p99_time
    return (
        stage.name,
        note,
        stage.concurrency,
        stage.busy_ratio,
        stage.cpu_ratio if is_timed else None,
        stage.wait_in_ratio,
        stage.wait_out_ratio,
        *(times if is_timed else (None,) * len(times)),
        tasks.num_tasks,
        tasks.num_tasks / elapsed if elapsed else 0.0,
        stage.capacity if is_timed else None,
        stage.queue.occupancy_rate if stage.queue.elapsed else None,
        tasks.num_failures,
        stage.num_dropped,
    )
