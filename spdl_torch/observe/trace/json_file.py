"""Trace files: strict JSON, plain or gzipped; a reader never sees an unfinished one."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...shown_text import printable_content
from ...whole_files import whole_file
from ..store.schema import damaged
from ..verdict.report import Report, part_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

OURS: Final = "spdlTorch"
"""The key of the part of a trace that only we read."""

_GZIP = b"\x1f\x8b"
SQLITE = b"SQLite format 3\x00"
"""The start of a file of SQLite's, such as a statistics file."""
_OTHER_COMPRESSIONS = (".bz2", ".xz", ".zip", ".zst")

_BATCH = 2000
"""The number of events encoded in one call, which holds the GIL: 3 ms."""


def path_to_write(path: str | os.PathLike[str]) -> Path:
    """Return the path, if a trace can be written there."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: a trace must be a file, and this is a folder. Add a name to it.")
    if path.suffix in _OTHER_COMPRESSIONS:
        raise ValueError(f"{path}: a trace is compressed by gzip alone: end the name in .gz.")
    return path


def write(path: str | os.PathLike[str], trace: dict[str, Any]) -> Path:
    """Write a trace, gzipped where its name ends in ``.gz``. The file takes its name once it is
    complete; folders are created, a file is replaced.
    """
    path = path_to_write(path)
    with whole_file(path) as file:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file) as packed:
                packed.writelines(map(_bytes_of, _texts(trace)))
        else:
            file.writelines(map(_bytes_of, _texts(trace)))
    return path


def write_to_descriptor(descriptor: int, trace: dict[str, Any]) -> None:
    """Write a trace to an open file, and close it."""
    with open(descriptor, "wb") as file:
        file.writelines(map(_bytes_of, _texts(trace)))


def _bytes_of(text: str) -> bytes:
    # Letters as they are: Perfetto shows an escape in the name of a counter as "\\u2192". A lone
    # surrogate, as in a file's name that is not text, has no UTF-8 form and stays an escape.
    return text.encode("utf-8", "backslashreplace")


def _texts(trace: dict[str, Any]) -> Iterator[str]:
    encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
    # The viewers look for displayTimeUnit before the events.
    head = encode({key: value for key, value in trace.items() if key != "traceEvents"})
    yield f'{head[:-1]}{"," if len(head) > 2 else ""}\n"traceEvents":['
    events = iter(trace["traceEvents"])
    mark = "\n"
    while batch := list(itertools.islice(events, _BATCH)):
        yield mark + encode(batch)[1:-1].replace('},{"ph"', '},\n{"ph"')
        mark = ",\n"
    yield "\n]}\n"


def read(path: str | os.PathLike[str], *, strict: bool = True) -> dict[str, Any]:
    """Return the JSON objects of a trace file.

    strict: refuse NaN and infinity, which are not JSON; otherwise they become texts.
    Raises: FileNotFoundError; ValueError: not a trace.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"trace {path} does not exist. Give a file that Profile.write_trace or tracing wrote."
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give a trace in it, or merge them all.")
    content = path.read_bytes()
    if content.startswith(SQLITE):
        raise ValueError(
            f"{path}: a statistics file, not a trace. Read it with python -m spdl_torch report."
        )
    try:
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        trace = json.loads(content, parse_constant=_refuse if strict else str)
    except (ValueError, EOFError, OSError, RecursionError) as error:
        raise ValueError(f"{path}: not a trace in JSON: {error}") from error
    if isinstance(trace, list):  # a bare list of events is allowed as well
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{path}: not a Chrome trace: it has no list of 'traceEvents'.")
    return trace


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not allowed in JSON")


def profiles_of(trace: dict[str, Any], where: object) -> list[dict[str, Any]]:
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
    with damaged(f"{where}: its block {OURS!r}"):
        for profile in profiles:
            int(profile["rank"]), str(profile["host"]), list(map(int, profile["pids"]))
            int(profile["num_lost"]), int(profile["num_left_out"])
    return profiles


def report_in(profile: dict[str, Any], where: object) -> Report:
    """Return the report of one of :func:`profiles_of`."""
    with damaged(where):
        report = Report.from_dict(printable_content(profile["report"]))
        str(report), part_of(report)  # its values are looked at only when it is shown
        return report
