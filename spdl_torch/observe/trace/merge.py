"""Merge traces: those of several ranks, and ours with torch's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...whole_files import starts_like_json
from ..store.schema import damaged
from .json_file import OURS, path_to_write, profiles_of, read, write
from .rows import FLOWS_PER_PROCESS, microseconds, nanoseconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Trace = dict[str, Any]

# The key of our own traces; in torch's traces without it, times count from 1970.
_BASE = "baseTimeNanoseconds"


def merge_with_torch(
    trace: str | os.PathLike[str],
    torch_trace: str | os.PathLike[str],
    output: str | os.PathLike[str],
) -> Path:
    """Merge a trace of ours with one of ``torch.profiler``, on one clock; return the path written.

    trace: written by ``Profile.write_trace`` or :func:`merge_ranks`.
    torch_trace: written by ``export_chrome_trace`` in the same process, or on the same machine;
        plain or gzipped. Its events are kept as they are.
    output: of any name, gzipped where it ends in ``.gz``; may be one of the two.
    Raises: FileNotFoundError; ValueError: a file that is not such a trace, or an output that
        cannot be.
    """
    output = path_to_write(output)
    ours = _read_ours(trace)
    # Some releases of torch write NaN among a device's properties. As text it is harmless.
    theirs = read(torch_trace, strict=False)
    if OURS in theirs:
        raise ValueError(
            f"{torch_trace}: has rows of ours already. Merge with the file that torch wrote."
        )
    merged = {**theirs, "traceEvents": list(theirs["traceEvents"])}
    with damaged(trace):
        _lay_over(merged, ours, _base_of(ours, trace) - _base_of(theirs, torch_trace))
    return write(output, merged)


def merge_ranks(
    traces: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    offsets: Mapping[int, float] | None = None,
) -> Path:
    """Merge traces of several processes, on one clock; return the path written.

    traces: files that ``Profile.write_trace`` wrote, one or more for each rank; or a folder, all
        such files in it (but no merged ones and none of other programs). Rows that
        came from torch are left out.
    output: of any name, gzipped where it ends in ``.gz``.
    offsets: seconds to add to the times of ranks whose machines have another clock.
    Raises: FileNotFoundError; ValueError: not such a trace, none at all, an output that cannot be,
        or an offset for a rank that is not there.
    """
    output = path_to_write(output)
    paths = [traces] if isinstance(traces, str | os.PathLike) else list(traces)
    folder = len(paths) == 1 and Path(paths[0]).is_dir()
    if folder:
        loaded = _load_folder(Path(paths[0]))
    else:
        loaded = [(Path(path), _read_ours(path)) for path in paths]
    if not loaded and folder:
        raise ValueError(f"{paths[0]}: there is no trace in it that Profile.write_trace wrote.")
    if not loaded:
        raise ValueError("merge_ranks: no traces were given. Give files, or a folder of them.")
    offsets = dict(offsets or {})
    ranks = {profile["rank"] for path, one in loaded for profile in profiles_of(one, path)}
    if unknown := sorted(offsets.keys() - ranks):
        raise ValueError(
            f"merge_ranks: offsets are given for ranks {unknown}, and the traces are of "
            f"ranks {sorted(ranks)}."
        )
    base = min(_base_of(one, path) for path, one in loaded)
    merged: Trace = {"schemaVersion": 1, "displayTimeUnit": "ms", _BASE: base}
    merged["traceEvents"] = []
    for path, one in loaded:
        with damaged(path):
            _lay_over(merged, one, _base_of(one, path) - base, offsets)
    merged["traceEvents"].sort(key=lambda event: event.get("ts", float("-inf")))
    return write(output, merged)


def _read_ours(path: str | os.PathLike[str]) -> Trace:
    trace = read(path)
    profiles_of(trace, path)
    return trace


def _load_folder(folder: Path) -> list[tuple[Path, Trace]]:
    loaded = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_file() or not starts_like_json(path):
            continue
        try:
            trace = read(path)
        except ValueError:
            continue  # another program's
        # The parts of a merged file usually lie beside it.
        if OURS in trace and len(profiles_of(trace, path)) == 1:
            loaded.append((path, trace))
    return loaded


def _base_of(trace: Trace, where: object) -> int:
    base = trace.get(_BASE, 0)
    if not isinstance(base, int):
        raise ValueError(f"{where}: {_BASE} must be a whole number, got {base!r}.")
    return base


def _lay_over(
    merged: Trace, ours: Trace, shift_ns: int, offsets: Mapping[int, float] | None = None
) -> None:
    """Add our rows of a trace, with ids that no other row has. ``offsets``: more seconds for the
    times of a rank."""
    known = merged.setdefault(OURS, {"formatVersion": 1, "profiles": []})["profiles"]
    events = merged["traceEvents"]
    objects = [event for event in events if isinstance(event, dict)]  # torch's are kept as they are
    ids = (event.get(key) for event in objects for key in ("pid", "tid"))
    taken = {each for each in ids if isinstance(each, int)}
    pids, shifts = {}, {}
    for profile in profiles_of(ours, "the trace"):
        for pid in profile["pids"]:
            pids[pid] = _free_id(pid, taken)
            shifts[pid] = shift_ns + round((offsets or {}).get(profile["rank"], 0.0) * 1e9)
        known.append({**profile, "pids": [pids[p] for p in profile["pids"]]})
    tids = dict(pids)  # events of a whole process have its id as that of the thread
    for event in ours["traceEvents"]:
        pid, tid = event.get("pid"), event.get("tid")
        if pid not in pids:
            continue
        if tid not in tids:
            tids[tid] = _free_id(tid, taken)
        event = {**event, "pid": pids[pid], "tid": tids[tid]}
        if "bind_id" in event:
            number = int(event["bind_id"], 16) % FLOWS_PER_PROCESS
            event["bind_id"] = f"{pids[pid] * FLOWS_PER_PROCESS + number:#x}"
        if "ts" in event:
            _shift(event, shifts[pid])
        events.append(event)


def _free_id(wanted: int, taken: set[int]) -> int:
    while wanted in taken:
        wanted += 1
    taken.add(wanted)
    return wanted


def _shift(event: dict[str, Any], shift_ns: int) -> None:
    """Shift start and end, not the length: then neighbours still meet after rounding."""
    start_ns = nanoseconds(event["ts"])
    event["ts"] = microseconds(start_ns + shift_ns)
    if "dur" in event:
        end_ns = start_ns + nanoseconds(event["dur"])
        event["dur"] = microseconds(end_ns + shift_ns) - event["ts"]
