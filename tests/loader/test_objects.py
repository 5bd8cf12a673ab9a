"""The walker that every look at a user's objects is made with."""

from __future__ import annotations

import collections
import functools
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from spdl_torch.objects.kinds import is_immutable
from spdl_torch.objects.members import (
    Unfinished,
    members,
    reachable,
    text_of,
    walk,
)


class Plain:
    """Has a dictionary."""


class Slotted:
    """Has none; one of its names is private."""

    __slots__ = ("__private", "first", "second")

    def private(self, value):
        """Set the private one."""
        self.__private = value


class Both(Slotted):
    """Has slots and a dictionary."""

    __slots__ = ("__dict__", "third")


@dataclass(frozen=True)
class Frozen:
    """A dataclass."""

    part: object


class Steps(list):
    """A list with attributes."""


class Names(dict):
    """A dictionary with attributes."""


class Calls:
    """An object with a method."""

    def __init__(self, part):
        self.part = part

    def method(self):
        """Do nothing."""


def closure(part, other):
    """A function with a variable around it and a default argument."""

    def call(default=other):
        return part, default

    return call


def objects(values, shape):
    """An array of objects."""
    array = np.empty(len(values), dtype=object)
    for number, each in enumerate(values):
        array[number] = each
    return array.reshape(shape)


LEAVES = (1, "text", None, b"", 2.5, np.arange(2), torch.zeros(1), torch.float32, len, Plain, types)
# Filled once all are there, so that cycles arise.
EMPTY = (list, dict, Plain, Slotted, Both, Steps, Names, collections.deque)
# Made of objects that are there.
MADE = {
    "tuple": lambda a, b: (a, b),
    "partial": lambda a, b: functools.partial(max, a, key=b),
    "method": lambda a, b: Calls(a).method,
    "frozen": lambda a, b: Frozen(a),
    "row": lambda a, b: objects([a, b], (2,)),
    "table": lambda a, b: objects([a, b], (2, 1)),
    "space": lambda a, b: types.SimpleNamespace(a=a, b=b),
    "ordered": lambda a, b: collections.OrderedDict(a=a, b=b),
    "set": lambda a, b: {Calls, len, types},
}


def fill(empty, values):
    """Put values where an object keeps them."""
    if isinstance(empty, list | collections.deque):
        empty.extend(values)
    if isinstance(empty, dict):
        empty.update(zip(("a", "b.c", 3, (4, "[5]")), values, strict=False))
    if isinstance(empty, Slotted):
        empty.private(values[0])
        empty.second = values[-1]
    if isinstance(empty, Plain | Steps | Names | Both):
        empty.kept, empty.last = values[0], values[-1]


@st.composite
def graphs(draw):
    """Objects that refer to each other; those in the end lead to the others."""
    kinds = draw(
        st.lists(st.sampled_from([*EMPTY, *MADE, *range(len(LEAVES))]), min_size=2, max_size=12)
    )
    found = [draw(st.sampled_from(LEAVES))]
    for kind in kinds:
        if isinstance(kind, int):
            found.append(LEAVES[kind])
        elif isinstance(kind, str):
            found.append(MADE[kind](*(draw(st.sampled_from(found)) for _ in range(2))))
        else:
            found.append(kind())
    for each in found:
        if type(each) in EMPTY:
            fill(each, draw(st.lists(st.sampled_from(found), min_size=1, max_size=4)))
    return found


def walked(root, **options):
    """All that a root leads to, by its text."""
    found = walk([("root", root)], functools.partial(members, **options), 10_000, values=True)
    return [(text_of(way), value) for way, value in found]


@given(graphs())
def test_text_of_a_way_is_the_expression_that_leads_there(graph):
    """Through attributes, slots, containers, keys, partials, methods, arrays of objects."""
    root = graph[-1]
    for text, value in walked(root):
        assert eval(text, {"root": root}) is value, text  # what a user would type


@given(graphs())
def test_each_object_comes_once_and_before_what_lies_deeper(graph):
    """Shared ones and cycles included."""
    root = graph[-1]
    found = list(walk([("root", root)], members, 10_000))
    assert len({id(value) for _, value in found}) == len(found)
    depths = [depth for (_, _, depth), _ in found]
    assert depths == sorted(depths)


@given(graphs())
def test_nothing_is_missed_that_the_collector_sees(graph):
    """Python's garbage collector knows all references; the quick look takes them from there."""
    root = graph[-1]
    named = {id(value): value for _, value in walked(root, code=True)}
    inside = {id(value) for value in reachable([root], 10_000)}
    placed = {id(value): value for value in graph}
    for number, value in placed.items():
        is_entered = not (is_immutable(type(value)) or isinstance(value, types.FunctionType))
        assert number not in inside or number in named
        assert number not in named or number in inside or not is_entered


@given(graphs(), st.integers(1, 20))
def test_bound_leaves_out_the_deepest(graph, most):
    """A walk that ends early has given whole levels, and says that it is unfinished."""
    root = [("root", graph[-1])]
    whole, found = list(walk(root, members, 10_000)), []
    try:
        found.extend(walk(root, members, most))
    except Unfinished:
        assert most <= len(found) <= len(whole)
    else:
        assert len(found) == len(whole)
    assert [id(value) for _, value in found] == [id(value) for _, value in whole[: len(found)]]
    left = whole[len(found) :]
    assert all(way[2] > found[-1][0][2] for way, _ in left)


def test_functions_are_entered_if_asked_to():
    """The variables around them and their defaults, in words; a method's function."""
    part, other = Plain(), Plain()
    call = closure(part, other)
    assert walked(call) == [("root", call)]
    assert walked(call, code=True) == [
        ("root", call),
        ("part, a variable around root", part),
        ("default, a default argument of root", other),
    ]
    method = Calls(part).method
    texts = [text for text, _ in walked(method)]
    assert texts == ["root", "root.__self__", "root.__func__", "root.__self__.part"]


def test_long_container_is_not_entered():
    """Its attributes are."""
    steps = Steps([1, 2, 3])
    steps.kept = 4
    assert [value for _, value in members(steps, most=3)] == [1, 2, 3, 4]
    assert [value for _, value in members(steps, most=2)] == [4]


class Hostile(list):
    """Fails whenever anything of its own is called."""

    def fail(self, *_):
        """Raise."""
        raise AssertionError("user code ran")

    __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = __repr__ = __getattr__ = fail
    __hash__ = None  # type: ignore[assignment]


class HostileNames(dict):
    """The same of a dictionary."""

    fail = Hostile.fail
    __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = __repr__ = __getattr__ = fail
    items = values = keys = fail


@pytest.mark.parametrize("kind", [Hostile, HostileNames])
def test_no_method_of_an_object_is_called(kind):
    """Not even to ask for its length."""
    part, other = Plain(), Plain()
    value = kind([part]) if kind is Hostile else kind(a=part)
    vars(value)["kept"] = other
    found = [each for _, each in members(value, most=9)]
    assert any(each is part for each in found)
    assert any(each is other for each in found)
    assert any(each is part for each in reachable([value], 99, 9))
