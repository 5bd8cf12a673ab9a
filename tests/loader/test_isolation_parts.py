"""The parts of isolation="process": batches in slabs, messages on a wire."""

import linecache
import os
import pickle
import random
import sys
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from _forks import found_in_fork
from _inside import regions_of
from _isolated import isolated, num_mapped_slabs
from _isolation_data import Images
from hypothesis import given, settings, strategies as st
from torchvision import tv_tensors

from spdl_torch.io import Transfer
from spdl_torch.loader.backends.jobs import Loaded
from spdl_torch.loader.backends.processes.batch_packing import SlabWriter, unpack
from spdl_torch.loader.backends.processes.child import _seed_process
from spdl_torch.loader.backends.processes.shared_memory import Mappings
from spdl_torch.loader.backends.processes.wire import LONG_BYTES, File, Wire, socket_pair
from spdl_torch.loader.fetching.collating import LARGE_BYTES

pytestmark = pytest.mark.skipif(os.name != "posix", reason="passes descriptors")

Point = namedtuple("Point", "x y")


class Passage:
    """Both sides of the border, in one process."""

    def __init__(self, most_held=8):
        self.writer = SlabWriter()
        self.mappings = Mappings(most_held)

    def __call__(self, batch):
        packed = self.writer.pack(batch)
        if packed.size:
            self.mappings.open(packed.slab, packed.size, File(os.dup(self.writer.slab.file)))
        self.writer.sent()
        self.mappings.forget(self.writer.slabs.retired())
        message = pickle.loads(pickle.dumps(packed, 5))
        return unpack(Loaded(0, message), self.mappings).batch

    def tell_freed(self):
        """Slabs that nothing views any more go back."""
        freed = self.mappings.freed()
        self.writer.slabs.freed(*freed)
        return freed.slabs


BIG = torch.rand(4, 3, 100, 100)


