"""A stage whose op is a generator: one item in, many out, each passed on as soon as it comes.

On an executor a generator is run to its end before its first item is passed on; a plain
:class:`~.stage.Stage` does that.
"""

from __future__ import annotations

import functools
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ..channel.waits import ChannelClosed, EndOfChannel
from ..recorder.moments import Outcome
from .op_timing import EXHAUSTED, Measured, Spent, next_of
from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..hooks.context_managers import LazyRunner
    from ..hooks.task_hooks import TaskCell
    from ..recorder.rings import Ring

_PASSED, _FAILED = int(Outcome.PASSED), int(Outcome.FAILED)


class ExpandingStage(Stage):
    """A stage of generators. It stops as any stage: outputs go into a channel that may close."""

    def work(
        self, cell: TaskCell, ring: Ring, call: Callable[[Any], Measured], runner: LazyRunner
    ) -> None:
        """Run one generator after the other."""
        since_ns = ring.begin()
        while True:
            try:
                number, item = self.take()
            except EndOfChannel:
                return
            started_ns, outcome, spent = perf_counter_ns(), _PASSED, Spent()
            expand = functools.partial(self._pass_on, cell, call, number, spent)
            try:
                self.hooks.around(expand, runner)(item)
            except BaseException as error:
                if not isinstance(error, Exception) or self.ends_worker(error):
                    self.emit_nothing(number)  # later items in the order must not wait for this one
                    raise
                outcome = _FAILED
                cell.add_failure(spent.wall_ns, spent.cpu_ns)
                self.tally.count_failure(error, number, item)
            else:
                cell.add(spent.wall_ns, spent.cpu_ns)
            self.emit_nothing(number)
            if self.outlet.closed:
                raise ChannelClosed
            item = None  # else it would stay alive while this thread waits
            # Its work and its waits for room alternate; the turn shows all of the work first.
            ended_ns = started_ns + spent.wall_ns
            done_ns = perf_counter_ns()
            if done_ns - since_ns >= ring.shortest_ns:
                ring.add(
                    since_ns,
                    started_ns,
                    ended_ns,
                    done_ns,
                    spent.cpu_ns,
                    number,
                    spent.output,
                    self.inlet,
                    self.outlet,
                    outcome,
                )
            since_ns = done_ns

    def _pass_on(
        self,
        cell: TaskCell,
        call: Callable[[Any], Measured],
        number: int,
        spent: Spent,
        item: Any,
    ) -> None:
        """Pass on the outputs of the generator; ``spent`` sums the time inside it.

        Task hooks are around all of this. That the outlet has closed is no error of the op's, so
        they do not see it.
        """
        outputs, spent.wall_ns, spent.cpu_ns = call(item)
        step = self.limited(functools.partial(self.measure, next_of))
        while True:
            output, wall_ns, cpu_ns = step(outputs)
            spent.wall_ns += wall_ns
            spent.cpu_ns += cpu_ns
            if output is EXHAUSTED:
                return
            try:
                if output is None:
                    cell.num_dropped += 1
                elif self.ordered:
                    self.outlet.put_at(number, output, last=False)
                else:
                    spent.output = self.outlet.put(output)
            except ChannelClosed:
                return
            output = None  # else it would stay alive while the generator waits
