"""``default_collate`` collates what torch collates, in every seat: torch's loader is the oracle.
Errors in collating name what was collated, and the odd sample."""

import collections
import multiprocessing
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.datasets import Divided, Made
from support.loaders import epoch_of, torch_loader
from support.seats import FORKED, NONE, THREADS, in_every_seat, in_seats
from torch.utils.data._utils.collate import default_collate_fn_map

from spdl_torch import DataLoader

# torch and numpy warn of half of these kinds of samples, wherever they are made.
pytestmark = pytest.mark.filterwarnings("ignore")

LARGE = 20_000
"""Entries of a tensor that a worker process writes straight into shared memory."""


class Tagged(torch.Tensor):
    """A tensor of a user's class."""


class Names(dict):
    """A dictionary of a user's class."""


class Fixed(collections.abc.Mapping):
    """A mapping that cannot be written, and is built from pairs."""

    def __init__(self, pairs):
        self.pairs = dict(pairs)

    def __getitem__(self, name):
        return self.pairs[name]

    def __iter__(self):
        return iter(self.pairs)

    def __len__(self):
        return len(self.pairs)


class Box(list):
    """A list of a user's class."""


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    x: Any


DTYPES = (
    *("u1", "i2", "i4", "i8", "u2", "f2", "f4", "f8", "c8"),
    *("?", ">i4", "U3", "S3", "O", "M8[s]"),
)
LEAVES = {
    **{f"array {name}": lambda n, name=name: np.array([0, n]).astype(name) for name in DTYPES},
    "array 0-d": lambda n: np.array(float(n)),
    "array large": lambda n: np.full(LARGE, n, np.float32),
    "array reversed": lambda n: np.arange(4.0)[::-1],
    "array read-only": lambda n: np.broadcast_to(np.float32(n), (LARGE,)),
    "array matrix": lambda n: np.matrix([[n, 1]]),
    "array masked": lambda n: np.ma.masked_array([n, 1], mask=[False, True]),
    "array records": lambda n: np.array([(n, 1.0)], dtype=[("a", "i4"), ("b", "f4")]),
    **{f"numpy {kind.__name__}": kind for kind in (np.float32, np.int16, np.bool_, np.str_)},
    **{kind.__name__: kind for kind in (float, int, bool, complex, str)},
    "bytes": lambda n: str(n).encode(),
    "None": lambda n: None,
    "object": lambda n: Record(n),
    "set": lambda n: {n},
    "list": lambda n: [n, n + 1],
    "ragged list": lambda n: list(range(n)),
    "tensor": lambda n: torch.tensor([n, 1]),
    "tensor float": lambda n: torch.tensor([n, 0.5]),
    "tensor 0-d": torch.tensor,
    "tensor large": lambda n: torch.full((LARGE,), float(n)),
    "tensor large double": lambda n: torch.full((LARGE,), float(n), dtype=torch.float64),
    "tensor large, transposed": lambda n: torch.full((200, 100), float(n)).t(),
    "tensor large, conjugate": lambda n: torch.full((LARGE,), complex(n, 1)).conj(),
    "tensor large, view of both": lambda n: torch.arange(2.0 * LARGE)[n % 2 * LARGE :][:LARGE],
    "tensor ragged": lambda n: torch.ones(n + 1),
    "tensor ragged large": lambda n: torch.ones(LARGE + n),
    "tensor empty": lambda n: torch.ones(0, 3),
    "tensor bfloat16": lambda n: torch.full((LARGE,), float(n), dtype=torch.bfloat16),
    "tensor meta": lambda n: torch.ones(3, device="meta"),
    "parameter": lambda n: torch.nn.Parameter(torch.ones(LARGE) * n, requires_grad=False),
    "subclass": lambda n: (torch.ones(LARGE) * n).as_subclass(Tagged),
    "coo": lambda n: torch.eye(3).mul(n).to_sparse_coo(),
    "csr": lambda n: torch.eye(3).mul(n).to_sparse_csr(),
    "quantized": lambda n: torch.quantize_per_tensor(torch.ones(3) * n, 0.1, 0, torch.quint8),
    "nested": lambda n: torch.nested.nested_tensor([torch.ones(2), torch.ones(n + 1)]),
}


