"""The calls of an op that run on the user's executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor, Future

    from .op_timing import Measured


class ExecutorCalls:
    """The calls of one stage that its executor has not finished."""

    def __init__(self, is_stopped: Callable[[], bool]) -> None:
        self.are_refused = False
        """Whether the executor refused one: it is broken or shut down, and would refuse all."""
        self._is_stopped = is_stopped
        # Workers add and discard; cancel(), on any thread, goes through a copy of it.
        self._submitted: set[Future[Measured]] = set()

    def make(self, executor: Executor, measured: Callable[[Any], Measured], item: Any) -> Measured:
        """Make a call there, and wait for it. Raises: what the op raises; CancelledError."""
        try:
            future = executor.submit(measured, item)
        except Exception:
            self.are_refused = True
            raise
        self._submitted.add(future)
        try:
            # The race with a stop: the run closes the outlet before it has the calls cancelled. So
            # either that saw this future, or the outlet is seen closed here.
            if self._is_stopped():
                future.cancel()
            return future.result()
        finally:
            self._submitted.discard(future)

    def cancel(self) -> None:
        """Withdraw those that the executor has not begun. Never blocks."""
        for future in self._submitted.copy():
            future.cancel()
