"""Checks of users' hooks: when a pipeline is built, and when a hook is entered."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from .context_managers import NotAContextError, blocking
from .stats_queue import StatsQueue
from .task_hooks import TaskHook, TaskStatsHook

if TYPE_CHECKING:
    from contextlib import ExitStack


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
    if inspect.isgeneratorfunction(method):
        raise _lacking(hook, name, stage, "a generator", "contextmanager")
    if inspect.isasyncgenfunction(method):
        raise _lacking(hook, name, stage, "an async generator", "asynccontextmanager")
    if inspect.iscoroutinefunction(method):
        raise _lacking(hook, name, stage, "a coroutine", "asynccontextmanager")


def _lacking(hook: object, name: str, stage: str, made: str, decorator: str) -> TypeError:
    return BadHookError(
        f"stage {stage!r}: {type(hook).__name__}.{name} must return a context manager, and it "
        f"makes {made}. Decorate it with contextlib.{decorator}."
    )


def bad_hook(hook: object, name: str, stage: str, error: NotAContextError) -> BadHookError:
    """Return the error for a method whose result turned out to be no context manager."""
    return BadHookError(
        f"stage {stage!r}: {type(hook).__name__}.{name} {error}. Decorate it with "
        "contextlib.contextmanager or contextlib.asynccontextmanager."
    )


def enter_stage_hook(stack: ExitStack, hook: TaskHook, stage: str) -> None:
    """Enter ``hook.stage_hook()`` until the stack is closed. Raises: BadHookError."""
    try:
        context = blocking(hook.stage_hook())
    except NotAContextError as error:
        raise bad_hook(hook, "stage_hook", stage, error) from None
    stack.enter_context(context)


def enter_queue_hook(stack: ExitStack, queue: Any) -> None:
    """Enter ``queue.stage_hook()``, if its class has one of its own."""
    if isinstance(queue, StatsQueue) and type(queue).stage_hook is not StatsQueue.stage_hook:
        try:
            context = blocking(queue.stage_hook())
        except NotAContextError as error:
            raise bad_hook(queue, "stage_hook", queue.info.stage_name, error) from None
        stack.enter_context(context)
