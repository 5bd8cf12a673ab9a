"""Stages that combine many items into one, and pass the rest on at the end of an epoch."""

from __future__ import annotations

import logging
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ..channel.waits import EndOfChannel
from ..recorder.moments import Outcome
from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..definition.stages import Aggregator
    from ..hooks.context_managers import LazyRunner
    from ..hooks.task_hooks import TaskCell
    from ..recorder.rings import Ring
    from .op_timing import Measured

_logger = logging.getLogger("spdl_torch.pipeline")

_PASSED, _FAILED = int(Outcome.PASSED), int(Outcome.FAILED)


class GroupingStage(Stage):
    """One thread, which takes items until the channel ends; subclasses combine them."""

    _cell: TaskCell
    _ring: Ring
    _since_ns: int
    """The end of the last turn: a turn lasts from one item passed on to the next."""

    def _begin(self, cell: TaskCell, ring: Ring) -> None:
        self._cell, self._ring, self._since_ns = cell, ring, ring.begin()

    def _emit(
        self,
        call: Callable[[Any], Measured],
        item: Any,
        number: int,
        task: int,
        *,
        drop: bool = False,
    ) -> None:
        """Call the op and pass its result on, unless it is None or to be dropped.

        number: the number of the last item in it; task: its name in errors.
        """
        cell, ring, since_ns = self._cell, self._ring, self._since_ns
        output, outcome, started_ns = -1, _PASSED, perf_counter_ns()
        try:
            result, wall_ns, cpu_ns = call(item)
        except Exception as error:
            if self.ends_worker(error):
                raise
            ended_ns, cpu_ns, outcome = perf_counter_ns(), -1, _FAILED
            cell.add_failure(ended_ns - started_ns, cpu_ns)
            self.tally.count_failure(error, task, item)
        else:
            ended_ns = perf_counter_ns()
            cell.add(wall_ns, cpu_ns)
            if result is not None and not drop:
                output = self.outlet.put(result)
        self._since_ns = done_ns = perf_counter_ns()
        if done_ns - since_ns >= ring.shortest_ns:
            ring.add(
                since_ns,
                started_ns,
                ended_ns,
                done_ns,
                cpu_ns,
                number,
                output,
                self.inlet,
                self.outlet,
                outcome,
            )


class AggregateStage(GroupingStage):
    """Lists of ``batch_size`` items; a shorter one at the end unless ``drop_last``."""

    _group: list[Any]
    _call: Callable[[Any], Measured]

    def work(
        self, cell: TaskCell, ring: Ring, call: Callable[[Any], Measured], runner: LazyRunner
    ) -> None:
        """Collect items; the op, which is timed, copies the list."""
        self._begin(cell, ring)
        self._group, self._call = [], self.hooks.around(call, runner)
        size, number = self.spec.batch_size, 0
        while True:
            try:
                number, item = self.take()
            except EndOfChannel:
                break
            self._group.append(item)
            item = None  # else it would stay alive while this thread waits
            if len(self._group) == size:
                self._emit_group(number)
        self.end_epoch(number)

    def end_epoch(self, number: int) -> None:
        """Pass the incomplete list on, or drop it."""
        if self._group and not self.spec.drop_last:
            self._emit_group(number)
        self._cell.num_dropped += len(self._group)
        self._group = []

    def _emit_group(self, number: int) -> None:
        group, self._group = self._group, []
        self._emit(self._call, group, number, number // self.spec.batch_size)


class AggregatorStage(GroupingStage):
    """A user's aggregator: each call of its ``accumulate`` is a task.

    The object outlives this run. So however that ends, the object is empty then: the next run,
    which may be another epoch's, would pass on what this one left in it.
    """

    _flush: Callable[[Any], Measured]

    def work(
        self, cell: TaskCell, ring: Ring, call: Callable[[Any], Measured], runner: LazyRunner
    ) -> None:
        """Call it with item after item, and pass its results on."""
        self._begin(cell, ring)
        accumulate = self.hooks.around(call, runner)
        aggregator: Aggregator = self.spec.op.__self__  # type: ignore[attr-defined]  # a method
        flush = self.limited(lambda _: self.measure(lambda _: aggregator.flush(), None))
        self._flush = self.hooks.around(flush, runner)
        number, is_empty = 0, False
        try:
            while True:
                try:
                    number, item = self.take()
                except EndOfChannel:
                    break
                self._emit(accumulate, item, number, number)
                item = None  # else it would stay alive while this thread waits
            is_empty = True
            self.end_epoch(number)
        finally:
            if not is_empty:  # the loop was left, or the run has failed
                _empty(aggregator)

    def end_epoch(self, number: int) -> None:
        """Pass on the rest that it returns, and begin the next epoch empty."""
        self._emit(self._flush, None, number, number, drop=self.spec.drop_last)


def _empty(aggregator: Aggregator) -> None:
    """Drop what is in it. The run has ended, whatever the user's method raises now."""
    try:
        aggregator.flush()
    except Exception:
        _logger.exception("Pipeline: an aggregator could not be emptied after a run that was left")
