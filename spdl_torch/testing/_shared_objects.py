"""The objects that the workers' copies of a dataset share, and which of them have changed."""

from __future__ import annotations

import collections
import threading
import types
from typing import TYPE_CHECKING, Any

from ..data.rng.owned import GENERATOR_KINDS
from ..data.workers.dataset_copies import own_copy, own_function
from ._members import PLAIN, members, state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._user_code import UserCode

__all__ = ["SharedObjects"]

_MOST_OBJECTS = 5_000
_SMALL = 16  # members of a container that may be a stack or a mailbox
_HARMLESS = (
    *PLAIN,
    *GENERATOR_KINDS,  # the loader seeds them for each sample
    *(type, types.ModuleType, types.MappingProxyType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(type(threading.Lock()), type(threading.RLock()), threading.local),
)


class SharedObjects:
    """The objects that two workers' copies both lead to, in their state when this is made."""

    def __init__(
        self, dataset: Any, functions: Sequence[Callable[..., Any] | None], code: UserCode
    ) -> None:
        self._found: dict[str, Any] = {}
        self._changed: dict[str, None] = {}
        turn = threading.Lock()
        first, second = own_copy(dataset, turn), own_copy(dataset, turn)
        pairs = [("dataset", first, second)]
        for name, function in zip(("collate_fn", "worker_init_fn"), functions, strict=True):
            if function is not None:
                own = [own_function(function, dataset, each, turn) for each in (first, second)]
                pairs.append((name, own[0], own[1]))
        pairs += [(each.__qualname__, each, each) for each in code.classes]
        pairs += [(each.__qualname__, each, each) for each in code.functions]
        pairs += [(scope.name, scope, scope) for scope in code.scopes]
        self._walk(pairs)
        self._states = {path: state(path, value) for path, value in self._found.items()}

    def look(self) -> None:
        """Note what differs now. Look often: a shuffled list may be in order again later."""
        for path, value in self._found.items():
            before, after = self._states[path], state(path, value)
            if before is not None and after is not None:
                keys = dict.fromkeys([*before, *after])
                self._changed.update(dict.fromkeys(k for k in keys if _differs(before, after, k)))

    def changed(self) -> list[str]:
        """Name what had changed at any look."""
        return list(self._changed)

    def suspects(self) -> list[str]:
        """Name, with their types, the shared objects that cannot be looked into, and small
        containers, which may be unchanged again by the time they are looked at.
        """
        return [
            f"{path} ({type(value).__name__})"
            for path, value in self._found.items()
            if (self._states[path] is None and not isinstance(value, _HARMLESS))
            or (isinstance(value, list | dict | set | collections.deque) and len(value) <= _SMALL)
        ]

    def _walk(self, pairs: list[tuple[str, Any, Any]]) -> None:
        """Go on from two copies to what they hold, breadth first."""
        seen: dict[tuple[int, int], Any] = {}  # keeps them alive: another may get a freed id
        while pairs and len(seen) < _MOST_OBJECTS:
            level, pairs = pairs, []
            for path, first, second in level:
                if (id(first), id(second)) in seen or isinstance(first, PLAIN):
                    continue
                seen[id(first), id(second)] = (first, second)
                if first is second and not isinstance(first, GENERATOR_KINDS):
                    self._found.setdefault(path, first)
                theirs = members(path, second)
                pairs += [
                    (name, each, theirs[name])
                    for name, each in members(path, first).items()
                    if name in theirs
                ]


_NOTHING = object()


def _differs(before: dict[str, Any], after: dict[str, Any], key: str) -> bool:
    return not _same(before.get(key, _NOTHING), after.get(key, _NOTHING))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return a is b or (len(a) == len(b) and all(map(_same, a, b)))
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)
