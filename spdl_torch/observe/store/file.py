"""The statistics file: how it is opened, and rows of a time span, by name; its tables and views are
those of ``schema.sql``."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

from ...scopes import scope
from .entries import EventLogEntry

_SCHEMA = Path(__file__).with_name("schema.sql")
SCHEMA_VERSION = 4
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


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open or create the file; use write-ahead logging where the file system allows it, so that
    readers and the writer do not wait for each other.

    Raises: ValueError: the file is something else, or of another release; OSError; sqlite3.Error.
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
        if not _check_is_ours(connection, path):
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

    Raises: FileNotFoundError; ValueError: the file is something else, of another release, or
        damaged; sqlite3.Error: somebody keeps it locked.
    """
    path = Path(path)
    check_exists(path, "statistics file", _WRITERS)
    with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA query_only = ON")
        if not _check_is_ours(connection, path, _OTHER_FILE):
            raise ValueError(f"{path} is an empty SQLite file; nothing was logged to it.")
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
) -> bool:
    """Return whether it is a file of ours; False = a new one."""
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if getattr(error, "sqlite_errorcode", None) in _BUSY:
            raise
        raise ValueError(f"{path} is not a statistics file: {error}. {remedy}") from error
    if not num_objects:
        return False
    if (application, version) != (_APPLICATION_ID, SCHEMA_VERSION):
        raise ValueError(
            f"{path} is not a statistics file of this release: its application_id is "
            f"{application:#x} and its user_version {version}, expected {_APPLICATION_ID:#x} and "
            f"{SCHEMA_VERSION}. {remedy}"
        )
    return True


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


TaskStatsQueryResult: TypeAlias = dict[str, Any]
QueueStatsQueryResult: TypeAlias = dict[str, Any]
"""Rows, by the names that SPDL's example has for them."""


def query_task_stats(
    db_path: str | os.PathLike[str],
    name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    *,
    run_id: int | None = None,
    pipeline: int | None = None,
) -> list[dict[str, Any]]:
    """Return rows of the view ``task_stats``, newest first.

    name: a stage as logged (``0:1:decode[10]``) or without its numbers (``decode``).
    start_time, end_time: bounds of ``timestamp``, both inclusive; seconds since 1970.
    run_id: the number of a run; None = all runs in the file.
    pipeline: the first number in stages' names, one for each loader of a run; None = all.
    Raises: FileNotFoundError; ValueError: not a statistics file, or one of another release.
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
) -> list[dict[str, Any]]:
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
    query = f"SELECT * FROM {view} WHERE {where} ORDER BY timestamp {order}, id {order}"
    with reading(db_path) as connection, damaged(db_path):
        return rows_of(connection, query, [value for _, value in given])


_JSON = ("details", "versions", "config")


def rows_of(connection: sqlite3.Connection, query: str, values: Any) -> list[dict[str, Any]]:
    """Return the rows of a query within :func:`damaged`, with the content of JSON."""
    rows = [dict(row) for row in connection.execute(query, values)]
    for row in rows:
        for column in _JSON:
            if row.get(column) is not None:
                row[column] = json.loads(row[column])
    return rows
