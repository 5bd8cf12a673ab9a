"""Transfers on a device that is not a GPU: packing, slabs, order, hand-over, public functions."""

from __future__ import annotations

import threading
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from support.gates import in_thread, named, result_of
from torch.nn.utils.rnn import pack_sequence

from spdl_torch.io import Transfer
from spdl_torch.io._transfer.slabs import ALIGNMENT, SMALL_BYTES

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    image: Any
    key: str


@dataclass(frozen=True, slots=True)
class Frozen:
    """Its second field cannot be given, and is what ``__post_init__`` would make of a given one."""

    x: Any
    late: Any = field(init=False)

    def __post_init__(self):
        assert not isinstance(self.x, Later) or not self.x.is_moved, "it has run before"
        object.__setattr__(self, "late", [self.x])


class Tagged(UserDict):
    """A mapping with more than its items, as transformers' ``BatchEncoding`` is."""

    tag = None

    def to(self, device):
        raise AssertionError("mappings are walked")


def tagged(members):
    mapping = Tagged(members)
    mapping.tag = "kept"
    return mapping


@dataclass
class Later:
    """Moves itself, and only where it is used."""

    key: int
    is_moved: bool = False

    def to(self, device):
        assert not self.is_moved
        return Later(self.key, is_moved=True)


DTYPES = [
    *(torch.uint8, torch.bool, torch.int16, torch.int64, torch.uint16, torch.float8_e4m3fn),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


@st.composite
def tensors(draw):
    """Any dtype, zero to four dimensions, sizes from 0; dense, permuted, with holes, expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(len(shape)))
    tensor = (tensor * 3).to(dtype)
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        kind = draw(st.sampled_from(["permute", "slice", "expand", "narrow"]))
        if kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif kind == "slice":
            tensor = tensor[..., ::2]
        elif kind == "expand" and tensor.shape[0] > 0:
            tensor = tensor[:1].expand(draw(st.integers(0, 3)), *tensor.shape[1:])
        elif kind == "narrow":
            tensor = tensor[1:]
    return tensor


def containers(inner):
    dicts = st.dictionaries(st.text(max_size=2), inner, max_size=3)
    kinds = (OrderedDict, partial(defaultdict, list), MappingProxyType, ChainMap, tagged)
    lists = st.lists(inner, max_size=4)
    return st.one_of(
        *(lists, lists.map(tuple), lists.map(partial(deque, maxlen=5)), dicts),
        *(dicts.map(kind) for kind in kinds),
        *(st.builds(kind, inner, st.text(max_size=2)) for kind in (Pair, Sample)),
        st.builds(Frozen, inner),
    )


leaves = st.text(max_size=3) | st.integers() | st.none() | st.builds(Later, st.integers(0, 9))
batches = st.recursive(tensors() | leaves, containers, max_leaves=8)


def members_of(batch):
    """By name or place; None = it is no container."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, list | tuple | deque):
        return dict(enumerate(batch))
    if isinstance(batch, Sample | Frozen):
        return {each.name: getattr(batch, each.name) for each in fields(batch)}
    return None


KEPT = ("default_factory", "maxlen", "tag")
"""What containers have beside their members."""


def frozen(batch):
    """Everything that a user can see of a batch, except where it is."""
    if isinstance(batch, torch.Tensor):
        # The oracle for strides is torch: `.to` of another device.
        strides = batch.to("meta").stride()
        return (batch.dtype, tuple(batch.shape), strides, repr(batch.tolist()))
    if isinstance(batch, Later):
        return ("later", batch.key)
    members = members_of(batch)
    if members is None:
        return batch
    kept = [getattr(batch, name, None) for name in KEPT]
    return type(batch), kept, [(key, frozen(value)) for key, value in members.items()]


def leaves_of(batch, kind=torch.Tensor):
    """The tensors in a batch, in order, or the leaves of another class."""
    if isinstance(batch, kind):
        return [batch]
    members = members_of(batch) or {}
    return [leaf for member in members.values() for leaf in leaves_of(member, kind)]


@pytest.fixture
def transfer(backends):
    """To the lazy device."""
    return Transfer("cuda", num_slabs=2)


@pytest.fixture
def backend(transfer, backends):
    """What it asks of that device."""
    return backends[0]


@pytest.mark.usefixtures("pins")
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(batches, min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_batch_equals_itself_after_a_transfer(backends, given_batches, num_slabs, in_turn):
    """Any batch, in containers of any kind and nesting, in any dtypes, shapes and strides. The one
    that was given stays as it was, as far as it is not overwritten."""
    transfer = Transfer("cuda", num_slabs=num_slabs)
    expected = [frozen(batch) for batch in given_batches]
    received, staged = [], []
    for batch in given_batches:
        staged.append(transfer.stage(batch))
        for tensor in leaves_of(batch):
            if tensor.numel():
                tensor.untyped_storage().fill_(0x55)
        if in_turn:
            received.append(staged.pop().receive())
    received += [later.receive() for later in staged]
    assert [frozen(batch) for batch in received] == expected
    for batch in received:
        for tensor in leaves_of(batch):
            assert tensor.stride() == tensor.to("meta").stride()
        assert all(each.is_moved for each in leaves_of(batch, Later))
    assert not any(each.is_moved for batch in given_batches for each in leaves_of(batch, Later))


def test_small_tensors_travel_together(transfer, backend):
    """A batch of a hundred boxes and two images is three copies, not a hundred and two."""
    image = torch.arange(SMALL_BYTES, dtype=torch.uint8)
    batch = [image.clone(), image.clone(), [torch.full((4,), float(k)) for k in range(100)]]
    images = transfer.stage(batch).receive()
    assert backend.copy_sizes == [SMALL_BYTES, SMALL_BYTES, 100 * ALIGNMENT]
    assert torch.equal(images[0], image)
    assert [box[0].item() for box in images[2]] == list(range(100))
    # What is large can be kept alone.
    assert images[0].untyped_storage().nbytes() == SMALL_BYTES


def test_tensor_is_sent_once_when_a_batch_holds_it_twice(transfer, backend):
    """It stays one tensor, as it was."""
    tensor = torch.arange(SMALL_BYTES, dtype=torch.uint8)
    first, second = transfer.stage([tensor, {"same": tensor}]).receive()
    assert first is second["same"]
    assert len(backend.copy_sizes) == 1


def test_received_tensor_is_no_view(transfer):
    """In-place operations that need gradients work on it, as on any tensor."""
    received = transfer.stage(torch.ones(3)).receive()
    assert not received._is_view()
    weight = torch.ones(3, requires_grad=True)
    received.mul_(weight).sum().backward()
    assert weight.grad.tolist() == [1, 1, 1]


def test_slabs_are_used_again(transfer, backend):
    """However many batches: two slabs, as large as the largest batch; made in inference mode, as by
    a validation that comes first, they are used outside."""
    size = 4_816_896  # 32 photographs, for which a power of two would be 8 MiB
    with torch.inference_mode():
        for value in (size, 10):
            transfer.stage(torch.ones(value, dtype=torch.uint8)).receive()
    for size_of in (size, 3, size, 7, 9):
        batch = torch.full((size_of,), size_of % 251, dtype=torch.uint8)
        assert torch.equal(transfer.stage(batch).receive(), batch)
    assert backend.slab_sizes == [size, SMALL_BYTES]
    transfer.stage(torch.zeros(size + 512, dtype=torch.uint8))
    (grown,) = backend.slab_sizes[2:]
    assert size + 512 <= grown <= size * 9 / 8
    transfer.stage(torch.zeros(1 << 20))
    transfer.stage(torch.zeros(grown, dtype=torch.uint8))
    assert len(backend.slab_sizes) == 3


def test_pinned_tensor_is_copied_from_where_it_is(transfer, backend):
    """If it is large and has no holes; the rest is packed."""
    pinned = backend.pinned(4 * SMALL_BYTES).copy_(torch.arange(4 * SMALL_BYTES) % 251)
    dense, holes, small = pinned.view(-1, 8).t(), pinned[::2], pinned[:8]
    del backend.slab_sizes[:]
    batch = transfer.stage({"dense": dense, "holes": holes, "small": small}).receive()
    assert backend.slab_sizes == [2 * SMALL_BYTES + ALIGNMENT]
    assert backend.copy_sizes == [2 * SMALL_BYTES, ALIGNMENT, 4 * SMALL_BYTES]
    assert torch.equal(batch["dense"], dense)
    assert batch["dense"].stride() == (1, 8)
    assert torch.equal(batch["holes"], holes)
    assert torch.equal(batch["small"], small)


class MovesItself:
    """Remembers who moved it."""

    def to(self, device):
        return (torch.device(device), threading.current_thread())


class Watched(list):
    """Counts whoever looks at its members."""

    num_looks = 0

    def __iter__(self):
        self.num_looks += 1
        return super().__iter__()

    def __getitem__(self, place):
        self.num_looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("late", [(), (MovesItself(),)])
def test_batch_is_not_walked_at_the_hand_over(transfer, late):
    """However many names are in it: where something moves then was found when it was staged. It
    moves by itself on the thread, and so on the stream, of those who use it."""
    names = Watched(["a name"] * 1000)
    staged = result_of(in_thread(transfer.stage, [torch.ones(2), {"names": names, "late": late}]))
    assert names.num_looks == 1
    tensor, rest = staged.receive()
    assert tensor.tolist() == [1, 1]
    assert rest["names"] is names
    assert names.num_looks == 1
    assert [*rest["late"]] == [(transfer.device, threading.current_thread())] * len(late)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        pack_sequence([torch.ones(2), torch.ones(1)]),
    ],
    ids=["sparse", "nested", "needs gradients", "parameter", "packed sequence"],
)
def test_tensor_that_is_not_plain_moves_by_its_own_method(transfer, backend, tensor):
    """Gradients flow, classes and layouts stay; the sizes of a packed sequence's steps, a member of
    a named tuple, stay on the host."""
    received = transfer.stage((tensor, torch.ones(1))).receive()[0]
    assert received is tensor  # it is on that device already; nothing was packed
    assert len(backend.copy_sizes) == 1


