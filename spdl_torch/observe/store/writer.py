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
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self, TypeAlias

from ...checks import check_whole, checked_seconds
from ...engine.statistics import QueuePerfStats, TaskPerfStats
from ...engine.threads import ThreadGroup
from ...shown_text import short_repr
from .entries import (
    EventLogEntry,
    IntervalLogEntry,
    LogEntry,
    QueueStatsLogEntry,
    TaskStatsLogEntry,
)
from .file import open_for_writing

_logger = logging.getLogger("spdl_torch.observe")

_MOST_PENDING = 100_000  # entries kept in memory while the file cannot be written; about 50 MB


Buffer: TypeAlias = queue.Queue[Any] | queue.SimpleQueue[Any]


class SQLiteStatsWriter:
    """Move log entries from memory into an SQLite file, one transaction every ``flush_interval``.

    Pass entries to :meth:`log`, or put them on the given ``buffer``. Use it
    as a context manager, or call :meth:`start` and :meth:`shutdown`.

    Ends: ``shutdown()`` wakes the thread, which writes the rest, and waits for it; Ctrl-C, an
    exception and the interpreter's exit do the same. A process that is killed leaves a file that
    opens and lacks at most the last ``flush_interval``. While the file cannot be written (disk
    full), which is logged, the last 100,000 entries wait in memory. An entry that cannot be written
    at all (details that JSON cannot hold) is left out; the first one is logged.

    Args:
        db_path: the file, created if it does not exist; several runs may share it.
        buffer: ``queue.Queue`` or ``queue.SimpleQueue`` of entries to take from, every
            ``flush_interval``; None = ``log`` alone.
        flush_interval: seconds.
        config: stored with the run; JSON types.
        rank, world_size: of this process; None = torchrun's ``RANK`` and ``WORLD_SIZE``, else 0, 1.
    Raises: TypeError, ValueError: a bad argument; ValueError: ``db_path`` is not a statistics file,
        or is of another release; OSError, sqlite3.Error: it cannot be opened.
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
        check_whole("SQLiteStatsWriter", rank=rank, least=0, optional=True)
        check_whole("SQLiteStatsWriter", world_size=world_size, optional=True)
        self.db_path = Path(db_path)
        self.flush_interval = flush_interval
        self._buffer = buffer
        # Not queue.Queue: a garbage collection inside its put() may log an event, whose put() on
        # the same thread would wait for the lock that this thread holds: a deadlock. SimpleQueue
        # is re-entrant.
        self._own: queue.SimpleQueue[LogEntry] = queue.SimpleQueue()
        self._pending: list[LogEntry] = []  # taken, not written yet; only the writer thread uses it
        self._has_complained = False
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()  # re-entrant; an Event is not
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
        self._own.put(entry)

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
            while not self._is_stopped():
                self._flush()
            self._flush()
            if self._pending:
                _logger.error("%s: %d entries were not written.", self.db_path, len(self._pending))
            with suppress(sqlite3.Error):
                self._rows.end()
        finally:
            self._rows.close()

    def _request_stop(self) -> None:
        self._stop.put(None)

    def _is_stopped(self) -> bool:
        """Wait for the end of the interval, or for the stop; return whether it has come."""
        try:
            self._stop.get(timeout=self.flush_interval)
        except queue.Empty:
            return False
        return True

    def _flush(self) -> None:
        """Write all entries so far, in one transaction; keep them if that fails."""
        self._take(self._own)
        if self._buffer is not None:
            self._take(self._buffer)
        if not self._pending:
            return
        try:
            self._rows.add(self._pending)
        except sqlite3.Error as error:
            del self._pending[:-_MOST_PENDING]
            if not self._has_complained:
                self._has_complained = True
                _logger.warning(
                    "%s cannot be written (%s); the last %d entries wait in memory.",
                    self.db_path,
                    error,
                    _MOST_PENDING,
                )
        else:
            self._pending.clear()
            self._has_complained = False

    def _take(self, source: Buffer) -> None:
        with suppress(queue.Empty):
            while True:
                self._pending.append(source.get_nowait())


_PACKAGES = ("spdl-torch", "torch", "torchvision", "av", "numpy", "lightning")

_encode = json.JSONEncoder(default=str, allow_nan=False).encode

_QUEUE = "_queue"
_STAGE_NAME = re.compile(rf"(\d+):(\d+):(.*?)(?:\[(\d+)\])?(?:{_QUEUE})?")


class RunRows:
    """A new run in a file, and its rows; one thread at a time uses them.

    Raises: ValueError: ``path`` is not a statistics file, or is of another release.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], rank: int | None, world_size: int | None
    ) -> None:
        self._connection = open_for_writing(path)
        self._path, self._has_refused = path, False
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

    def add(self, entries: Sequence[LogEntry]) -> None:
        """Add the entries in one transaction, less those that no file could store.

        Raises: sqlite3.Error: the file cannot be written; none of them was added.
        """
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for entry in entries:
                try:
                    self._add(entry)
                except sqlite3.OperationalError:  # of the file, which may be writable later
                    raise
                except Exception as error:  # the text of a user's object may raise anything
                    self._refuse(entry, error)
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def end(self) -> None:
        """Note the end of the run. Raises: sqlite3.Error: the file cannot be written."""
        values = time.time(), self._run_id
        self._connection.execute("UPDATE run SET ended = ? WHERE run_id = ?", values)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _add(self, entry: LogEntry) -> None:
        match entry:
            case TaskStatsLogEntry(timestamp, name, stats, num_dropped):
                columns = _figures(TaskPerfStats, stats) | _stage_of(name)
                columns["num_dropped"] = num_dropped
                self._insert("task_window", timestamp, columns)
            case QueueStatsLogEntry(timestamp, name, stats):
                columns = _figures(QueuePerfStats, stats) | _stage_of(name)
                if columns["label"] != name and not name.endswith(_QUEUE):
                    # SPDL's programs log ``str(self.info)``, which is also the name of the tasks.
                    columns["name"] += _QUEUE
                self._insert("queue_window", timestamp, columns)
            case EventLogEntry(timestamp, name, details):
                columns = {"event_name": name, "details": _as_json(dict(details))}
                self._insert("event", timestamp, columns)
            case IntervalLogEntry():
                columns = {"pipeline": entry.pipeline, "name": entry.name, "begins": entry.begins}
                columns |= {"totals": _as_json(entry.totals), "details": _as_json(entry.details)}
                self._insert("interval", entry.timestamp, columns)
            case _:
                raise TypeError(
                    "expected a TaskStats-, QueueStats- or EventLogEntry, got "
                    f"{type(entry).__name__}"
                )

    def _insert(self, table: str, timestamp: float, columns: Mapping[str, Any]) -> None:
        columns = {"run_id": self._run_id, "timestamp": timestamp, **columns}
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        statement = f"INSERT INTO {table} ({names}) VALUES ({marks})"
        self._connection.execute(statement, [*columns.values()])

    def _refuse(self, entry: LogEntry, error: Exception) -> None:
        """Log the first entry of the run that is left out."""
        if not self._has_refused:
            self._has_refused = True
            _logger.warning(
                "%s: an entry cannot be written and is left out; later ones are left out without a "
                "message: %s (%s: %s).",
                self._path,
                short_repr(entry),
                type(error).__name__,
                error,
            )


def _figures(kind: type[TaskPerfStats | QueuePerfStats], stats: Any) -> dict[str, Any]:
    """Return the figures that have columns: a subclass may have more."""
    return {each.name: getattr(stats, each.name) for each in fields(kind)}


def _stage_of(name: str) -> dict[str, Any]:
    """Return the columns that say of which stage a window is."""
    parts = _STAGE_NAME.fullmatch(name)
    pipeline, number, label, concurrency = parts.groups() if parts else (None, None, name, None)
    return {
        "name": name,
        "pipeline": pipeline,
        "stage_number": number,
        "label": label or name,
        "concurrency": concurrency or 1,
    }


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


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):  # an extra that is not installed
            found[package] = version(package)
    return found
