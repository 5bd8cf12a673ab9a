"""The size of an element in bytes, measured on a few of them."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engine.definition.ops import OpKind
from ..objects.generator_states import generators_kept

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..engine.definition.specs import PipelineSpec

_NUMBER_BYTES = 8  # as a tensor: int64 or float64
_NUM_SAMPLES = 3

_Size = tuple[int | None, str]  # None = not known; how it was measured, or why it could not be


class _Uncounted(Exception):
    """An object whose size is unknown."""


def nbytes_of(element: Any) -> int | None:
    """Return the bytes of tensors, arrays, images, buffers, strings and numbers in nested
    containers; None = there is something else among them.
    """
    try:
        return _nbytes(element, set())
    except _Uncounted:
        return None


def _nbytes(element: Any, above: set[int]) -> int:
    if element is None:
        return 0
    if isinstance(element, int | float | complex):
        return _NUMBER_BYTES
    if isinstance(element, str | bytes | bytearray):
        return len(element)
    nbytes = getattr(element, "nbytes", None)  # tensors, arrays, NumPy scalars, memoryviews
    if isinstance(nbytes, int):
        return nbytes
    if callable(getattr(element, "getbands", None)):  # Pillow's images
        return int(element.width * element.height * len(element.getbands()))
    if id(element) in above:
        return 0  # it contains itself
    return sum(_nbytes(member, above | {id(element)}) for member in _members(element))


def _members(element: Any) -> Iterable[Any]:
    if isinstance(element, Mapping):
        return element.values()
    if isinstance(element, Sequence | Set):
        return element
    if dataclasses.is_dataclass(element) and not isinstance(element, type):
        return [getattr(element, field.name) for field in dataclasses.fields(element)]
    raise _Uncounted(type(element).__name__)


def size_in_dataset(dataset: Any) -> _Size:
    """Measure samples spread evenly over a dataset with indices, else its first ones.

    The calling thread loads them; random's, NumPy's and torch's generators are left as they were.
    """
    if isinstance(dataset, Iterator):
        return _spent_by_looking(dataset, "dataset")
    with generators_kept():
        return _largest_of(_loads_from(dataset))


def size_in_pipeline(spec: PipelineSpec[Any]) -> _Size:
    """Measure the largest form of the source's first items before the first aggregate, process or
    coroutine. The calling thread runs the ops; the generators are left as they were.
    """
    source = spec.src.source
    if isinstance(source, Iterator | AsyncIterable):
        return _spent_by_looking(source, "source")
    with generators_kept():
        load = partial(_largest_form, spec, iter(source))
        return _largest_of(itertools.repeat(load, _NUM_SAMPLES))


def _spent_by_looking(source: object, what: str) -> _Size:
    kind = "asynchronous" if isinstance(source, AsyncIterable) else "an iterator, which runs once"
    return (None, f"the {what}, a {type(source).__name__}, is {kind}")


def _loads_from(dataset: Any) -> Iterable[Callable[[], Any]]:
    """Return calls that each return a sample; StopIteration means the end."""
    data = sys.modules.get("torch.utils.data")
    is_stream = data is not None and isinstance(dataset, data.IterableDataset)
    length: int | None
    try:
        length = None if is_stream or not hasattr(dataset, "__getitem__") else len(dataset)
    except TypeError:  # tar shards without an index, or no len at all
        length = None
    if length is None:
        return itertools.repeat(iter(dataset).__next__, _NUM_SAMPLES)
    places = dict.fromkeys(length * number // _NUM_SAMPLES for number in range(_NUM_SAMPLES))
    return [partial(dataset.__getitem__, place) for place in places if place < length]


def _largest_form(spec: PipelineSpec[Any], items: Iterator[Any]) -> Any:
    """Return the largest form of the next item: itself, or the output of a stage."""
    forms = [next(items)]
    for stage in spec.pipes:
        if stage.kind is not OpKind.FUNCTION or stage.executor is not None:
            break
        form = stage.op(forms[-1])
        if form is None:
            break  # dropped
        forms.append(form)
    if nbytes_of(forms[-1]) is None:
        return forms[-1]  # of unknown size, so it may be the largest
    return max(forms, key=lambda form: nbytes_of(form) or 0)


def _largest_of(loads: Iterable[Callable[[], Any]]) -> _Size:
    sizes: list[int] = []
    why_not = "there is no sample"
    for load in loads:
        try:
            sizes.append(_nbytes(load(), set()))
        except StopIteration:
            break
        except _Uncounted as unknown:
            return (None, f"a sample has a {unknown} in it, whose size is not known")
        except Exception as error:  # the user's own: if it matters, training will raise it
            why_not = f"no sample could be loaded ({type(error).__name__}: {error})"
    if not sizes:
        return (None, why_not)
    return max(sizes), f"the largest of {len(sizes)} samples"
