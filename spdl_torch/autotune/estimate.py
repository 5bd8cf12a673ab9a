"""The threads and buffers that fit into a share of the cores and of the memory, and why."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections import Counter
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ..engine.ops import OpKind
from ..objects.generator_states import generators_kept
from ..pipeline.builder import PipelineBuilder
from .tuning import check_counts, check_shares

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ..engine.definition import PipelineSpec, StageSpec
    from ..machine.limits import Limits

    _Size = tuple[int | None, str]
    """None = not known; how it was measured, or why it could not be."""
    _Plan = Callable[[int, int], tuple[int, dict[str, Any]]]
    """From threads and most room of a buffer to the elements in flight and the settings."""

_WHERE = "PerfParams.estimate"

_NUMBER_BYTES = 8  # as a tensor: int64 or float64
_NUM_SAMPLES = 3
_SPENT = "is an iterator, which runs once"

_CHEAP_ROOM_BYTES = 16 * 2**20
"""The total size up to which more elements may wait than the threads need: where they come
quickly, waking a thread for each one costs more than their memory."""

_CHEAP_ROOM = 64
"""The room from which more gains nothing; see ``python examples/bench engine``."""


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
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return fields of ``PerfParams`` for a dataset, a DataLoader or a PipelineBuilder, and the
    reasons for them in lines; see ``PerfParams.estimate``, which calls this.
    """
    counts = {"batch_size": batch_size, "prefetch_factor": prefetch_factor}
    check_counts(_WHERE, {**counts, "element_bytes": element_bytes})
    check_shares(_WHERE, cpu_util=cpu_util, memory_util=memory_util)
    # The tiny term makes up for 0.29 * 100 being a little less than 29.
    cores = max(1, int(limits.own_cores * cpu_util + 1e-9))
    memory = limits.own_memory(memory_util)
    size, origin, made_of = element_bytes, "given", ""
    if isinstance(target, PipelineBuilder):
        if batch_size is not None:
            raise ValueError(
                f"{_WHERE}: batch_size must be None for a pipeline, whose aggregates say how many "
                f"items are in a list, got {batch_size}."
            )
        spec = target.get_config()
        if size is None:
            size, origin = _size_in_pipeline(spec)
        plan = _plan_of_pipeline(spec, size, keep)
        most_room = max(_CHEAP_ROOM, 2 * cores, *(2 * stage.concurrency for stage in spec.pipes))
    else:
        if keep:
            raise ValueError(
                f"{_WHERE}: keep is for a PipelineBuilder, got {sorted(keep)} with a "
                f"{type(target).__name__}."
            )
        dataset, batch_size = _dataset_of(target, batch_size)
        if size is None:
            size, origin = _size_in_dataset(dataset)
        plan, most_room = _plan_of_loader(batch_size), prefetch_factor
        made_of = f", {batch_size:,} in a batch"

    def fits(threads: int, room: int) -> bool:
        return size is None or memory is None or size * plan(threads, room)[0] <= memory

    # Buffers shrink first, then threads.
    threads = max((n for n in range(1, cores + 1) if fits(n, 1)), default=1)
    room = max((n for n in range(1, most_room + 1) if fits(threads, n)), default=1)
    num_elements, settings = plan(threads, room)
    ranks = f" / {limits.local_world_size} ranks" if limits.local_world_size > 1 else ""
    lines = [
        f"cores: {limits.num_cores:g} * {cpu_util:g}{ranks} -> threads: {cores}",
        f"memory: {_bytes(limits.memory_bytes)} * {memory_util:g}{ranks} -> {_bytes(memory)}",
        f"element: {_bytes(size)} ({origin}){made_of}",
    ]
    if size is not None:
        most = f"in flight: at most {_bytes(size * num_elements)}"
        more = ", more than that: one thread and room for one are least"
        lines.append(most if fits(threads, room) else most + more)
    if size is None or memory is None:
        unknown = "the system does not say how much there is. Pass memory_bytes"
        doubt = unknown if size is not None else f"{origin}. Pass element_bytes"
        warnings.warn(f"{_WHERE}: memory sets no bound: {doubt}.", stacklevel=3)
    return settings, tuple(lines)