CONTAINERS = {
    "as it is": lambda leaf: leaf,
    "dict": lambda leaf: {"y": leaf, "n": 1},
    "dict subclass": lambda leaf: Names(y=leaf),
    "mapping": lambda leaf: Fixed({"y": leaf}),
    "defaultdict": lambda leaf: collections.defaultdict(int, y=leaf),
    "ordered": lambda leaf: collections.OrderedDict(y=leaf),
    "tuple": lambda leaf: (1, leaf),
    "list": lambda leaf: [leaf, [leaf]],
    "list subclass": lambda leaf: Box([leaf]),
    "namedtuple": lambda leaf: Point(leaf, {"z": leaf}),
    "dataclass": Record,
}


def named(index):
    """A sample that is made by its name, in any process."""
    if multiprocessing.parent_process() is not None:
        warnings.simplefilter("ignore")  # a fork server has its own filters
    container, leaf, number = EACH[index // 2][index % 2]
    return CONTAINERS[container](LEAVES[leaf](number))


def outcomes(loader):
    """Return each batch in a form that can be compared, or its error."""
    # What torch says then lists the backends for which some kernel is registered, ours among them.
    cut = " is only available for"
    return epoch_of(loader, form, lambda error: (type(error), str(error).partition(cut)[0]))


def form(value):
    """Return a batch's types, dtypes and values."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_nested:
            return kind, value.layout, value.shape, repr(value)
        values = value.dequantize() if value.is_quantized else value
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        listed = values.detach().double().flatten().tolist()
        summed = listed if len(listed) < 100 else (sum(listed), listed[:3], listed[-3:])
        return kind, value.dtype, value.shape, value.requires_grad, repr(summed)
    if isinstance(value, collections.abc.Mapping):
        return kind, [(name, form(each)) for name, each in value.items()]
    if isinstance(value, list | tuple):
        return kind, [form(each) for each in value]
    return kind, repr(value)


EACH = [
    *([("as it is", leaf, 1), ("as it is", leaf, 2)] for leaf in sorted(LEAVES)),
    *([("tuple", "array f4", 1), ("tuple", leaf, 2)] for leaf in sorted(LEAVES)),
    *([("dict", "tensor large", 1), ("dict", leaf, 2)] for leaf in sorted(LEAVES)),
    *([(each, "tensor large", 1), (each, "tensor large", 2)] for each in CONTAINERS),
]


@in_every_seat
def test_every_batch_is_what_torch_makes_of_its_samples(seat):
    """Each kind of sample, also after an array and a large tensor, and in each container: the same
    types, dtypes and values, or the same error and text."""
    data = Made(named, 2 * len(EACH))
    want, got = (outcomes(make(data, batch_size=2)) for make in (torch_loader, seat.loader))
    assert [each for each in zip(EACH, got, want, strict=True) if each[1] != each[2]] == []


NEEDS_GRAD = Made(lambda n: torch.ones(LARGE if n < 4 else 2, requires_grad=n % 4 > 1), 8)
"""Samples to which gradients flow, of every second batch alone."""


@in_seats(NONE, THREADS, FORKED)
def test_a_batch_to_which_gradients_flow_keeps_its_graph_or_is_refused(seat):
    """As with torch: the graph would be lost without a word on the way from a process."""
    got = outcomes(seat.loader(NEEDS_GRAD, batch_size=2))
    if not seat.are_processes:
        assert got == outcomes(torch_loader(NEEDS_GRAD, batch_size=2))
        return
    kinds = [each[0] for each in outcomes(seat.peer(NEEDS_GRAD, batch_size=2))]
    assert [each[0] for each in got] == kinds == [torch.Tensor, RuntimeError] * 2
    assert all("does not support crossing process boundaries" in got[k][1] for k in (1, 3))


class Late:
    """A sample of a type that is registered late, as by a library that the first sample imports."""

    def __init__(self, value):
        self.value = value

    @staticmethod
    def collate(samples, *, collate_fn_map=None):
        return "collated late", [getattr(sample, "value", sample) for sample in samples]


def registering(index):
    """Register types when a sample is made, from the second batch on: its own, then torch's."""
    if index >= 2:
        default_collate_fn_map[Late] = Late.collate
    if index >= 4:
        default_collate_fn_map[torch.Tensor] = Late.collate
    return Late(index) if 2 <= index < 4 else torch.tensor(index)


@in_every_seat
def test_a_type_that_is_registered_by_a_sample_is_known(seat):
    """As with torch: when the workers have begun already; a type that torch knew as well."""
    before = default_collate_fn_map.copy()
    try:
        got = [repr(batch) for batch in seat.loader(Made(registering, 8), batch_size=2)]
    finally:
        default_collate_fn_map.clear()
        default_collate_fn_map.update(before)
    late = [[2, 3], [torch.tensor(4), torch.tensor(5)], [torch.tensor(6), torch.tensor(7)]]
    assert got[1:] == [repr(("collated late", values)) for values in late]


def ragged(index):
    """One row is longer."""
    return {"x": torch.zeros(3 + (index == 6)), "y": index}


class RaggedStream(Divided):
    """The same one after another."""

    make = staticmethod(ragged)


def note_of(batches):
    """The note on the error of the next batch."""
    with pytest.raises((TypeError, RuntimeError, KeyError, ValueError)) as caught:
        next(batches)
    return next(each for each in caught.value.__notes__ if "in collate_fn" in each)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (Made(ragged, 8), "batch 1, indices [4, 5, 6, 7]"),
        (RaggedStream(8), "batch 1, items 4 to 7 of the iterator of RaggedStream"),
    ],
    ids=["map", "iterable"],
)
@in_every_seat
def test_error_of_collating_names_the_odd_sample(seat, data, where):
    """Not the first one of its batch: torch's own text, with a note that finds the row."""
    batches = iter(seat.loader(data, 4, num_workers=min(1, seat.num_workers)))
    next(batches)
    note = note_of(batches)
    assert f"{where}, given list of 4: dict" in note
    assert "sample 2 of it is unlike most: sample['x'] is Tensor of shape (4,) and type" in note
    assert "elsewhere Tensor of shape (3,)" in note


