"""Record traces of this process: of a block of code, and when something goes wrong."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ...pipeline.recorder.flight_recorder import (
    FlightRecorder,
    Level,
    RecordingSession,
    live_recorders,
)
from ...pipeline.stats.perf_stats import PipelineStats
from ...pipeline.threads.stacks import describe_busy
from ...pipeline.threads.thread_group import ThreadGroup
from ..verdict.cached_steps import against_cached_steps, step_seconds
from ..verdict.probes import join_probing, start_probing, stop_probing
from ..verdict.report import Report, make_report
from .json_file import path_to_write, write_to_descriptor
from .profile import Profile
from .user_events import ProgramLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...pipeline.recorder.timeline import Timeline
    from .user_events import Program

__all__ = ["flight_recorder", "profile_of", "profile_of_run", "rank_of_process", "tracing"]

_logger = logging.getLogger("spdl_torch.observe")

_LOOK_SECONDS = 1.0  # how often the flight recorder checks whether a wait is too long


@contextmanager
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
    ends by an exception. Slices of your own: :func:`spdl_torch.io.utils.trace_event`.

    path: of any name; gzipped where it ends in ``.gz``. Or a descriptor of an open file, which is
        closed.
    enable: False = do nothing, so that a command-line flag can be passed on.
    level: ``"item"`` = every call of every op, at about 0.3 µs each; ``"batch"`` = calls of
        0.1 ms or longer, which are always recorded.
    max_events: the latest are kept; the file says how many are left out. 200,000 are about 30 MB,
        gzipped 3 MB.
    process_name: the name of the process there; None = "Data pipeline".
    Raises: ValueError: a folder, or a file that is no trace, before the block begins.
    """
    if not enable:
        yield
        return
    if not isinstance(path, int):
        path = path_to_write(path)
    session, log = RecordingSession(level), ProgramLog()
    start_probing()  # which also records garbage collections
    try:
        yield
    finally:
        stop_probing()
        join_probing(_LOOK_SECONDS)
        program = log.close(process_name, session.began_ns)
        profile = profile_of(session.end(), since_ns=session.began_ns, program=program)
        if isinstance(path, int):
            write_to_descriptor(path, profile._as_trace(None, max_events))
        elif profile.timelines or program:
            written = profile.write_trace(path, max_events=max_events)
            _logger.info("tracing: trace written to %s", written)
        else:
            _logger.warning("tracing: nothing was loaded, so %s was not written", path)


def profile_of(
    recorders: Sequence[FlightRecorder], *, since_ns: int = 0, program: Program | None = None
) -> Profile:
    """Return what several runs recorded since that moment, with the report of the longest one."""
    shown, reports = [], []
    collections: set[int] = set()
    for recorder in recorders:
        timeline = recorder.timeline(since_ns)
        if any(row.turns for row in timeline.rows):
            shown.append(_without_repeats(timeline, collections))
            reports.append(_report_of(recorder.owner))
    report = max(reports, key=lambda report: report.stats.elapsed, default=_NOTHING)
    return Profile(report, tuple(shown), rank=rank_of_process(), _program=program)


def profile_of_run(report: Report, timeline: Timeline | None, cached_step: float | None) -> Profile:
    """Return what one run recorded; ``cached_step``: seconds of a step with cached batches."""
    if timeline is None:
        return Profile(report, rank=rank_of_process())
    report = against_cached_steps(report, step_seconds(timeline), cached_step)
    return Profile(report, (timeline,), rank=rank_of_process())


def _without_repeats(timeline: Timeline, collections: set[int]) -> Timeline:
    """Return the timeline without garbage collections that an earlier one has: they are the
    process's, so that the timeline of every run at the time has them.
    """
    instants = [i for i in timeline.instants if i.name != "gc" or i.time_ns not in collections]
    collections.update(i.time_ns for i in instants if i.name == "gc")
    return replace(timeline, instants=tuple(instants))


