"""Record what loaders do in a statistics file and in loggers, by one call and without any trainer's
help."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ...engine.threads import ThreadGroup
from ...scopes import scope
from ..verdict.intervals import interval_between
from .entries import EventLogEntry, entries_of, num_delivered
from .epoch_watchers import is_telling, watched
from .loggers import LoggerFeed, opened
from .logging_hooks import recording_gc
from .metrics import legal_name
from .skipped import SkippedLog
from .writer import SQLiteStatsWriter, check_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...engine.statistics import PipelineStats
    from ..verdict.report import Report
    from .loggers import Logger

_logger = logging.getLogger("spdl_torch.observe")


@overload
def recording(
    loaders: Any,
    path: str | os.PathLike[str],
    *,
    logger: Any = None,
    interval_seconds: float = 10.0,
    prefix: str = "data",
    step: Callable[[], int] | None = None,
    config: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> AbstractContextManager[SQLiteStatsWriter]: ...


@overload
def recording(
    loaders: Any,
    path: None = None,
    *,
    logger: Any,
    interval_seconds: float = 10.0,
    prefix: str = "data",
    step: Callable[[], int] | None = None,
) -> AbstractContextManager[None]: ...


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
) -> AbstractContextManager[SQLiteStatsWriter | None]:
    """Record every epoch of one or several loaders in the block into a statistics file, for
    ``python -m spdl_torch report`` and ``plot``, into loggers, or into both; also when the block
    ends by an exception. The result is the file's writer, for events of your own; None
    without a file.

    loaders: a ``spdl_torch.DataLoader``, a ``PipelineDataset``, torch's DataLoader around one, what
        Accelerate or Fabric has made of one of these, or a mapping of names to these.
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
    Raises: TypeError: a loader, a logger or another argument of the wrong kind; ValueError: a
        bad ``interval_seconds``, ``stats=False``, no loader, neither ``path`` nor ``logger``, a
        logger without a run, or the file is something else; OSError, sqlite3.Error: it cannot be
        opened.
    """
    return _recording(
        loaders,
        path,
        logger,
        interval_seconds=interval_seconds,
        prefix=prefix,
        step=step,
        config=config,
        rank=int(os.environ.get("RANK", "0")) if rank is None else rank,
        world_size=int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size,
    )


@scope
def _recording(
    loaders: Any,
    path: str | os.PathLike[str] | None,
    logger: Any,
    *,
    interval_seconds: float,
    prefix: str,
    step: Callable[[], int] | None,
    config: Mapping[str, Any] | None,
    rank: int,
    world_size: int,
) -> Iterator[SQLiteStatsWriter | None]:
    _check_arguments(path, interval_seconds, prefix, step)
    if path is None and logger is None:
        raise ValueError(
            "recording: expected a path, a logger, or both, got neither. On a rank that logs "
            "nothing pass logger=[]."
        )
    named = loaders if isinstance(loaders, Mapping) else {"": loaders}
    if not named:
        raise ValueError("recording: expected one loader or more, got an empty mapping.")
    sources = {str(name): _source_of(loader) for name, loader in named.items()}
    several = logger if isinstance(logger, list | tuple) else [logger]
    loggers = [opened(each) for each in several if each is not None]
    with ExitStack() as stack:
        writer = None
        if path is not None:
            own_path = path_of_rank(path, rank, world_size)
            writer = SQLiteStatsWriter(own_path, config=config, rank=rank, world_size=world_size)
            stack.enter_context(writer)
            stack.enter_context(recording_gc(writer.log, generation=2))
        logs = [
            _SourceLog(source, number, name, writer)
            for number, (name, source) in enumerate(sources.items())
        ]
        failed: list[Logger] = []
        for log in logs if loggers else ():
            own_step = step or (None if log is logs[0] else logs[0].num_delivered)
            log.feed(loggers, prefix, own_step, failed)
            stack.callback(log.call_loggers)  # including what the block's end adds
        for log in logs:
            stack.enter_context(log.followed())
        stack.enter_context(_repeating(logs, interval_seconds))
        yield writer


def _check_arguments(path: object, interval_seconds: object, prefix: object, step: object) -> None:
    check_seconds("recording: interval_seconds", interval_seconds)
    if not isinstance(path, str | os.PathLike | None):
        raise TypeError(f"recording: path must be the path of a file or None, got {path!r:.50}.")
    if not isinstance(prefix, str):
        raise TypeError(f"recording: prefix must be a str, got {prefix!r:.50}.")
    if not (step is None or callable(step)):
        raise TypeError(f"recording: step must be a function without arguments, got {step!r:.50}.")


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
        if is_telling(candidate):
            if not getattr(candidate, "stats", getattr(candidate, "_stats", True)):
                raise ValueError("recording: with stats=False there is nothing to record.")
            return candidate
    raise TypeError(
        "recording: expected a spdl_torch.DataLoader, a PipelineDataset or torch's DataLoader "
        f"around one, or a mapping of names to these, got {type(loader).__name__}."
    )


@scope
def _repeating(logs: list[_SourceLog], interval_seconds: float) -> Iterator[None]:
    """Write what is new, again and again, on a thread of its own, while the block runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(interval_seconds):
            for log in logs:
                log.write()
                log.call_loggers()

    threads = ThreadGroup(stop.set)
    threads.spawn("stats-recorder", run)
    try:
        yield
    finally:
        stop.set()
        threads.join()


