"""What ``PerfParams.estimate`` goes by: the size of an element, and how many are in flight."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import (
    AsyncIterable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from typing import TYPE_CHECKING, Any

from ..engine.ops import OpKind
from ..objects.generator_states import generators_kept

if TYPE_CHECKING:
    from ..engine.definition import PipelineSpec, StageSpec

    _Size = tuple[int | None, str]
    """None = not known; how it was measured, or why it could not be."""
    _Plan = Callable[[int, int], tuple[int, dict[str, Any]]]
    """From threads and most room of a buffer to the elements in flight and the settings."""

WHERE = "PerfParams.estimate"

_NUMBER_BYTES = 8  # as a tensor: int64 or float64
_NUM_SAMPLES = 3
_SPENT = "is an iterator, which runs once"

_CHEAP_ROOM_BYTES = 16 * 2**20
"""The total size up to which more elements may wait than the threads need: where they come
quickly, waking a thread for each one costs more than their memory."""

CHEAP_ROOM = 64
"""The room from which more gains nothing; see ``python examples/bench engine``."""


def shown_bytes(number: int | None) -> str:
    """Format as ``602,112 bytes`` or ``1,234.5 MiB``, always with an exact unit."""
    if number is None:
        return "not known"
    return f"{number:,} bytes" if number < 10 * 2**20 else f"{number / 2**20:,.1f} MiB"


def plan_of_loader(batch_size: int) -> _Plan:
    """Return what the numbers of a loader's workers and of their batches ahead amount to."""

    def plan(workers: int, room: int) -> tuple[int, dict[str, Any]]:
        # What was requested and not taken; the samples of batches that are being collated, besides
        # those batches; the one that the training step works on.
        num_elements = batch_size * (workers * room + workers + 1)
        return num_elements, {"num_workers": workers, "prefetch_factor": room}

    return plan


def plan_of_pipeline(spec: PipelineSpec[Any], size: int | None, keep: Collection[str]) -> _Plan:
    """Return what threads and room amount to in a pipeline, whose elements have this size."""
    stages = spec.pipes
    names = Counter(stage.name for stage in stages)  # settings go by name
    if missing := sorted(set(keep) - names.keys()):
        raise ValueError(
            f"{WHERE}: keep must name stages of the pipeline, got {missing[0]!r}. It has "
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
            wanted = max(2 * max(1, *widths[number : number + 2]), min(CHEAP_ROOM, cheap))
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


def dataset_of(target: Any, batch_size: int | None) -> tuple[Any, int]:
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
            f"{WHERE}: target must be a dataset, a DataLoader or a PipelineBuilder, got {given}."
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


def size_in_dataset(dataset: Any) -> _Size:
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


def size_in_pipeline(spec: PipelineSpec[Any]) -> _Size:
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
