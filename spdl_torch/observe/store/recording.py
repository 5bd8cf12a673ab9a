"""Record what loaders do in a statistics file and in other projects' loggers (TensorBoard, W&B,
MLflow, plain functions), by one call and without any trainer's help."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import checked_seconds
from ...engine.threads import repeating
from ...engine.timeline import TwoClocks
from ...locks import RLock
from ...machine.probes import Collections
from ...scopes import scope
from ..verdict.causes import num_delivered
from ..verdict.figures import legal_name
from ..verdict.report import metrics_of
from .entries import EventLogEntry, LogEntry
from .epoch_watchers import watched
from .following import Follower
from .writer import SQLiteStatsWriter, rank_and_world_size

if TYPE_CHECKING:
    from .following import Interval

_logger = logging.getLogger("spdl_torch.observe")

_REPORTING = (
    "spdl_torch.loader.dataloader.DataLoader",
    "spdl_torch.data.dataset.PipelineDataset",
    "spdl_torch.pipeline.pipeline.Pipeline",
)
"""The classes with reports. The first two begin each epoch within ``between_epochs``; a pipeline
runs once."""

_PASS_ON_SECONDS = 0.2  # between two looks for collections


@scope
def recording(
    loaders: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    logger: Any = None,
    interval_seconds: float = 10.0,
    prefix: str = "data",
    step: Callable[[], int] | None = None,
    config: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Iterator[Any]:
    """Record every epoch of one or several loaders in the block into a statistics file, for
    ``python -m spdl_torch report`` and ``plot``, into loggers, or into both; also when the block
    ends by an exception. The result is the file's writer, for events of your own; None
    without a file.

    loaders: a ``spdl_torch.DataLoader``, a ``PipelineDataset``, torch's DataLoader around one, what
        Accelerate or Fabric has made of one of these, a ``Pipeline``, or a mapping of names to
        these.
    path: the file; several runs may share it. Of several ranks, each has its own: ``run.db``
        becomes ``run.rank0.db``, ... unless the name has ``{rank}`` in it. None = no file.
    logger: a ``SummaryWriter`` of TensorBoard, a run of ``wandb`` or ``mlflow`` (or either module,
        for its current run), an object with ``log_metrics(metrics, step)``, such as Lightning's
        loggers, a function that takes ``(metrics, step)``, or a list of these, in which None is
        left out; None or ``[]`` = none, as on ranks that log nothing.
    interval_seconds: the time between two entries of a stage. An epoch's last one is taken when
        the next epoch or the block's end comes.
    prefix: the beginning of every name in loggers.
    step: a function that returns the step under which loggers get metrics; None = the number of
        batches that the first loader has handed over in the block. W&B has steps of its own:
        its metrics join the row that the program logs next.
    config, rank, world_size: as for :class:`SQLiteStatsWriter`.

    A file gets statistics of stages and queues, the probes' readings, skipped samples, decisions of
    tuning, and full garbage collections. Loggers get the metrics of ``PipelineStatsMonitor``, over
    the time since the last ones: ``data/wait_ratio``, ``data/<stage>/busy_ratio``, ... and, for a
    mapping, ``data/<name>/...``, unless the name is ``""``. A separate thread calls them.
    Raises: TypeError: a loader or a logger of the wrong kind; ValueError: a bad
        ``interval_seconds``, ``stats=False``, neither ``path`` nor ``logger``, a logger without a
        run, or the file is something else; OSError, sqlite3.Error: it cannot be opened.
    """
    interval_seconds = checked_seconds("recording: interval_seconds", interval_seconds)
    if path is None and logger is None:
        raise ValueError(
            "recording: expected a path, a logger, or both, got neither. On a rank that logs "
            "nothing pass logger=[]."
        )
    rank, world_size = rank_and_world_size(rank, world_size)
    named = loaders if isinstance(loaders, Mapping) else {"": loaders}
    sources = {str(name): _source_of(loader) for name, loader in named.items()}
    several = logger if isinstance(logger, list | tuple) else [logger]
    loggers = [opened(each) for each in several if each is not None]
    with ExitStack() as stack:
        writer = None
        if path is not None:
            own_path = path_of_rank(path, rank, world_size)
            run: Any = {"config": config, "rank": rank, "world_size": world_size}
            writer = SQLiteStatsWriter(own_path, flush_interval=min(10, interval_seconds), **run)
            stack.enter_context(writer)
            stack.enter_context(recording_gc(writer.log, generation=2))
        complained: list[object] = []
        logs = [
            _SourceLog(source, number, name, writer, complained)
            for number, (name, source) in enumerate(sources.items())
        ]
        for log in logs if loggers else ():
            log.feed(loggers, prefix, step or (None if log is logs[0] else logs[0].num_delivered))
            stack.callback(log.call_loggers)  # including what the block's end adds
        for log in logs:
            stack.callback(log.write)  # what is new at the block's end
            stack.enter_context(watched(log.source, log.between_epochs))

        def look() -> None:
            for log in logs:
                log.write()
                log.call_loggers()

        stack.enter_context(repeating("stats-recorder", interval_seconds, look))
        yield writer
    for log in logs:
        log.warn_of_nothing()


@scope
def recording_gc(log: Callable[[LogEntry], Any], *, generation: int = 0) -> Iterator[None]:
    """Log ``gc_start`` and ``gc_stop`` of garbage collections while the block runs.

    generation: the youngest generation to log; 2 = full collections only, which take long.

    ``log`` is called some moments after the collection, with the times of its start and stop, on a
    thread of its own, or when the block ends. What it raises on that thread is logged, and ends it.
    """
    collections, clock = Collections(), TwoClocks.now()

    def pass_on() -> None:
        for began_ns, ended_ns, info in collections.taken():
            if info["generation"] >= generation:
                at_start = {**info, "collected": 0, "uncollectable": 0}  # as Python has it
                log(EventLogEntry(clock.system(began_ns) / 1e9, "gc_start", at_start))
                log(EventLogEntry(clock.system(ended_ns) / 1e9, "gc_stop", info))

    collections.begin()
    try:
        with repeating("collections", _PASS_ON_SECONDS, pass_on):
            yield
    finally:
        collections.end()
        pass_on()


def path_of_rank(path: str | os.PathLike[str], rank: int, world_size: int) -> Path:
    """Return the file of a rank: with several, ``data.db`` becomes ``data.rank1.db``; ``{rank}`` in
    the name becomes the number alone.
    """
    path = Path(path)
    if "{rank}" in str(path):
        return Path(str(path).replace("{rank}", str(rank)))
    return path if world_size == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _source_of(loader: Any) -> Any:
    """Return what reports: the loader, the one that Accelerate (``base_dataloader``), Fabric or Ray
    (``_dataloader``) has put another one around, or the dataset inside of one."""
    inside = ("base_dataloader", "_dataloader", "dataset")
    for candidate in (loader, *(getattr(loader, name, None) for name in inside)):
        # Accelerate's loaders claim the class of the one inside, so isinstance would not do.
        kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(candidate).__mro__}
        if not kinds.isdisjoint(_REPORTING):
            if not getattr(candidate, "stats", getattr(candidate, "_stats", True)):
                raise ValueError("recording: with stats=False there is nothing to record.")
            return candidate
    raise TypeError(
        "recording: expected a spdl_torch.DataLoader, a PipelineDataset, torch's DataLoader around "
        f"one, a Pipeline, or a mapping of names to these, got {type(loader).__name__}."
    )


class _SourceLog(Follower):
    """What is written and logged of one loader."""

    def __init__(
        self,
        source: Any,
        number: int,
        name: str,
        writer: SQLiteStatsWriter | None,
        complained: list[object],
    ) -> None:
        """``complained``: of what an error was logged: of a logger, or of one of these."""
        log = None if writer is None else writer.log
        super().__init__(source, number, name, log=log, hear=self._hear, from_now=True)
        self._num_delivered = 0
        self._pid = os.getpid()
        self._complained = complained
        self._loggers: Sequence[LogFunction] = ()
        self._tallying = RLock()  # guards what is gathered for them, never while one works
        self._gathered: Interval | None = None
        self._step = 0

    def feed(
        self, loggers: Sequence[LogFunction], prefix: str, step: Callable[[], int] | None
    ) -> None:
        """Feed loggers, too, under these steps; None = the number of this loader's batches."""
        self._loggers = loggers
        self._start = "/".join(filter(None, (prefix, legal_name(self.name))))
        self._step_of = step or (lambda: self._num_delivered)

    def num_delivered(self) -> int:
        """Return the number of batches that the loop has taken in the block so far."""
        return self._num_delivered + _num_in(self.news())

    def _hear(self, interval: Interval) -> None:
        self._num_delivered += _num_in(interval)
        if self._loggers:
            step = self._step_of()
            with self._tallying:
                self._gathered, self._step = interval.after(self._gathered), step

    @scope
    def between_epochs(self) -> Iterator[None]:
        """Run while the loader ends an epoch, if it has one, and begins the next."""
        if os.getpid() != self._pid:  # a forked child has a copy of the lock, maybe taken
            yield
            return
        with self.lock:
            self.write()
            try:
                yield
            finally:
                self.begin_pass()

    def write(self) -> None:
        """Write what is new since the last time; log an error instead of raising it."""
        self._try(self, super().write, f"figures of {self.name!r} were not recorded")

    def warn_of_nothing(self) -> None:
        """Log a warning if the block had nothing of it, and no error says why."""
        if not self._num_delivered and self not in self._complained:
            text = "recording: the loader %r delivered nothing in the block. If a trainer makes "
            text += "another of it, as Lightning for several ranks, use PipelineStatsMonitor."
            _logger.warning(text, self.name)

    def call_loggers(self) -> None:
        """Hand what is new to the loggers; log a logger's first error instead of raising it."""
        with self._tallying:
            interval, step, self._gathered = self._gathered, self._step, None
        if interval is None:
            return
        for log in self._loggers:
            call = partial(self._log_to, log, interval, step)
            self._try(log, call, "figures did not reach a logger")

    def _log_to(self, log: LogFunction, interval: Interval, step: int) -> None:
        log(metrics_of(interval.judged(), self._start), step)

    def _try(self, whose: object, call: Callable[[], None], failure: str) -> None:
        """Call it, and log its first error: training goes on without statistics."""
        try:
            call()
        except Exception:
            if not any(each is whose for each in self._complained):
                self._complained.append(whose)
                _logger.exception("recording: %s.", failure)