def _bytes(number: int | None) -> str:
    """Format as ``602,112 bytes`` or ``1,234.5 MiB``, always with an exact unit."""
    if number is None:
        return "not known"
    return f"{number:,} bytes" if number < 10 * 2**20 else f"{number / 2**20:,.1f} MiB"


def _plan_of_loader(batch_size: int) -> _Plan:
    def plan(workers: int, room: int) -> tuple[int, dict[str, Any]]:
        # What was requested and not taken; the samples of batches that are being collated, besides
        # those batches; the one that the training step works on.
        num_elements = batch_size * (workers * room + workers + 1)
        return num_elements, {"num_workers": workers, "prefetch_factor": room}

    return plan


def _plan_of_pipeline(spec: PipelineSpec[Any], size: int | None, keep: Collection[str]) -> _Plan:
    stages = spec.pipes
    names = Counter(stage.name for stage in stages)  # settings go by name
    if missing := sorted(set(keep) - names.keys()):
        raise ValueError(
            f"{_WHERE}: keep must name stages of the pipeline, got {missing[0]!r}. It has "
            f"{', '.join(map(repr, names)) or 'none'}."
        )
    free = {s.name for s in stages if may_run_at_once(s) and names[s.name] == 1} - set(keep)
    lengths = _lengths(stages)

    def plan(threads: int, most: int) -> tuple[int, dict[str, Any]]:
        widths = [threads if s.name in free else s.concurrency for s in stages]
        buffer_size: dict[str, int] = {}
        num_elements = (lengths[-1] if lengths else 1) * (spec.sink.buffer_size + 1)
        for number, (stage, width, length) in enumerate(zip(stages, widths, lengths, strict=True)):
            cheap = 0 if size is None else _CHEAP_ROOM_BYTES // max(1, size * length)
            wanted = max(2 * max(1, *widths[number : number + 2]), min(_CHEAP_ROOM, cheap))
            room = stage.buffer_size or min(wanted, most)
            num_elements += length * (2 * width + room)  # each thread has an item and its result
            if stage.buffer_size is None:  # stages that share a name get the smallest
                buffer_size[stage.name] = min(room, buffer_size.get(stage.name, room))
        concurrency = {s.name: threads for s in stages if s.name in free}
        settings: dict[str, Any] = {"concurrency": concurrency, "buffer_size": buffer_size}
        if concurrency:
            # Stages that were given their threads keep them; the others share the cores.
            others = [s for s in stages if s.name not in free and s.executor is None]
            given = sum(stage.concurrency for stage in others if not stage.is_async)
            settings["num_threads"] = threads + given
        return num_elements, settings

    return plan


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
    is_plain = stage.kind is OpKind.FUNCTION and stage.executor is None
    return is_plain and stage.concurrency == 1 and not stage.on_one_thread


def _dataset_of(target: Any, batch_size: int | None) -> tuple[Any, int]:
    """Return the dataset, and the number of samples that a worker makes at a time."""
    data = sys.modules.get("torch.utils.data")
    if data is not None and isinstance(target, data.DataLoader):
        # A batch sampler hides the size of its batches from the loader.
        of_loader = target.batch_size or getattr(target.batch_sampler, "batch_size", None)
        return target.dataset, batch_size or of_loader or 1
    ours = sys.modules.get("spdl_torch.data.dataset")
    given = ""
    if ours is not None and isinstance(target, ours.PipelineDataset):
        given = "a PipelineDataset. Pass the builder that it is made of, and then apply()"
    elif not hasattr(target, "__getitem__") and not hasattr(target, "__iter__"):
        given = type(target).__name__
    if given:
        raise TypeError(
            f"{_WHERE}: target must be a dataset, a DataLoader or a PipelineBuilder, got {given}."
        )
    return target, batch_size or 1


