"""Trace files: strict JSON, plain or gzipped, of which a reader never sees an unfinished one; and
merged ones, of several ranks, and of ours with torch's own.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from ...whole_files import whole_file
from ..store.file import check_exists, damaged
from .chrome_trace import FIRST_ID, OURS, microseconds, nanoseconds

Trace = dict[str, Any]

_SQLITE = b"SQLite format 3\x00"
"""The start of a file of SQLite's, such as a statistics file."""
_GZIP = b"\x1f\x8b"
_OTHER_COMPRESSIONS = (".bz2", ".xz", ".zip", ".zst")

_BATCH = 2000
"""The number of events encoded in one call, which holds the GIL: 3 ms."""

# The key of our own traces; in torch's traces without it, times count from 1970.
_BASE = "baseTimeNanoseconds"


def path_to_write(path: str | PathLike[str]) -> Path:
    """Return the path, if a trace can be written there."""
    is_folder = str(path).endswith((os.sep, os.altsep or os.sep))  # that Path forgets
    path = Path(path)
    if is_folder or path.is_dir():
        raise ValueError(f"{path}: a trace must be a file, and this is a folder. Add a name to it.")
    if path.suffix in _OTHER_COMPRESSIONS:
        raise ValueError(f"{path}: a trace is compressed by gzip alone: end the name in .gz.")
    return path


def write(path: Path | int, trace: Trace) -> None:
    """Write a trace, gzipped where its name ends in ``.gz``. The file takes its name once it is
    complete; folders are created, a file is replaced. A descriptor of an open file is closed.
    """
    is_packed = isinstance(path, Path) and path.suffix == ".gz"
    with open(path, "wb") if isinstance(path, int) else whole_file(path) as file:
        packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=file) if is_packed else file
        # Letters as they are: Perfetto shows an escape in the name of a counter as "\\u2192". Names
        # of files may be any bytes: what has no UTF-8 form becomes a question mark.
        with packed if is_packed else nullcontext():
            packed.writelines(text.encode("utf-8", "replace") for text in _texts(trace))


def _texts(trace: Trace) -> Iterator[str]:
    encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
    # The viewers look for displayTimeUnit before the events.
    others = {key: value for key, value in trace.items() if key != "traceEvents"}
    yield encode({**others, "traceEvents": []}).removesuffix("]}")
    events, mark = iter(trace["traceEvents"]), "\n"
    while batch := list(itertools.islice(events, _BATCH)):
        yield mark + encode(batch)[1:-1].replace('},{"ph"', '},\n{"ph"')
        mark = ",\n"
    yield "\n]}\n"


def read(path: str | PathLike[str]) -> Trace:
    """Return the JSON objects of a trace file. Some releases of torch write NaN among a device's
    properties: it becomes a text, which is harmless there.

    Raises: FileNotFoundError; ValueError: not a trace.
    """
    path = Path(path)
    check_exists(path, "trace", "Profile.write_trace or tracing")
    content = path.read_bytes()
    if content.startswith(_SQLITE):
        raise ValueError(
            f"{path}: a statistics file, not a trace. Read it with python -m spdl_torch report."
        )
    try:
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        trace = json.loads(content, parse_constant=str)
    except (ValueError, EOFError, OSError, RecursionError, zlib.error) as error:
        raise ValueError(f"{path}: not a trace in JSON: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path}: not a Chrome trace: it has no list of 'traceEvents'.")
    if not isinstance(trace.setdefault(_BASE, 0), int):
        raise ValueError(f"{path}: {_BASE} must be a whole number, got {trace[_BASE]!r}.")
    return trace


def profiles_of(trace: Trace, where: object) -> list[dict[str, Any]]:
    """Return our notes in a trace about each process. Raises: ValueError: we did not write it."""
    block = trace.get(OURS)
    if not isinstance(block, dict) or not isinstance(block.get("profiles"), list):
        raise ValueError(f"{where}: a trace, but not one that spdl_torch wrote.")
    if block.get("formatVersion") != 1:
        raise ValueError(
            f"{where}: its format is {block.get('formatVersion')!r}, and this release reads 1. "
            "Use the release that wrote it, or a later one."
        )
    profiles: list[dict[str, Any]] = block["profiles"]
    return profiles


