"""Whether a trace can be shown in full: whatever viewers would drop silently is an error here."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

from spdl_torch.observe.trace.chrome_trace import OURS, nanoseconds
from spdl_torch.observe.trace.trace_file import profiles_of

_LATEST = 2.0**62  # microseconds: every time that a viewer can show
_NEEDED = {
    "M": ("name", "pid", "args"),
    "X": ("name", "pid", "tid", "ts", "dur"),
    "C": ("name", "pid", "ts", "args"),
    "i": ("name", "pid", "tid", "ts", "s"),
}
_TYPES = {
    "name": str,
    "args": dict,
    "pid": int | float | str,
    "tid": int | float | str,
    "bind_id": int | str,
}


def content_of(path):
    """The JSON of a trace's file, which may be compressed."""
    content = Path(path).read_bytes()
    return json.loads(gzip.decompress(content) if str(path).endswith("gz") else content)


def check_trace(trace):
    """Assert that a trace, a file or its contents, can be shown in full; return what is in it.

    It is strict JSON; each event has a time and a row; times in a row go forward; slices of a row
    enclose each other or do not meet; and arrows have both ends.

    In one of ours only our rows are counted, and other programs' events, torch's after a merge, as
    ``num_others``. ``num_flows``: arrows, of items that can be followed; ``num_lost``: turns and
    parts that were overwritten in memory before the trace was written; ``num_left_out``: slices and
    instants beyond ``max_events`` or before ``last_seconds``.
    """
    content = content_of(trace) if isinstance(trace, str | os.PathLike) else trace
    json.dumps(content, allow_nan=False)
    profiles = profiles_of(content, "the trace") if OURS in content else []
    events, pids = content["traceEvents"], {pid for each in profiles for pid in each["pids"]}
    own = [each for each in events if each.get("pid") in pids] if OURS in content else events
    rows, flows = {}, {}
    for event in own:
        _check_event(event)
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
            if "bind_id" in event:
                flows.setdefault(event["bind_id"], []).append(event)
    for slices in rows.values():
        if profiles:
            for before, after in pairwise(slices):
                assert before["ts"] <= after["ts"], f"{after} comes after {before}"
        _check_nesting(slices)
    for ends in flows.values():
        _check_flow(sorted(ends, key=lambda event: event["ts"]))
    return SimpleNamespace(
        ranks=tuple(sorted({profile["rank"] for profile in profiles})),
        num_rows=len(rows),
        num_slices=sum(map(len, rows.values())),
        num_flows=len(flows),
        num_instants=sum(event["ph"] == "i" for event in own),
        num_others=len(events) - len(own),
        num_lost=sum(profile["num_lost"] for profile in profiles),
        num_left_out=sum(profile["num_left_out"] for profile in profiles),
    )


def _check_event(event):
    for key in _NEEDED.get(event["ph"], ("pid", "ts")):
        assert key in event, f"{event} has no {key!r}"
    for key, types in _TYPES.items():
        assert key not in event or isinstance(event[key], types), f"{event}: {key!r}"
    for key in {"ts", "dur", "tdur"} & event.keys():
        assert type(event[key]) in (int, float), f"{event}: {key!r} is no number"
        lowest = -_LATEST if key == "ts" else 0
        assert lowest <= event[key] < _LATEST, f"{event}: {key!r} is no time"


def _check_nesting(slices):
    around = []
    for event in sorted(slices, key=lambda e: (nanoseconds(e["ts"]), -e["dur"])):
        start = nanoseconds(event["ts"])
        end = start + nanoseconds(event["dur"])
        while around and around[-1][0] <= start:
            around.pop()
        assert not around or end <= around[-1][0], f"{event} sticks out of {around[-1][1]}"
        around.append((end, event))


def _check_flow(ends):
    into = [event.get("flow_in") is True for event in ends]
    out_of = [event.get("flow_out") is True for event in ends]
    whole = [True] * (len(ends) - 1)
    assert len(ends) >= 2, f"{ends}: an arrow lacks an end"
    assert (into, out_of) == ([False, *whole], [*whole, False]), f"{ends}: an arrow is broken"
