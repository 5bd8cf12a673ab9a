"""Whether a thread may draw from torch's default generator while it runs user code."""

from __future__ import annotations

import os
import threading

_LOOK_EVERY = 64
"""The interval, in batches (or samples without batches), at which draws are looked for."""

_main_thread = threading.main_thread().ident  # cached: the lookup would dominate the cost


def _after_fork() -> None:
    global _main_thread
    _main_thread = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Borrowing:
    """The choice, batch by batch, whether samples draw from the default generator itself.

    That is for the main thread, while the program has no other (but daemons) and samples do draw:
    now and then it is looked whether they still do.
    """

    def __init__(self) -> None:
        self.is_on = False
        """Whether each sample of this batch begins with the default generator seeded."""
        self.looks = False
        """Whether draws are looked for in this batch."""
        self.has_drawn = True
        """Whether a sample has drawn since they were last looked for. Whoever sees a draw says
        so."""
        self._is_main = False
        self._num_batches = self._num_threads = 0
        self._has_company = False

    def enter(self) -> None:
        """Begin on the calling thread."""
        self._is_main = threading.get_ident() == _main_thread

    def begin(self) -> None:
        """Choose for a batch that begins."""
        if not self._is_main:  # as on all workers
            self.is_on = self.looks = False
            return
        self._num_batches += 1
        self.is_on = self.has_drawn and self._is_alone()
        self.looks = self.is_on and self._num_batches % _LOOK_EVERY == 1
        if self.looks:
            self.has_drawn = False  # until the first draw

    def _is_alone(self) -> bool:
        """Return whether the default generator is this thread's alone. A thread that begins is
        noticed at the next batch; one that takes the place of another, within ``_LOOK_EVERY``."""
        count = threading.active_count()  # 0.1 µs; going through the threads takes ten times that
        if count != self._num_threads or self._num_batches % _LOOK_EVERY == 1:
            self._num_threads = count
            self._has_company = count > 1 and _others_may_draw()
        return not self._has_company


def _others_may_draw() -> bool:
    """Return whether another thread of the program lives that is not a daemon.

    Daemons (progress bars' and loggers' threads, our own) are taken for helpers that draw nothing:
    checking each of their calls would cost every program that has one.
    """
    own = threading.get_ident()
    return any(not each.daemon and each.ident != own for each in threading.enumerate())
