"""The objects that the workers' copies of a dataset share, and which of them have changed."""

from __future__ import annotations

import collections
import threading
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..data.workers.dataset_copies import own_copy, own_function
from ..objects.kinds import GENERATORS, is_immutable, is_value
from ..objects.members import Unfinished, text_of, walk
from ._members import members_and_code, state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..objects.members import Step

_MOST_OBJECTS = 5_000
_SMALL = 16  # members of a container that may be a stack or a mailbox
_HARMLESS = (
    *GENERATORS,  # the loader seeds them for each sample
    *(types.FunctionType, types.MethodType),
    *(type(threading.Lock()), type(threading.RLock()), threading.local),
)


class SharedObjects:
    """The objects that two workers' copies both lead to, in their state when this is made."""

    def __init__(self, dataset: Any, functions: Sequence[Callable[..., Any] | None]) -> None:
        self._found: dict[str, Any] = {}
        self._changed: dict[str, None] = {}
        turn = threading.Lock()
        first, second = own_copy(dataset, turn), own_copy(dataset, turn)
        pairs = [("dataset", first, second)]
        for name, function in zip(("collate_fn", "worker_init_fn"), functions, strict=True):
            if function is not None:
                own = [own_function(function, dataset, each, turn) for each in (first, second)]
                pairs.append((name, own[0], own[1]))
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

    def written(self) -> list[str]:
        """Name the tensors and arrays whose contents had changed at any look."""
        return [name for name in self._changed if name.startswith("the contents of ")]

    def suspects(self) -> list[str]:
        """Name, with their types, the shared objects that cannot be looked into, and small
        containers, which may be unchanged again by the time they are looked at.
        """
        return [
            f"{path} ({type(value).__name__})"
            for path, value in self._found.items()
            if (self._states[path] is None and not _is_harmless(value))
            or (isinstance(value, list | dict | set | collections.deque) and len(value) <= _SMALL)
        ]

    def _walk(self, pairs: list[tuple[str, Any, Any]]) -> None:
        """Go on from two copies to what they hold."""
        known: dict[tuple[int, int], tuple[Any, Any]] = {}

        def paired(first: Any, second: Any) -> tuple[Any, Any]:
            """Return the one tuple of two objects, by which the walk knows them again."""
            return known.setdefault((id(first), id(second)), (first, second))

        def members_of_both(pair: tuple[Any, Any]) -> Iterator[tuple[Step, Any]]:
            theirs = dict(members_and_code(pair[1]))
            for step, each in members_and_code(pair[0]):
                if step in theirs and not is_value(type(each)):  # of a pair, walk() cannot know
                    yield step, paired(each, theirs[step])

        roots = [(name, paired(first, second)) for name, first, second in pairs]
        with suppress(Unfinished):
            for path, (first, second) in walk(roots, members_of_both, _MOST_OBJECTS):
                if first is second and not isinstance(first, GENERATORS):
                    self._found.setdefault(text_of(path), first)


def _is_harmless(value: Any) -> bool:
    return is_immutable(type(value)) or isinstance(value, _HARMLESS)


_NOTHING = object()


def _differs(before: dict[str, Any], after: dict[str, Any], key: str) -> bool:
    return not _same(before.get(key, _NOTHING), after.get(key, _NOTHING))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return a is b or (len(a) == len(b) and all(map(_same, a, b)))
    return a is b or (type(a) is type(b) and is_value(type(a)) and a == b)
