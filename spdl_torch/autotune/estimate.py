"""The threads and buffers that fit into a share of the cores and of the memory, and why."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..engine.definition.ops import OpKind
from ..named_tuples import NamedTuple
from ..pipeline.builder import PipelineBuilder
from .sizes import size_in_dataset, size_in_pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ..engine.definition.specs import PipelineSpec, StageSpec
    from ..machine.limits import Limits

_CHEAP_ROOM_BYTES = 16 * 2**20
"""The total size up to which more elements may wait than the threads need: where they come
quickly, waking a thread for each one costs more than their memory."""

_CHEAP_ROOM = 64
"""The room from which more gains nothing; see ``python examples/bench engine``."""


class Estimate(NamedTuple):
    """Settings, and the reasons for them."""

    settings: dict[str, Any]
    """Fields of ``PerfParams``."""
    lines: tuple[str, ...]
    doubt: str | None
    """The reason why memory sets no bound; None = it does."""


class _Kind(NamedTuple):
    """What differs between a loader and a pipeline, by threads and most room of a buffer."""

    most_room: int
    elements: Callable[[int, int], int]
    """The number of elements in flight."""
    settings: Callable[[int, int], dict[str, Any]]
    made_of: str = ""


def estimate(
    target: Any,
    *,
    batch_size: int | None,
    prefetch_factor: int,
    element_bytes: int | None,
    keep: Collection[str],
    cpu_util: float,
    memory_util: float,
    limits: Limits,
) -> Estimate:
    """Estimate for a dataset, a DataLoader or a PipelineBuilder; see ``PerfParams.estimate``."""
    _check_numbers(
        batch_size=batch_size, prefetch_factor=prefetch_factor, element_bytes=element_bytes
    )
    _check_shares(cpu_util=cpu_util, memory_util=memory_util)
    # The tiny term makes up for 0.29 * 100 being a little less than 29.
    cores = max(1, int(limits.own_cores * cpu_util + 1e-9))
    memory = limits.own_memory(memory_util)
    if isinstance(target, PipelineBuilder):
        if batch_size is not None:
            raise ValueError(
                "PerfParams.estimate: batch_size must be None for a pipeline, whose aggregates say "
                f"how many items are in a list, got {batch_size}."
            )
        spec = target.get_config()
        size, origin = (element_bytes, "given") if element_bytes else size_in_pipeline(spec)
        kind = _of_pipeline(spec, cores, size, keep)
    else:
        if keep:
            raise ValueError(
                f"PerfParams.estimate: keep is for a PipelineBuilder, got {sorted(keep)} with a "
                f"{type(target).__name__}."
            )
        dataset, batch_size = _dataset_of(target, batch_size)
        size, origin = (element_bytes, "given") if element_bytes else size_in_dataset(dataset)
        kind = _of_loader(batch_size, prefetch_factor)

    def fits(threads: int, room: int) -> bool:
        return size is None or memory is None or size * kind.elements(threads, room) <= memory

    threads = max((n for n in range(1, cores + 1) if fits(n, 1)), default=1)
    room = max((n for n in range(1, kind.most_room + 1) if fits(threads, n)), default=1)
    ranks = f" / {limits.local_world_size} ranks" if limits.local_world_size > 1 else ""
    lines = [
        f"cores: {limits.num_cores:g} * {cpu_util:g}{ranks} -> threads: {cores}",
        f"memory: {_bytes(limits.memory_bytes)} * {memory_util:g}{ranks} -> {_bytes(memory)}",
        f"element: {_bytes(size)} ({origin}){kind.made_of}",
    ]
    doubt = None
    if size is None:
        doubt = f"{origin}. Pass element_bytes"
    elif memory is None:
        doubt = "the system does not say how much there is. Pass memory_bytes"
    if size is not None:
        more = ", more than that: one thread and room for one are least"
        in_flight = _bytes(size * kind.elements(threads, room))
        lines.append(f"in flight: at most {in_flight}{'' if fits(threads, room) else more}")
    return Estimate(kind.settings(threads, room), tuple(lines), doubt)


def _of_loader(batch_size: int, prefetch_factor: int) -> _Kind:
    return _Kind(
        prefetch_factor,
        # What was requested and not taken; the samples of batches that are being collated, besides
        # those batches; the one that the training step works on.
        lambda workers, room: batch_size * (workers * room + workers + 1),
        lambda workers, room: {"num_workers": workers, "prefetch_factor": room},
        f", {batch_size:,} in a batch",
    )


def _of_pipeline(
    spec: PipelineSpec[Any], cores: int, size: int | None, keep: Collection[str]
) -> _Kind:
    stages = spec.pipes
    names = Counter(stage.name for stage in stages)  # settings go by name
    missing = sorted(set(keep) - names.keys())
    if missing:
        raise ValueError(
            f"PerfParams.estimate: keep must name stages of the pipeline, got {missing[0]!r}. It "
            f"has {', '.join(map(repr, names)) or 'none'}."
        )
    is_free = [may_run_at_once(s) and s.name not in keep and names[s.name] == 1 for s in stages]
    lengths = _lengths(stages)

    def widths_of(threads: int) -> list[int]:
        return [threads if free else s.concurrency for s, free in zip(stages, is_free, strict=True)]

    def rooms_of(threads: int, most: int) -> list[int]:
        widths = widths_of(threads)
        rooms = []
        for stage, width, after, length in zip(
            stages, widths, [*widths, 1][1:], lengths, strict=True
        ):
            cheap = 0 if size is None else _CHEAP_ROOM_BYTES // max(1, size * length)
            wanted = max(2, 2 * width, 2 * after, min(_CHEAP_ROOM, cheap))
            rooms.append(stage.buffer_size or min(wanted, most))
        return rooms

    def elements(threads: int, most: int) -> int:
        """Each thread has an item and its result in hand; the consumer works on one."""
        number = (lengths[-1] if lengths else 1) * (spec.sink.buffer_size + 1)
        widths, rooms = widths_of(threads), rooms_of(threads, most)
        for length, width, room in zip(lengths, widths, rooms, strict=True):
            number += length * (2 * width + room)
        return number

    def settings(threads: int, most: int) -> dict[str, Any]:
        concurrency = {s.name: threads for s, free in zip(stages, is_free, strict=True) if free}
        buffer_size: dict[str, int] = {}
        for stage, room in zip(stages, rooms_of(threads, most), strict=True):
            if stage.buffer_size is None:  # stages that share a name get the smallest
                buffer_size[stage.name] = min(room, buffer_size.get(stage.name, room))
        found: dict[str, Any] = {"concurrency": concurrency, "buffer_size": buffer_size}
        if concurrency:
            # Stages that were given their threads keep them; the others share the cores.
            found["num_threads"] = threads + sum(
                s.concurrency
                for s, free in zip(stages, is_free, strict=True)
                if not free and s.executor is None and not s.is_async
            )
        return found

    return _Kind(max([_CHEAP_ROOM, *(2 * width for width in widths_of(cores))]), elements, settings)


def _lengths(stages: Collection[StageSpec]) -> list[int]:
    """Return how many elements are in an item of each stage: 32 after ``aggregate(32)``."""
    lengths, lists = [], [1]
    for stage in stages:
        if stage.kind is OpKind.AGGREGATE:
            lists.append(lists[-1] * stage.batch_size)
        elif stage.kind is OpKind.GENERATOR and stage.name == "disaggregate" and len(lists) > 1:
            lists.pop()
        lengths.append(lists[-1])
    return lengths


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
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(target, data.DataLoader):
        # A batch sampler hides the size of its batches from the loader.
        of_loader = target.batch_size or getattr(target.batch_sampler, "batch_size", None)
        return target.dataset, batch_size or of_loader or 1
    ours = sys.modules.get("spdl_torch.data.dataset")
    if ours is not None and isinstance(target, ours.PipelineDataset):
        raise TypeError(
            "PerfParams.estimate: target must be a dataset, a DataLoader or a PipelineBuilder, got "
            "a PipelineDataset. Pass the builder that it is made of, and then apply()."
        )
    if not hasattr(target, "__getitem__") and not hasattr(target, "__iter__"):
        raise TypeError(
            "PerfParams.estimate: target must be a dataset, a DataLoader or a PipelineBuilder, got "
            f"{type(target).__name__}."
        )
    return target, batch_size or 1


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"PerfParams.estimate: {name} must be an int, got {value!r}.")
        if value < 1:
            raise ValueError(f"PerfParams.estimate: {name} must be >= 1, got {value}.")


def _check_shares(**shares: float) -> None:
    for name, value in shares.items():
        if not 0 < value <= 1:
            raise ValueError(
                f"PerfParams.estimate: {name} must be a share above 0, at most 1, got {value}."
            )


def _bytes(number: int | None) -> str:
    """Format as ``602,112 bytes`` or ``1,234.5 MiB``, always with an exact unit."""
    if number is None:
        return "not known"
    return f"{number:,} bytes" if number < 10 * 2**20 else f"{number / 2**20:,.1f} MiB"
