"""Rows of Parquet files: one after the other from any place on, or by their numbers."""

from __future__ import annotations

import glob
import operator
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from spdl_torch.checks import check_whole
from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler
from spdl_torch.io._cache.folders import file_stamp
from spdl_torch.io._remote import RETRIES, is_url
from spdl_torch.scopes import scope
from spdl_torch.shown_text import counted

from ._arrow import KeptTables, Rows, columns_of, rows_of, shuffled, sized, without_views
from ._base import checked_start, random_of, seed_of
from ._files import find_files
from ._index import pieces, read_each
from ._shard import ShardFiles, ShardSource, changed, check_unchanged

if TYPE_CHECKING:
    import random

    import pyarrow as pa
    import pyarrow.parquet as pq

    from spdl_torch.io._resuming import Version

    from ._stream import Mix

_Stamp: TypeAlias = "tuple[int, Version | None]"

_ENDINGS = (".parquet", ".parq", ".pq")
_READ_BYTES = 8 << 20  # that are decoded at once, about
_MOST_ROWS = 1 << 16  # and rows


class Parquet(ShardSource):
    """The rows of Parquet files, or batches of rows. A source of pipelines, and a map-style dataset
    for loaders. Needs pyarrow, the extra ``parquet``.

    files: one or more paths, folders, globs or URLs that fsspec opens, such as
        ``"hf://datasets/OWNER/NAME/**/*.parquet"``. The matches of a glob and the files of a folder
        (``.parquet``, ``.parq``, ``.pq``) are sorted; everything else keeps its order.
    columns: the names of those to read, in this order; None = all of the first file. Files must
        have them with the same types.
    batch_size: None: an item is a row. A number: an item is a batch of so many consecutive rows,
        the last one perhaps of fewer, across row groups and files.
    retries: attempts to go on with a file of a URL whose connection is lost.
    storage_options: options of fsspec's file system.
    cache, max_bytes, ahead: keep whole files on a local disk, as :class:`TarShards`.

    An item is a dict by column. In a batch, columns of numbers and booleans are tensors of the
    column's type, (rows,), and lists of fixed size tensors (rows, size, ...); other lists of
    numbers are lists with a tensor for each row. In a row, these are numpy scalars and tensors.
    Everything else (strings, bytes, times, structs, any column with a null in the batch or beside
    the row) has Python's types, as ``pyarrow`` gives them. ``decode_image`` and ``load_audio`` take
    Hugging Face's ``{"bytes": ..., "path": ...}`` as they are.

    Positions are exact: ``len()`` is known from the files' footers, which are read at once, and
    ``iterate(start)`` reads no row group but those with rows from there on.

    ``shard``: parts of consecutive rows, of the epoch's order of row groups; their lengths in rows
    differ by one at most.

    ``shuffle``: the order of the files and of each one's row groups by ``(seed, epoch)``, then that
    of the rows among each ``buffer_size`` consecutive ones (None = 1000), in memory at once.

    As a map-style dataset it gives a batch in one read of each row group that has rows of it, and
    up to 256 MB of row groups stay in the memory of a process; threads may share it.

    Raises: ImportError: pyarrow is not installed; FileNotFoundError: nothing matches; ValueError:
    no files, no such column, or columns of several types; DecodeError, also while reading: no
    Parquet file, or a damaged one; SourceChangedError: a file was replaced meanwhile.
    """

    thread_safe = True
    _WHAT = "file"

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None = None,
        *,
        batch_size: int | None = None,
        retries: int = RETRIES,
        storage_options: Mapping[str, Any] | None = None,
        cache: str | os.PathLike[str] | None = None,
        max_bytes: float | None = None,
        ahead: int = 2,
    ) -> None:
        if isinstance(columns, str):
            raise TypeError(f"Parquet: columns must be a list of names, got {columns!r}.")
        check_whole("Parquet", batch_size=batch_size, optional=True)
        super().__init__(files, storage_options, retries, cache, max_bytes, ahead)
        self._batch_size = None if batch_size is None else int(batch_size)
        self._footers = self._read_footers()
        self.columns = self._common_columns(columns)
        """The names of the columns that are read."""
        footers = [footer for footer, _ in self._footers]
        groups = [range(footer.num_row_groups) for footer in footers]
        # Of each row group: its file, and its number there.
        self._places = [(file, group) for file, each in enumerate(groups) for group in each]
        nums_rows = (footers[file].row_group(group).num_rows for file, group in self._places)
        # The number of each row group's first row, and that of all rows.
        self._first_rows = array("q", accumulate(nums_rows, initial=0))
        self._kept = KeptTables()

    def __repr__(self) -> str:
        items = "" if self._batch_size is None else f", batches of {self._batch_size}"
        what = f"{counted(len(self.urls), 'file')}, columns {', '.join(self.columns)}{items}"
        return f"<Parquet of {what}{self._shown_parts()}>"

    def __len__(self) -> int:
        """Return the number of items in this part."""
        first, end = self._bounds(self._first_rows[-1])
        return -(-(end - first) // (self._batch_size or 1))

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Read the item at a position of this part.

        Raises: IndexError; TypeError: the source is shuffled; DecodeError: the file is damaged.
        """
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> Sequence[dict[str, Any]]:
        """Read the items at these positions. With torch's ``default_collate``, rows become a batch
        without passing through rows. Raises: as ``[position]``."""
        self._check_positions()
        length, size = len(self), self._batch_size
        places = np.array([*map(operator.index, positions)], np.int64)
        outside = (places < -length) | (places >= length)
        if outside.any():
            wrong = places[outside][0]
            raise IndexError(f"Parquet: position must be below {length}, got {wrong}.")
        places[places < 0] += length
        first, end = self._bounds(self._first_rows[-1])
        if size is None:
            return Rows(self._taken(places + first))
        starts = (places * size + first).tolist()
        return [columns_of(self._taken(np.arange(at, min(at + size, end)))) for at in starts]

    def iterate(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Iterate from the ``start``-th item on; row groups before it are not read."""
        return self._with()._items(checked_start(self, start) * (self._batch_size or 1))

    def _found(self, pattern: str) -> list[str]:
        is_named = not glob.has_magic(pattern) and pattern.lower().endswith(_ENDINGS)
        if is_named and (is_url(pattern) or os.path.isfile(pattern)):
            return [pattern]
        return find_files("Parquet", pattern, False, self.storage_options, _ENDINGS)

    def _items(self, start: int) -> Iterator[dict[str, Any]]:
        """Yield the items from the ``start``-th row of this part on."""
        first, end = self._bounds(self._first_rows[-1])
        if self._mix is None:
            batches = self._read(range(len(self._places)), first + start, end)
        else:
            batches = self._mixed(self._mix, first, end, start)
        if self._batch_size is None:
            yield from chain.from_iterable(map(rows_of, batches))
        else:
            yield from map(columns_of, sized(batches, self._batch_size))

    def _mixed(self, mix: Mix, first: int, end: int, start: int) -> Iterator[Any]:
        """Yield the rows of a part in the order of the epoch: window after window is shuffled, so
        that none before that of ``start`` has to be read."""
        place = [number for part in self._parts for number in part]
        order = self._shuffled_groups(random_of("groups", mix.seed, self.epoch))
        window, skipped = divmod(start, mix.buffer_size)
        tables = sized(self._read(order, first + window * mix.buffer_size, end), mix.buffer_size)
        for number, table in enumerate(tables, window):
            seed = seed_of("window", mix.seed, self.epoch, number, *place)
            yield from shuffled(table, seed)[skipped:].to_batches()
            skipped = 0

    def _shuffled_groups(self, draw: random.Random) -> list[int]:
        """Return the row groups with the files in another order, and those of each file."""
        by_file = groupby(range(len(self._places)), lambda number: self._places[number][0])
        files = [[*groups] for _, groups in by_file]
        draw.shuffle(files)
        for groups in files:
            draw.shuffle(groups)
        return [*chain.from_iterable(files)]

    def _read(self, order: Sequence[int], first: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows ``first`` to ``end``, with row groups in this order."""
        found = pieces(self._first_rows, order, first, end)
        runs = [
            (file, [*run])
            for file, run in groupby(found, key=lambda piece: self._places[piece[0]][0])
        ]
        urls = self._files.each([self.urls[file] for file, _ in runs])
        for (file, run), _ in zip(runs, urls, strict=True):
            with self._opened(file) as opened:
                for number, low, high in run:
                    yield from self._read_group(opened, self._places[number], low, high)

    def _read_group(
        self, opened: pq.ParquetFile, place: tuple[int, int], low: int, high: int
    ) -> Iterator[pa.RecordBatch]:
        row, name, (footer, stamp) = 0, self.urls[place[0]], self._footers[place[0]]
        group = footer.row_group(place[1])
        most = min(_MOST_ROWS, _READ_BYTES * group.num_rows // max(1, group.total_byte_size))
        with self._damage_in(*place):
            columns = list(self.columns)
            batches = opened.iter_batches(max(1, most), [place[1]], columns, use_threads=False)
            while row < high:
                if (batch := next(batches, None)) is None:
                    raise DecodeError(
                        f"{name}: row group {place[1]} ends after {row} rows, and the footer says "
                        "that it has more."
                    )
                if row + len(batch) > low:
                    batch.validate(full=True)  # text, too, which is decoded later
                    check_unchanged(name, self._files, stamp[0])
                    yield batch.select(self.columns)[max(low - row, 0) : high - row]
                row += len(batch)

    def _taken(self, rows: np.ndarray[Any, Any]) -> pa.Table:
        """Return these rows, in this order, from row groups that are kept for later calls."""
        import pyarrow as pa

        groups = np.searchsorted(self._first_rows, rows, "right") - 1
        tables, places = [], []
        for group in np.unique(groups).tolist():
            (here,) = np.nonzero(groups == group)
            kept = self._kept.get(group, self._table, self._await_copy)
            tables.append(kept.take(rows[here] - self._first_rows[group]))
            places.append(here)
        if len(tables) == 1:
            return tables[0]
        return pa.concat_tables(tables).take(np.argsort(np.concatenate(places)))

    def _await_copy(self, number: int) -> None:
        """Wait for the copy of a row group's file, so that this thread's wait is counted, too."""
        if self._files.copies is not None:
            self._files.open(self.urls[self._places[number][0]]).close()

    def _table(self, number: int) -> pa.Table:
        """Read a whole row group."""
        file, group = self._places[number]
        with self._opened(file) as opened, self._damage_in(file, group):
            table = opened.read_row_group(group, list(self.columns), use_threads=False)
            table.validate(full=True)
            return without_views(table.select(self.columns))

    @scope
    def _opened(self, file: int) -> Iterator[pq.ParquetFile]:
        """Open a file, for one thread. Raises: SourceChangedError: it is not that of the footer."""
        name, (footer, stamp) = self.urls[file], self._footers[file]
        with self._open(name, self._files, footer) as (opened, now):
            if not all(here in (None, then) for here, then in zip(now, stamp, strict=True)):
                raise changed(self._files.named(name))
            yield opened

    @scope
    def _open(
        self, name: str, files: ShardFiles, footer: pq.FileMetaData | None = None
    ) -> Iterator[tuple[pq.ParquetFile, _Stamp]]:
        """Open a file; with it comes its stamp."""
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ImportError(
                "Parquet needs pyarrow: pip install pyarrow (the extra parquet)."
            ) from error
        with ExitStack() as stack:
            source: Any = name
            if is_url(name) or files.copies is not None:
                source = stack.enter_context(files.open(name, seekable=True))
            # What is another when the file is another; a copy was found by its version.
            stamp: _Stamp
            if is_url(name):
                stamp = source.seek(0, os.SEEK_END), getattr(source.raw, "version", None)
            else:
                stamp = file_stamp(name), None
            is_far = is_url(name) and files.copies is None
            opened = pq.ParquetFile(source, metadata=footer, pre_buffer=is_far)
            yield stack.enter_context(opened), stamp

    def _damage_in(self, file: int, group: int) -> AbstractContextManager[None]:
        return _damage_of(f"{self._files.named(self.urls[file])}: row group {group}")

    def _read_footers(self) -> list[tuple[pq.FileMetaData, _Stamp]]:
        """Read the footers of all files, with the stamps of these."""
        there = replace(self._files, copies=None)  # a footer alone is not worth a copy of the file

        def footer_of(name: str) -> tuple[pq.FileMetaData, _Stamp]:
            with _damage_of(f"{name}: its footer"), self._open(name, there) as (opened, stamp):
                opened.metadata.schema.to_arrow_schema()  # decodes the names
                self._files.versions[name] = stamp[1] or {"size": f"{stamp[0]}"}
                return opened.metadata, stamp

        return read_each(footer_of, self.urls)

    def _common_columns(self, wanted: Sequence[str] | None) -> tuple[str, ...]:
        """Return the names of the columns. Raises: ValueError: a file does not have them, or with
        another type."""
        first = self._footers[0][0].schema.to_arrow_schema()
        names = tuple(first.names if wanted is None else wanted)
        if not names or len({*names}) < len(names):
            raise ValueError(
                f"Parquet: columns must be names that differ, at least one, got {list(names)} "
                f"of {self.urls[0]}."
            )
        for file, (footer, _) in zip(self.urls, self._footers, strict=True):
            schema = footer.schema.to_arrow_schema()
            for name in names:
                if name not in schema.names:
                    raise ValueError(
                        f"Parquet: {file} has no column {name!r}, it has "
                        f"{', '.join(map(repr, schema.names))}."
                    )
                if (here := schema.field(name).type) != (there := first.field(name).type):
                    raise ValueError(
                        f"Parquet: column {name!r} is {here} in {file}, and {there} in "
                        f"{self.urls[0]}. Write them with one type, or leave the column out."
                    )
        return names


@scope
def _damage_of(what: str) -> Iterator[None]:
    """Turn what Arrow raises on the content of a file into a DecodeError that says where it is."""
    try:
        yield
    except unless_of_handler(Exception) as error:
        is_arrows = type(error).__module__.startswith("pyarrow")
        is_plain = type(error) is OSError and error.errno is None
        if not (is_arrows or is_plain or isinstance(error, UnicodeDecodeError)):
            raise
        raise DecodeError(f"{what} cannot be read: {error}") from error
