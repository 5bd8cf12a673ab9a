"""Tables of Arrow as items: their columns as tensors, their rows; and tables that are kept."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from ...handlers import unless_of_handler
from ...locks import RLock

if TYPE_CHECKING:
    import pyarrow as pa

_KEPT_BYTES = 1 << 28


def columns_of(table: pa.Table | pa.RecordBatch) -> dict[str, Any]:
    """Return the columns by name: tensors where they are numbers without a null, else lists.

    The tensors have memory of their own, which can be written.
    """
    return {name: _column(each) for name, each in _named_arrays(table)}


def rows_of(table: pa.Table | pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows: dicts of numpy's scalars, of tensors where a value has dimensions, and of
    Python's objects."""
    names = table.schema.names
    columns = [_values(_column(each)) for _, each in _named_arrays(table)]
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


class Rows(Sequence[dict[str, Any]]):
    """The rows of a table, made when somebody asks for one."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._rows: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, place: Any) -> Any:
        if self._rows is None:
            self._rows = list(rows_of(self._table))
        return self._rows[place]

    @property
    def collated(self) -> dict[str, Any] | None:
        """The batch, as ``default_collate`` makes it of the rows; None = it cannot."""
        try:
            return {
                name: column if isinstance(column, torch.Tensor) else default_collate(column)
                for name, column in columns_of(self._table).items()
            }
        except unless_of_handler(Exception):
            return None  # the rows bring the same error, to whoever collates them


def sized(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of ``size``; the last one may have fewer."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    room = size
    for batch in batches:
        while len(batch) >= room:
            yield pa.Table.from_batches([*waiting, batch[:room]])
            batch, waiting, room = batch[room:], [], size
        if len(batch):
            waiting.append(batch)
            room -= len(batch)
    if waiting:
        yield pa.Table.from_batches(waiting)


def without_views(table: pa.Table) -> pa.Table:
    """Return a table of which rows can be taken: Arrow takes none of views of text and bytes."""
    import pyarrow as pa

    others = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    fields = [each.with_type(others.get(each.type, each.type)) for each in table.schema]
    schema = pa.schema(fields, table.schema.metadata)
    return table if schema == table.schema else table.cast(schema)


def shuffled(table: pa.Table, seed: int) -> pa.Table:
    """Return the rows in an order that the seed determines."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    order = torch.randperm(len(table), generator=generator, device="cpu")
    return without_views(table).take(order.numpy())


def _named_arrays(table: pa.Table | pa.RecordBatch) -> Iterator[tuple[str, pa.Array]]:
    for name, column in zip(table.schema.names, table.columns, strict=True):
        yield name, column if hasattr(column, "offset") else column.combine_chunks()


def _column(array: pa.Array) -> Any:
    """Return a tensor, or a list with a value for each row."""
    import pyarrow as pa

    if isinstance(array, pa.FixedShapeTensorArray):
        if not array.null_count:
            return torch.from_numpy(np.array(array.to_numpy_ndarray()))
        return [torch.from_numpy(np.array(t.to_numpy())) if t.is_valid else None for t in array]
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if _is_number(kind) and not array.null_count:
        return torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False)))
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(array)
    return array.to_pylist()


def _lists(array: pa.Array) -> Any:
    """Return lists of one size as one tensor, others as a tensor each; as Python's lists those that
    are not of numbers, or have a null."""
    import pyarrow as pa

    if not array.null_count:
        inner = _column(array.flatten())
        if isinstance(inner, torch.Tensor):
            if pa.types.is_fixed_size_list(array.type):
                return inner.view(len(array), array.type.list_size, *inner.shape[1:])
            lengths = array.value_lengths().to_pylist()
            return list(torch.split(inner, lengths))
        if not _has_numbers(array.type):
            return array.to_pylist()
    return [_column(each.values) if each.is_valid else None for each in array]


def _has_numbers(kind: pa.DataType) -> bool:
    """Return whether lists, perhaps of lists, are of numbers."""
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return _is_number(kind)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    tests = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
    return any(test(kind) for test in tests)


def _values(column: Any) -> Any:
    """Return a column's value for each row."""
    if not isinstance(column, torch.Tensor):
        return column
    return list(column.numpy()) if column.ndim == 1 else column.unbind()


class KeptTables:
    """The tables that were asked for last, up to 256 MB and at least one. Threads share them: who
    asks for one that another is reading waits for that. Another process has none at first."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = RLock()
        self._tables: OrderedDict[int, Future[pa.Table]] = OrderedDict()
        self._num_bytes = 0

    def __reduce__(self) -> Any:
        return KeptTables, ()

    def get(self, number: int, read: Callable[[int], Any], wait: Callable[[int], Any]) -> Any:
        """Return a table, which ``read`` reads if it is not here; while another thread does,
        ``wait`` is called first. Raises: what these raise."""
        if self._process != os.getpid():  # forked, where another thread may hold the lock
            self._begin()
        with self._lock:
            found = self._tables.get(number)
            if found is not None:
                self._tables.move_to_end(number)
            else:
                reading = self._tables[number] = Future[Any]()
        if found is not None:
            if not found.done():
                wait(number)
            return found.result()
        try:
            table = read(number)
        except BaseException as error:
            with self._lock:
                self._tables.pop(number, None)
            reading.set_exception(error)
            raise
        reading.set_result(table)
        self._make_room(table.nbytes)
        return table

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            for number in list(self._tables)[:-1]:
                table = self._tables[number]
                if self._num_bytes <= _KEPT_BYTES or not table.done():
                    break
                del self._tables[number]
                self._num_bytes -= table.result().nbytes
