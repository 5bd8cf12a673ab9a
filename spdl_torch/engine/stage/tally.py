"""What becomes of the tasks of a stage, and when that is too bad to go on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ..failures import add_note
from ..hooks.task_hooks import TaskCell

if TYPE_CHECKING:
    from ..failures import FailureBudget
    from ..recorder.flight_recorder import FlightRecorder
    from ..run.run import Run


class Tally:
    """The counts of a stage's tasks. With too many failures it ends the run."""

    def __init__(
        self, stage: str, budget: FailureBudget, owner: Run, recorder: FlightRecorder
    ) -> None:
        self._stage = stage
        self._budget = budget
        self._owner = owner
        self._recorder = recorder
        # One for each thread, which alone writes it; the list only grows. Whoever adds them up
        # needs no lock: sums may lack what is being counted, and are exact once the threads ended.
        self._cells: list[TaskCell] = []

    @property
    def num_dropped(self) -> int:
        """The number of tasks whose op returned None."""
        return sum(cell.num_dropped for cell in self._cells)

    @property
    def num_tasks(self) -> int:
        """The number of tasks that ended, failures included."""
        return sum(cell.num_tasks for cell in self._cells)

    @property
    def num_failures(self) -> int:
        """The number of tasks that raised."""
        return self._budget.num_failures

    def new_cell(self) -> TaskCell:
        """Return a new cell for one thread."""
        cell = TaskCell()
        self._cells.append(cell)
        return cell

    def count_failure(self, error: Exception, number: int, item: Any) -> None:
        """Note a failing item on the user's exception and charge the budget."""
        add_note(error, self._stage, threading.current_thread().name, number, item)
        self._recorder.failed(self._stage, number, error)
        if self._budget.spend(error, self.num_tasks):
            self._end_run()

    def judge_epoch(self) -> None:
        """End the run after an empty epoch, if it was empty because every task failed."""
        if self._budget.nothing_succeeded(self.num_tasks):
            self._end_run()

    def judge_end(self) -> None:
        """Let the run fail if, after the stage's last task, too many have failed."""
        if self._budget.overdrawn_at_end(self.num_tasks):
            self._end_run()

    def _end_run(self) -> None:
        self._owner.fail(self._budget.message(self.num_tasks), self._budget.errors)
