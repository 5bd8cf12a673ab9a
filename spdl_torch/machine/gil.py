"""The model of the GIL: what the waits for it, and the cores in use, say of threads that share it.

The thresholds were measured: 1 to 4 threads on 2 cores that ran pure Python, C code without the
GIL, and sleeps (see the explanation page).
"""

from __future__ import annotations

import sys
import sysconfig

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
