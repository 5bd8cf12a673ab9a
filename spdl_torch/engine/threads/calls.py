"""Callables that happen once, or that do not keep alive what they are for."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Once:
    """A call that happens once, however often it is made."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


def weakly(method: Any) -> Callable[..., None]:
    """Return the bound method without a reference to its object; without that, it does nothing.

    For threads and finalizers, which live until they have run: a reference of theirs to a run or a
    pool would keep alive for ever all that its ops or dataset refer to, perhaps the very object
    whose end is waited for.
    """
    # Not a WeakMethod, which has callbacks that print errors when the interpreter finalises.
    owner, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any) -> None:
        alive = owner()
        if alive is not None:
            function(alive, *args)

    return call
