"""Write a run's statistics to an SQLite file, on one thread, without ever delaying the run."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import socket
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any, Self, TypeAlias

from ...checks import check_whole, checked_seconds
from ...engine.threads import ThreadGroup
from ...locks import RLock
from ...shown_text import short_repr
from .entries import (
    EventLogEntry,
    IntervalLogEntry,
    LogEntry,
    QueueStatsLogEntry,
    TaskStatsLogEntry,
)
from .file import FIGURES, open_for_writing

_logger = logging.getLogger("spdl_torch.observe")

_MOST_PENDING = 100_000  # entries kept in memory while the file cannot be written; about 50 MB
_MOST_WAITING = 1_000_000  # and while it can, until the writer's thread has had its turns
MANY_WAIT = 1000  # entries for which the writer does not wait for the end of its interval


Buffer: TypeAlias = queue.Queue[Any] | queue.SimpleQueue[Any]


class SQLiteStatsWriter:
    """Move log entries from memory into an SQLite file, one transaction every ``flush_interval``,
    or sooner if many wait.

    Pass entries to :meth:`log`, or put them on the given ``buffer``. Use it
    as a context manager, or call :meth:`start` and :meth:`shutdown`.

    Ends: ``shutdown()`` wakes the thread, which writes the rest, and waits for it; Ctrl-C, an
    exception and the interpreter's exit do the same. A process that is killed leaves a file that
    opens and lacks at most the last ``flush_interval``. If entries are logged faster than they are
    written, up to 1,000,000 wait in memory; while the file cannot be written (disk full), up to
    100,000. An entry that cannot be written at all (details that JSON cannot hold) is left out; the
    first one is logged. Dropped entries are counted; the count is logged, kept in the table
    ``run``, and mentioned by :func:`report_of_file`.

    Args:
        db_path: the file, created if it does not exist; several runs may share it.
        buffer: ``queue.Queue`` or ``queue.SimpleQueue`` of entries to take from, every
            ``flush_interval``; None = ``log`` alone.
        flush_interval: seconds.
        config: stored with the run; JSON types.
        rank, world_size: of this process; None = torchrun's ``RANK`` and ``WORLD_SIZE``, else 0, 1.
    Raises: TypeError, ValueError: a bad argument; ValueError: ``db_path`` is not a statistics file,
        or is from a newer release; OSError, sqlite3.Error: it cannot be opened.
    """

    def __init__(
        self,
        db_path: str | os.PathLike[str],
        buffer: Buffer | None = None,
        flush_interval: float = 10.0,
        *,
        config: Mapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        flush_interval = checked_seconds("SQLiteStatsWriter: flush_interval", flush_interval)
        if not isinstance(config, Mapping | None):
            raise TypeError(
                f"SQLiteStatsWriter: config must be a mapping, got {type(config).__name__}. Give "
                "names to the values, as vars() does for arguments that were parsed."
            )
        check_whole("SQLiteStatsWriter", rank=rank, least=0, optional=True)
        check_whole("SQLiteStatsWriter", world_size=world_size, optional=True)
        self.db_path = Path(db_path)
        self.flush_interval = flush_interval
        self.num_dropped = 0
        """The number of entries that found no room in memory or cannot be written."""
        self._counting = RLock()  # re-entrant, for log() within a garbage collection
        self._buffer = buffer
        # Not queue.Queue: a garbage collection inside its put() may log an event, whose put() on
        # the same thread would wait for the lock that this thread holds: a deadlock. SimpleQueue
        # is re-entrant.
        self._own: queue.SimpleQueue[LogEntry] = queue.SimpleQueue()
        self._pending: list[
            LogEntry
        ] = []  # taken, not written yet; only the writer thread touches it
        self._has_complained = False  # of the file
        self._has_refused = False  # an entry
        # What the writer waits for: None = stop. Re-entrant as well, which an Event is not.
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_called = False  # there is a call that the writer has not answered
        self._threads: ThreadGroup | None = None
        self._rows = RunRows(self.db_path, config or {}, rank, world_size)

    def start(self) -> None:
        """Start the writer thread. Raises: RuntimeError: it was started before."""
        if self._threads is not None:
            raise RuntimeError("SQLiteStatsWriter.start: it was started before.")
        # At exit it stops after the pipelines, whose last statistics it writes.
        self._threads = ThreadGroup(self._request_stop, stops_last=True)
        self._threads.spawn("stats-writer", self._run)

    def log(self, entry: LogEntry) -> None:
        """Log an entry. Never blocks; any thread may call it, also within a garbage collection."""
        num_waiting = self._own.qsize()
        if num_waiting < (_MOST_PENDING if self._has_complained else _MOST_WAITING):
            self._own.put(entry)
            if num_waiting >= MANY_WAIT and not self._is_called:
                self._is_called = True
                self._calls.put(True)
        else:
            with self._counting:
                self.num_dropped += 1

    def shutdown(self) -> None:
        """Write the remaining entries and close the file; idempotent. Blocks until that is done."""
        self._request_stop()
        if self._threads is None:
            self._threads = ThreadGroup(self._request_stop)
            self._run()  # never started: the logged entries are written all the same
        self._threads.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        """Write every ``flush_interval``, and at the end; the writer's thread runs this."""
        try:
            while self._wait():
                self._flush()
            self._flush()
            self._end_run()
        finally:
            self._rows.close()

    def _request_stop(self) -> None:
        self._calls.put(False)

    def _wait(self) -> bool:
        """Wait for the end of the interval or until many entries wait; return False at the end."""
        try:
            goes_on = self._calls.get(timeout=self.flush_interval)
        except queue.Empty:
            return True
        self._is_called = False  # before they are taken: whoever logs now calls again
        return goes_on

    def _flush(self) -> None:
        """Write all entries so far, in one transaction; keep them if that fails."""
        self._take(self._own)
        if self._buffer is not None:
            self._take(self._buffer)
        if not self._pending:
            return
        try:
            refused = self._rows.add(self._pending)
        except sqlite3.Error as error:
            self._after_failure(error)  # refused entries are tried again with the others
        else:
            self._pending.clear()
            self._has_complained = False
            self._leave_out(refused)

    def _take(self, source: Buffer) -> None:
        with suppress(queue.Empty):
            while True:
                self._pending.append(source.get_nowait())

    def _after_failure(self, error: sqlite3.Error) -> None:
        excess = len(self._pending) - _MOST_PENDING
        if excess > 0:
            del self._pending[:excess]
            with self._counting:
                self.num_dropped += excess
        if not self._has_complained:
            self._has_complained = True
            _logger.warning(
                "%s cannot be written (%s); the last %d entries wait in memory.",
                self.db_path,
                error,
                _MOST_PENDING,
            )

    def _leave_out(self, refused: Sequence[Refused]) -> None:
        """Count entries that no file could store; log the first one of the run."""
        with self._counting:
            self.num_dropped += len(refused)
        if refused and not self._has_refused:
            self._has_refused = True
            entry, error = refused[0]
            _logger.warning(
                "%s: an entry cannot be written and is left out; later ones are left out without a "
                "message: %s (%s: %s).",
                self.db_path,
                short_repr(entry),
                type(error).__name__,
                error,
            )

    def _end_run(self) -> None:
        lost = self.num_dropped + len(self._pending)
        if lost:
            _logger.error("%s: %d entries were not written.", self.db_path, lost)
        try:
            self._rows.end(lost)
        except sqlite3.Error:
            _logger.exception("%s: the end of the run was not written.", self.db_path)


