"""The statistics file: how it is opened, and rows of a time span, by name; its tables and views are
those of ``schema.sql``."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from ...engine.statistics import TaskPerfStats
from ...scopes import scope
from ...shown_text import printable_line
from .entries import EventLogEntry

_SCHEMA = Path(__file__).with_name("schema.sql")
SCHEMA_VERSION = 2
"""``PRAGMA user_version`` of the files that this release writes."""

_APPLICATION_ID = 0x5350444C  # "SPDL": marks our files for `file` and for us

_WRITERS = "recording or SQLiteStatsWriter"
_OTHER_FILE = f"Give a file that {_WRITERS} wrote; ui.perfetto.dev opens a trace."

_NOT_OURS = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""What values raise that the writer does not write so."""

_BUSY = sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED
_BUSY_SECONDS = 5.0  # how long one writer waits for another, or a reader without WAL

# File systems on which WAL's shared memory does not work (https://sqlite.org/wal.html, section 1).
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "ceph", "fuse", "9p", "beegfs")


class _Row(TypedDict):
    """The stage of a row, where it ran, and the interval."""

    timestamp: float
    name: str
    elapsed: float
    label: str
    stage_number: int | None
    concurrency: int
    run_id: int
    rank: int
    host: str
    pipeline: int | None


class TaskStatsRow(_Row):
    """Statistics of a stage's tasks in one interval; times in seconds."""

    num_tasks: int
    num_failures: int
    ave_time: float
    p90_time: float
    p99_time: float
    ave_cpu_time: float
    p50_time: float
    busy_time: float
    num_dropped: int | None


class QueueStatsRow(_Row):
    """Statistics of a queue in one interval; times in seconds."""

    num_items: int
    ave_put_time: float
    ave_get_time: float
    p90_put_time: float
    p99_put_time: float
    p90_get_time: float
    p99_get_time: float
    occupancy_rate: float
    put_wait_time: float
    get_wait_time: float


FIGURES = {
    "task": tuple(each.name for each in fields(TaskPerfStats)),
    "queue": ("elapsed", *[*QueueStatsRow.__annotations__][len(_Row.__annotations__) :]),
}
"""Those of a window, in the order of the tables."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open or create the file; use write-ahead logging where the file system allows it, so that
    readers and the writer do not wait for each other.

    Raises: ValueError: the file is something else, or of a newer release; OSError; sqlite3.Error.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Add a file's name to it, such as run.db.")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        connection = sqlite3.connect(
            path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except sqlite3.OperationalError as error:  # it does not say which file
        raise sqlite3.OperationalError(f"statistics file {path}: {error}.") from error
    try:
        _check_is_ours(connection, path)  # before any change to it
        connection.execute("PRAGMA foreign_keys = ON")
        if not _is_on_a_network(path):
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        # The race with another process that creates the same file: look and create in one
        # transaction.
        connection.execute("BEGIN IMMEDIATE")
        if _check_is_ours(connection, path) == 0:
            # One by one: ``executescript`` would commit the transaction that they are in.
            for statement in _SCHEMA.read_text("utf-8").split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


@scope
def reading(path: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """Open an existing file for the block, whether or not somebody writes to it.

    Raises: FileNotFoundError; ValueError: the file is something else, of a newer release, or
        damaged, also where the block finds that out; sqlite3.Error: somebody keeps it locked.
    """
    path = Path(path)
    check_exists(path, "statistics file", _WRITERS)
    with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA query_only = ON")
        if _check_is_ours(connection, path, _OTHER_FILE) == 0:
            raise ValueError(f"{path} is an empty SQLite file; nothing was logged to it.")
        with damaged(path):
            yield connection


@scope
def damaged(where: object) -> Iterator[None]:
    """Turn what a file's content raises that we do not write so into an error of the file."""
    try:
        yield
    except (sqlite3.Error, *_NOT_OURS) as error:
        # Errors of the module itself, such as of a text that is no UTF-8, have no code.
        if getattr(error, "sqlite_errorcode", None) in _BUSY:
            raise
        raise ValueError(f"{where} is damaged: {error!r}.") from error


def check_exists(path: Path, what: str, writers: str) -> None:
    """Raise an error, which names what writes such files, where there is none."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, and no {what}.")
    if not path.exists():
        raise FileNotFoundError(f"{what} {path} does not exist. Give a file that {writers} wrote.")


def _check_is_ours(
    connection: sqlite3.Connection, path: Path, remedy: str = "Choose another name."
) -> int:
    """Return the file's schema version; 0 = a new file."""
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if getattr(error, "sqlite_errorcode", None) in _BUSY:
            raise
        raise ValueError(f"{path} is not a statistics file: {error}. {remedy}") from error
    if num_objects and application != _APPLICATION_ID:
        raise ValueError(
            f"{path} is a SQLite file of another program, not a statistics file. {remedy}"
        )
    if num_objects and version < SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, of an earlier spdl_torch; this one reads and "
            f"writes {SCHEMA_VERSION}. Read it with the one that wrote it, or record anew."
        )
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, this release of spdl_torch knows up to "
            f"{SCHEMA_VERSION}. Upgrade spdl_torch to read it."
        )
    return int(version) if num_objects else 0