def _num_in(interval: Interval | None) -> int:
    return 0 if interval is None else num_delivered(interval.stats.stages) or 0


LogFunction = Callable[[Mapping[str, float], int], object]
"""A function that is called with metrics by name, and the step to which they belong."""


def opened(logger: Any) -> LogFunction:
    """Return the function that logs metrics; one thread at a time calls it. Call this on the thread
    that made the logger: an MLflow run belongs to a thread.

    Raises: TypeError: it is of no known kind; ValueError: it has no run.
    """
    library = (getattr(logger, "__name__", "") or type(logger).__module__).split(".")[0]
    if hasattr(logger, "add_scalar"):  # a SummaryWriter, torch's or tensorboardX's
        return partial(_log_scalars, logger)
    if library == "wandb":
        run = logger.run if inspect.ismodule(logger) else logger
        if run is None:
            raise ValueError("recording: wandb has no run. Call wandb.init() first, or pass a run.")
        # Its steps only increase, and are the program's: under a step of ours it would drop the
        # program's next row, and a row of ours would shift the program's steps. So the metrics join
        # the row that the program logs next.
        return lambda metrics, step: run.log(dict(metrics), commit=False)
    if library == "mlflow":
        from mlflow.tracking import MlflowClient

        run = logger.active_run() if inspect.ismodule(logger) else logger
        if run is None:
            raise ValueError(
                "recording: mlflow has no active run on this thread. Begin one first: "
                "with mlflow.start_run(): ..."
            )
        return partial(_log_to_mlflow, MlflowClient(), str(run.info.run_id))
    if hasattr(logger, "log_metrics"):  # Lightning's loggers, Comet's experiments
        return lambda metrics, step: logger.log_metrics(dict(metrics), step=step)
    if callable(logger) and not inspect.isclass(logger):
        log: LogFunction = logger
        return log
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
