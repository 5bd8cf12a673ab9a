"""The CPU time of a thread's calls, for less than reading its clock twice in each of them.

That clock takes 0.2 to 0.5 µs to read, ten times as long as the wall clock. Of short calls one in
eight is timed, and stands for the others. A call of 0.2 ms or more stands for itself alone, as
there may be few of these and most of the time in them. Nobody knows at its beginning how long it
will take; but the clock only goes on, so it is enough to have read it a little earlier.
"""

from __future__ import annotations

from time import thread_time_ns

LONG_NS = 200_000
"""The wall time from which the CPU time of every call is known."""
_FRESH_NS = 100_000
"""The age up to which a reading serves as that of a long call's beginning. What the thread computed
in between is not known: half of it is taken off, so a long call after short ones is off by 0.05 ms
at most."""
_FRESH_PARTS = 32
"""After a long call a reading serves for this part of its length: others of its kind, which mostly
follow, are off by 1.6 % at most."""


class CallClock:
    """When to read the clock for one thread's calls of one op. Only that thread uses it.

    The caller reads the clock before a call if ``due_ns`` has come or ``num_unclocked`` is 0, and
    counts that down for short calls for which it has not. It asks ``cpu_of`` for all others.
    """

    __slots__ = ("_read_cpu_ns", "_read_ns", "due_ns", "num_unclocked")

    def __init__(self) -> None:
        self.num_unclocked = 0
        """Short calls to come before the next one that is timed."""
        self.due_ns = 0
        """The wall time from which the last reading is too old."""
        self._read_ns = self._read_cpu_ns = 0

    def cpu_of(self, cpu_ns: int, began_ns: int, ended_ns: int) -> int:
        """Return the CPU time of a call that has just ended; -1 = others stand for it.

        cpu_ns: the clock's reading at its beginning; -1 = it was not due.
        """
        took_ns = ended_ns - began_ns
        if took_ns < LONG_NS and self.num_unclocked > 0:  # it was read in case the call is long
            self.num_unclocked -= 1
            self._read_ns, self._read_cpu_ns = began_ns, cpu_ns
            self.due_ns = began_ns + _FRESH_NS
            return -1
        now_cpu_ns = thread_time_ns()
        if cpu_ns < 0:
            cpu_ns = self._read_cpu_ns + (began_ns - self._read_ns) // 2
        self._read_ns, self._read_cpu_ns = ended_ns, now_cpu_ns
        if took_ns < LONG_NS:
            self.num_unclocked = 4 + (ended_ns >> 3) % 7  # at random: calls may follow a pattern
            self.due_ns = ended_ns + _FRESH_NS
            return now_cpu_ns - cpu_ns
        self.due_ns = ended_ns + min(_FRESH_NS, took_ns // _FRESH_PARTS)
        return min(took_ns, max(0, now_cpu_ns - cpu_ns))
