"""A program's own events in a trace: named spans of its threads, and counters."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from ...scopes import scope

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST = 200_000  # spans, and counters, in one block; the latest are kept


class Span(NamedTuple):
    """A named span of a thread's time, by ``time.perf_counter_ns()``."""

    name: str
    thread: str
    """The name of the thread."""
    thread_id: int
    """The operating system's id of the thread."""
    started_ns: int
    ended_ns: int
    cpu_ns: int
    """The thread's CPU time in the span."""


class Count(NamedTuple):
    """A counter's value from a moment on."""

    name: str
    time_ns: int
    value: float
    """May be NaN or infinite, as a loss that has left its range: no curve can show it."""


@dataclass(frozen=True, slots=True)
class Program:
    """The events that a program added to a trace, and its name there."""

    name: str | None = None
    spans: tuple[Span, ...] = ()
    counts: tuple[Count, ...] = ()

    def __len__(self) -> int:
        return len(self.spans) + len(self.counts)

    def since(self, cutoff: float) -> Program:
        """Return the events without those that had ended by then."""
        spans = tuple(span for span in self.spans if span.ended_ns > cutoff)
        counts = tuple(count for count in self.counts if count.time_ns > cutoff)
        return Program(self.name, spans, counts)


@dataclass(eq=False)
class ProgramLog:
    """The events of one traced block; while it is open, every thread adds to it."""

    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_MOST))
    counts: deque[Count] = field(default_factory=lambda: deque(maxlen=_MOST))

    def __post_init__(self) -> None:
        _open_logs.append(self)

    def close(self, name: str | None, since_ns: int) -> Program:
        """Close the log, and return its events; cut those that began before ``since_ns``."""
        _open_logs.remove(self)
        spans = (span for span in self.spans.copy() if span.ended_ns > since_ns)
        # How much of the CPU time of one that is cut fell before that moment is unknown.
        cut = (
            s if s.started_ns >= since_ns else s._replace(started_ns=since_ns, cpu_ns=-1)
            for s in spans
        )
        return Program(name, tuple(cut), tuple(self.counts.copy()))


# No lock: appending to lists and deques, removing and copying are atomic, with a GIL and without;
# readers make copies.
_open_logs: list[ProgramLog] = []


@scope
def trace_event(name: str) -> Iterator[None]:
    """Show the block as a slice of that name in the trace of :func:`tracing`, on the row of the
    thread that runs it. Costs next to nothing while nothing is traced.

    name: of another type than ``str``: its text is the name.
    """
    if not _open_logs:
        yield
        return
    started_ns, cpu_ns = perf_counter_ns(), thread_time_ns()
    try:
        yield
    finally:
        cpu_ns, ended_ns = thread_time_ns() - cpu_ns, perf_counter_ns()
        me = threading.current_thread()
        native_id = threading.get_native_id()
        span = Span(str(name), me.name, native_id, started_ns, ended_ns, max(cpu_ns, 0))
        for log in _open_logs.copy():
            log.spans.append(span)


def trace_counter(i: int, val: float) -> None:
    """Show the curve ``counter i`` at that value from now on, in the trace of :func:`tracing`. Does
    nothing while nothing is traced.

    val: a number, or a tensor or array with a single one; that of a CUDA tensor is waited for. NaN
        and infinity leave the curve as it is: an event shows when the value became so.
    Raises: TypeError: ``val`` is something else.
    """
    if _open_logs:
        count = Count(f"counter {i}", perf_counter_ns(), _number_of(val))
        for log in _open_logs.copy():
            log.counts.append(count)


def _number_of(val: Any) -> float:
    try:
        if not isinstance(val, str | bytes | bytearray):
            # torch warns of float() of a tensor with a gradient, NumPy of an array with dimensions.
            return float(val.item() if callable(getattr(val, "item", None)) else val)
    except OverflowError:  # a whole number beyond all floats
        return math.inf if val > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):  # more than one number, or none
        pass
    raise TypeError(
        "trace_counter: val must be a number, or a tensor or array with a single one, got "
        f"{_described(val)}. Pass one number for each counter."
    )


def _described(val: object) -> str:
    kind, shape = type(val).__name__, getattr(val, "shape", None)
    return kind if shape is None else f"{kind} of shape {tuple(shape)}"
