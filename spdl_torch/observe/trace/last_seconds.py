"""Write a trace of the last seconds when something goes wrong: a stall, an exception, a signal."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ...engine.recorder import live_recorders
from ...engine.stacks import describe_busy
from ...engine.threads import ThreadGroup
from ...scopes import scope
from .tracing import profile_of, rank_of_process

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

_logger = logging.getLogger("spdl_torch.observe")

_LOOK_SECONDS = 1.0  # how often it checks whether a wait is too long


@scope
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
    watch = Watch(Path(folder), stall_seconds, last_seconds)
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


class Watch:
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
            waits, steps = self.too_long("waiting_since_ns"), self.too_long("busy_since_ns")
            if waits - self._traced:
                _logger.warning("flight_recorder: a loop waits for data. %s", _at_work())
                self.dump("stall")
            if steps - self._traced:
                _logger.warning("flight_recorder: a loop has been busy with one batch for too long")
                self.dump("step")
            self._traced = waits | steps

    def too_long(self, since_when: str) -> set[int]:
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


@scope
def _handling(number: int | None, watch: Watch) -> Iterator[None]:
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, watch.wake)
    try:
        yield
    finally:
        signal.signal(number, before)
