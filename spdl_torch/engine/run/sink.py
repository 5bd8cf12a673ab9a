"""The sink of a pipeline: the queue from which the consumer takes."""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter_ns
from typing import TYPE_CHECKING, NoReturn

from ..channel.waits import ChannelClosed, EndOfChannel
from ..hooks.checks import enter_queue_hook
from ..stage.source import as_exception

if TYPE_CHECKING:
    from ..hooks.stats_queue import StatsQueue
    from ..recorder.rings import Ring
    from .run import Run


class Sink:
    """A thread that forwards the finished items. It ends with the queue before it."""

    def __init__(self, inlet: StatsQueue, outlet: StatsQueue, ring: Ring, owner: Run) -> None:
        self.inlet = inlet
        self.outlet = outlet
        """The queue from which the consumer takes."""
        self._ring = ring
        self._owner = owner
        self._hooks = ExitStack()

    def enter(self) -> None:
        """Enter the hook of the queue, before the thread starts."""
        enter_queue_hook(self._hooks, self.outlet)

    def run(self) -> None:
        """Forward items to the end. The target of the sink's thread."""
        try:
            self._forward()
        except (EndOfChannel, ChannelClosed):
            pass
        except BaseException as error:  # a user's queue class raised: no stage may wait for room
            self._owner.fail("the sink broke", [as_exception(error)])
            self.inlet.close()
        finally:
            self._leave()

    def _forward(self) -> NoReturn:
        before, after, ring = self.inlet, self.outlet, self._ring
        since_ns = ring.begin()
        while True:
            number, item = before.get_numbered()
            got_ns = perf_counter_ns()
            output = after.put(item)
            item = None  # else it would stay alive while this thread waits
            done_ns = perf_counter_ns()
            if done_ns - since_ns >= ring.shortest_ns:
                ring.add(since_ns, got_ns, got_ns, done_ns, -1, number, output, before, after)
            since_ns = done_ns

    def _leave(self) -> None:
        try:
            self._hooks.close()
        except Exception as error:
            self._owner.fail("a queue's stage_hook raised", [error])
        finally:
            self.outlet.finish()
