"""What the probes' counters say of a window, the difference of two of them, in shares and seconds;
and those of one run. The model of the GIL: what the waits for it, and the cores in use, say of
threads that share it.

By itself, because only who reports or steers needs it, and most epochs end with nobody asking.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from .histogram import bucket_of, percentile
from .limits import usable_cores
from .probes import probe_counters, start_probing, stop_probing

if TYPE_CHECKING:
    from .probes import ProbeCounters

_MIN_SAMPLES = 5  # below this a median means nothing
_HELD_NS = 500_000
"""The least delay with which the probe wakes if a thread held the GIL for a while (measured with
threads that wait or compute without it: 0.06 to 0.2 ms)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probes:
    """The readings of the machine in a window; None = not measured."""

    gil_seconds: float | None = None
    """The median time that a thread waits for the GIL when it wakes up."""
    run_delay_ratio: float | None = None
    """Share of the loader threads' time in which they had no core, 0 to 1."""
    gc_ratio: float | None = None
    """Share of the time in which garbage was collected, 0 to 1."""
    step_slowdown: float | None = None
    """Step time over step time with cached batches, minus 1."""
    num_cores: float | None = None
    """The cores that this process may use: its part, where several ranks share them."""
    switch_interval: float = 0.005
    """``sys.getswitchinterval()``, seconds."""
    own_gil: bool = False
    """Whether no worker shares a GIL with another: each has a process, or Python has no GIL."""
    gil_held_ratio: float | None = None
    """Share of the time in which some thread held the GIL for a while (0.5 ms or more), 0 to 1."""
    cores_used: float | None = None
    """Cores in use by the training process and its workers together, on average."""
    helper_cores: float | None = None
    """The part of them in use by threads that ops started, such as a codec's."""
    sampling_ratio: float | None = None
    """Share of the time in which a loader's loop drew from its sampler, 0 to 1: a part of its
    waits."""
    could_go_without_gil: bool = False
    """Whether this is a free-threaded Python that runs with a GIL nevertheless."""


_OF_LAST = ("num_cores", "switch_interval", "own_gil", "could_go_without_gil")
"""The probes that are as they were last; the others are means."""


def probes_over(windows: Sequence[Mapping[str, Any]]) -> Probes:
    """Return the readings over several windows, each with its ``seconds`` and its ``probes`` by
    name."""
    values: dict[str, Any] = {}
    for name in (each.name for each in fields(Probes)):
        known = [each for each in windows if each["probes"].get(name) is not None]
        if known and (name in _OF_LAST or len(known) == 1):
            values[name] = known[-1]["probes"][name]
        elif known:
            seconds = sum(each["seconds"] for each in known)
            weighed = sum(each["probes"][name] * each["seconds"] for each in known)
            values[name] = weighed / seconds if seconds else 0.0
    return Probes(**values)


def probes_between(before: ProbeCounters, after: ProbeCounters) -> Probes:
    """Return the readings of a window."""
    late = tuple(b - a for a, b in zip(before.late, after.late, strict=True))
    wall_ns, thread_ns = after.wall_ns - before.wall_ns, after.thread_ns - before.thread_ns
    delay_ns = after.run_delay_ns - before.run_delay_ns
    helpers_ns = after.helpers_ns - before.helpers_ns
    gc_ns = None
    if before.gc_ns is not None and after.gc_ns is not None:
        gc_ns = after.gc_ns - before.gc_ns
    is_known = has_gil() and sum(late) >= _MIN_SAMPLES
    held = sum(late[bucket_of(_HELD_NS) :])
    return Probes(
        gil_seconds=percentile(late, 0.5) / 1e9 if is_known else None,
        run_delay_ratio=min(1.0, delay_ns / thread_ns) if thread_ns > 0 else None,
        gc_ratio=gc_ns / wall_ns if gc_ns is not None and wall_ns > 0 else None,
        num_cores=usable_cores(),
        switch_interval=sys.getswitchinterval(),
        own_gil=not has_gil(),
        gil_held_ratio=held / sum(late) if is_known else None,
        helper_cores=max(0, helpers_ns) / max(1, wall_ns) if thread_ns > 0 else None,
        cores_used=(after.cpu_ns - before.cpu_ns) / wall_ns if wall_ns > 0 else None,
        could_go_without_gil=could_go_without_gil(),
    )


class Probing:
    """Probing from the start of a run to its end."""

    def __init__(self) -> None:
        self._before: ProbeCounters | None = None  # it has not begun
        self._after: ProbeCounters | None = None  # it goes on

    def begin(self) -> None:
        """Start probing."""
        has_read = start_probing(self)
        self._before = probe_counters(run_delays=not has_read)

    def end(self) -> None:
        """Take the last reading. Never blocks."""
        if self._before is not None and self._after is None:
            self._after = probe_counters()
        stop_probing(self)

    def readings(self) -> Probes | None:
        """Return the readings since the start, up to the end; None = it never began."""
        before, after = self._before, self._after
        return None if before is None else probes_between(before, after or probe_counters())


# The model of the GIL. The thresholds were measured: 1 to 4 threads on 2 cores that ran pure
# Python, C code without the GIL, and sleeps (see the explanation page).

_TAKEN = 0.2
"""The wait for the GIL, in switch intervals of the interpreter, above which it is the rule (pure
Python: 1 to 4 intervals; C code without the GIL, or sleeps: 0.02)."""

_TAKEN_IN_TURNS = 0.05
"""The same where several threads together use no more than one core, because they take the GIL in
turns: quick ops release it before the interval is over."""

_HINT = 0.03
"""The same from which threads that are busy for no other known reason may wait for the GIL. Short
calls that take it in turns, with switches that a busy machine makes slow, are not much above the
rest (measured there: CIFAR through Pillow 0.034 to 0.05; C code without the GIL, and sleeps, 0.016
to 0.024)."""

_ONE_CORE = (0.7, 1.35)
"""Cores used together by threads that take the GIL in turns (measured: 1.0 to 1.25)."""

_LEAST_CORES = 0.3
"""The same where each turn begins late: a third of a core (measured: CIFAR through Pillow on a busy
machine, 2,200 samples a second with two threads and 6,900 with one)."""


def has_gil() -> bool:
    """Return whether this Python runs with a GIL."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def could_go_without_gil() -> bool:
    """Return whether this is a free-threaded Python that runs with a GIL nevertheless: by
    ``PYTHON_GIL=1``, or since it imported an extension module not marked as working without one.
    """
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED")) and has_gil()


def take_turns(cores: float, *, begins_late: bool = False) -> bool:
    """Return whether threads that use this many cores together may take the GIL in turns: about
    one. ``begins_late``: or less, where each turn may begin late, as on a busy machine.
    """
    return (_LEAST_CORES if begins_late else _ONE_CORE[0]) <= cores <= _ONE_CORE[1]


def is_taken(wait_seconds: float, switch_interval: float, *, in_turns: bool = False) -> bool:
    """Return whether threads have to wait for the GIL as a rule.

    wait_seconds: the median time for which a thread that wakes up waits for it.
    in_turns: whether several threads use about one core together.
    """
    return wait_seconds >= (_TAKEN_IN_TURNS if in_turns else _TAKEN) * switch_interval


def is_hinted(wait_seconds: float, switch_interval: float) -> bool:
    """Return whether threads that use no more than a core together may wait for the GIL."""
    return wait_seconds >= _HINT * switch_interval