def _is_on_a_network(path: Path) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    path = path.resolve()
    kind, longest = "", -1
    with open("/proc/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, place, fs_type, *_ = line.split(" ")
            folder = Path(place.replace("\\040", " "))
            if len(folder.parts) > longest and path.is_relative_to(folder):
                kind, longest = fs_type, len(folder.parts)
    return kind.startswith(_NETWORK_FILE_SYSTEMS)


TaskStatsQueryResult: TypeAlias = TaskStatsRow
"""The row under its name in SPDL's example; it has that example's columns, and more."""

QueueStatsQueryResult: TypeAlias = QueueStatsRow
"""The row under its name in SPDL's example; it has that example's columns, and more."""


def query_task_stats(
    db_path: str | os.PathLike[str],
    name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    *,
    run_id: int | None = None,
    pipeline: int | None = None,
) -> list[TaskStatsRow]:
    """Return rows of the view ``task_stats``, newest first.

    name: a stage as logged (``0:1:decode[10]``) or without its numbers (``decode``).
    start_time, end_time: bounds of ``timestamp``, both inclusive; seconds since 1970.
    run_id: the number of a run; None = all runs in the file.
    pipeline: the first number in stages' names, one for each loader of a run; None = all.
    Raises: FileNotFoundError; ValueError: not a statistics file, or one of a newer release.
    """
    return _select(db_path, "task_stats", (name, start_time, end_time, run_id, pipeline), "DESC")


def query_queue_stats(
    db_path: str | os.PathLike[str],
    name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    *,
    run_id: int | None = None,
    pipeline: int | None = None,
) -> list[QueueStatsRow]:
    """Return rows of the view ``queue_stats``, newest first; arguments as for
    :func:`query_task_stats`.

    name: a queue (``0:1:decode[10]_queue``), or the stage that fills it.
    """
    return _select(db_path, "queue_stats", (name, start_time, end_time, run_id, pipeline), "DESC")


def query_event_stats(
    db_path: str | os.PathLike[str],
    event_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    *,
    run_id: int | None = None,
) -> list[EventLogEntry]:
    """Return events, oldest first; arguments as for :func:`query_task_stats`, less ``pipeline``."""
    rows = _select(db_path, "event_stats", (event_name, start_time, end_time, run_id, None), "ASC")
    return list(map(event_of, rows))


def event_of(row: Mapping[str, Any]) -> EventLogEntry:
    """Return the event of a row of ``event_stats``."""
    return EventLogEntry(row["timestamp"], row["event_name"], row["details"])


def _select(
    db_path: str | os.PathLike[str],
    view: str,
    filters: tuple[str | None, float | None, float | None, int | None, int | None],
    order: str,
) -> list[Any]:
    named = "event_name = ?" if view == "event_stats" else "? IN (name, label)"
    if view == "queue_stats":  # also by the name of the stage that fills it
        named = "? IN (name, label, substr(name, 1, length(name) - length('_queue')))"
    conditions = (named, "timestamp >= ?", "timestamp <= ?", "run_id = ?", "pipeline = ?")
    given = [(c, value) for c, value in zip(conditions, filters, strict=True) if value is not None]
    where = " AND ".join(condition for condition, _ in given) or "TRUE"
    columns = ", ".join(_COLUMNS[view])
    query = f"SELECT {columns} FROM {view} WHERE {where} ORDER BY timestamp {order}, id {order}"
    with reading(db_path) as connection:
        return rows_of(connection, query, *(value for _, value in given))


_COLUMNS = {
    "task_stats": tuple(TaskStatsRow.__annotations__),
    "queue_stats": tuple(QueueStatsRow.__annotations__),
    "event_stats": ("timestamp", "event_name", "details"),
}
_TEXTS = ("name", "label", "kind", "host", "event_name", "totals")  # shown wherever the row is
_JSON = ("details", "versions", "config")
_MAY_BE_NULL = ("pipeline", "stage_number", "num_dropped", "ended", "details")


def rows_of(connection: sqlite3.Connection, query: str, *values: Any) -> list[dict[str, Any]]:
    """Return the rows of a query within :func:`reading`, with the content of JSON. Their values are
    what the writer writes: SQLite does not see to that."""
    rows = []
    for each in connection.execute(query, values):
        row = dict(each)
        for column, value in row.items():
            if value is None and column in _MAY_BE_NULL:
                pass
            elif column in _TEXTS:
                row[column] = printable_line(value)
            elif column in _JSON:
                row[column] = dict(**json.loads(value))
            else:
                int(value)  # raises for what is no number, or an infinite one
        rows.append(row)
    return rows
