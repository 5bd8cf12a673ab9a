"""Threads that never keep the interpreter from exiting, and never outlive it.

A daemon thread that is inside a C++ library when the interpreter finalises aborts the process
(``terminate called without an active exception``); a non-daemon one that is blocked keeps the
process alive for ever. So threads are daemons, and at exit every live group is asked to stop and
joined for a bounded time before finalisation begins: when the main thread ends or, if it was made
for another thread for which Python waits, after that.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from ..handlers import start
from ..locks import LiveObjects, in_forked_child
from ..machine.probes import thread_ends
from ..machine.thread_times import call_itself
from ..scopes import scope

_logger = logging.getLogger("spdl_torch.pipeline")

_EXIT_JOIN_SECONDS = 5.0  # long enough for one decode or one read; a blocked op is then left

_process = object()  # another one in a forked child: asking the system costs 0.2 µs an item
_live: LiveObjects[ThreadGroup] = LiveObjects()
_exiting = threading.Event()

Target = tuple[str, Callable[[], None]]
"""Name and function of a thread."""
TakeOver = Callable[[], Callable[[], None] | None]
_taken_over: list[TakeOver] = []


def takes_over(read: TakeOver) -> TakeOver:
    """Decorate a function that reads a setting which new threads inherit.

    It is called on the thread that starts others; what it returns is called first on each of them.
    None = nothing to set.
    """
    _taken_over.append(read)
    return read


@takes_over
def _decimals() -> Callable[[], None] | None:
    """Have a context of decimals of one's own, like that of the starting thread: it changes with
    every operation. All other context variables have the values of that thread.
    """
    decimal: Any = sys.modules.get("decimal")
    return decimal and (lambda: decimal.setcontext(decimal.getcontext().copy()))


@takes_over
def _modes_of_torch() -> Callable[[], None] | None:
    """Take over ``torch.no_grad()``, and ``torch.autocast()`` for the CPU and for CUDA. Inference
    mode arrives as the former: a tensor made in it could not be used outside, while those that come
    from a worker process can.
    """
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "get_autocast_dtype"):  # it is not there, or half imported
        return None
    has_grad = torch.is_grad_enabled()
    dtypes = {
        kind: torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    }
    if has_grad and not dtypes:
        return None

    def take_over() -> None:
        torch._C._set_grad_enabled(has_grad)
        if dtypes:
            torch.set_autocast_cache_enabled(False)  # it is emptied where autocast ends: never here
        for kind, dtype in dtypes.items():
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)

    return take_over


def _leave_function_modes() -> None:
    """Leave the TorchFunctionModes that user code has left on this thread, as
    ``torch.set_default_device()`` does. torch lets go of them when Python's thread has ended, and
    asks for the GIL: if the interpreter exits meanwhile, that aborts the process.
    """
    overrides: Any = sys.modules.get("torch.overrides")
    if hasattr(overrides, "_get_current_function_mode_stack"):
        for _ in overrides._get_current_function_mode_stack():
            overrides._pop_mode()


@takes_over
def _thread_of_use() -> Callable[[], None]:
    """Take over for whom the caller works: what a thread of ours starts is for the same one."""
    user = _user()
    return lambda: setattr(threading.current_thread(), "spdl_user", user)


def _user() -> weakref.ref[threading.Thread]:
    """Return the program's thread for which the caller works: itself, if it is not ours."""
    me = threading.current_thread()
    user: weakref.ref[threading.Thread] = getattr(me, "spdl_user", None) or weakref.ref(me)
    return user


def exit_has_begun() -> bool:
    """Return whether the interpreter is exiting, for ops that wait where no channel wakes them."""
    return _exiting.is_set()


