"""Infer settings from a dataset or a pipeline and a machine, and explain them."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.definition.ops import OpKind
from ..pipeline.builder import PipelineBuilder
from .model import Budget, Fit, StageShape, budget_of, fit_loader, fit_stages
from .sizes import ElementSize, size_in_dataset, size_in_pipeline

if TYPE_CHECKING:
    from ..engine.definition.specs import PipelineSpec, StageSpec
    from ..machine.limits import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """The user's options; see ``PerfParams.estimate``."""

    batch_size: int | None
    prefetch_factor: int
    element_bytes: int | None
    num_samples: int
    keep: frozenset[str]
    cpu_util: float
    memory_util: float

    def __post_init__(self) -> None:
        for name in ("batch_size", "prefetch_factor", "element_bytes", "num_samples"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"PerfParams.estimate: {name} must be an int, got {value!r}.")
            if value < 1:
                raise ValueError(f"PerfParams.estimate: {name} must be >= 1, got {value}.")
        for name in ("cpu_util", "memory_util"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(
                    f"PerfParams.estimate: {name} must be a share above 0, at most 1, got {value}."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Inference:
    """The result of an estimate."""

    settings: dict[str, Any]
    """Fields of ``PerfParams``."""
    lines: tuple[str, ...]
    """The reasons for them, for people."""
    doubt: str | None
    """The reason why memory sets no bound; None = it does."""


def infer(target: Any, wishes: Wishes, limits: Limits) -> Inference:
    """Infer settings for a dataset, a DataLoader or a PipelineBuilder."""
    budget = budget_of(limits, wishes.cpu_util, wishes.memory_util)
    size = None if wishes.element_bytes is None else ElementSize(wishes.element_bytes, "given")
    is_pipeline = isinstance(target, PipelineBuilder)
    if is_pipeline and wishes.batch_size is not None:
        raise ValueError(
            "PerfParams.estimate: batch_size must be None for a pipeline, whose aggregates say how "
            f"many items are in a list, got {wishes.batch_size}."
        )
    if not is_pipeline and wishes.keep:
        raise ValueError(
            f"PerfParams.estimate: keep is for a PipelineBuilder, got {sorted(wishes.keep)} with a "
            f"{type(target).__name__}."
        )
    if is_pipeline:
        spec = target.get_config()
        size = size or size_in_pipeline(spec, wishes.num_samples)
        settings, fit = _of_pipeline(spec, budget, size.nbytes, wishes.keep)
        made_of = ""
    else:
        dataset, batch_size = _dataset_of(target, wishes.batch_size)
        size = size or size_in_dataset(dataset, wishes.num_samples)
        fit = fit_loader(
            budget, size.nbytes, batch_size=batch_size, prefetch_factor=wishes.prefetch_factor
        )
        settings = {"num_workers": fit.threads, "prefetch_factor": fit.rooms[0]}
        made_of = f", {batch_size:,} in a batch"
    return Inference(
        settings=settings,
        lines=(
            *_lines_of_limits(limits, budget, wishes),
            f"element: {_bytes(size.nbytes)} ({size.origin}){made_of}",
            *_lines_of_fit(fit, budget),
        ),
        doubt=_doubt(size, limits),
    )


def _of_pipeline(
    spec: PipelineSpec[Any], budget: Budget, element_bytes: int | None, keep: frozenset[str]
) -> tuple[dict[str, Any], Fit]:
    missing = keep - {stage.name for stage in spec.pipes}
    if missing:
        raise ValueError(
            f"PerfParams.estimate: keep must name stages of the pipeline, got {min(missing)!r}. It "
            f"has {', '.join(repr(stage.name) for stage in spec.pipes) or 'none'}."
        )
    names = Counter(stage.name for stage in spec.pipes)  # settings go by name
    shapes = _shapes(spec, keep | {name for name, count in names.items() if count > 1})
    fit = fit_stages(budget, element_bytes, shapes, spec.sink.buffer_size)
    stages = list(zip(spec.pipes, shapes, fit.rooms, strict=True))
    concurrency = {s.name: fit.threads for s, shape, _ in stages if shape.concurrency is None}
    buffer_size: dict[str, int] = {}
    for stage, shape, room in stages:
        if shape.room is None:  # stages that share a name get the smallest
            buffer_size[stage.name] = min(room, buffer_size.get(stage.name, room))
    settings: dict[str, Any] = {"concurrency": concurrency, "buffer_size": buffer_size}
    if concurrency:
        # Stages that were given their threads keep them; the others share the budget.
        others = sum(
            shape.concurrency or 0
            for s, shape, _ in stages
            if s.executor is None and not s.is_async
        )
        settings["num_threads"] = fit.threads + others
    return settings, fit


def _shapes(spec: PipelineSpec[Any], keep: frozenset[str] | set[str]) -> list[StageShape]:
    shapes, lists = [], [1]
    for stage in spec.pipes:
        if stage.kind is OpKind.AGGREGATE:
            lists.append(lists[-1] * stage.batch_size)
        elif stage.kind is OpKind.GENERATOR and stage.name == "disaggregate" and len(lists) > 1:
            lists.pop()
        is_free = may_run_at_once(stage) and stage.name not in keep
        shapes.append(
            StageShape(lists[-1], None if is_free else stage.concurrency, stage.buffer_size)
        )
    return shapes


def may_run_at_once(stage: StageSpec) -> bool:
    """Return whether the stage is a plain function whose concurrency nobody has set."""
    return (
        stage.kind is OpKind.FUNCTION
        and stage.concurrency == 1
        and stage.executor is None
        and not stage.on_one_thread
    )


def _dataset_of(target: Any, batch_size: int | None) -> tuple[Any, int]:
    """Return the dataset, and the number of samples that a worker makes at a time."""
    ours = sys.modules.get("spdl_torch.data.dataset")
    if ours is not None and isinstance(target, ours.PipelineDataset):
        raise TypeError(
            "PerfParams.estimate: target must be a dataset, a DataLoader or a PipelineBuilder, got "
            "a PipelineDataset. Pass the builder that it is made of, and then apply()."
        )
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(target, data.DataLoader):
        # A batch sampler hides the size of its batches from the loader.
        of_loader = target.batch_size or getattr(target.batch_sampler, "batch_size", None)
        return target.dataset, batch_size or of_loader or 1
    if not hasattr(target, "__getitem__") and not hasattr(target, "__iter__"):
        raise TypeError(
            "PerfParams.estimate: target must be a dataset, a DataLoader or a PipelineBuilder, got "
            f"{type(target).__name__}."
        )
    return target, batch_size or 1


def _doubt(size: ElementSize, limits: Limits) -> str | None:
    if size.nbytes is None:
        return f"{size.origin}. Pass element_bytes"
    if limits.memory_bytes is None:
        return "the system does not say how much there is. Pass memory_bytes"
    return None


def _lines_of_limits(limits: Limits, budget: Budget, wishes: Wishes) -> tuple[str, str]:
    ranks = f" / {limits.local_world_size} ranks" if limits.local_world_size > 1 else ""
    return (
        f"cores: {limits.num_cores:g} * {wishes.cpu_util:g}{ranks} -> threads: {budget.threads}",
        f"memory: {_bytes(limits.memory_bytes)} * {wishes.memory_util:g}{ranks} -> "
        f"{_bytes(budget.memory_bytes)}",
    )


def _lines_of_fit(fit: Fit, budget: Budget) -> list[str]:
    if fit.in_flight_bytes is None:
        return []
    more = (
        "" if fit.is_within(budget) else ", more than that: one thread and room for one are least"
    )
    return [f"in flight: at most {_bytes(fit.in_flight_bytes)}{more}"]


def _bytes(number: int | None) -> str:
    """Format as ``602,112 bytes`` or ``1,234.5 MiB``, always with an exact unit."""
    if number is None:
        return "not known"
    return f"{number:,} bytes" if number < 10 * 2**20 else f"{number / 2**20:,.1f} MiB"
