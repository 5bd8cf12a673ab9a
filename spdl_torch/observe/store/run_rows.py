"""The rows of one run in a statistics file."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sqlite3
import time
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from .entries import (
    EventLogEntry,
    IntervalLogEntry,
    LogEntry,
    QueueStatsLogEntry,
    TaskStatsLogEntry,
)
from .schema import FIGURES, open_for_writing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_MOST_VALUES = 999  # in one statement, of every release of SQLite

_PACKAGES = ("spdl-torch", "torch", "torchvision", "av", "numpy", "lightning")

_FIGURES = {kind: attrgetter(*names) for kind, names in FIGURES.items()}
_COLUMNS = {
    "task_window": ("stage_id", "timestamp", *FIGURES["task"], "num_dropped"),
    "queue_window": ("stage_id", "timestamp", *FIGURES["queue"]),
    "event": ("run_id", "timestamp", "event_name", "details"),
    "interval": ("run_id", "timestamp", "pipeline", "name", "begins", "totals", "details"),
}

# Errors of a single entry, whatever the state of the file. Anything else that SQLite raises
# concerns the file, which may be writable later.
_ENTRY_ERRORS = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.NotSupportedError,
    sqlite3.ProgrammingError,
)

_Row: TypeAlias = tuple[LogEntry, tuple[Any, ...]]  # with the values of its columns
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
        self._run_id = self._begin(config, rank, world_size)

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
        self._connection.execute(
            "UPDATE run SET ended = ?, num_dropped = ? WHERE run_id = ?",
            (time.time(), num_dropped, self._run_id),
        )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _begin(self, config: Mapping[str, Any], rank: int | None, world_size: int | None) -> int:
        """Insert the run itself; return its number."""
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
        assert cursor.lastrowid is not None, "guaranteed after an INSERT"
        return cursor.lastrowid

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
        columns = _COLUMNS[table]
        marks = ", ".join([f"({', '.join('?' * len(columns))})"] * len(rows))
        statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES {marks}"
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
        return _encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _is_of_entry(error: Exception) -> bool:
    """Return whether the entry is to blame, and not the file."""
    return isinstance(error, _ENTRY_ERRORS) or not isinstance(error, sqlite3.Error)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass  # an extra that is not installed
    return found
