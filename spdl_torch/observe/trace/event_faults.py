"""What is wrong with an event of a trace by itself: missing keys, values of other types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .json_file import owned_pids

if TYPE_CHECKING:
    from collections.abc import Iterator

_LATEST = 2.0**62  # microseconds: every time that a viewer can show
_NEEDED = {
    "M": ("name", "pid", "args"),
    "X": ("name", "pid", "tid", "ts", "dur"),
    "C": ("name", "pid", "ts", "args"),
    "i": ("name", "pid", "tid", "ts", "s"),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "args": (dict,),
    "pid": (int, float, str),
    "tid": (int, float, str),
    "bind_id": (int, str),
}
# What metadata of ours says, by its name.
_METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def faults_of(event: Any) -> Iterator[str]:
    """Yield what is wrong with any program's event."""
    if not isinstance(event, dict):
        yield f"not an object: {event!r:.50}"
        return
    phase = event.get("ph")
    if not isinstance(phase, str) or not phase:
        yield "has no 'ph'"
        return
    for key in _NEEDED.get(phase, ("pid", "ts")):
        if key not in event:
            yield f"{phase!r} has no {key!r}"
    for key, types in _TYPES.items():
        if key in event and not isinstance(event[key], types):
            yield f"{key!r} must be {types[-1].__name__}, got {event[key]!r:.50}"
    for key in ("ts", "dur", "tdur"):
        if key in event and type(event[key]) not in (int, float):
            yield f"{key!r} is not a number: {event[key]!r}"
        elif key in event and not abs(event[key]) < _LATEST:
            yield f"{key!r} is no time: {event[key]!r:.50}"
        elif key in event and key != "ts" and event[key] < 0:
            yield f"{event.get('name')!r} has {key} {event[key]}, less than 0"


def may_be_own(event: Any, pids: set[int] | None) -> bool:
    """Return whether an event is of one of our processes, or damaged; None = all are."""
    if pids is None or not isinstance(event, dict):
        return True
    pid = event.get("pid")
    return isinstance(pid, dict | list) or pid in pids


def check_own_events(trace: dict[str, Any], where: object) -> None:
    """Check every event of ours in a trace, which what draws and merges them relies on.

    Raises: ValueError: the first one that we do not write.
    """
    base = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int) or abs(base) > 1000 * _LATEST:
        raise ValueError(f"{where}: baseTimeNanoseconds must be a whole number, got {base!r:.50}.")
    pids = owned_pids(trace)
    for number, event in enumerate(trace["traceEvents"]):
        if not may_be_own(event, pids):
            continue
        fault = next(faults_of(event), None) or next(_faults_of_ours(event), None)
        if fault is not None:
            raise ValueError(f"{where}: damaged: event {number}: {fault}.")


def _faults_of_ours(event: dict[str, Any]) -> Iterator[str]:
    phase, args = event["ph"], event.get("args", {})
    for key in ("pid", "tid"):
        if key in event and not isinstance(event[key], int):
            yield f"{key!r} is not a whole number: {event[key]!r:.50}"
    said = _METADATA.get(event["name"]) if phase == "M" else None
    if said is not None and not isinstance(args.get(said), str if said == "name" else int):
        yield f"{event['name']!r} has no {said!r}"
    if phase == "C" and not all(isinstance(value, int | float) for value in args.values()):
        yield f"{event['name']!r} has a value that is no number"
    if "bind_id" in event:
        try:
            int(event["bind_id"], 16)
        except (TypeError, ValueError):
            yield f"bind_id is not hexadecimal: {event['bind_id']!r:.50}"
