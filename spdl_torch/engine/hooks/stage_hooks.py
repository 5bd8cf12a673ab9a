"""The hooks of one stage, from its first thread to its last."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from .checks import bad_hook, checked_hooks, enter_queue_hook, enter_stage_hook
from .context_managers import NotAContextError
from .task_hooks import TaskStatsHook

if TYPE_CHECKING:
    from collections.abc import Callable

    from .context_managers import LazyRunner
    from .stats_queue import StatsQueue
    from .task_hooks import TaskCell, TaskHook

R = TypeVar("R")


class StageHooks:
    """The hooks that a factory made for a stage.

    Raises: TypeError: no list of hooks, or a method that lacks its decorator.
    """

    def __init__(self, hooks: list[TaskHook], stage: str) -> None:
        self._stage = stage
        self._hooks = hooks = checked_hooks(hooks, stage)
        self.recorders = [hook for hook in hooks if isinstance(hook, TaskStatsHook)]
        # Hooks without code of the user's are not entered: where task_hook is not overridden,
        # workers write into the recorder's cells directly.
        self._sharing = [hook for hook in hooks if _is_plain_recorder(hook)]
        self.of_tasks = [hook for hook in hooks if not _is_plain_recorder(hook)]
        """Those that every task enters."""
        self._entered = ExitStack()

    def enter(self, outlet: StatsQueue) -> None:
        """Enter the hooks of the queue and of the stage, and start the clocks."""
        enter_queue_hook(self._entered, outlet)
        for hook in self._hooks:
            if isinstance(hook, TaskStatsHook):
                hook.start()
            enter_stage_hook(self._entered, hook, self._stage)

    def leave(self) -> None:
        """Leave what was entered. Raises: what a hook raises."""
        self._entered.close()

    def stop_clocks(self) -> None:
        """Stop the clocks of the statistics."""
        for recorder in self.recorders:
            recorder.end()

    def share(self, cell: TaskCell) -> None:
        """Let the recorders count what a thread writes into its cell."""
        for recorder in self._sharing:
            recorder.share(cell)

    def around(self, call: Callable[[Any], R], runner: LazyRunner) -> Callable[[Any], R]:
        """Return ``call`` inside the task hooks."""
        hooks = self.of_tasks
        if not hooks:
            return call

        def call_hooked(item: Any) -> R:
            with ExitStack() as stack:
                for hook in hooks:
                    try:
                        context = runner.blocking(hook.task_hook(item))
                    except NotAContextError as error:
                        raise bad_hook(hook, "task_hook", self._stage, error) from None
                    stack.enter_context(context)
                return call(item)
            raise RuntimeError("a task hook must not swallow the exception of the op.")

        return call_hooked


def _is_plain_recorder(hook: TaskHook) -> TypeGuard[TaskStatsHook]:
    return isinstance(hook, TaskStatsHook) and type(hook).task_hook is TaskStatsHook.task_hook