_MOST_VALUES = 999  # in one statement, of every release of SQLite

_PACKAGES = ("spdl-torch", "torch", "torchvision", "av", "numpy", "lightning")

_FIGURES = {kind: attrgetter(*names) for kind, names in FIGURES.items()}

# Errors that concern the file, which may be writable later. All others, those of classes derived
# from the first as well, are of a single entry, whatever the state of the file.
_FILE_ERRORS = (sqlite3.DatabaseError, sqlite3.InternalError, sqlite3.OperationalError)

_Row: TypeAlias = tuple[LogEntry, tuple[Any, ...]]  # with the values of its columns after the id
Refused: TypeAlias = tuple[LogEntry, Exception]
"""An entry that no file could store, and why."""

_encode = json.JSONEncoder(default=str, allow_nan=False).encode

_QUEUE = "_queue"
_STAGE_NAME = re.compile(rf"(\d+):(\d+):(.*?)(?:\[(\d+)\])?(?:{_QUEUE})?")


class RunRows:
    """A new run in a file, and its rows; one thread at a time uses them.

    Raises: ValueError: ``path`` is not a statistics file, or is from a newer release.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], rank: int | None, world_size: int | None
    ) -> None:
        self._connection = open_for_writing(path)
        self._stage_ids: dict[tuple[str, str], int] = {}
        cursor = self._connection.execute(
            "INSERT INTO run (started, host, pid, rank, world_size, versions, config) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                time.time(),
                socket.gethostname(),
                os.getpid(),
                *rank_and_world_size(rank, world_size),
                json.dumps(_versions()),
                json.dumps(config, default=str),
            ),
        )
        self._run_id = cursor.lastrowid

    def add(self, entries: Sequence[LogEntry]) -> list[Refused]:
        """Add the entries in one transaction; return those that no file could store.

        Raises: sqlite3.Error: the file cannot be written; none of them was added.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            refused = self._insert(entries)
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._stage_ids.clear()  # some may have been part of the lost transaction
            raise
        return refused

    def end(self, num_dropped: int) -> None:
        """Note the end of the run. Raises: sqlite3.Error: the file cannot be written."""
        values = time.time(), num_dropped, self._run_id
        statement = "UPDATE run SET ended = ?, num_dropped = ? WHERE run_id = ?"
        self._connection.execute(statement, values)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _insert(self, entries: Sequence[LogEntry]) -> list[Refused]:
        """Insert the entries; return those that cannot be written, with the reason.

        Raises: sqlite3.Error: the file cannot be written.
        """
        refused: list[Refused] = []
        by_table: dict[str, list[_Row]] = {}
        for entry in entries:
            try:
                table, row = self._row(entry)
            except Exception as error:  # the text of a user's object may raise anything
                if not _is_of_entry(error):
                    raise
                refused.append((entry, error))
            else:
                by_table.setdefault(table, []).append((entry, row))
        for table, rows in by_table.items():
            step = _MOST_VALUES // len(rows[0][1])
            for first in range(0, len(rows), step):
                refused += self._insert_rows(table, rows[first : first + step])
        return refused

    def _insert_rows(self, table: str, rows: Sequence[_Row]) -> list[Refused]:
        """Insert rows by one statement, which takes the GIL once, or else one by one; return those
        that cannot be written.
        """
        marks = ", ".join(["?"] * len(rows[0][1]))
        statement = f"INSERT INTO {table} VALUES {', '.join([f'(NULL, {marks})'] * len(rows))}"
        try:
            self._connection.execute(statement, [value for _, row in rows for value in row])
        except Exception as error:
            if not _is_of_entry(error):
                raise
            if len(rows) == 1:
                return [(rows[0][0], error)]
            return [refused for row in rows for refused in self._insert_rows(table, [row])]
        return []

    def _row(self, entry: LogEntry) -> tuple[str, tuple[Any, ...]]:
        """Return the table of an entry, and the values of its columns."""
        match entry:
            case TaskStatsLogEntry(timestamp, name, stats, num_dropped):
                figures = (timestamp, *_FIGURES["task"](stats), num_dropped)
                return "task_window", (self._stage_id("task", name), *figures)
            case QueueStatsLogEntry(timestamp, name, stats):
                figures = (timestamp, *_FIGURES["queue"](stats))
                return "queue_window", (self._stage_id("queue", name), *figures)
            case EventLogEntry(timestamp, name, details):
                return "event", (self._run_id, timestamp, name, _as_json(dict(details)))
            case IntervalLogEntry(timestamp, pipeline, name, begins, totals, details):
                figures = (timestamp, pipeline, name, begins, _as_json(totals), _as_json(details))
                return "interval", (self._run_id, *figures)
        raise TypeError(f"expected a TaskStats-, QueueStats- or EventLogEntry, got {type(entry)}")

    def _stage_id(self, kind: str, name: str) -> int:
        key = (kind, name)
        if key not in self._stage_ids:
            parts = _STAGE_NAME.fullmatch(name)
            if kind == "queue" and parts and not name.endswith(_QUEUE):
                # SPDL's programs log ``str(self.info)``, which is also the name of the tasks.
                name += _QUEUE
            pipeline, stage_number, label, concurrency = parts.groups() if parts else [None] * 4
            cursor = self._connection.execute(
                "INSERT INTO stage VALUES (NULL, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET name = name RETURNING stage_id",
                (self._run_id, kind, name, pipeline, stage_number, label or name, concurrency or 1),
            )
            (self._stage_ids[key],) = cursor.fetchone()
        return self._stage_ids[key]


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return them; None = torchrun's variable, which a program without it lacks."""
    return (
        int(os.environ.get("RANK", "0")) if rank is None else rank,
        int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size,
    )


def _as_json(value: Any) -> str:
    """Return strict JSON, for SQLite's functions: null for NaN and infinity."""
    try:
        return _encode(value)
    except ValueError:
        text = json.dumps(value, default=str)
        return _encode(json.loads(text, parse_constant=lambda _: None))


def _is_of_entry(error: Exception) -> bool:
    """Return whether the entry is to blame, and not the file."""
    return type(error) not in _FILE_ERRORS


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):  # an extra that is not installed
            found[package] = version(package)
    return found