class ThreadGroup:
    """The threads of one run. ``request_stop`` must wake them all and must not block.

    stops_last: stop at exit after the other groups, because it still receives their last items.
    """

    _is_exiting = staticmethod(sys.is_finalizing)  # finalizers ask when this module is empty

    def __init__(self, request_stop: Callable[[], None], *, stops_last: bool = False) -> None:
        self.pid = os.getpid()
        """The process that has these threads; one forked from it has none of them."""
        self._process = _process
        self._request_stop = request_stop
        self._stops_last = stops_last
        self._cannot_stop = False  # asking it at exit has failed: it is not asked a second time
        self._exit_deadline: float | None = None  # set when it is first stopped at exit, for good
        self._threads: list[threading.Thread] = []
        self._user: weakref.ref[threading.Thread] | None = None

    @property
    def is_here(self) -> bool:
        """Whether the threads are of this process, and not of one from which it was forked. False
        while the interpreter is taken down, which finds none of them."""
        return not self._is_exiting() and self._process is _process

    def spawn(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """Start a thread named ``spdl-<name>``."""
        return self.spawn_all([(name, target)])[0]

    def spawn_all(self, targets: Sequence[Target]) -> list[threading.Thread]:
        """Start threads, given as name and target, in that order."""
        if not self._threads:
            # Not in __init__: if the construction of the owner failed after it, request_stop would
            # be called at exit on an owner that is half made.
            _install_exit_hook()
            self._user = _user()
            _live.add(self)
        steps = [step for read in _taken_over if (step := read()) is not None]
        # As a forked worker, a thread has the context variables of the one that starts it, such as
        # numpy's error handling. It would begin with their defaults.
        runs = [contextvars.copy_context().run for _ in targets]
        threads = [
            threading.Thread(
                target=run, args=(_run_as, target, steps), name=f"spdl-{name}", daemon=True
            )
            for run, (name, target) in zip(runs, targets, strict=True)
        ]
        # Without those that have ended: a tuner may start and end any number.
        present = [each for each in self._threads if each.is_alive() or each.ident is None]
        self._threads = present + threads
        start(*threads)
        return threads

    def join(
        self, timeout: float | None = None, *, without: Collection[threading.Thread] = ()
    ) -> bool:
        """Join every thread but ``without`` and the caller's own; False if time ran out."""
        deadline = None if timeout is None else monotonic() + timeout
        me = threading.current_thread()
        begun = []
        for thread in self._threads:
            if thread in without or thread is me:
                continue
            if thread.ident is None:  # start() was cut off: if it begins, its channels are closed
                continue
            begun.append(thread)
            thread.join(None if deadline is None else max(0.0, deadline - monotonic()))
        return not [thread for thread in begun if thread.is_alive()]

    def threads(self) -> list[threading.Thread]:
        """Return the threads that were started, in that order; perhaps with ended ones."""
        return list(self._threads)

    @property
    def outlives_main_thread(self) -> bool:
        """Whether it works for a thread for which Python waits once the main thread has ended."""
        user = None if self._user is None else self._user()
        if user is None or user is threading.main_thread():
            return False
        return user.is_alive() and not user.daemon

    def is_member(self) -> bool:
        """Return whether the caller runs on one of these threads."""
        return threading.current_thread() in self._threads

    def alive(self, *, without: Collection[threading.Thread] = ()) -> list[str]:
        """Return the names of the threads that still run."""
        me = threading.current_thread()
        return [t.name for t in self._threads if t.is_alive() and t not in without and t is not me]


def _run_as(target: Callable[[], None], steps: Sequence[Callable[[], None]]) -> None:
    """Run ``target`` as a thread that the system knows by its name, with those that it starts.
    ``steps``: take over the settings of the thread that has started it."""
    for step in steps:
        step()
    call_itself(threading.current_thread().name)
    try:
        target()
    finally:
        thread_ends()
        _leave_function_modes()


@in_forked_child
def _now_in_child() -> None:
    global _process
    _process = object()


def before_exit(function: Callable[[], object]) -> None:
    """Call a function when the main thread has ended, before threads of ours are stopped."""
    _install_exit_hook()
    _register_exit(function)


@functools.cache
def _install_exit_hook() -> None:
    # One that two threads have installed at once finds nothing to do the second time.
    _register_exit(_stop_with_main_thread)


def _register_exit(function: Callable[[], object]) -> None:
    # Unlike atexit's functions these run before the interpreter joins other threads (3.9+,
    # private; concurrent.futures uses it for the same reason), the last one first.
    register = getattr(threading, "_register_atexit", atexit.register)
    with suppress(RuntimeError):  # an atexit function runs, before the one below
        register(function)


def _stop_with_main_thread() -> None:
    stay = {group for group in _live.now() if group.outlives_main_thread}
    if not stay:
        _exiting.set()
    _stop([group for group in _live.now() if group not in stay])


def _stop_all() -> None:
    _exiting.set()
    _stop(_live.now())


def _stop(stopping: Collection[ThreadGroup]) -> None:
    deadline = monotonic() + _EXIT_JOIN_SECONDS
    for stops_last in (False, True):
        groups = [group for group in stopping if group._stops_last is stops_last]
        for group in groups:
            if group._cannot_stop:
                continue
            # A group that fails to stop must not keep the others from stopping: the writer of
            # statistics, which stops last, would lose its rows.
            try:
                group._request_stop()
            except Exception:
                group._cannot_stop = True
                names = ", ".join(group.alive()) or "none alive"
                _logger.exception("exit: threads (%s) could not be asked to stop", names)
        for group in groups:
            if group._exit_deadline is None:
                group._exit_deadline = deadline
            group.join(max(0.0, group._exit_deadline - monotonic()))


# For the threads of the program's other threads, which have ended by then, and for those of atexit
# functions that it has registered since. They run after those of threading, and before this one.
atexit.register(_stop_all)


@scope
def repeating(name: str, seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """While the block runs, call it every so many seconds, on a thread named ``spdl-<name>``. The
    first error is logged, and ends the calls."""
    is_over = threading.Event()

    def run() -> None:
        try:
            while not is_over.wait(seconds):
                call()
        except Exception:
            _logger.exception("spdl-%s: the thread has ended with an error.", name)

    threads = ThreadGroup(is_over.set)
    threads.spawn(name, run)
    try:
        yield
    finally:
        is_over.set()
        threads.join()
