"""Write a trace of the last seconds when something goes wrong: a stall, an exception."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from ...engine.recorder import live_recorders
from ...engine.stacks import describe_busy
from ...engine.threads import repeating
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
    last_seconds: float = 30.0,
) -> Iterator[None]:
    """While the block runs, write a trace of the last seconds whenever something goes wrong: a
    training loop that waits for a batch for too long, or works with one for too long while others
    are ready, or an exception that leaves the block. The files are
    ``<why>-rank<R>-<date>-<n>.json.gz``; the log names each.

    Costs nothing beyond what is always recorded; a thread checks once a second.

    folder: created when the first trace is written.
    stall_seconds: a wait for one batch, or a step with one while others are ready, that is too
        long; one trace for each. None = do not check.
    last_seconds: how much of the past is written.
    Raises: ValueError: ``stall_seconds`` or ``last_seconds`` <= 0.
    """
    for name, value in (("stall_seconds", stall_seconds), ("last_seconds", last_seconds)):
        if value is not None and value <= 0:
            raise ValueError(f"flight_recorder: {name} must be > 0, got {value}.")
    watch = Watch(Path(folder), stall_seconds or math.inf, last_seconds)
    looks = repeating("flight-recorder", _LOOK_SECONDS, watch.look)
    with nullcontext() if stall_seconds is None else looks:
        try:
            yield
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                watch.dump(f"exception-{type(error).__name__}")
            raise


class Watch:
    """Looks for waits and steps that are too long, and writes traces."""

    def __init__(self, folder: Path, stall_seconds: float, last_seconds: float) -> None:
        self._folder = folder
        self._stall_seconds = stall_seconds
        self._last_seconds = last_seconds
        self._traced: set[int] = set()  # starts of the waits and steps that have a trace already
        self._num_written = 0

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

    def look(self) -> None:
        """Write a trace for each kind of what is too long now and was not before."""
        waits, steps = self.too_long("waiting_since_ns"), self.too_long("busy_since_ns")
        if waits - self._traced:
            others = [t for t in threading.enumerate() if t is not threading.current_thread()]
            busy = describe_busy([t for t in others if t.name.startswith("spdl-")])
            _logger.warning("flight_recorder: a loop waits for data. %s", busy)
            self.dump("stall")
        if steps - self._traced:
            _logger.warning("flight_recorder: a loop has been busy with one batch for too long")
            self.dump("step")
        self._traced = waits | steps

    def too_long(self, since_when: str) -> set[int]:
        """Return the starts of the waits for a batch, or the steps with one, that are too long."""
        latest = perf_counter_ns() - self._stall_seconds * 1e9
        starts = {getattr(recorder, since_when) for recorder in live_recorders()}
        return {start for start in starts if start is not None and start <= latest}
