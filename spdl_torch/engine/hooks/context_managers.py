"""Context managers of either kind, plain or asynchronous, entered by a worker thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

AnyContext = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]


class NotAContextError(TypeError):
    """Raised for an object that neither ``with`` nor ``async with`` can enter."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return the error for an object that is not a context manager."""
        if hasattr(given, "close"):
            given.close()  # a coroutine: no warning that it was never awaited
        return cls(f"must return a context manager, got {type(given).__name__}")


class LazyRunner:
    """An event loop for one thread, created only if an asynchronous context is entered."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()

    def blocking(self, context: AnyContext) -> AbstractContextManager[Any]:
        """Return ``context`` as a plain context manager."""
        if isinstance(context, AbstractContextManager):
            return context
        return _Blocking(_checked(context), self)

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine to its end on this thread's loop."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        if not _is_in_a_loop():
            return self._runner.run(coroutine)
        # A thread can run one loop at a time, and a notebook's cells already run inside one.
        with ThreadPoolExecutor(1, "spdl-hook") as elsewhere:
            return elsewhere.submit(self._runner.run, coroutine).result()


def blocking(context: AnyContext) -> AbstractContextManager[Any]:
    """Return ``context`` as a plain context manager, with a loop of its own while it is open."""
    if isinstance(context, AbstractContextManager):
        return context
    return _Blocking(_checked(context), None)


def _checked(context: Any) -> AbstractAsyncContextManager[Any]:
    if isinstance(context, AbstractAsyncContextManager):
        return context
    raise NotAContextError.of(context)


class _Blocking(AbstractContextManager[Any]):
    def __init__(
        self, context: AbstractAsyncContextManager[Any], runner: LazyRunner | None
    ) -> None:
        self._context = context
        self._own = LazyRunner() if runner is None else None
        self._runner = runner or self._own

    def __enter__(self) -> Any:
        assert self._runner is not None, "guaranteed by __init__"
        try:
            return self._runner.run(_enter(self._context))
        except BaseException:  # no __exit__ follows
            self._close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._runner is not None, "guaranteed by __init__"
        try:
            swallow: bool | None = self._runner.run(_exit(self._context, kind, error, traceback))
            return swallow
        finally:
            self._close()

    def _close(self) -> None:
        if self._own is not None:
            self._own.__exit__()


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _enter(context: AbstractAsyncContextManager[Any]) -> Any:
    return await context.__aenter__()


async def _exit(context: AbstractAsyncContextManager[Any], *details: Any) -> bool | None:
    return await context.__aexit__(*details)