def sparse_tensors():
    """torch says once that blocks are new, and in some versions that nothing is checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": torch.eye(300).to_sparse(),
            "sparse, not coalesced": torch.sparse_coo_tensor(
                [[0, 0]], [1.0, 2.0], (3,), check_invariants=True
            ),
            "sparse blocks": torch.eye(300).to_sparse_bsc((10, 10)),
        }


TENSORS = {
    "contiguous": BIG,
    "channels last": BIG.to(memory_format=torch.channels_last),
    "with holes": BIG[:, :, ::2],
    "transposed": torch.rand(200, 200).t(),
    "expanded": torch.tensor(3.0).expand(300, 300),
    "expanded rows": torch.rand(300, 1, 300).expand(300, 5, 300),
    "part of a larger one": torch.rand(3, 300, 300)[1],
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    "small": torch.arange(5, dtype=torch.int16),
    "bfloat16": torch.rand(300, 300).to(torch.bfloat16),
    "bool": torch.rand(300, 300) > 0.5,
    "complex, conjugated": torch.rand(300, 300, dtype=torch.complex64).conj(),
    **sparse_tensors(),
    "needs gradients": torch.rand(300, 300, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.rand(300, 300)),
    "subclass": tv_tensors.Image(torch.randint(0, 255, (3, 300, 300), dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_is_itself_on_the_other_side(name):
    """Type, dtype, shape, strides where they are dense, gradients and every bit."""
    tensor = TENSORS[name]
    found = Passage()({"x": [tensor]})["x"][0]
    assert type(found) is type(tensor)
    assert (found.dtype, found.shape, found.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert found.requires_grad == tensor.requires_grad
    if name != "with holes" and tensor.layout is torch.strided:
        assert found.stride() == tensor.stride()
    is_sparse = tensor.layout is not torch.strided
    assert torch.equal(*(t.to_dense() if is_sparse else t for t in (found, tensor)))
    if tensor.is_sparse:
        assert found.is_coalesced() == tensor.is_coalesced()
    assert not getattr(torch._utils, "_sparse_tensors_to_validate", [])  # which torch.load would


leaves = st.one_of(
    st.integers(0, 2 * LARGE_BYTES).map(lambda size: torch.arange(size, dtype=torch.uint8)),
    st.integers(0, LARGE_BYTES).map(lambda size: np.arange(size, dtype=np.int16)),
    st.text(max_size=5),
    st.none(),
    st.just("x" * 50_000),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=8,
)


def comparable(tree):
    """A batch as something that compares."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        return type(tree).__name__, str(tree.dtype), tuple(tree.shape), bytes(np.asarray(tree))
    if isinstance(tree, dict):
        return {key: comparable(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree), [comparable(each) for each in tree]
    return tree


def test_batches_of_any_form_pass_and_stay():
    """Through the same slabs, one after the other, some of them kept."""
    passage = Passage(most_held=3)
    kept = []

    @settings(max_examples=100, deadline=None)
    @given(trees, st.booleans())
    def check(tree, keep):
        found = passage(tree)
        assert comparable(found) == comparable(tree)
        if keep:
            kept.append((found, comparable(tree)))
            del kept[:-5]
        passage.tell_freed()
        for batch, expected in kept:
            assert comparable(batch) == expected

    check()
    kept.clear()
    passage.tell_freed()
    assert len(regions_of(passage.mappings)) <= 3 + 2


READ_ONLY = {
    "small": np.frombuffer(bytes(range(12)), np.uint8),
    "large": np.frombuffer(bytes(400_000), np.float32),
    "transposed": np.frombuffer(bytes(range(48)), np.int32).reshape(3, 4).T,
    "steps": np.frombuffer(bytes(400_000), np.int16).reshape(2, -1)[:, ::3],
    "moments": np.frombuffer(bytes(range(64)), "M8[ns]"),
    "fields": np.frombuffer(bytes(range(24)), [("a", "<i4"), ("b", "<f4")]),
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
}


@pytest.mark.parametrize("name", READ_ONLY)
def test_read_only_array_can_be_written_as_after_torchs_pickle(name):
    """torch's workers use the default protocol, which has no read-only arrays before Python
    3.14."""
    array, expected = READ_ONLY[name], pickle.loads(pickle.dumps(READ_ONLY[name]))
    found = Passage()(array)
    assert (found.dtype, found.strides) == (expected.dtype, expected.strides)
    assert np.array_equal(found, expected)
    assert found.flags.writeable == expected.flags.writeable
    if found.flags.writeable:
        found[...] = found[::-1].copy()
    assert not array.flags.writeable


def test_slab_is_free_when_the_last_view_dies():
    """A view of a view keeps it; so does an array. One that is too small is replaced, and forgotten
    on both sides."""
    passage = Passage()
    batch = passage([BIG, np.arange(100_000.0)])
    part, array = batch[0][1].reshape(-1)[5:], batch[1][::2]
    del batch
    assert passage.tell_freed() == ()
    del part
    assert passage.tell_freed() == ()
    del array
    assert passage.tell_freed() == (0,)
    passage([BIG])
    assert passage.tell_freed() == (0,)  # the same one again
    for size in (1_000_000, 2_000_000):
        passage(torch.zeros(size))
        passage.tell_freed()
    assert list(regions_of(passage.mappings)) == [2]


def test_batch_that_gets_no_further_gives_its_slab_back():
    """An epoch that was left drops what was ready; a sample may fail after some were made."""
    writer = SlabWriter()
    assert [writer.pack(BIG).slab for _ in range(3)] == [0, 0, 0]
    writer, places = SlabWriter(), set()
    for _ in range(3):
        writer.begin()
        places.add(writer.room(LARGE_BYTES).data_ptr())
        assert writer.room(LARGE_BYTES - 1) is None
    assert len(places) == 1


def test_slab_that_the_child_views_is_not_written_again():
    """A dataset may keep samples that were made in it, or pass them on once more."""
    passage, kept, places = Passage(), [], []
    writer = passage.writer
    for value in range(6):
        writer.begin()
        made = writer.room(LARGE_BYTES).fill_(value)
        places.append(made.data_ptr())
        kept += [made[:9]] if value % 2 else []
        assert bytes(passage(made)) == bytes([value]) * LARGE_BYTES
        del made
        passage.tell_freed()
    assert [each.tolist() for each in kept] == [[value] * 9 for value in (1, 3, 5)]
    assert places[::2] == places[1::2]  # each was used twice, and then kept
    assert len(set(places)) == 3
    kept.clear()
    writer.begin()
    assert writer.room(LARGE_BYTES).data_ptr() in places


def test_slab_is_a_nameless_file_where_there_is_no_memfd(monkeypatch):
    """As on macOS."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    passage = Passage()
    found = passage([BIG])
    assert torch.equal(found[0], BIG)


@pytest.mark.cuda
def test_slabs_are_locked_for_a_device_stage():
    """What views them needs no packing, and is whole on the device."""
    passage, transfer = Passage(), Transfer("cuda")
    passage.mappings = Mappings(8, lock=transfer.limited(99).region)
    found = passage([BIG])[0]
    assert found.is_pinned()
    assert torch.equal(transfer.stage(found).receive().cpu(), BIG)


@pytest.mark.parametrize("limit", [None, 7])
def test_child_is_seeded_without_reading_a_source(limit):
    """torch describes the stack of a call for a device that is not in use, and reads each frame's
    file for that. How long tracebacks are stays as the program has set it."""

    def seeded():
        if limit is not None:
            sys.tracebacklimit = limit
        linecache.clearcache()
        _seed_process(2**40, 3)
        return list(linecache.cache), torch.initial_seed(), getattr(sys, "tracebacklimit", None)

    assert found_in_fork(seeded) == ([], 2**40 + 3, limit)


class Unpicklable(int):
    """An index that cannot be sent."""

    def __reduce__(self):
        raise ZeroDivisionError


def test_indices_that_cannot_be_sent_cost_no_memory():
    """The slabs that would have been reported free with them are reported all the same."""
    order = [[Unpicklable(0)] if number % 2 and number > 4 else [number] for number in range(80)]
    batches = iter(isolated(Images(80), batch_sampler=order, num_workers=1, prefetch_factor=2))
    found, num_errors, most = [], 0, 0
    while True:
        try:
            found.append(next(batches)["index"].item())
            most = max(most, num_mapped_slabs())
        except ZeroDivisionError:
            num_errors += 1
        except StopIteration:
            break
    assert (found, num_errors) == ([0, 1, 2, 3, *range(4, 80, 2)], 38)
    assert most <= 4


SIZES = [0, 1, 70, LONG_BYTES, LONG_BYTES + 1, 100_000]


def all_of(wire):
    """The messages that have come, with their files."""
    wire.read()
    return [(bytes(content), files) for content, files in iter(wire.next, None)]


@pytest.mark.parametrize("is_read", [True, False], ids=["in any parts", "while nobody reads"])
def test_messages_of_any_size_come_in_order_with_their_own_files(is_read, tmp_path):
    """Neither side ever waits until the other one reads; files come apart from the bytes that they
    belong to. An end with something unread, as of a child that is killed, is the end."""
    (ours, theirs), draws, sent, found = map(Wire, socket_pair()), random.Random(0), [], []
    for number in range(60):
        path = (tmp_path / str(number)).as_posix() if draws.random() < 0.3 else None
        sent.append((bytes([number]) * draws.choice(SIZES), path))
        files = [] if path is None else [File(os.open(path, os.O_CREAT | os.O_RDWR))]
        ours.send(sent[-1][0], *files)
        if is_read and draws.random() < 0.3:
            found += all_of(theirs)
    while len(found) < len(sent):
        found += all_of(theirs)
        ours.flush()
    assert not ours.unsent
    for (expected, path), (content, files) in zip(sent, found, strict=True):
        assert (content, len(files)) == (expected, path is not None)
        for file in files:
            assert os.path.samestat(os.fstat(file), os.stat(path))
            assert not os.get_inheritable(file)
    ours.send(b"a job")
    theirs.close()
    assert all_of(ours) == []
    assert ours.is_over
    ours.close()