class _Uncounted(Exception):
    """An object whose size is unknown."""


def nbytes_of(element: Any) -> int | None:
    """Return the bytes of tensors, arrays, images, buffers, strings and numbers in nested
    containers; None = there is something else among them.
    """
    try:
        return _nbytes(element, frozenset())
    except _Uncounted:
        return None


def _nbytes(element: Any, above: frozenset[int]) -> int:
    if isinstance(element, int | float | complex):
        return _NUMBER_BYTES
    if isinstance(element, str | bytes | bytearray):
        return len(element)
    nbytes = getattr(element, "nbytes", None)  # tensors, arrays, NumPy scalars, memoryviews
    if isinstance(nbytes, int):
        return nbytes
    if callable(getattr(element, "getbands", None)):  # Pillow's images
        return int(element.width * element.height * len(element.getbands()))
    if element is None or id(element) in above:
        return 0  # the latter contains itself
    members: Iterable[Any]
    if isinstance(element, Mapping):
        members = element.values()
    elif isinstance(element, Sequence | Set):
        members = element
    elif dataclasses.is_dataclass(element) and not isinstance(element, type):
        members = [getattr(element, field.name) for field in dataclasses.fields(element)]
    else:
        raise _Uncounted(type(element).__name__)
    return sum(_nbytes(member, above | {id(element)}) for member in members)


def _size_in_dataset(dataset: Any) -> _Size:
    """Measure samples spread evenly over a dataset with indices, else its first ones."""
    if isinstance(dataset, Iterator):
        return None, f"the dataset, a {type(dataset).__name__}, {_SPENT}"
    data = sys.modules.get("torch.utils.data")
    is_stream = data is not None and isinstance(dataset, data.IterableDataset)
    try:
        length = None if is_stream or not hasattr(dataset, "__getitem__") else len(dataset)
    except TypeError:  # tar shards without an index, or no len at all
        length = None
    with generators_kept():
        if length is None:
            items = iter(dataset)
            return _largest_of(lambda _: next(items), range(_NUM_SAMPLES))
        places = {length * number // _NUM_SAMPLES for number in range(_NUM_SAMPLES)}
        return _largest_of(dataset.__getitem__, sorted(n for n in places if n < length))


def _size_in_pipeline(spec: PipelineSpec[Any]) -> _Size:
    """Measure the largest form of the source's first items before the first aggregate, process or
    coroutine: an item itself, or the output of a stage.
    """
    source = spec.src.source
    if isinstance(source, Iterator | AsyncIterable):
        why = "is asynchronous" if isinstance(source, AsyncIterable) else _SPENT
        return None, f"the source, a {type(source).__name__}, {why}"
    items = iter(source)

    def largest_form(_: int) -> Any:
        form = largest = next(items)
        for stage in spec.pipes:
            if stage.kind is not OpKind.FUNCTION or stage.executor is not None:
                break
            output = stage.op(form)
            if output is None:
                break  # dropped
            form = output
            largest = max(largest, form, key=lambda each: nbytes_of(each) or 0)
        # One of unknown size may be the largest.
        return form if nbytes_of(form) is None else largest

    with generators_kept():
        return _largest_of(largest_form, range(_NUM_SAMPLES))


def _largest_of(load: Callable[[int], Any], places: Iterable[int]) -> _Size:
    """Load samples on the calling thread, up to the first StopIteration."""
    sizes: list[int] = []
    why_not = "there is no sample"
    for place in places:
        try:
            sizes.append(_nbytes(load(place), frozenset()))
        except StopIteration:
            break
        except _Uncounted as unknown:
            return None, f"a sample has a {unknown} in it, whose size is not known"
        except Exception as error:  # the user's own: if it matters, training will raise it
            why_not = f"no sample could be loaded ({type(error).__name__}: {error})"
    return (max(sizes), f"the largest of {len(sizes)} samples") if sizes else (None, why_not)
