"""The Lightning callback: what the loaders do, in the trainer's own loggers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

try:
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'spdl_torch.lightning needs Lightning: pip install "spdl-torch[lightning]".'
    ) from error

from .observe.laps import lap_between

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from .observe.report import Report
    from .observe.verdict import Cause
    from .pipeline.stats import PipelineStats, StageStats

__all__ = ["PipelineStatsMonitor"]

# MLflow takes these and no others; what a stage is called may have more ("aggregate(8)").
_ILLEGAL = re.compile(r"[^A-Za-z0-9_. -]+")


class PipelineStatsMonitor(Callback):
    """Logs how long training waits for data and what every stage of loading does meanwhile.

    Finds the loaders of fit, validate, test and predict by itself: ``spdl_torch.DataLoader``,
    ``PipelineDataset``, either inside of torch's DataLoader without workers, and several of them
    in lists and dicts. Others are passed over.

    **Logged metrics**, of training every ``log_every_n_steps`` steps, over the steps since the
    last time:

    - ``data/wait_ratio``: share of the time in which training waited for a batch, 0 to 1
    - ``data/<stage>/busy_ratio``, ``wait_in_ratio``, ``wait_out_ratio``: shares of the stage's
      threads' time inside its op, waiting for items, waiting for room, 0 to 1
    - ``data/<stage>/cpu_ratio``: CPU time over wall time inside the op, 0 to 1
    - ``data/<stage>/items_per_second``: calls of the op a second
    - ``data/<stage>/task_seconds_p50``, ``task_seconds_p99``: of a call, in this epoch
    - ``data/<stage>/num_failures``, ``num_dropped``: calls that raised, that returned None
    - ``data/<stage>/concurrency``: threads

    and at the end of a validation or test epoch, over all of it, the same with ``data/val/`` and
    ``data/test/`` in front. With several loaders the name or number of each follows ``data/``.

    At the end of a training epoch it tells the verdict, when that is another than before: what
    holds training back, why, and what to do.

    Args:
        prefix: in place of ``data``.
        stages: log the stages; False = ``wait_ratio`` alone.
        verdict: tell the verdict.
        across_ranks: gather every rank's ``wait_ratio`` (one small all-gather each time it is
            logged): ``data/wait_ratio_min``, ``_mean``, ``_max``, and ``data/slowest_rank``, the
            rank that waits longest.
    Raises: MisconfigurationException: the trainer has no logger.
    """

    def __init__(
        self,
        prefix: str = "data",
        *,
        stages: bool = True,
        verdict: bool = True,
        across_ranks: bool = False,
    ) -> None:
        self._prefix = prefix
        self._stages = stages
        self._verdict = verdict
        self._across_ranks = across_ranks
        self._before: dict[str, PipelineStats] = {}
        self._told: dict[str, tuple[Cause, str | None]] = {}
        self._has_warned = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a trainer that has nowhere to log to."""
        if not trainer.loggers:
            raise MisconfigurationException(
                f"Cannot use `{type(self).__name__}` callback with `Trainer(logger=False)`."
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A new pass begins: nothing of the one before is taken off."""
        self._before.clear()

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
        metrics: dict[str, float] = {}
        for name, report in self._reports(trainer.train_dataloader):
            lap = lap_between(self._before.get(name), report.stats)
            self._before[name] = report.stats
            metrics |= self._metrics_of(lap, name)
        self._log(trainer, metrics, step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell what was found."""
        reports = list(self._reports(trainer.train_dataloader))
        if not reports and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{type(self).__name__} found no loader of spdl_torch in training; use "
                "spdl_torch.DataLoader or spdl_torch.PipelineDataset."
            )
        if self._verdict:
            for name, report in reports:
                self._tell(name, report)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the whole epoch."""
        if not trainer.sanity_checking:
            self._log_epoch(trainer, trainer.val_dataloaders, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the whole epoch."""
        self._log_epoch(trainer, trainer.test_dataloaders, "test")

    def _log_epoch(self, trainer: pl.Trainer, loaders: Any, split: str) -> None:
        metrics: dict[str, float] = {}
        for name, report in self._reports(loaders):
            metrics |= self._metrics_of(report.stats, f"{split}/{name}" if name else split)
        self._log(trainer, metrics, _step_of(trainer))

    def _reports(self, loaders: Any) -> Iterator[tuple[str, Report]]:
        """Of every loader that has figures, under its name among several."""
        for name, loader in _named(loaders):
            for candidate in (loader, getattr(loader, "dataset", None)):
                if candidate is not None and hasattr(type(candidate), "report"):
                    try:
                        yield name, candidate.report()
                    except RuntimeError:  # nothing was loaded yet, or stats=False
                        continue
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

    def _tell(self, name: str, report: Report) -> None:
        verdict = report.verdict
        found = verdict.cause, verdict.stage
        if self._told.get(name) != found:
            self._told[name] = found
            whose = f"{self._prefix}/{name}" if name else self._prefix
            lines = [f"{whose}: {verdict.finding} {verdict.action}", *verdict.remarks]
            rank_zero_info("\n".join(lines))


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
