"""Trace a block of code with what the program adds of its own, or the last seconds when a
loop waits for too long; and make the profile of a run.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING

from ...checks import check_whole
from ...engine.recorder import FlightRecorder, Level, RecordingSession, live_recorders
from ...engine.stacks import describe_busy
from ...engine.threads import repeating
from ...machine.probes import join_probing, start_probing, stop_probing
from ...scopes import scope
from .chrome_trace import Count, Program, Span, chrome_trace
from .profile import Profile
from .trace_file import path_to_write, write

if TYPE_CHECKING:
    from ...engine.timeline import Timeline
    from ..verdict.report import Report

_logger = logging.getLogger("spdl_torch.observe")

_JOIN_SECONDS = 1.0  # how long the end of a block waits for the probe to end
_LOOK_SECONDS = 1.0  # how often it is checked whether a wait is too long
_MOST = 200_000  # spans, and counters, in one block; the latest are kept
_SHORTEST_STEP = 1e-4  # as recorded: of an empty step any loading is many times as much
_WARM_UP = 3  # steps that are not counted

# --- the program's own events --------------------------------------------------------------------


@dataclass(eq=False)
class _ProgramLog:
    """The program's events in one traced block; while it is open, every thread adds to it."""

    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_MOST))
    counts: deque[Count] = field(default_factory=lambda: deque(maxlen=_MOST))


# No lock: adding one and taking one away are atomic, with a GIL and without, and so is copying a
# list; a deque's copy is not.
_open_logs: list[_ProgramLog] = []


@scope
def trace_event(name: str) -> Iterator[None]:
    """Show the block as a slice of that name in the trace of :func:`tracing`, on a row of the
    thread that runs it, below the pipelines. Costs next to nothing while nothing is traced.

    name: of another type than ``str``: its text is the name.
    """
    if not _open_logs:
        yield
        return
    started_ns, cpu_ns = perf_counter_ns(), thread_time_ns()
    try:
        yield
    finally:
        cpu_ns, ended_ns = thread_time_ns() - cpu_ns, perf_counter_ns()
        me = threading.current_thread()
        native_id = threading.get_native_id()
        span = Span(str(name), me.name, native_id, started_ns, ended_ns, max(cpu_ns, 0))
        for log in _open_logs.copy():
            log.spans.append(span)


def trace_counter(i: int, val: float) -> None:
    """Show the curve ``counter i`` at that value from now on, in the trace of :func:`tracing`. Does
    nothing while nothing is traced.

    val: as for ``float()``; the value of a CUDA tensor is waited for. NaN and infinity are left
        out.
    """
    if _open_logs and math.isfinite(value := float(val)):
        count = Count(f"counter {i}", perf_counter_ns(), value)
        for log in _open_logs.copy():
            log.counts.append(count)


