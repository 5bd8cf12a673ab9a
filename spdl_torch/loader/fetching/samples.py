"""Fetch the samples of a map-style dataset: one by one, in one call a batch, or as rows; and the
calls of user code that do it.

Of a TensorDataset torch takes the rows one by one and stacks them again. With torch's own collate
function, indexing with all row numbers at once gives the same result in a tenth of the time. Only
an exact ``TensorDataset`` is read this way, because its type guarantees that it only takes rows.
Nothing can be assumed of a dataset's own ``__getitem__``; such a dataset can offer
``__getitems__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ...engine.failures import describe
from ...io._storage import room_in_batch
from ...objects.members import is_memory
from ..error_notes import (
    add_thread_note,
    describe_indices,
    is_users,
    noted_call,
    noted_sample,
)
from .bad_samples import MISSING, nothing_good
from .batch_maker import LONG_SAMPLES, BatchMaker, timed
from .collating import has_torchs_types_only, is_torchs_collate
from .items import Items

if TYPE_CHECKING:
    from ..checkpoint.user_state import WorkerState
    from .batch_maker import BatchRecipe

_PLAIN_INDICES = (type(None), list, tuple, range)


def samples_at(dataset: Any, indices: Iterable[Any]) -> list[Any]:
    """Return a sample for each index, as torch's own loader makes them: at the same cost."""
    return [dataset[index] for index in indices]


def samples_into(samples: list[Any], dataset: Any, indices: Iterable[Any]) -> None:
    """Append the samples of ``indices``; at an error, the length is the failing sample's number."""
    # Not extend(map(...)): calling __getitem__ from C takes 10 to 50 ns longer.
    for index in indices:
        samples.append(dataset[index])  # noqa: PERF401


def one_sample_of(dataset: Any) -> Callable[[Any], Any]:
    """Return a function that fetches the sample of an index, if need be by ``__getitems__``."""
    own = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
    if own is Dataset.__getitem__ and hasattr(dataset, "__getitems__"):
        return lambda index: dataset.__getitems__([index])[0]
    return partial(getitem, dataset)


def is_read_at_once(dataset: Any, collate_fn: Any) -> bool:
    """Return whether the samples of a batch are read by one call."""
    return takes_batches(dataset) or has_rows(dataset, collate_fn)


