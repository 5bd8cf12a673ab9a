"""Starting worker processes beside a loop that goes on with its threads."""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING

from ...engine.threads.thread_group import taking_over
from ...machine.starting import start
from ..child_process.signals import handlers_deferred
from . import trial

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..child_process.process_seats import ProcessSeats
    from ..rng.keys import StreamKey
    from ..workers.moving import Moving

_logger = logging.getLogger("spdl_torch.data")


class Hiring:
    """The children of a crew that moves, from the first that are wanted to those that work.

    One thread, the mover, starts them; it writes ``children`` and ``are_open``, and the memory only
    if it fails. The loop's thread writes these three only while no mover runs: before it starts
    one, and once ``are_open`` is set, which is the last thing that a mover does. ``request_stop``
    may run on any thread, in the middle of anything; it writes ``_is_stopped`` alone.
    """

    def __init__(self, open_children: Callable[[], ProcessSeats], memory: Moving) -> None:
        self._open_children = open_children
        self._memory = memory
        self.children: ProcessSeats | None = None
        self.are_open = False
        """Whether the children are started, with nobody still at it."""
        self._opened_seconds = math.inf  # when the loop first saw that
        self._is_second_start = False  # whether the loop's thread has forked them
        self._is_stopped = False

    def begin(self, key: StreamKey) -> None:
        """Start children on a thread of its own."""
        run = taking_over(lambda: self.open(key))
        start(threading.Thread(target=run, name="spdl-mover", daemon=True))

    def new(self) -> ProcessSeats:
        """Return children that the caller starts."""
        self.children = self._open_children()
        return self.children

    def open(self, key: StreamKey) -> None:
        """Start children. If that fails, the memory says why."""
        try:
            children = self.new()
            if not self._is_stopped:
                children.prepare(key, ())
        except Exception as error:  # not Ctrl-C, where this is the loop's thread
            if not self._is_stopped:  # the end of the loop says nothing about later epochs
                self._memory.stays(trial.not_started(error))
        else:
            # Last of all: once the loop sees it, the children get jobs.
            self.are_open = True
        finally:
            # request_stop() sets the flag before it looks for children, and this looks for the flag
            # after they are there: so one of the two stops them, whoever comes first. Once they are
            # open, the loop's thread may put others in their place: so read the attribute once.
            opened = self.children
            if self._is_stopped and opened is not None:
                opened.request_stop()

    def ready(self, now: float, key: StreamKey) -> ProcessSeats | None:
        """Return the children once they are ready for jobs. If they never will be, the memory says
        why.

        Not before: a fork beside the program's threads may wait for ever in a library that does not
        expect a fork; the threads then keep the work.
        """
        children = self.children
        if not self.are_open or children is None:
            return None
        self._opened_seconds = min(self._opened_seconds, now)
        if children.is_up:
            return children
        if (death := children.early_death) is not None:
            self._memory.stays(trial.not_started(death))
        elif children.are_copies and now - self._opened_seconds >= trial.LONGEST_START_SECONDS:
            with handlers_deferred():
                self._start_again(children, key)
        return None

    def _start_again(self, children: ProcessSeats, key: StreamKey) -> None:
        """Fork children on the loop's thread, which takes as long as when torch's loader does it,
        and is safe wherever that is: they keep what belongs to the thread.
        """
        children.stop()  # at once: they have done nothing yet, and are killed
        self.children, self.are_open, self._opened_seconds = None, False, math.inf
        if self._is_second_start:
            self._memory.stays("worker processes that were forked never began")
            return
        self._is_second_start = True
        _logger.info(
            "DataLoader: worker processes that were forked beside the training loop did not begin "
            "within %g s; the loop forks others.",
            trial.LONGEST_START_SECONDS,
        )
        self.open(key)

    def request_stop(self) -> None:
        """End the children, and those that are being started. Never blocks; safe in a finalizer."""
        self._is_stopped = True  # before looking for children: open() looks after it has some
        children = self.children
        if children is not None:
            children.request_stop()

    def stop(self) -> None:
        """Keep what the children recorded, and wait a moment for their end."""
        self._is_stopped = True
        children = self.children
        if children is not None:
            children.stop()
