"""The Lightning callback: what the loaders do, in the trainer's own loggers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

try:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "spdl_torch.lightning needs Lightning: pip install lightning (the extra lightning)."
    ) from error

from .observe.store.epoch_watchers import watched
from .observe.store.following import Follower, report_of
from .observe.store.recording import path_of_rank
from .observe.store.writer import SQLiteStatsWriter
from .observe.verdict.figures import legal_name
from .observe.verdict.report import metrics_of
from .scopes import scope

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from .observe.store.following import Interval
    from .observe.verdict.causes import Cause
    from .observe.verdict.report import Report

__all__ = ["PipelineStatsMonitor"]


class PipelineStatsMonitor(Callback):
    """Logs how long training waits for data and what every stage of loading does meanwhile.

    Finds the loaders of fit, validate, test and predict by itself: ``spdl_torch.DataLoader``,
    ``PipelineDataset``, either inside of torch's DataLoader without workers, and several of them
    in lists, dicts and a ``CombinedLoader``. Others are passed over.

    **Logged metrics**, of training every ``log_every_n_steps`` steps (with
    ``accumulate_grad_batches`` at the last batch of the step), over the steps since the last
    time, without the time in which validation ran (what was loaded ahead meanwhile counts):

    - ``data/wait_ratio``: share of the time in which training waited for a batch, 0 to 1
    - ``data/<stage>/busy_ratio``: share of the stage's threads' time inside its op, 0 to 1
    - ``data/<stage>/wait_in_ratio``: the same, waiting for items, 0 to 1
    - ``data/<stage>/wait_out_ratio``: the same, waiting for room, 0 to 1
    - ``data/<stage>/cpu_ratio``: CPU time over wall time inside the op, 0 to 1
    - ``data/<stage>/items_per_second``: calls of the op, 1/s
    - ``data/<stage>/task_seconds_p50``, ``data/<stage>/task_seconds_p99``: of a call, seconds
    - ``data/<stage>/num_failures``, ``data/<stage>/num_dropped``: calls that raised, that returned
      None, count
    - ``data/<stage>/concurrency``: threads, count
    - ``data/num_processes``: worker processes of a ``DataLoader`` with workers, count; 0 = these
      are threads of the training process

    and at the end of a validation, test or predict epoch, over all of it, the same with
    ``data/val/``, ``data/test/`` and ``data/predict/`` in front. With several loaders the name or
    number of each follows. The sanity check is left out. Give validation a loader of its own: if
    it runs a pass of training's, the rest of that epoch of training is not measured.

    At the end of a training epoch rank 0 logs in one line what holds training back and, when that
    is another cause or stage than before, what to do.

    Args:
        prefix: in place of ``data``.
        stages: log the stages; False = ``wait_ratio`` alone.
        verdict: log the verdict.
        across_ranks: gather every rank's ``wait_ratio`` (one small all-gather each time it is
            logged): ``data/wait_ratio_min``, ``data/wait_ratio_mean``, ``data/wait_ratio_max``,
            0 to 1, and ``data/slowest_rank``, the rank that waits longest.
        db_path: also keep all statistics of this rank in a file, for
            ``python -m spdl_torch report``: at every log point and at the end of every epoch.
            Every rank has its own: ``data.db`` becomes ``data.rank0.db``, ... where there are
            several, unless it has ``{rank}`` in it. Each call of the trainer is a run in it.
    Raises: MisconfigurationException: the trainer has no logger and there is no ``db_path``.
    """

    def __init__(
        self,
        prefix: str = "data",
        *,
        stages: bool = True,
        verdict: bool = True,
        across_ranks: bool = False,
        db_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self._prefix = prefix
        self._stages = stages
        self._verdict = verdict
        self._across_ranks = across_ranks
        self._db_path = db_path
        self._writer: SQLiteStatsWriter | None = None
        self._followers: dict[str, Follower] = {}
        """Of every loader of the trainer's call, by split and name."""
        self._has_run = False
        self._epoch: dict[str, Interval] = {}
        """The epoch of each training loader, by name, and what of it nobody has logged yet."""
        self._unlogged: dict[str, Interval] = {}
        self._watching: ExitStack | None = None
        """From the first batch of a training epoch to its end: what is told of new passes."""
        self._logged: dict[str, tuple[Cause, str | None]] = {}
        self._has_warned = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the file; refuse a trainer that has nowhere to log to."""
        self._close()
        self._followers, self._epoch, self._unlogged = {}, {}, {}
        if self._db_path is not None:
            path = path_of_rank(self._db_path, trainer.global_rank, trainer.world_size)
            ranks: Any = {"rank": trainer.global_rank, "world_size": trainer.world_size}
            self._writer = SQLiteStatsWriter(path, config={"trainer": stage}, **ranks)
            self._writer.start()
        elif not trainer.loggers:
            raise MisconfigurationException(
                f"Cannot use `{type(self).__name__}` callback with `Trainer(logger=False)`. "
                "Give it a `db_path` to keep the figures in a file."
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the remaining statistics to the file."""
        self._close()
        self._has_run = True

    def _close(self) -> None:
        """Write what is left, and end the run in the file, if there is one."""
        self._stop_watching()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the remaining statistics to the file, up to the step that failed."""
        if trainer.training:  # and not pausing for a validation
            self._end_intervals(trainer)
        self._close()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let training loaders come first in the file, whatever is logged first, and measure from
        here where training goes on in the middle of an epoch, whose start is not told.
        """
        for name, source in self._reporting(trainer.train_dataloader):
            self._follower_of("train", name, source)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the statistics of a new epoch from zero."""
        self._epoch, self._unlogged = {}, {}
        for name, source in self._reporting(trainer.train_dataloader):
            self._follower_of("train", name, source).begin_pass()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Watch for loaders that start again within the epoch, from its first batch on: before
        that, Lightning begins the pass of the epoch itself.
        """
        if self._watching is not None:
            return
        self._watching = ExitStack()
        for name, source in self._reporting(trainer.train_dataloader):
            watcher = partial(self._between_passes, name, source)
            self._watching.enter_context(watched(source, watcher))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the interval at the steps at which Lightning logs."""
        step = _step_of(trainer)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if not every or (step + 1) % every or _is_within_step(trainer):
            return
        self._end_intervals(trainer)
        metrics: dict[str, float] = {}
        for name, interval in self._unlogged.items():
            metrics |= self._metrics_of(interval.judged(), name)
        self._unlogged = {}
        names = [name for name, _ in self._reporting(trainer.train_dataloader)]
        self._log(trainer, metrics, step, names)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the interval of training, which pauses."""
        if not trainer.sanity_checking:
            self._end_intervals(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resume training's statistics, without the pause."""
        for name, source in self._reporting(trainer.train_dataloader):
            self._follower_of("train", name, source).end_pause()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the verdict of the epoch."""
        self._stop_watching()
        self._end_intervals(trainer)
        if not self._has_warned:
            self._warn_of_nothing(trainer)
        if self._verdict:
            for name, interval in self._epoch.items():
                self._log_verdict(name, interval.judged())

    def _warn_of_nothing(self, trainer: pl.Trainer) -> None:
        sources = [source for _, source in self._reporting(trainer.train_dataloader)]
        if not sources:
            found = "found no loader of spdl_torch in training; use spdl_torch.DataLoader or"
            found += " spdl_torch.PipelineDataset."
        elif all(getattr(source, "stats", None) is False for source in sources):
            found = "has nothing to log: the loaders of training have stats=False."
        else:
            return
        self._has_warned = True
        rank_zero_warn(f"{type(self).__name__} {found}")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the whole epoch."""
        if not trainer.sanity_checking:
            self._log_epoch(trainer, trainer.val_dataloaders, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the whole epoch."""
        self._log_epoch(trainer, trainer.test_dataloaders, "test")

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the whole epoch."""
        self._log_epoch(trainer, trainer.predict_dataloaders, "predict")

    def _log_epoch(self, trainer: pl.Trainer, loaders: Any, split: str) -> None:
        metrics: dict[str, float] = {}
        sources, step = list(self._reporting(loaders)), _step_of(trainer)
        for name, source in sources:
            follower, report = self._follower_of(split, name, source), report_of(source)
            follower.begin_pass()
            follower.write()
            if report is not None:
                metrics |= self._metrics_of(report, follower.name)
        self._log(trainer, metrics, step, [_split_and(split, name) for name, _ in sources])

    def _follower_of(self, split: str, name: str, source: Any) -> Follower:
        whose = _split_and(split, name)
        if whose not in self._followers:
            self._followers[whose] = Follower(
                source,
                len(self._followers),
                whose,
                log=None if self._writer is None else self._writer.log,
                hear=partial(self._hear, name) if split == "train" else None,
                from_now=self._has_run,
            )
        self._followers[whose].source = source  # which may be another one in each epoch
        return self._followers[whose]

    def _hear(self, name: str, interval: Interval) -> None:
        """Add an interval of a training loader."""
        for intervals in (self._epoch, self._unlogged):
            intervals[name] = interval.after(intervals.get(name))

    def _end_intervals(self, trainer: pl.Trainer) -> None:
        """End the interval of every training loader, and begin the next one."""
        for name, source in self._reporting(trainer.train_dataloader):
            self._follower_of("train", name, source).write()

    @scope
    def _between_passes(self, name: str, source: Any) -> Iterator[None]:
        """Run while a loader that ``"max_size_cycle"`` starts again ends one pass and begins the
        next, whose statistics begin at zero.
        """
        follower = self._follower_of("train", name, source)
        follower.write()
        yield
        follower.begin_pass()

    def _stop_watching(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.close()

    def _reporting(self, loaders: Any) -> Iterator[tuple[str, Any]]:
        """Yield what has a report: each loader, or the dataset inside it, with its name."""
        for name, loader in _named(loaders):
            for candidate in (loader, getattr(loader, "dataset", None)):
                if candidate is not None and hasattr(type(candidate), "report"):
                    yield name, candidate
                    break

    def _start_of(self, name: str) -> str:
        return "/".join(part for part in (self._prefix, name) if part)

    def _metrics_of(self, report: Report, name: str) -> dict[str, float]:
        return metrics_of(report, self._start_of(name), stages=self._stages)

    def _log(
        self, trainer: pl.Trainer, metrics: dict[str, float], step: int, names: Sequence[str]
    ) -> None:
        """Log ``metrics``. ``names``: of the loaders, which are the same on every rank."""
        if self._across_ranks and trainer.world_size > 1:
            keys = [f"{self._start_of(name)}/wait_ratio" for name in names]
            metrics |= _over_ranks(trainer, [metrics.get(key, math.nan) for key in keys], keys)
        if metrics:
            for logger in trainer.loggers:  # on ranks other than 0 they do nothing
                separator = logger.group_separator
                named = {key.replace("/", separator): v for key, v in metrics.items()}
                logger.log_metrics(named, step=step)

    def _log_verdict(self, name: str, report: Report) -> None:
        verdict = report.verdict
        found = verdict.cause, verdict.stage
        lines = [f"{self._prefix}/{name}: " if name else f"{self._prefix}: "]
        lines[0] += verdict.finding
        if self._logged.get(name) != found:
            self._logged[name] = found
            lines[0] += f" {verdict.action}"
            lines += verdict.remarks
        rank_zero_info("\n".join(lines))


def _split_and(split: str, name: str) -> str:
    """Return a loader's name with its split in front."""
    return f"{split}/{name}" if name else split


def _named(loaders: Any) -> list[tuple[str, Any]]:
    """Return the loaders of a collection, each with its key or number; a single one has no name."""
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        found = [(str(key), value) for key, value in loaders.items()]
    elif isinstance(loaders, Sequence) and not hasattr(loaders, "report"):
        found = [(str(number), value) for number, value in enumerate(loaders)]
    elif hasattr(loaders, "iterables") and hasattr(loaders, "flattened"):  # a CombinedLoader
        return _named(loaders.iterables)
    else:
        return [("", loaders)]
    named = [
        (f"{legal_name(key)}/{inner}".rstrip("/"), loader)
        for key, value in found
        for inner, loader in _named(value)
    ]
    return [("", named[0][1])] if len(named) == 1 else named


def _over_ranks(
    trainer: pl.Trainer, waits: Sequence[float], keys: Sequence[str]
) -> dict[str, float]:
    """Return the least, mean and largest wait of the ranks, and the rank that waits longest.

    Every rank gives as many ``waits`` as there are ``keys``; NaN = it has measured none.
    """
    import torch

    own = torch.tensor(waits, device=trainer.strategy.root_device)
    parts = [torch.empty_like(own) for _ in range(trainer.world_size)]
    torch.distributed.all_gather(parts, own)  # Lightning's own calls what torch is removing
    found: dict[str, float] = {}
    for key, column in zip(keys, torch.stack(parts).cpu().unbind(1), strict=True):
        known = column[~column.isnan()]
        if not len(known):
            continue
        found[f"{key}_min"], found[f"{key}_max"] = known.min().item(), known.max().item()
        found[f"{key}_mean"] = known.mean().item()
        place = key.removesuffix("wait_ratio")
        found[f"{place}slowest_rank"] = float(column.nan_to_num(-1).argmax().item())
    return found


def _step_of(trainer: pl.Trainer) -> int:
    """Return Lightning's own x axis. It is private; ``global_step`` counts optimizer steps, of
    which there are more with several optimizers and fewer with gradient accumulation.
    """
    loop = getattr(trainer.fit_loop, "epoch_loop", None)
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step))


def _is_within_step(trainer: pl.Trainer) -> bool:
    """Return whether the step goes on with the next batch, which gradient accumulation adds to it.
    Lightning's x axis stands still meanwhile; it asks this, which is private, before it logs.
    """
    should_accumulate = getattr(trainer.fit_loop, "_should_accumulate", None)
    return should_accumulate is not None and bool(should_accumulate())
