"""What ``PerfParams.estimate`` goes by: the size of an element, and how many are in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from ..engine.ops import OpKind
from ..objects.generator_states import generators_kept

if TYPE_CHECKING:
    from ..engine.definition import PipelineSpec, StageSpec

    _Plan = Callable[[int, int], tuple[int, dict[str, Any]]]
    """From threads and the room of a buffer to the elements in flight and the settings."""

_NUMBER_BYTES = 8  # as a tensor: int64 or float64
_NUM_SAMPLES = 3


def plan_of_loader(batch_size: int) -> _Plan:
    """Return what the numbers of a loader's workers and of their batches ahead amount to."""

    def plan(workers: int, room: int) -> tuple[int, dict[str, Any]]:
        # What was requested and not taken; the samples of batches that are being collated, besides
        # those batches; the one that the training step works on.
        num_elements = batch_size * (workers * room + workers + 1)
        return num_elements, {"num_workers": workers, "prefetch_factor": room}

    return plan


def plan_of_pipeline(spec: PipelineSpec[Any]) -> _Plan:
    """Return what the threads of each stage and the room after it amount to in a pipeline."""
    stages = spec.pipes
    names = Counter(stage.name for stage in stages)  # settings go by name
    free = {s.name for s in stages if may_run_at_once(s) and names[s.name] == 1}
    # Stages that were given their threads keep them; the others share the cores.
    others = [s for s in stages if s.name not in free and s.executor is None and not s.is_async]
    given = sum(stage.concurrency for stage in others)

    def plan(threads: int, room: int) -> tuple[int, dict[str, Any]]:
        num_elements, length = 0, 1
        for stage in stages:
            length *= max(1, stage.batch_size)  # the elements in an item from here on, at most
            width = threads if stage.name in free else stage.concurrency
            # Each thread has an item and its result.
            num_elements += length * (2 * width + (stage.buffer_size or room))
        num_elements += length * (spec.sink.buffer_size + 1)
        settings: dict[str, Any] = {
            "concurrency": {s.name: threads for s in stages if s.name in free},
            "buffer_size": {s.name: room for s in stages if s.buffer_size is None},
        }
        if free:
            settings["num_threads"] = threads + given
        return num_elements, settings

    return plan


def may_run_at_once(stage: StageSpec) -> bool:
    """Return whether the stage is a plain function whose concurrency nobody has set."""
    is_plain = stage.kind is OpKind.FUNCTION and stage.executor is None
    return is_plain and stage.concurrency == 1 and not stage.on_one_thread


def dataset_of(target: Any, batch_size: int | None) -> tuple[Any, int]:
    """Return the dataset, and the number of samples that a worker makes at a time."""
    from torch.utils.data import DataLoader

    if not isinstance(target, DataLoader):
        is_readable = hasattr(target, "__getitem__") or hasattr(target, "__iter__")
        if not is_readable or hasattr(type(target), "report"):  # a PipelineDataset has its threads
            raise TypeError(
                "PerfParams.estimate: expected a dataset, a DataLoader, or the definition of a "
                f"pipeline, got {type(target).__name__}."
            )
        return target, batch_size or 1
    # A batch sampler hides the size of its batches from the loader.
    of_loader = target.batch_size or getattr(target.batch_sampler, "batch_size", None)
    return target.dataset, batch_size or of_loader or 1


def samples_of(dataset: Any) -> Iterator[Any]:
    """Yield samples spread evenly over a dataset with indices, else its first ones."""
    from torch.utils.data import IterableDataset

    is_indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    try:
        length = len(dataset) if is_indexed else None
    except TypeError:  # tar shards without an index, or no len at all
        length = None
    if length is None:
        yield from _first_of(dataset)
        return
    for place in range(0, length, -(-length // _NUM_SAMPLES) or 1):
        yield dataset[place]


def forms_of(spec: PipelineSpec[Any]) -> Iterator[Any]:
    """Yield what the stages before the first aggregate, process or coroutine make of the source's
    first items; where there is none of them, those items.
    """
    plain = [*takewhile(lambda s: s.kind is OpKind.FUNCTION and s.executor is None, spec.pipes)]
    for form in _first_of(spec.src.source):
        if not plain:
            yield form
        for stage in plain:
            form = stage.op(form)
            if form is None:
                break  # dropped
            yield form


def _first_of(source: Any) -> Iterator[Any]:
    if isinstance(source, Iterator):  # they would be missing later
        raise TypeError(f"a {type(source).__name__} is an iterator, which runs once")
    return islice(source, _NUM_SAMPLES)


def size_of_largest(samples: Iterable[Any]) -> tuple[int | None, str]:
    """Return the bytes of the largest sample; or None, and why they are not known."""
    try:
        with generators_kept():
            sizes = [_nbytes(each) for each in samples]
    except Exception as error:  # the user's own: if it matters, training will raise it
        return None, f"{type(error).__name__}: {error}"
    return (max(sizes), "") if sizes else (None, "there is no sample")


def nbytes_of(element: Any) -> int | None:
    """Return the bytes of tensors, arrays, buffers, strings and numbers in nested containers and
    dataclasses; None = there is something else among them.
    """
    try:
        return _nbytes(element)
    except (TypeError, RecursionError):
        return None


def _nbytes(element: Any) -> int:
    if element is None:
        return 0
    if isinstance(element, int | float | complex):
        return _NUMBER_BYTES
    if isinstance(element, str | bytes | bytearray):
        return len(element)
    nbytes = getattr(element, "nbytes", None)  # tensors, arrays, NumPy scalars, memoryviews
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(element, Mapping):
        element = element.values()
    elif is_dataclass(element):
        element = [getattr(element, each.name) for each in fields(element)]
    elif not isinstance(element, Sequence | Set):
        raise TypeError(f"the size of a {type(element).__name__} is not known")
    return sum(map(_nbytes, element))
