"""Batches as trees: what is a leaf, and which classes and objects stay."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from spdl_torch.io._transfer.tree import map_leaves

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Plain:
    x: Any
    name: str = "plain"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    late: Any = field(init=False)

    def __post_init__(self):
        assert self.x is not None
        object.__setattr__(self, "late", [self.x])


class Tagged(UserDict):
    """A mapping with more than its items, as transformers' ``BatchEncoding`` is."""

    tag = None

    def to(self, device):
        raise AssertionError("mappings are walked")


def moved(leaf):
    """A leaf that is distinct from every other."""
    return ("moved", leaf)


T = torch.zeros(2)
M = ("moved", T)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (T, M),
        ([T, 1, "a"], [M, 1, "a"]),
        ((T, (T,)), (M, (M,))),
        ({"x": T, "n": {"y": T}}, {"x": M, "n": {"y": M}}),
        (Pair(T, "y"), Pair(M, "y")),
        (OrderedDict(b=T, a=1), OrderedDict(b=M, a=1)),
        (defaultdict(list, x=T), defaultdict(list, x=M)),
        (MappingProxyType({"x": T}), MappingProxyType({"x": M})),
        (ChainMap({"x": T}), ChainMap({"x": M})),
        (deque([T, 1], maxlen=2), deque([M, 1], maxlen=2)),
        (Plain(T), Plain(M)),
        ([Plain({"k": (T,)})], [Plain({"k": (M,)})]),
    ],
)
def test_leaves_are_replaced_in_containers_of_any_kind(batch, expected):
    """The class, the order and what is not a tensor stay."""
    result = map_leaves(batch, moved)
    assert type(result) is type(expected)
    assert repr(result) == repr(expected)


def test_original_is_untouched_when_leaves_are_replaced():
    """The batch that was given may still be in use."""
    inner = [T]
    batch = {"x": inner, "p": Plain(T), "d": defaultdict(list, x=T)}
    result = map_leaves(batch, moved)
    assert inner == [T]
    assert batch["p"].x is T
    assert result["d"].default_factory is list


def test_frozen_dataclass_keeps_its_fields_when_they_have_no_argument():
    """__post_init__ is not run again, and slots and init=False fields come along."""
    result = map_leaves(Frozen(T), moved)
    assert type(result) is Frozen
    assert (result.x, result.late) == (M, [M])


def test_mapping_keeps_its_attributes_when_it_has_a_method_to():
    """As torch's pin_memory does; its values go the quick way instead of by its own method."""
    batch = Tagged(x=T)
    batch.tag = "kept"
    result = map_leaves(batch, moved)
    assert (type(result), result.tag, result["x"]) == (Tagged, "kept", M)
    assert batch["x"] is T


def test_object_is_a_leaf_when_it_moves_itself():
    """PackedSequence is a named tuple of which one member must stay on the CPU."""
    packed = pack_sequence([T, T])
    assert isinstance(packed, PackedSequence)
    assert map_leaves([packed], moved) == [("moved", packed)]


@pytest.mark.parametrize(
    "batch",
    [
        *(None, 3, 2.5, True, "text", b"bytes", range(3), torch.float32, torch.Tensor, Plain),
        *(["a", ("b",), {"c": None}], np.zeros(3), {1, 2}, object(), Plain("x"), Pair(1, 2)),
    ],
)
def test_batch_is_the_same_object_when_there_is_no_tensor(batch):
    """Nothing is copied for nothing, and classes are not taken for what they make."""
    assert map_leaves(batch, moved) is batch


class OnlyItems(tuple):
    """A sequence that cannot be made from a list."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def test_sequence_becomes_a_list_when_its_class_cannot_be_made():
    """As torch's pin_memory does."""
    assert map_leaves(OnlyItems(T, 1), moved) == [M, 1]