def takes_batches(dataset: Any) -> bool:
    """Return whether a batch takes one call of ``__getitems__``, as torch's loader asks for it.

    torch's Subset always has that method; around a dataset without it, it only loops.
    """
    if type(dataset) is Subset:
        return takes_batches(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


class Samples(BatchMaker):
    """Fetches the samples of a batch one by one; or one sample, for a loader without batches."""

    def _open(self, recipe: BatchRecipe, resume: WorkerState, worker: int) -> None:
        self._fetch_one = one_sample_of(recipe.dataset)
        self._steps: Any = None  # an iterator over the batch's indices; describe() reads it

    def fetch(self, index: Any) -> Any:
        if not self._auto_collation:
            return self._sample(index) if self._tolerance is None else self.fetch_at(0, index)
        indices = index if type(index) in (list, tuple) else _indices_in(index)
        count, taken = len(indices), cast("Any", iter(indices))
        self._steps = taken
        steps = taken if self._streams is None else self._streams.over(taken, count)
        if self._tolerance is not None:
            return self._fetch_good(indices, steps)
        try:
            return timed(self._cell, samples_at, self._dataset, steps, tasks=count)
        except BaseException as error:
            place = max(0, count - 1 - taken.__length_hint__())
            if self._cell is not None:
                self._cell.num_tasks += place  # the good samples before it
            raise noted_sample(error, indices[place])  # noqa: B904
        finally:
            self._steps = None

    def _fetch_good(self, indices: Sequence[Any], steps: Any) -> list[Any]:
        """Return the samples, with MISSING in place of those whose failure is tolerated."""
        samples: list[Any] = []
        try:
            timed(self._cell, samples_into, samples, self._dataset, steps, into=samples)
        except BaseException as error:
            place = min(len(samples), len(indices) - 1)  # Ctrl-C may come after the last one
            if not isinstance(error, Exception):
                raise noted_sample(error, indices[place])  # noqa: B904
            bad = cast("Exception", noted_sample(error, indices[place]))
            self._note_bad(place, indices[place], bad)
            del bad  # the error's traceback holds this frame: avoid the cycle
        if len(samples) < len(indices):
            place = len(samples)
            samples.append(self._instead_of(place, indices[place]))
            samples += [self.fetch_at(n, indices[n]) for n in range(place + 1, len(indices))]
        return samples

    def fetch_at(self, place: int, index: Any) -> Any:
        """Return the sample at ``place`` of the batch; MISSING for a tolerated failure."""
        if self._streams is not None:
            self._streams.at(place)
        if self._tolerance is None:
            return self._sample(index)
        try:
            return self._sample(index)
        except Exception as error:
            self._note_bad(place, index, error)
        return self._instead_of(place, index)

    def describe(self, index: Any) -> str:
        if not self._auto_collation:
            return f"sample index {describe(index)}"
        streams, steps = self._streams, self._steps
        if streams is not None:
            place = streams.place
        else:
            place = -1 if steps is None else len(index) - 1 - steps.__length_hint__()
        if not 0 <= place < len(index):
            return describe_indices(index)
        return f"sample index {describe(index[place])}"

    def _sample(self, index: Any) -> Any:
        try:
            return timed(self._cell, self._fetch_one, index, recorded_from=LONG_SAMPLES)
        except BaseException as error:
            raise noted_sample(error, index)  # noqa: B904

    def _instead_of(self, place: int, index: Any) -> Any:
        """Return the replacement of a sample that failed; MISSING: none.

        It depends on the indices alone, and draws from the failed sample's stream.
        """
        tolerance = self._tolerance
        assert tolerance is not None, "guaranteed by the callers: it is their branch"
        if not tolerance.replaces:
            return MISSING
        for instead in tolerance.instead_of(index):
            self._begin_again_at(place)
            try:
                return self._sample(instead)
            except Exception as error:
                self._note_bad(place, instead, error)
        raise nothing_good([each for each in self._bad if each.place == place])


def _indices_in(index: Any) -> list[Any]:
    try:
        return list(index)
    except BaseException as error:
        where = "in the indices of a batch"
        add_thread_note(error, where, f"for which the batch sampler gave {describe(index)}")
        raise


class SamplesAtOnce(Samples):
    """Fetches a batch in one call of the dataset's ``__getitems__``."""

    def fetch(self, index: Any) -> Any:
        try:
            return timed(self._cell, self._dataset.__getitems__, index)
        except BaseException as error:
            tolerates = self._tolerance is not None and is_users(error)
            if not tolerates or not isinstance(index, list | tuple):
                where = f"in {self._name}.__getitems__"
                what = describe_indices(index)
                raise noted_call(error, "__getitems__", where, what)  # noqa: B904
        if self._cell is not None:  # uncount the call: its samples are counted one by one below
            self._cell.num_tasks -= 1
            self._cell.num_failures -= 1
        self._begin_again_at(0)
        return [self.fetch_at(place, each) for place, each in enumerate(index)]

    def describe(self, index: Any) -> str:
        return describe_indices(index)


class RowBatch:
    """Samples that are already one batch."""

    def __init__(self, collated: list[torch.Tensor], num_samples: int) -> None:
        self.collated = collated
        """The batch, as ``default_collate`` returns it."""
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples


class Rows(Samples):
    """Fetches a batch of a TensorDataset, or of a Subset of one through its ``indices``, with one
    call for each tensor and none of the user's code.

    It looks up the dataset's tensors for every batch: they may be replaced at any time.
    """

    def _open(self, recipe: BatchRecipe, resume: WorkerState, worker: int) -> None:
        super()._open(recipe, resume, worker)
        self._table, self._indices = _table_of(recipe.dataset)
        self.reads_rows = self._memory is None and self._tolerance is None

    def make_plain(self, index: Any) -> Any:
        rows = self._read(index) if type(index) is list else None
        return None if rows is None else rows.collated

    def fetch(self, index: Any) -> Any:
        batch = self._read(index)
        # One by one otherwise, so that an error names its sample.
        return super().fetch(index) if batch is None else batch

    def _read(self, index: Any) -> RowBatch | None:
        """Return the rows of ``index``; None if some do not exist, or if it holds anything but
        plain integers: a bool or a slice would mean something else.
        """
        if not isinstance(index, list | tuple) or set(map(type, index)) != {int}:
            return None
        if (tensors := _tensors_of(self._table)) is None:
            return None
        if self._indices is not None:
            try:
                index = [self._indices[number] for number in index]
            except IndexError:
                return None
            if set(map(type, index)) != {int}:
                return None
        num_rows = min(map(len, tensors))
        if max(index) >= num_rows or min(index) < -num_rows:
            return None
        return cast("RowBatch", timed(self._cell, _rows_at, tensors, index, tasks=len(index)))


def has_rows(dataset: Any, collate_fn: Any) -> bool:
    """Return whether a batch of the dataset's rows is the same as torch's."""
    if not is_torchs_collate(collate_fn):
        return False
    table, indices = _table_of(dataset)
    is_plain = type(table) is TensorDataset and type(indices) in _PLAIN_INDICES
    return is_plain and _tensors_of(table) is not None


def _table_of(dataset: Any) -> tuple[Any, Any]:
    """Return the dataset whose rows are read, and the indices through which; None = its own."""
    return (dataset.dataset, dataset.indices) if type(dataset) is Subset else (dataset, None)


def _tensors_of(table: TensorDataset) -> Sequence[torch.Tensor] | None:
    """Return the tensors; None if one of them is not a plain one, or if somebody has registered
    types with ``default_collate`` meanwhile."""
    tensors = table.tensors if has_torchs_types_only() else ()
    # Of which indexing only takes rows, which torch stacks unchanged.
    are_plain = all(type(t) is torch.Tensor and t.ndim > 0 and is_memory(t) for t in tensors)
    return tensors if tensors and are_plain else None


def _rows_at(tensors: Sequence[torch.Tensor], index: Sequence[int]) -> RowBatch:
    """Read rows into one batch, in memory that the loader offers for it, if any."""
    numbers = torch.tensor(index, dtype=torch.int64)
    columns = []
    for tensor in tensors:
        is_on_host = tensor.device.type == "cpu"
        memory = room_in_batch(len(index) * tensor[0].nbytes) if is_on_host else None
        if memory is None or min(index) < 0:  # which index_select does not take
            columns.append(tensor[numbers].contiguous())
        else:
            out = memory.view(tensor.dtype).view(len(index), *tensor.shape[1:])
            columns.append(torch.index_select(tensor, 0, numbers, out=out))
    return RowBatch(columns, len(index))


def maker_of(recipe: BatchRecipe, **parts: Any) -> BatchMaker:
    """Return the maker that fits the dataset; ``parts``: as :class:`BatchMaker` takes them."""
    kind: type[BatchMaker] = Samples
    if recipe.iterable:
        kind = Items
    elif recipe.auto_collation and takes_batches(recipe.dataset):
        kind = SamplesAtOnce
    elif recipe.auto_collation and has_rows(recipe.dataset, recipe.collate_fn):
        kind = Rows
    return kind(recipe, **parts)
