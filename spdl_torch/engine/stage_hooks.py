"""The hooks of one stage, from its first thread to its last: how users' methods are checked when a
pipeline is built, and entered when it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from .hooks import TaskHook, TaskStatsHook
from .loop import NotAContextError
from .queues import StatsQueue

if TYPE_CHECKING:
    from .counters import TaskCell
    from .loop import LazyRunner, LoopThread

R = TypeVar("R")


class BadHookError(TypeError):
    """Raised where a hook's method returns no context manager. No item is to blame, so it ends the
    pipeline.
    """


def checked_hooks(hooks: Any, stage: str) -> list[TaskHook]:
    """Return the hooks that a factory made for a stage.

    Raises: TypeError: no list of hooks, or a method that lacks its decorator.
    """
    if not isinstance(hooks, list | tuple):
        raise TypeError(
            f"build: task_hook_factory must return a list of hooks for stage {stage!r}, got "
            f"{type(hooks).__name__}. Return [] for none."
        )
    for hook in hooks:
        if type(hook) is not TaskStatsHook:
            for name in ("stage_hook", "task_hook"):
                _check_method(hook, name, stage)
    return list(hooks)


def _check_method(hook: Any, name: str, stage: str) -> None:
    method = getattr(hook, name, None)
    if method is None:
        raise TypeError(
            f"build: a hook of stage {stage!r}, a {type(hook).__name__}, has no {name}. Derive it "
            "from TaskHook."
        )
    for is_made, made, decorator in (
        (inspect.isgeneratorfunction, "a generator", "contextmanager"),
        (inspect.isasyncgenfunction, "an async generator", "asynccontextmanager"),
        (inspect.iscoroutinefunction, "a coroutine", "asynccontextmanager"),
    ):
        if is_made(method):
            raise BadHookError(
                f"stage {stage!r}: {type(hook).__name__}.{name} must return a context manager, and "
                f"it makes {made}. Decorate it with contextlib.{decorator}."
            )


def bad_hook(hook: object, name: str, stage: str, error: NotAContextError) -> BadHookError:
    """Return the error for a method whose result turned out to be no context manager."""
    return BadHookError(
        f"stage {stage!r}: {type(hook).__name__}.{name} {error}. Decorate it with "
        "contextlib.contextmanager or contextlib.asynccontextmanager."
    )


def enter_queue_hooks(stack: ExitStack, queues: Sequence[StatsQueue], loop: LoopThread) -> None:
    """Enter the ``stage_hook()`` of each queue whose class has one of its own, until the stack is
    closed; they are left in the same order."""
    entered = []
    try:
        for queue in queues:
            if type(queue).stage_hook is not StatsQueue.stage_hook:
                context = _stage_hook(queue, queue.info.stage_name, loop)
                context.__enter__()
                entered.append(context)
    finally:
        for context in reversed(entered):
            stack.push(context)


def _stage_hook(
    owner: TaskHook | StatsQueue, stage: str, loop: LoopThread
) -> AbstractContextManager[Any]:
    """Return ``owner.stage_hook()``, on the loop if it is asynchronous. Raises: BadHookError."""
    context: Any = owner.stage_hook()
    if isinstance(context, AbstractContextManager):
        return context
    if isinstance(context, AbstractAsyncContextManager):
        return loop.entered(context)
    raise bad_hook(owner, "stage_hook", stage, NotAContextError.of(context))


class StageHooks:
    """The hooks that a factory made for a stage.

    Raises: TypeError: no list of hooks, or a method that lacks its decorator.
    """

    def __init__(self, hooks: list[TaskHook], stage: str, loop: LoopThread) -> None:
        self._stage = stage
        self._loop = loop
        self._hooks = hooks = checked_hooks(hooks, stage)
        self.recorders = [hook for hook in hooks if isinstance(hook, TaskStatsHook)]
        # Hooks without code of the user's are not entered: where task_hook is not overridden,
        # workers write into the recorder's cells directly.
        self._sharing = [hook for hook in hooks if _is_plain_recorder(hook)]
        self.of_tasks = [hook for hook in hooks if not _is_plain_recorder(hook)]
        """Those that every task enters."""
        self._entered = ExitStack()

    def enter(self, queues: tuple[StatsQueue, ...]) -> None:
        """Enter the hooks of the queues and of the stage, and start the clocks."""
        enter_queue_hooks(self._entered, queues, self._loop)
        for hook in self._hooks:
            if isinstance(hook, TaskStatsHook):
                hook.start()
            self._entered.enter_context(_stage_hook(hook, self._stage, self._loop))

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
