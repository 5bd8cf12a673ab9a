"""Record what loaders do in a statistics file and in loggers, by one call and without any trainer's
help."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ...engine.threads import repeating
from ...scopes import scope
from ..verdict.causes import num_delivered
from ..verdict.figures import legal_name
from .epoch_watchers import is_telling, watched
from .following import Follower
from .loggers import LoggerFeed, opened
from .logging_hooks import recording_gc
from .writer import SQLiteStatsWriter, check_seconds, rank_and_world_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .following import Interval
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
    _check_arguments(path, interval_seconds, prefix, step)
    if path is None and logger is None:
        raise ValueError(
            "recording: expected a path, a logger, or both, got neither. On a rank that logs "
            "nothing pass logger=[]."
        )
    rank, world_size = rank_and_world_size(rank, world_size)
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
        complained: list[object] = []
        logs = [
            _SourceLog(source, number, name, writer, complained)
            for number, (name, source) in enumerate(sources.items())
        ]
        for log in logs if loggers else ():
            log.feed(loggers, prefix, step or (None if log is logs[0] else logs[0].num_delivered))
            stack.callback(log.call_loggers)  # including what the block's end adds
        for log in logs:
            stack.enter_context(log.followed())

        def look() -> None:
            for log in logs:
                log.write()
                log.call_loggers()

        stack.enter_context(repeating("stats-recorder", interval_seconds, look))
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
        super().__init__(source, number, name, log=log, listeners=[self._hear], from_now=True)
        self._feeds = list[LoggerFeed]()
        self._num_delivered = 0
        self._pid = os.getpid()
        self._complained = complained

    def feed(self, loggers: Sequence[Logger], prefix: str, step: Callable[[], int] | None) -> None:
        """Feed loggers, too, under these steps; None = the number of this loader's batches."""
        start = "/".join(filter(None, (prefix, legal_name(self.name))))
        step = step or (lambda: self._num_delivered)
        self._feeds = [LoggerFeed(logger, start, step) for logger in loggers]

    def num_delivered(self) -> int:
        """Return the number of batches that the loop has taken in the block so far."""
        return self._num_delivered + _num_in(self.news())

    def _hear(self, interval: Interval) -> None:
        self._num_delivered += _num_in(interval)
        for feed in self._feeds:
            feed.gather(interval)

    @scope
    def followed(self) -> Iterator[None]:
        """Hear of the loader's epochs in the block, and write what is new at its end."""
        try:
            with watched(self.source, self._between_epochs):
                yield
        finally:
            self.write()

    @scope
    def _between_epochs(self) -> Iterator[None]:
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

    def call_loggers(self) -> None:
        """Hand what is new to the loggers; log a logger's first error instead of raising it."""
        for feed in self._feeds:
            self._try(feed.logger, feed.log, "figures did not reach a logger")

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
