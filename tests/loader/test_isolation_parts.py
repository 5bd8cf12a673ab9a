"""The parts of isolation="process": batches in slabs, messages on a wire."""

import os
import pickle
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from _inside import regions_of
from _isolated import isolated, num_mapped_slabs
from _isolation_data import Images
from hypothesis import given, settings, strategies as st

from spdl_torch.loader.backends.jobs import Loaded
from spdl_torch.loader.backends.processes.batch_packing import SlabWriter, unpack
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
