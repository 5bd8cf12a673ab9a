"""Other projects' loggers behind one interface: TensorBoard, W&B, MLflow, and plain functions; and
what feeds a loader's statistics to one."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...locks import RLock
from ..verdict.figures import metrics_of
from .following import Tally

if TYPE_CHECKING:
    from ..verdict.placement import Placement
    from .following import Interval

LogFunction = Callable[[Mapping[str, float], int], object]
"""A function that is called with metrics by name, and the step to which they belong."""


class Logger(NamedTuple):
    """A logger, as recording sees it. One thread at a time calls it."""

    log: LogFunction
    text: Callable[[str, str, int], object] | None = None
    """Logs a text: its key, the text, and the step; None = the logger takes none."""


def opened(logger: Any) -> Logger:
    """Wrap a logger for recording. Call this on the thread that made the logger: an MLflow run
    belongs to a thread.

    Raises: TypeError: it is of no known kind; ValueError: it has no run.
    """
    library = (getattr(logger, "__name__", "") or type(logger).__module__).split(".")[0]
    if hasattr(logger, "add_scalar"):  # a SummaryWriter, torch's or tensorboardX's
        return Logger(partial(_log_scalars, logger), getattr(logger, "add_text", None))
    if library == "wandb":
        run = logger.run if inspect.ismodule(logger) else logger
        if run is None:
            raise ValueError("recording: wandb has no run. Call wandb.init() first, or pass a run.")
        # Its steps only increase, and are the program's: under a step of ours it would drop the
        # program's next row, and a row of ours would shift the program's steps. So the metrics join
        # the row that the program logs next.
        return Logger(lambda metrics, step: run.log(dict(metrics), commit=False))
    if library == "mlflow":
        from mlflow.tracking import MlflowClient

        run = logger.active_run() if inspect.ismodule(logger) else logger
        if run is None:
            raise ValueError(
                "recording: mlflow has no active run on this thread. Begin one first: "
                "with mlflow.start_run(): ..."
            )
        return Logger(partial(_log_to_mlflow, MlflowClient(), str(run.info.run_id)))
    if hasattr(logger, "log_metrics"):  # Lightning's loggers, Comet's experiments
        return Logger(lambda metrics, step: logger.log_metrics(dict(metrics), step=step))
    if callable(logger) and not inspect.isclass(logger):
        return Logger(logger)
    raise TypeError(
        "recording: logger must be a SummaryWriter, a run of wandb or mlflow, an object with "
        "log_metrics(metrics, step), or a function that takes (metrics, step); got "
        f"{type(logger).__name__}."
    )


def _log_scalars(writer: Any, metrics: Mapping[str, float], step: int) -> None:
    for key, value in metrics.items():
        writer.add_scalar(key, value, step)


def _log_to_mlflow(client: Any, run_id: str, metrics: Mapping[str, float], step: int) -> None:
    """The run is addressed by its id: another thread has another current run."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    entries = [Metric(key, value, now_ms, step) for key, value in metrics.items()]
    client.log_batch(run_id, metrics=entries)


class LoggerFeed:
    """Gathers intervals on the loop's thread and logs their sum on another."""

    def __init__(self, logger: Logger, start: str, step: Callable[[], int]) -> None:
        self.logger = logger
        self._start, self._step_of = start, step
        self._lock = RLock()  # guards the tally, never while the logger works
        self._tally, self._step = Tally(), 0
        self._placement: Placement | None = None  # as logged

    def gather(self, interval: Interval) -> None:
        """Add an interval."""
        step = self._step_of()
        with self._lock:
            self._tally.add(interval)
            self._step = step

    def log(self) -> None:
        """Log the intervals since the last time, if there are any."""
        with self._lock:
            tally, step, self._tally = self._tally, self._step, Tally()
        report = tally.report()
        if report is None:
            return
        self.logger.log(metrics_of(report, self._start), step)
        placement, log_text = report.placement, self.logger.text
        if log_text is not None and placement is not None and not placement.is_as(self._placement):
            self._placement = placement
            log_text(f"{self._start}/placement", str(placement), step)
