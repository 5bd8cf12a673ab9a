"""The Lightning callback: what the loaders do, in the trainer's own loggers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "spdl_torch.lightning needs Lightning: pip install lightning (the extra lightning)."
    ) from error

from .autotune.tuning import decision_entry
from .data.lightning_states import correct_resumed_loaders, correct_saved_states, want_states
from .observe.store.entries import EventLogEntry, entries_of
from .observe.store.writer import SQLiteStatsWriter
from .observe.verdict.intervals import after_pause, lap_between, sum_of_laps
from .observe.verdict.report import Report, make_report

if TYPE_CHECKING:
    import os

    import lightning.pytorch as pl

    from .autotune.window import Decision
    from .observe.verdict.verdict import Cause
    from .pipeline.stats.perf_stats import PipelineStats, StageStats

__all__ = ["PipelineStatsMonitor"]

# MLflow takes these and no others; what a stage is called may have more ("aggregate(8)").
_ILLEGAL = re.compile(r"[^A-Za-z0-9_. -]+")


class PipelineStatsMonitor(Callback):
    """Logs how long training waits for data and what every stage of loading does meanwhile.

    Finds the loaders of fit, validate, test and predict by itself: ``spdl_torch.DataLoader``,
    ``PipelineDataset``, either inside of torch's DataLoader without workers, and several of them
    in lists, dicts and a ``CombinedLoader``. Others are passed over.

    **Logged metrics**, of training every ``log_every_n_steps`` steps, over the steps since the
    last time, without the time in which validation ran (what was loaded ahead meanwhile counts):

    - ``data/wait_ratio``: share of the time in which training waited for a batch, 0 to 1
    - ``data/<stage>/busy_ratio``: share of the stage's threads' time inside its op, 0 to 1
    - ``data/<stage>/wait_in_ratio``: the same, waiting for items, 0 to 1
    - ``data/<stage>/wait_out_ratio``: the same, waiting for room, 0 to 1
    - ``data/<stage>/cpu_ratio``: CPU time over wall time inside the op, 0 to 1
    - ``data/<stage>/items_per_second``: calls of the op, 1/s
    - ``data/<stage>/task_seconds_p50``, ``data/<stage>/task_seconds_p99``: of a call, in this
      epoch so far, seconds
    - ``data/<stage>/num_failures``, ``data/<stage>/num_dropped``: calls that raised, that returned
      None, count
    - ``data/<stage>/concurrency``: threads, count

    and at the end of a validation, test or predict epoch, over all of it, the same with
    ``data/val/``, ``data/test/`` and ``data/predict/`` in front. With several loaders the name or
    number of each follows. The sanity check is left out.

    At the end of a training epoch rank 0 tells in one line what holds training back and, when that
    is another cause or stage than before, what to do.

    Args:
        prefix: in place of ``data``.
        stages: log the stages; False = ``wait_ratio`` alone.
        verdict: tell the verdict.
        across_ranks: gather every rank's ``wait_ratio`` (one small all-gather each time it is
            logged): ``data/wait_ratio_min``, ``data/wait_ratio_mean``, ``data/wait_ratio_max``,
            0 to 1, and ``data/slowest_rank``, the rank that waits longest.
        db_path: also keep all figures of this rank in a statistics file, for
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
        self._pipeline_ids: dict[str, int] = {}
        self._num_skipped: dict[tuple[str, str], int] = {}
        self._last_decision: dict[tuple[str, str], float] = {}
        self._laps: dict[str, _Laps] = {}
        self._told: dict[str, tuple[Cause, str | None]] = {}
        self._has_warned = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the file; refuse a trainer that has nowhere to log to."""
        self._laps.clear()
        if self._db_path is not None:
            self._close()
            rank, world_size = trainer.global_rank, trainer.world_size
            path = _path_of_rank(self._db_path, rank, world_size)
            config = {"trainer": stage}
            self._writer = SQLiteStatsWriter(path, config=config, rank=rank, world_size=world_size)
            self._writer.start()
        elif not trainer.loggers:
            raise MisconfigurationException(
                f"Cannot use `{type(self).__name__}` callback with `Trainer(logger=False)`. "
                "Give it a `db_path` to keep the figures in a file."
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write what is left to the file."""
        self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write what is left to the file, up to the step that failed."""
        if trainer.training:  # and not pausing for a validation
            self._end_laps(trainer)
        self._close()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put a resumed loader right, where Lightning did not. Loaders of training come first in
        the file, whatever is logged first.
        """
        correct_resumed_loaders(trainer)
        want_states(trainer)
        for name, _ in self._reporting(trainer.train_dataloader):
            self._pipeline_id("train", name)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let the loaders' states be of what was trained."""
        correct_saved_states(trainer, checkpoint)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A new pass begins: nothing of the one before is taken off."""
        self._laps.clear()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the lap, where Lightning logs."""
        step = _step_of(trainer)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if not every or (step + 1) % every:
            return
        self._end_laps(trainer)
        metrics: dict[str, float] = {}
        for name, laps in self._laps.items():
            if laps.unlogged:
                metrics |= self._metrics_of(sum_of_laps(laps.unlogged), name)
                laps.unlogged.clear()
        self._log(trainer, metrics, step)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training pauses, and no lap of it goes on."""
        if not trainer.sanity_checking:
            self._end_laps(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """It goes on."""
        for name, report in self._reports(trainer.train_dataloader):
            if name in self._laps:
                self._laps[name].go_on(report)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell what was found."""
        self._end_laps(trainer)
        if not self._laps and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{type(self).__name__} found no loader of spdl_torch in training; use "
                "spdl_torch.DataLoader or spdl_torch.PipelineDataset."
            )
        if self._verdict:
            for name, laps in self._laps.items():
                self._tell(name, laps.report())

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
        for name, report in self._reports(loaders):
            self._write(split, name, report, None)
            metrics |= self._metrics_of(report.stats, f"{split}/{name}" if name else split)
        self._write_skipped(split, loaders)
        self._log(trainer, metrics, _step_of(trainer))

    def _end_laps(self, trainer: pl.Trainer) -> None:
        """A lap of every training loader ends now; the next one begins."""
        for name, report in self._reports(trainer.train_dataloader):
            laps = self._laps.setdefault(name, _Laps())
            before = laps.before
            if laps.end(report):
                self._write("train", name, report, before)
        self._write_skipped("train", trainer.train_dataloader)

    def _reports(self, loaders: Any) -> Iterator[tuple[str, Report]]:
        """Of every loader that has figures, under its name among several."""
        for name, source in self._reporting(loaders):
            try:
                report = source.report()
            except RuntimeError:  # nothing was loaded yet, or stats=False
                continue
            yield name, report

    def _reporting(self, loaders: Any) -> Iterator[tuple[str, Any]]:
        """Whatever reports: a loader, or the dataset inside of another."""
        for name, loader in _named(loaders):
            for candidate in (loader, getattr(loader, "dataset", None)):
                if candidate is not None and hasattr(type(candidate), "report"):
                    yield name, candidate
                    break

    def _metrics_of(self, stats: PipelineStats, name: str) -> dict[str, float]:
        start = "/".join(part for part in (self._prefix, name) if part)
        metrics = {f"{start}/wait_ratio": stats.consumer_wait_ratio}
        if self._stages:
            for stage in stats.stages:
                place = f"{start}/{_ILLEGAL.sub('_', stage.name)}"
                for key, value in _figures_of(stage).items():
                    metrics[f"{place}/{key}"] = value
        return metrics

    def _log(self, trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
        if self._across_ranks and trainer.world_size > 1:
            metrics |= _over_ranks(trainer, metrics)
        if metrics:
            for logger in trainer.loggers:  # of other ranks than 0 they do nothing
                separator = logger.group_separator
                named = {key.replace("/", separator): v for key, v in metrics.items()}
                logger.log_metrics(named, step=step)

    def _pipeline_id(self, split: str, name: str) -> int:
        whose = f"{split}/{name}" if name else split
        return self._pipeline_ids.setdefault(whose, len(self._pipeline_ids))

    def _write(self, split: str, name: str, report: Report, before: Report | None) -> None:
        if self._writer is not None:
            number = self._pipeline_id(split, name)
            whose = f"{split}/{name}" if name else split
            for entry in entries_of(report, before, pipeline_id=number, name=whose):
                self._writer.log(entry)

    def _write_skipped(self, split: str, loaders: Any) -> None:
        """The samples that a loader left out since the last time."""
        for name, source in self._reporting(loaders):
            samples: Sequence[Any] = getattr(source, "skipped", ())
            place = split, name
            num_written = self._num_skipped.get(place, 0)
            for sample in samples[num_written if num_written <= len(samples) else 0 :]:
                if self._writer is not None:
                    details = {"pipeline": self._pipeline_id(split, name), "key": str(sample.key)}
                    details |= {"stage": sample.stage, "error": str(sample.error)}
                    self._writer.log(EventLogEntry(time.time(), "skipped", details))
            self._num_skipped[place] = len(samples)  # fewer than before: another epoch
            self._write_decisions(split, name, source)

    def _write_decisions(self, split: str, name: str, source: Any) -> None:
        """What tuning has changed since the last time."""
        decisions: Sequence[Decision] = getattr(source, "decisions", ())
        before = self._last_decision.get((split, name), 0.0)
        for decision in decisions:
            if self._writer is not None and decision.timestamp > before:
                number = self._pipeline_id(split, name)
                self._writer.log(decision_entry(decision, pipeline=number))
        if decisions:
            self._last_decision[split, name] = decisions[-1].timestamp

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown()
        self._pipeline_ids.clear()  # of the next run

    def _tell(self, name: str, report: Report) -> None:
        verdict = report.verdict
        found = verdict.cause, verdict.stage
        lines = [f"{self._prefix}/{name}: " if name else f"{self._prefix}: "]
        lines[0] += verdict.finding
        if self._told.get(name) != found:
            self._told[name] = found
            lines[0] += f" {verdict.action}"
            lines += verdict.remarks
        rank_zero_info("\n".join(lines))


class _Laps:
    """A loader of training, lap by lap: the readings of one epoch, less the pauses."""

    def __init__(self) -> None:
        self.before: Report | None = None
        self.unlogged: list[PipelineStats] = []
        self._epoch: list[PipelineStats] = []
        self._last: Report | None = None

    def end(self, report: Report) -> bool:
        """A lap from ``before`` ends here; False where no time has passed."""
        before = self.before.stats if self.before is not None else None
        if before == report.stats:
            return False  # the pass is over, and its figures stand still
        lap = lap_between(before, report.stats)
        self.unlogged.append(lap)
        self._epoch = [sum_of_laps([*self._epoch, lap])]
        self.before = self._last = report
        return True

    def go_on(self, report: Report) -> None:
        """The pause that began with the last lap's end is over."""
        if self.before is not None:
            stats = after_pause(self.before.stats, report.stats)
            report = replace(report, stats=stats)
        self.before = report

    def report(self) -> Report:
        """Over the epoch."""
        assert self._last is not None, "made by the first lap"
        return make_report(sum_of_laps(self._epoch), self._last.probes, pooled=self._last.pooled)


def _path_of_rank(db_path: str | os.PathLike[str], rank: int, world_size: int) -> Path:
    """``data.db`` -> ``data.rank1.db`` of several; ``{rank}`` is the number itself."""
    path = Path(db_path)
    if "{rank}" in str(path):
        return Path(str(path).replace("{rank}", str(rank)))
    return path if world_size == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _figures_of(stage: StageStats) -> dict[str, float]:
    tasks = stage.tasks
    return {
        "busy_ratio": stage.busy_ratio,
        "cpu_ratio": stage.cpu_ratio,
        "wait_in_ratio": stage.wait_in_ratio,
        "wait_out_ratio": stage.wait_out_ratio,
        "items_per_second": tasks.num_tasks / tasks.elapsed if tasks.elapsed else 0.0,
        "task_seconds_p50": tasks.p50_time,
        "task_seconds_p99": tasks.p99_time,
        "num_failures": float(tasks.num_failures),
        "num_dropped": float(stage.num_dropped),
        "concurrency": float(stage.concurrency),
    }


def _named(loaders: Any) -> list[tuple[str, Any]]:
    """Loaders of a collection, each with its key or number; a single one has no name."""
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
        (f"{_ILLEGAL.sub('_', key)}/{inner}".rstrip("/"), loader)
        for key, value in found
        for inner, loader in _named(value)
    ]
    return [("", named[0][1])] if len(named) == 1 else named


def _over_ranks(trainer: pl.Trainer, metrics: Mapping[str, float]) -> dict[str, float]:
    """Least, mean and largest wait of the ranks, and who it is that waits longest."""
    import torch

    keys = [key for key in metrics if key.endswith("/wait_ratio")]
    own = torch.tensor([metrics[key] for key in keys], device=trainer.strategy.root_device)
    parts = [torch.empty_like(own) for _ in range(trainer.world_size)]
    torch.distributed.all_gather(parts, own)  # Lightning's own goes by a function that torch drops
    found: dict[str, float] = {}
    for key, column in zip(keys, torch.stack(parts).cpu().unbind(1), strict=True):
        found[f"{key}_min"], found[f"{key}_max"] = column.min().item(), column.max().item()
        found[f"{key}_mean"] = column.mean().item()
        place = key.removesuffix("wait_ratio")
        found[f"{place}slowest_rank"] = float(column.argmax().item())
    return found


def _step_of(trainer: pl.Trainer) -> int:
    """Lightning's own x axis. It is private; ``global_step`` counts optimizer steps, which are more
    with several optimizers and fewer with gradient accumulation.
    """
    loop = getattr(trainer.fit_loop, "epoch_loop", None)
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step))