def merge_with_torch(
    trace: str | PathLike[str] | Iterable[str | PathLike[str]],
    torch_trace: str | PathLike[str],
    output: str | PathLike[str],
) -> Path:
    """Merge a trace of ours with one of ``torch.profiler``, on one clock; return the path written.

    trace: written by ``Profile.write_trace`` or :func:`merge_ranks`; or several, as for that.
    torch_trace: written by ``export_chrome_trace`` in the same process, or on the same machine;
        plain or gzipped. Its events are kept as they are.
    output: of any name, gzipped where it ends in ``.gz``; may be one of the two.
    Raises: FileNotFoundError; ValueError: a file that is not such a trace, or an output that
        cannot be.
    """
    output, ours, theirs = path_to_write(output), _traces_in(trace), read(torch_trace)
    if OURS in theirs:
        raise ValueError(
            f"{torch_trace}: has rows of ours already. Merge with the file that torch wrote."
        )
    merged = {**theirs, "traceEvents": [*theirs["traceEvents"]]}
    _lay_over(merged, ours)
    write(output, merged)
    return output


def merge_ranks(
    traces: str | PathLike[str] | Iterable[str | PathLike[str]], output: str | PathLike[str]
) -> Path:
    """Merge traces of several processes, on one clock; return the path written.

    traces: written by ``Profile.write_trace`` or :func:`tracing`, one or more for each rank. Rows
        that came from torch are left out.
    output: of any name, gzipped where it ends in ``.gz``.
    Raises: FileNotFoundError; ValueError: not such a trace, none at all, or an output that cannot
        be.
    """
    output, loaded = path_to_write(output), _traces_in(traces)
    base = min(one[_BASE] for _, one in loaded)
    merged: Trace = {"schemaVersion": 1, "displayTimeUnit": "ms", _BASE: base, "traceEvents": []}
    _lay_over(merged, loaded)
    merged["traceEvents"].sort(key=lambda event: event.get("ts", float("-inf")))
    write(output, merged)
    return output


def _traces_in(
    traces: str | PathLike[str] | Iterable[str | PathLike[str]],
) -> list[tuple[Path, Trace]]:
    """Return the traces in a file, or in several."""
    paths = [traces] if isinstance(traces, str | PathLike) else traces
    loaded = [(Path(path), read(path)) for path in paths]
    if not loaded:
        raise ValueError("there is no trace to merge: no file was given.")
    return loaded


def _lay_over(merged: Trace, loaded: Iterable[tuple[Path, Trace]]) -> None:
    """Add our rows of traces, with ids that nothing else has."""
    known = merged.setdefault(OURS, {"formatVersion": 1, "profiles": []})["profiles"]
    events = merged["traceEvents"]
    # torch's events are kept as they are, whatever they are.
    objects = (event for event in events if isinstance(event, dict))
    theirs = {str(event.get(key)) for event in objects for key in ("pid", "tid")}
    ids = (number for number in itertools.count(FIRST_ID) if str(number) not in theirs)
    for path, trace in loaded:
        numbers: dict[int, int] = defaultdict(ids.__next__)  # new ones by those in the file
        profiles, shift_ns = profiles_of(trace, path), trace[_BASE] - merged[_BASE]
        with damaged(path):
            pids = {pid for profile in profiles for pid in profile["pids"]}
            for profile in profiles:
                known.append({**profile, "pids": [numbers[pid] for pid in profile["pids"]]})
            events += [
                _moved(event, numbers, shift_ns)
                for event in trace["traceEvents"]
                if event.get("pid") in pids
            ]


def _moved(event: dict[str, Any], numbers: Mapping[int, int], shift_ns: int) -> dict[str, Any]:
    event = {**event, "pid": numbers[event["pid"]], "tid": numbers[event["tid"]]}
    if "bind_id" in event:
        event["bind_id"] = f"{numbers[int(event['bind_id'], 16)]:#x}"
    if "ts" in event:
        # Start and end are shifted, not the length: then neighbours still meet after rounding.
        start_ns = nanoseconds(event["ts"])
        event["ts"] = microseconds(start_ns + shift_ns)
        if "dur" in event:
            end_ns = start_ns + nanoseconds(event["dur"])
            event["dur"] = microseconds(end_ns + shift_ns) - event["ts"]
    return event
