"""The walker that every look at a user's objects is made with."""

from __future__ import annotations

import collections
import functools
import types

import numpy as np
import pytest
import torch

from spdl_torch.objects.members import Unfinished, members, reachable, walk


class Plain:
    """Has a dictionary."""

    def __init__(self, part=None):
        self.part = part

    def method(self):
        """Do nothing."""


class Slotted:
    """Has none; one of its names is private."""

    __slots__ = ("__private", "first", "second")

    def __init__(self, part):
        self.__private = self.second = part


class Both(Slotted):
    """Has slots and a dictionary."""

    __slots__ = ("__dict__", "third")

    def __init__(self, part):
        super().__init__(None)
        self.kept = part


class Steps(list):
    """A list with attributes."""


class Names(dict):
    """A dictionary with attributes."""


def with_attribute(value, part):
    """An object, with one."""
    value.kept = part
    return value


def objects(part, shape):
    """An array of objects."""
    array = np.array([len, None], dtype=object)
    array[1] = part
    return array.reshape(shape)


HOLDERS = {
    "list": lambda part: [1, part, "text", None, torch.zeros(1)],
    "deque": lambda part: collections.deque([np.arange(2), part]),
    "dict": lambda part: {"b.c": 2, (4, "[5]"): part},
    "tuple": lambda part: (part, types),
    "partial": lambda part: functools.partial(max, part),
    "keyword": lambda part: functools.partial(max, 1, key=part),
    "method": lambda part: Plain(part).method,
    "plain": Plain,
    "slotted": Slotted,
    "both": Both,
    "steps": lambda part: Steps([part]),
    "attribute of a list": lambda part: with_attribute(Steps([1]), part),
    "names": lambda part: Names(a=part),
    "attribute of a dict": lambda part: with_attribute(Names(), part),
    "row": lambda part: objects(part, (2,)),
    "table": lambda part: objects(part, (2, 1)),
    "space": lambda part: types.SimpleNamespace(a=part),
    "ordered": lambda part: collections.OrderedDict(a=part),
}


@pytest.mark.parametrize("outer", HOLDERS)
def test_everything_is_found_once(outer):
    """Through attributes, slots, containers, keys, partials, methods, arrays of objects; cycles
    included. The quick look finds it, too."""
    for inner in HOLDERS.values():
        part = {Plain}
        ring = [part]
        ring += [ring, part]
        root = HOLDERS[outer](inner(ring))
        found = list(walk([root], members, 10_000, values=True))
        assert len(set(map(id, found))) == len(found)
        for place in (ring, part):
            assert any(each is place for each in found)
            assert any(each is place for each in reachable([root], 10_000))
        assert any(each is Plain for each in found)


def test_bound_leaves_out_the_deepest():
    """A walk that ends early has given whole levels, and says that it is unfinished."""
    root = [[Plain(), [1]], [Plain([2]), Plain()]]
    level, ends = [root], [0]
    while level:
        ends.append(ends[-1] + len(level))
        held = [each for value in level for each in members(value)]
        level = [each for each in held if not isinstance(each, int | None)]
    whole = list(walk([root], members, 10_000))
    for most in range(1, 12):
        found = []
        try:
            found.extend(walk([root], members, most))
        except Unfinished:
            assert most <= len(found) < len(whole)
        else:
            assert len(found) == len(whole)
        assert [*map(id, found)] == [*map(id, whole[: len(found)])]
        assert len(found) in ends


def test_long_container_is_not_entered():
    """Its attributes are."""
    steps = Steps([1, 2, 3])
    steps.kept = 4
    assert [*members(steps, most=3)] == [1, 2, 3, 4]
    assert [*members(steps, most=2)] == [4]


def fail(*_):
    raise AssertionError("user code ran")


ASKED = ("len", "iter", "getitem", "contains", "eq", "repr", "getattr")
METHODS = {**{f"__{name}__": fail for name in ASKED}, "__hash__": None}
Hostile = type("Hostile", (list,), METHODS)
HostileNames = type(
    "HostileNames", (dict,), {**METHODS, **dict.fromkeys(("items", "keys", "values"), fail)}
)


@pytest.mark.parametrize("kind", [Hostile, HostileNames])
def test_no_method_of_an_object_is_called(kind):
    """Not even to ask for its length."""
    part, other = Plain(), Plain()
    value = kind([part]) if kind is Hostile else kind(a=part)
    vars(value)["kept"] = other
    found = list(members(value, most=9))
    assert any(each is part for each in found)
    assert any(each is other for each in found)
    assert any(each is part for each in reachable([value], 99, 9))
