"""The random generators: the process's (torch's, Python's and numpy's), those that user code keeps,
and those that samples or workers have in common."""

from __future__ import annotations

import dis
import functools
import random
import types
from contextlib import suppress
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..data.differences import path_of_difference
from ..data.rng.owned import OwnedGenerators, ids_of_the_process, set_state, state_digest, state_of
from ..data.workers.worker_info import acting_as_worker
from ..objects.copies import deep_copy
from ..objects.generator_states import GeneratorStates
from ..objects.kinds import GENERATORS
from ..objects.members import Unfinished, text_of, walk
from ..scopes import scope
from ._members import Scope, is_users, members_and_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..objects.members import Step


_MOST = 5_000


class UserCode:
    """The user's functions and classes that can be reached from some objects, by reading code."""

    def __init__(self, *roots: Any) -> None:
        self.classes: list[type] = []
        self.functions: list[types.FunctionType] = []
        self._names: dict[int, Scope] = {}
        with suppress(Unfinished):
            for _ in walk([("", root) for root in roots], self._next, _MOST):
                pass

    @property
    def scopes(self) -> list[Scope]:
        """The globals that the functions use, of each module."""
        return list(self._names.values())

    def _next(self, value: Any) -> Iterator[tuple[Step, Any]]:
        """Yield what a function, class or object leads to, and keep functions and classes."""
        return (("", each) for each in self._led_to(value))

    def _led_to(self, value: Any) -> list[Any]:
        if isinstance(value, functools._lru_cache_wrapper | staticmethod | classmethod):
            value = value.__wrapped__
        if isinstance(value, property):
            return [value.fget, value.fset]
        if isinstance(value, types.FunctionType):
            if not is_users(value):
                return []
            self.functions.append(value)
            return [*_held_by(value), *self._used_by(value)]
        if isinstance(value, type):
            if not is_users(value):
                return []
            self.classes.append(value)
            return [*vars(value).values(), *value.__bases__]
        return [type(value), *_held_by(value)]

    def _used_by(self, function: types.FunctionType) -> Iterator[Any]:
        """Yield the globals that a function names; keep those that hold data."""
        module = function.__globals__
        scope = self._names.setdefault(id(module), Scope(module, set()))
        for code in _nested(function.__code__):
            for step in dis.get_instructions(code):
                if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
                    name = str(step.argval)
                    value = module.get(name)
                    if isinstance(value, types.ModuleType):
                        yield from _named_in(value, code.co_names)
                    elif not isinstance(value, type | types.FunctionType):
                        scope.names.add(name)
                    yield value


def _held_by(value: Any) -> list[Any]:
    return [each for _, each in members_and_code(value)]


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _named_in(module: types.ModuleType, names: tuple[str, ...]) -> Iterator[Any]:
    """Yield what a user's module has under some names."""
    for name in names:
        value = vars(module).get(name)
        if isinstance(value, type | types.FunctionType):
            yield value


def changed_since(before: GeneratorStates) -> set[str]:
    """Name the generators, of those that a dataset could draw from unseen, whose state differs."""
    now = GeneratorStates.now()
    pairs = {"random": (before.python, now.python), "numpy.random": (before.numpy, now.numpy)}
    return {name for name, (a, b) in pairs.items() if path_of_difference(a, b) is not None}


def seed_all(seed: int, run: int) -> None:
    """Seed torch's generator with ``seed``, the others with both numbers."""
    torch.manual_seed(seed)
    random.seed(f"{seed} {run}")
    np.random.seed((seed + run) & 0xFFFFFFFF)


_MOST_OBJECTS = 5_000
_MOST_ITEMS = 16


class OwnGenerators:
    """The generators that a dataset and the code it calls lead to, by the expression for each:
    attributes, closure variables, default arguments, class attributes and globals.

    ``without``: the ids of those to leave out, besides the process's own.
    """

    def __init__(self, *roots: Any, without: frozenset[int] = frozenset()) -> None:
        code = UserCode(*roots)
        called: list[tuple[str, Any]] = [(each.__qualname__, each) for each in code.functions]
        called += [(each.__qualname__, each) for each in code.classes]
        called += [(scope.name, scope) for scope in code.scopes]
        named: list[tuple[str, Any]] = list(zip(("dataset", "collate_fn"), roots, strict=False))
        excepted = ids_of_the_process() | without
        self._found: dict[str, Any] = {}
        # The dataset first: what it leads to is named by an expression from there.
        for roots_by_name in (named, called):
            with suppress(Unfinished):
                for path, value in walk(roots_by_name, members_and_code, _MOST_OBJECTS):
                    if isinstance(value, GENERATORS) and id(value) not in excepted:
                        excepted |= {id(value)}
                        self._found[text_of(path)] = value

    def digests(self) -> dict[str, int]:
        """Return a number for the state of each."""
        return {path: state_digest(generator) for path, generator in self._found.items()}

    def changed(self, before: dict[str, int]) -> list[str]:
        """Name those whose state differs from ``before``."""
        return [
            f"{path} (another state of a {type(self._found[path]).__name__})"
            for path, digest in self.digests().items()
            if digest != before[path]
        ]

    @scope
    def kept(self) -> Iterator[None]:
        """Restore all of them after the block."""
        states = {path: state_of(generator) for path, generator in self._found.items()}
        try:
            yield
        finally:
            for path, state in states.items():
                set_state(self._found[path], state)


def alike_on_workers(dataset: Any, *, seeds_transforms: bool) -> list[str]:
    """Name the generators from which two workers of an iterable dataset draw the same numbers for
    their items: each worker has a copy in the same state.

    Draws for the first item do not count, nor those for less than half of the items: workers that
    shuffle a list in the same way, before each takes its share, must draw alike.

    seeds_transforms: whether the loader seeds the generators of transforms for every item.
    """
    moved: list[dict[str, set[int]]] = []
    for number in range(2):
        try:
            own = deep_copy(dataset)
        except Exception:  # what cannot be copied cannot be looked at twice
            return []
        seeded = OwnedGenerators(own).found if seeds_transforms else ()
        generators = OwnGenerators(own, without=frozenset(id(each) for _, each in seeded))
        # A generator outside the copy is the same object for both: each begins with it as it is.
        with generators.kept(), acting_as_worker(number, 2, 0, own):
            states = [generators.digests() for _ in islice(iter(own), _MOST_ITEMS)]
        moved.append(_drawn_for_most(states))
    first, second = moved
    return [path for path in first if first[path] & second.get(path, set())]


def _drawn_for_most(states: list[dict[str, int]]) -> dict[str, set[int]]:
    """Return the states after the later items, of the generators that most of them draw from."""
    steps = list(pairwise(states))
    drawn = {
        path: [after[path] for before, after in steps if before[path] != after[path]]
        for path in (states[0] if states else ())
    }
    return {path: set(each) for path, each in drawn.items() if 2 * len(each) > len(steps)}