@pytest.mark.parametrize(
    "batch",
    [
        *(None, 3, 2.5, True, "text", b"bytes", range(3), torch.float32, torch.Tensor, Pair),
        *(["a", ("b",), {"c": None}], np.zeros(3), {1, 2}, object(), Sample(1, "x"), Pair(1, 2)),
        {"name": "x", "sizes": [1, 2]},
    ],
    ids=named,
)
def test_batch_without_tensors_passes(transfer, backend, batch):
    """The same object: nothing is copied, nothing is begun, and nobody waits. Classes are not taken
    for what they make."""
    staged = transfer.stage(batch)
    staged.synchronize()
    assert staged.receive() is batch
    assert (backend.handed_over, backend.copy_sizes) == ([], [])


def test_sequence_becomes_a_list_when_its_class_cannot_be_made(transfer):
    """As torch's pin_memory does."""

    class OnlyItems(tuple):
        def __new__(cls, first, second):
            return super().__new__(cls, (first, second))

    received = transfer.stage(OnlyItems(torch.ones(1), 1)).receive()
    assert (type(received), received[0].item(), received[1]) == (list, 1, 1)


def test_what_cannot_be_meant_is_refused(transfer):
    """It needs slabs to pack into; a second receiver would be on a stream that nothing guards."""
    with pytest.raises(ValueError, match="num_slabs must be >= 1, got 0"):
        Transfer("cuda", num_slabs=0)
    staged = transfer.stage(torch.ones(1))
    staged.receive()
    with pytest.raises(RuntimeError, match="handed over already; call it once"):
        staged.receive()
