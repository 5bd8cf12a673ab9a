"""Trace a block of code, and build profiles from the records of this process's runs."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...engine.recorder import (
    FlightRecorder,
    Level,
    RecordingSession,
)
from ...engine.statistics import PipelineStats
from ...machine.probes import join_probing, start_probing, stop_probing
from ...scopes import scope
from ..verdict.cached_steps import against_cached_steps, step_seconds
from ..verdict.report import Report, make_report, with_remarks
from .json_file import path_to_write, write_to_descriptor
from .profile import Profile
from .user_events import ProgramLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...engine.timeline import Timeline
    from .user_events import Program

_logger = logging.getLogger("spdl_torch.observe")

_JOIN_SECONDS = 1.0  # how long the end of a block waits for the probe to end


@scope
def tracing(
    path: str | os.PathLike[str] | int,
    enable: bool = True,
    *,
    level: Level = "item",
    max_events: int = 200_000,
    process_name: str | None = None,
) -> Iterator[None]:
    """Record what every thread of every pipeline and loader does in the block, and write it to
    ``path``, for Perfetto (https://ui.perfetto.dev) and chrome://tracing; also when the block
    ends by an exception, which comes through whatever becomes of the trace: then an error while
    writing it is logged. Slices of your own: :func:`spdl_torch.observe.trace_event`.

    path: of any name; gzipped where it ends in ``.gz``. Or a descriptor of an open file, which is
        closed.
    enable: False = do nothing, so that a command-line flag can be passed on.
    level: ``"item"`` = every call of every op, at some µs each; ``"batch"`` = calls of 0.1 ms or
        longer, which are always recorded.
    max_events: the latest are kept; the file says how many are left out. 200,000 are about 30 MB,
        gzipped 3 MB.
    process_name: the name of the process there; None = "Data pipeline".
    Raises: ValueError: a folder, or a file that is not a trace, before the block begins.
    """
    if not enable:
        yield
        return
    if not isinstance(path, int):
        path = path_to_write(path)
    session, log = RecordingSession(level), ProgramLog()
    start_probing(session)  # which also records garbage collections
    is_failing = True
    try:
        yield
        is_failing = False
    finally:
        stop_probing(session)
        join_probing(_JOIN_SECONDS)
        program = log.close(process_name, session.began_ns)
        recorders = session.end()
        try:
            profile = profile_of(recorders, since_ns=session.began_ns, program=program)
            _write(profile, path, max_events)
        except Exception as error:
            if not is_failing:
                raise
            _logger.error("tracing: no trace was written to %s: %r", path, error)
        _say_not_finite(program)


def _write(profile: Profile, path: str | os.PathLike[str] | int, max_events: int) -> None:
    if isinstance(path, int):
        write_to_descriptor(path, profile._as_trace(None, max_events))
    elif profile.timelines or profile._program:
        written = profile.write_trace(path, max_events=max_events)
        _logger.info("tracing: trace written to %s", written)
    else:
        _logger.warning("tracing: nothing was loaded, so %s was not written", path)


def _say_not_finite(program: Program) -> None:
    """Log how many values of counters no curve can show."""
    names = Counter(each.name for each in program.counts if not math.isfinite(each.value))
    for name, number in names.items():
        _logger.warning(
            "tracing: %d values of %s are not finite: no curve shows them", number, name
        )


def profile_of(
    recorders: Sequence[FlightRecorder], *, since_ns: int = 0, program: Program | None = None
) -> Profile:
    """Return what several runs recorded since then, with the report of the longest one."""
    shown: list[Timeline] = []
    reports: list[Report] = []
    collections: set[int] = set()
    for recorder in recorders:
        timeline = recorder.timeline(since_ns)
        if any(row.turns for row in timeline.rows):
            shown.append(_without_repeats(timeline, collections))
            reports.append(_report_of(recorder.owner))
    report = _longest(reports, shown)
    return Profile(report, tuple(shown), rank=rank_of_process(), _program=program)


def _longest(reports: Sequence[Report], timelines: Sequence[Timeline]) -> Report:
    """Return the report of the run that went on longest; it says of which of several it is."""
    if not reports:
        return _NOTHING
    number = max(range(len(reports)), key=lambda number: reports[number].stats.elapsed)
    report, own = reports[number], timelines[number]
    num_pipelines = len({timeline.pipeline_number for timeline in timelines})
    if num_pipelines == 1:  # epochs of one loader share its number
        return report
    return with_remarks(
        report,
        f"This report is of {own.pipeline} {own.pipeline_number} alone, which ran longest of the "
        f"{num_pipelines} that the trace shows.",
    )


def profile_of_run(report: Report, timeline: Timeline | None, cached_step: float | None) -> Profile:
    """Return what one run recorded; ``cached_step``: seconds of a step with cached batches."""
    if timeline is None:
        return Profile(report, rank=rank_of_process())
    report = against_cached_steps(report, step_seconds(timeline), cached_step)
    return Profile(report, (timeline,), rank=rank_of_process())


def _without_repeats(timeline: Timeline, collections: set[int]) -> Timeline:
    """Return the timeline without garbage collections that an earlier one has: they belong to the
    process, so the timeline of every run at the time has them.
    """
    instants = [i for i in timeline.instants if i.name != "gc" or i.time_ns not in collections]
    collections.update(i.time_ns for i in instants if i.name == "gc")
    return replace(timeline, instants=tuple(instants))


_NOTHING = make_report(PipelineStats(0, 0, ()))


def _report_of(owner: Any) -> Report:
    """Return the report of a pipeline or of a loader; an empty one if it is gone or has none."""
    try:
        if hasattr(owner, "report"):
            report: Report = owner.report()
            return report
        return _NOTHING if owner is None else make_report(owner.snapshot())
    except RuntimeError:  # nothing was loaded
        return _NOTHING


def rank_of_process() -> int:
    """Return the rank in torch's process group, if there is one, else torchrun's variable."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))
