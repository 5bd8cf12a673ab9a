"""Stages that make one item of several: lists, and what a user's :class:`Aggregator` makes. Both
are flushed by the end of the data and of an epoch, which they take as a mark."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..locks import LiveObjects
from .channel import Mark
from .failures import describe
from .stage import Stage

if TYPE_CHECKING:
    from .definition import Aggregator
    from .stage import Worker

_logger = logging.getLogger("spdl_torch.pipeline")


class ListStage(Stage):
    """Collects lists: a task is one list."""

    def _take(self, worker: Worker) -> Callable[[], tuple[int, Any]]:
        return self._lists(worker).__next__

    def _lists(self, worker: Worker) -> Iterator[tuple[int, list[Any]]]:
        """Yield lists of ``batch_size`` items; a shorter one at the end of an epoch."""
        size = self.spec.batch_size
        group: list[Any] = []
        for number, item in self._items(worker, with_ends=True):
            is_end = type(item) is Mark
            if not is_end:
                group.append(item)
            elif self.spec.drop_last:
                worker.cell.num_dropped += len(group)
                group = []
            item = None  # else it would stay alive while this thread waits
            if group and (is_end or len(group) == size):
                yield number, group
                group = []

    def _count_failure(self, error: Exception, number: int, item: Any) -> None:
        number = self.num_tasks - 1  # of the list
        self._charge(error, number, f"item {number}: {describe(item)}", self.num_tasks)


class AggregatorStage(Stage):
    """Gives items to a user's aggregator: a task is one item, or a flush."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._aggregator: Aggregator = self.spec.op.__self__  # type: ignore[attr-defined]
        self._op = self._accumulate

    def claim(self) -> None:
        """Have the aggregator for this run, once those that stop have left it."""
        mine = self._aggregator
        runs = {stage._run for stage in _aggregating.now() if stage._aggregator is mine}
        if [run for run in runs - {self._run} if run.goes_on()]:
            raise RuntimeError(
                f"stage {self.spec.name!r}: its {type(mine).__name__} is in use by another run, "
                "whose items it holds. Let that one end first, or define each pipeline with an "
                "aggregator of its own."
            )
        _aggregating.add(self)

    def _take(self, worker: Worker) -> Callable[[], tuple[int, Any]]:
        return self._items(worker, with_ends=True).__next__

    def _accumulate(self, item: Any) -> Any:
        if type(item) is not Mark:
            return self._aggregator.accumulate(item)
        rest = self._aggregator.flush()
        return None if self.spec.drop_last else rest

    def _count_failure(self, error: Exception, number: int, item: Any) -> None:
        what = "in flush()" if type(item) is Mark else f"item {number}: {describe(item)}"
        self._charge(error, number, what, self.num_tasks)

    def _work(self, worker: Worker) -> None:
        try:
            super()._work(worker)
        except BaseException:
            # The loop was left, or the run has failed. The aggregator outlives this run: the next
            # one would pass on what this one left in it.
            try:
                self._aggregator.flush()
            except Exception:  # the run has ended, whatever the user's method raises now
                _logger.exception(
                    "Pipeline: an aggregator could not be emptied after a run that was left"
                )
            raise


_aggregating: LiveObjects[AggregatorStage] = LiveObjects()
"""The stages whose runs have begun."""