@contextmanager
def flight_recorder(
    folder: str | os.PathLike[str],
    *,
    stall_seconds: float | None = 60.0,
    on_signal: int | None = getattr(signal, "SIGUSR2", None),
    last_seconds: float = 30.0,
) -> Iterator[None]:
    """While the block runs, write a trace of the last seconds whenever something goes wrong: a
    training loop that waits for a batch for too long, or works with one for too long while others
    are ready, an exception that leaves the block, or a signal (``kill -USR2 PID``). The files are
    ``<why>-rank<R>-<date>-<n>.json.gz``; the log names each.

    Costs nothing beyond what is always recorded; a thread checks once a second.

    folder: created when the first trace is written.
    stall_seconds: a wait for one batch, or a step with one while others are ready, that is too
        long; one trace for each. None = do not check.
    on_signal: None = none. Its handler is put back at the end; outside of the main thread, where
        Python does not allow handlers, it is left alone.
    last_seconds: how much of the past is written.
    Raises: ValueError: ``stall_seconds`` or ``last_seconds`` <= 0.
    """
    for name, value in (("stall_seconds", stall_seconds), ("last_seconds", last_seconds)):
        if value is not None and value <= 0:
            raise ValueError(f"flight_recorder: {name} must be > 0, got {value}.")
    watch = _Watch(Path(folder), stall_seconds, last_seconds)
    with _handling(on_signal, watch):
        watch.start()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                watch.dump(f"exception-{type(error).__name__}")
            raise
        finally:
            watch.stop()


class _Watch:
    """The thread that waits for a signal, and checks for waits that are too long."""

    def __init__(self, folder: Path, stall_seconds: float | None, last_seconds: float) -> None:
        self._folder = folder
        self._stall_seconds = stall_seconds
        self._last_seconds = last_seconds
        self._is_ending = False
        self._traced: set[int] = set()  # starts of the waits and steps that have a trace already
        self._num_written = 0
        # A bare lock, held while there is nothing to do. Not an Event: a signal handler may run on
        # a thread that is inside its wait, and would need the lock that the wait holds.
        self._idle = threading.Lock()
        self._idle.acquire()
        self._threads = ThreadGroup(self._end)

    def start(self) -> None:
        self._threads.spawn("flight-recorder", self._run)

    def stop(self) -> None:
        self._end()
        self._threads.join()

    def wake(self, *_: Any) -> None:
        """Handle the signal: wake the thread, which does the work."""
        try:
            self._idle.release()
        except RuntimeError:
            pass  # it is awake already

    def dump(self, why: str) -> None:
        """Write a trace. A failure to write is logged, never raised."""
        self._num_written += 1
        date = time.strftime("%Y%m%d-%H%M%S")
        name = f"{why}-rank{rank_of_process()}-{date}-{self._num_written}.json.gz"
        try:
            path = profile_of(live_recorders()).write_trace(
                self._folder / name, last_seconds=self._last_seconds
            )
        except (OSError, ValueError) as error:
            _logger.warning("flight_recorder: no trace for %s: %s", why, error)
        else:
            _logger.warning("flight_recorder: %s: trace written to %s", why, path)

    def _end(self) -> None:
        self._is_ending = True
        self.wake()

    def _run(self) -> None:
        seconds = _LOOK_SECONDS if self._stall_seconds is not None else -1
        while True:
            woken = self._idle.acquire(timeout=seconds)
            if self._is_ending:
                return
            if woken:
                self.dump("signal")
                continue
            waits, steps = self._too_long("waiting_since_ns"), self._too_long("busy_since_ns")
            if waits - self._traced:
                _logger.warning("flight_recorder: a loop waits for data. %s", _at_work())
                self.dump("stall")
            if steps - self._traced:
                _logger.warning("flight_recorder: a loop has been busy with one batch for too long")
                self.dump("step")
            self._traced = waits | steps

    def _too_long(self, since_when: str) -> set[int]:
        """Return the starts of the waits for a batch, or the steps with one, that are too long."""
        assert self._stall_seconds is not None, "guaranteed by _run: it looks only then"
        latest = perf_counter_ns() - int(self._stall_seconds * 1e9)
        starts = {getattr(recorder, since_when) for recorder in live_recorders()}
        return {start for start in starts if start is not None and start <= latest}


def _at_work() -> str:
    """Return the stacks of the busy threads of all pipelines and loaders."""
    me = threading.current_thread()
    return describe_busy(
        [t for t in threading.enumerate() if t.name.startswith("spdl-") and t is not me]
    )


@contextmanager
def _handling(number: int | None, watch: _Watch) -> Iterator[None]:
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, watch.wake)
    try:
        yield
    finally:
        signal.signal(number, before)


_NOTHING = make_report(PipelineStats(elapsed=0.0, consumer_wait_ratio=0.0, stages=()))


def _report_of(owner: Any) -> Report:
    """Return the report of a pipeline or of a loader; an empty one if it is gone or has none."""
    try:
        if hasattr(owner, "report"):
            report: Report = owner.report()
            return report
        return _NOTHING if owner is None else make_report(owner.stats())
    except RuntimeError:  # nothing was loaded
        return _NOTHING


def rank_of_process() -> int:
    """Return the rank in torch's process group, if there is one, else torchrun's variable."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))