# --- a block -------------------------------------------------------------------------------------


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
    level: ``"item"`` = every call of every op, at some µs each, of worker processes their batches;
        ``"batch"`` = calls of 0.1 ms or longer, which are always recorded.
    max_events: the latest are kept; the file says how many are left out. 200,000 are about 30 MB,
        gzipped 3 MB.
    process_name: the name of the process there; None = "Data pipeline".
    Raises: ValueError: a folder, or another level, before the block begins.
    """
    if not enable:
        yield
        return
    if level not in ("item", "batch"):
        raise ValueError(f'tracing: level must be "item" or "batch", got {level!r}.')
    check_whole("tracing", max_events=max_events)
    if not isinstance(path, int):
        path = path_to_write(path)
    session, log = RecordingSession(level), _ProgramLog()
    _open_logs.append(log)
    start_probing(session)  # which also records garbage collections
    is_failing = True
    try:
        yield
        is_failing = False
    finally:
        stop_probing(session)
        join_probing(_JOIN_SECONDS)
        _open_logs.remove(log)
        # One by one: a thread that had begun to add may do so still.
        spans = tuple(log.spans.popleft() for _ in range(len(log.spans)))
        counts = tuple(log.counts.popleft() for _ in range(len(log.counts)))
        program = Program(process_name, spans, counts)
        recorders = session.end()
        try:
            timelines = _timelines_of(recorders, session.began_ns)
            if isinstance(path, Path) and not (timelines or program):
                _logger.warning("tracing: nothing was loaded, so %s was not written", path)
            else:
                rank = rank_of_process()
                trace = chrome_trace(timelines, program, rank=rank, max_events=max_events)
                write(path, trace)
                _logger.info("tracing: trace written to %s", path)
        except Exception as error:
            if not is_failing:
                raise
            _logger.error("tracing: no trace was written to %s: %r", path, error)


# --- when something goes wrong -------------------------------------------------------------------


@scope
def flight_recorder(
    folder: str | os.PathLike[str],
    *,
    stall_seconds: float = 60.0,
    last_seconds: float = 30.0,
) -> Iterator[None]:
    """While the block runs, write a trace of the last seconds whenever a training loop waits for a
    batch for too long. The files are ``stall-rank<R>-<date>-<n>.json.gz``; the log names each.

    Costs nothing beyond what is always recorded; a thread checks once a second.

    folder: created when the first trace is written.
    stall_seconds: a wait for one batch that is too long; one trace for each.
    last_seconds: how much of the past is written.
    Raises: ValueError: ``stall_seconds`` or ``last_seconds`` <= 0.
    """
    for name, value in (("stall_seconds", stall_seconds), ("last_seconds", last_seconds)):
        if value <= 0:
            raise ValueError(f"flight_recorder: {name} must be > 0, got {value}.")
    traced: set[int] = set()
    look = partial(trace_stalls, Path(folder), stall_seconds, last_seconds, traced)
    with repeating("flight-recorder", _LOOK_SECONDS, look):
        yield


def trace_stalls(folder: Path, stall_seconds: float, last_seconds: float, traced: set[int]) -> None:
    """Write a trace if a loop waits for too long that did not before. A failure to write is logged,
    never raised. ``traced``: starts of the waits that have a trace already."""
    latest = perf_counter_ns() - stall_seconds * 1e9
    consumers = filter(None, [recorder.consumer for recorder in live_recorders()])
    starts = {consumer.waiting_since_ns for consumer in consumers}
    new = {start for start in starts if start is not None and start <= latest} - traced
    if not new:
        return
    traced |= new
    others = [t for t in threading.enumerate() if t is not threading.current_thread()]
    busy = describe_busy([t for t in others if t.name.startswith("spdl-")])
    _logger.warning("flight_recorder: a loop waits for data. %s", busy)
    rank, date = rank_of_process(), time.strftime("%Y%m%d-%H%M%S")
    path = folder / f"stall-rank{rank}-{date}-{len(traced)}.json.gz"
    try:
        timelines = _timelines_of(live_recorders())
        write(path, chrome_trace(timelines, rank=rank, last_seconds=last_seconds))
    except (OSError, ValueError) as error:
        _logger.warning("flight_recorder: no trace of it was written: %s", error)
    else:
        _logger.warning("flight_recorder: trace written to %s", path)


# --- profiles ------------------------------------------------------------------------------------


def _timelines_of(recorders: Sequence[FlightRecorder], since_ns: int = 0) -> list[Timeline]:
    """Return what several runs recorded since then."""
    shown: list[Timeline] = []
    collections: set[int] = set()
    for recorder in recorders:
        timeline = recorder.timeline(since_ns)
        if not any(row.turns for row in timeline.rows):
            continue
        # Garbage collections belong to the process: the timeline of every run at the time has them.
        own = [i for i in timeline.instants if i.name != "gc" or i.time_ns not in collections]
        collections.update(i.time_ns for i in own if i.name == "gc")
        shown.append(timeline._replace(instants=tuple(own)))
    return shown


def profile_of_run(report: Report, timeline: Timeline | None, cached_step: float | None) -> Profile:
    """Return what one run recorded; ``cached_step``: seconds of a step with cached batches."""
    if timeline is None:
        return Profile(report, rank=rank_of_process())
    report = against_cached_steps(report, step_seconds(timeline), cached_step)
    return Profile(report, (timeline,), rank=rank_of_process())


def step_seconds(timeline: Timeline) -> float | None:
    """Return the median time from getting a batch to asking for the next; None = too few steps
    were recorded. Steps shorter than 0.1 ms are never recorded.
    """
    turns = (turn for row in timeline.rows if row.role == "consumer" for turn in row.turns)
    steps = [turn.ended_ns - turn.started_ns for turn in turns if turn.number >= 0]
    return median(steps[_WARM_UP:]) / 1e9 if len(steps) > _WARM_UP else None


def against_cached_steps(report: Report, step: float | None, cached: float | None) -> Report:
    """Return the report with the extra time of a step over cached batches, if both are known and
    the step does something."""
    if not step or not cached or cached < _SHORTEST_STEP:
        return report
    probes = replace(report.probes, step_slowdown=step / cached - 1)
    return replace(report, probes=probes)


def rank_of_process() -> int:
    """Return the rank in torch's process group, if there is one, else torchrun's variable."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))