class _SourceLog:
    """The entries of one loader."""

    def __init__(
        self, source: Any, pipeline_id: int, name: str, writer: SQLiteStatsWriter | None
    ) -> None:
        self._source = source
        self._pipeline_id = pipeline_id
        self._name = name
        self._writer = writer
        self._feeds: list[LoggerFeed] = []
        self._failed: list[Logger] = []  # those whose error was logged, for any of the loaders
        self._step: Callable[[], int] | None = None  # None = the number of its own batches
        self._num_delivered = 0
        self._pid = os.getpid()
        # Held from the end of one epoch to the start of the next: a reading in between would be of
        # the old epoch again, and be taken for the first of the new one. Re-entrant: on one thread,
        # an epoch may begin while another is being begun.
        self._lock = threading.RLock()
        # The last reading of this epoch; at first that of an epoch that nobody asked to record.
        self._before = self._report()
        self._skipped = SkippedLog(source)
        self._last_decision = time.time()
        self._has_complained = False

    def feed(
        self,
        loggers: Sequence[Logger],
        prefix: str,
        step: Callable[[], int] | None,
        failed: list[Logger],
    ) -> None:
        """Feed loggers, too.

        step: None = under the number of this loader's batches.
        failed: the loggers whose error was logged already; shared by all loaders.
        """
        self._failed = failed
        start = "/".join(filter(None, (prefix, legal_name(self._name))))
        self._feeds, self._step = [LoggerFeed(logger, start) for logger in loggers], step

    def num_delivered(self) -> int:
        """Return the number of batches that the loop has taken in the block so far."""
        news = self._news()
        if news is None:
            return self._num_delivered
        report, interval = news
        return self._num_delivered + num_delivered(interval, report.pooled)

    @scope
    def followed(self) -> Iterator[None]:
        """Hear of the loader's epochs in the block, and write what is new at its end."""
        try:
            with watched(self._source, self._between_epochs):
                yield
        finally:
            self.write()

    @scope
    def _between_epochs(self) -> Iterator[None]:
        """Run while the loader ends an epoch, if it has one, and begins the next."""
        if os.getpid() != self._pid:  # a forked child has a copy of the lock, maybe taken
            yield
            return
        with self._lock:
            self.write()
            try:
                yield
            finally:
                self._before = None

    def write(self) -> None:
        """Write what is new since the last time; log an error instead of raising it."""
        try:
            with self._lock:
                self._write_figures()
                self._write_skipped()
                self._write_decisions()
        except Exception:  # training goes on without statistics
            if not self._has_complained:
                self._has_complained = True
                _logger.exception("recording: figures of %r were not recorded.", self._name)

    def _write_figures(self) -> None:
        news, before = self._news(), self._before
        if news is None:
            return
        report, interval = news
        if self._writer is not None:
            for entry in entries_of(report, before, pipeline_id=self._pipeline_id, name=self._name):
                self._writer.log(entry)
        self._before = report
        self._num_delivered += num_delivered(interval, report.pooled)
        if self._feeds and interval.stages:
            step = self._num_delivered if self._step is None else self._step()
            for feed in self._feeds:
                feed.gather(interval, report, step)

    def _news(self) -> tuple[Report, PipelineStats] | None:
        """Return the present report, and what is new since the last one; None = nothing is."""
        report, before = self._report(), self._before
        if report is None:
            return None
        if before is not None and report.stats.elapsed <= before.stats.elapsed:
            # The epoch is over, and its statistics no longer change. They may be a little older
            # than the last reading, if that was taken while the loop's thread took the final.
            return None
        return report, interval_between(None if before is None else before.stats, report.stats)

    def call_loggers(self) -> None:
        """Hand what is new to the loggers; log a logger's first error instead of raising it."""
        for feed in self._feeds:
            try:
                feed.log()
            except Exception:  # training goes on without statistics
                if not any(each is feed.logger for each in self._failed):
                    self._failed.append(feed.logger)
                    _logger.exception("recording: figures did not reach a logger.")

    def _report(self) -> Report | None:
        """Return the present report; None = nothing was loaded yet."""
        try:
            report: Report = self._source.report()
        except RuntimeError:
            return None
        return report

    def _write_skipped(self) -> None:
        for entry in self._skipped.entries(self._source, self._pipeline_id):
            if self._writer is not None:
                self._writer.log(entry)

    def _write_decisions(self) -> None:
        for decision in getattr(self._source, "decisions", ()):
            if decision.timestamp > self._last_decision:
                self._event(decision.timestamp, "decision", decision.as_details())
                self._last_decision = decision.timestamp

    def _event(self, timestamp: float, name: str, details: Mapping[str, Any]) -> None:
        if self._writer is not None:
            details = {"pipeline": self._pipeline_id, **details}
            self._writer.log(EventLogEntry(timestamp, name, details))