def with_part(part):
    """Samples whose first one has a part that torch may not take, all else is what it takes."""
    fine = {"n": 1.0, "s": "x", "t": torch.zeros(2), "a": np.zeros(2), "i": np.int64(1), "b": [1]}
    return [fine, {**fine, "b": part}] * 2


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([1, 2, "3", 4], "sample 2 of it is unlike most: sample is str, elsewhere int"),
        ([{"a": 1}, {"a": 1}, {"b": 1}], "sample['a'] is nothing, elsewhere int"),
        ([(1, 2), (1, 2), (1,)], "sample is tuple of 1, elsewhere tuple of 2"),
        ([1, 1, None], "sample is NoneType, elsewhere int"),
        ([1, "2", None, 2.0], ""),
        ([1, "2"], ""),
        ([type("Rude", (), {"__getattr__": lambda *_: 1 / 0})(), 1, 1], ""),
        (with_part(None), "sample['b'] of sample 1 of it is NoneType, which"),
        (with_part([1, {"c": complex}]), "sample['b'][1]['c'] of sample 1 of it is type, which"),
        (
            with_part(np.zeros(2, "M8[ns]")),
            "sample['b'] of sample 1 of it is ndarray of shape (2,)",
        ),
        (with_part(np.array(["a"])), "sample['b'] of sample 1 of it is ndarray of shape (1,) and"),
    ],
)
def test_error_of_collating_says_what_is_wrong(samples, said):
    """Of the sample that is unlike most, if there are most; or of the part that torch does not
    take: what it takes is never named. Nor is there a word where asking fails."""
    note = note_of(iter(DataLoader(samples, batch_size=4)))
    assert said in note
    assert ("unlike most" in note) is ("elsewhere" in said)


def test_error_of_collating_without_batches_names_the_sample():
    """There collate_fn converts one sample."""
    batches = iter(DataLoader(["two"], batch_size=None, collate_fn=int))
    assert note_of(batches) == "in collate_fn, batch 0, sample index 0, given 'two'"
