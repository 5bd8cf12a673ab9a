"""The parts of isolation="process": batches in slabs, messages on a wire."""

import os
import pickle
import random

import numpy as np
import pytest
import torch
from _inside import regions_of
from _isolated import isolated, num_mapped_slabs
from _isolation_data import Images
from hypothesis import given, settings, strategies as st
from torch.utils.data import Dataset

from spdl_torch import DataLoader
from spdl_torch.loader.backends.jobs import Loaded
from spdl_torch.loader.backends.processes.batch_packing import SlabWriter, unpack
from spdl_torch.loader.backends.processes.shared_memory import Mappings
from spdl_torch.loader.backends.processes.wire import LONG_BYTES, File, Wire, socket_pair
from spdl_torch.loader.fetching.collating import LARGE_BYTES

pytestmark = pytest.mark.skipif(os.name != "posix", reason="passes descriptors")


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


PARTS = st.builds(
    lambda make, size, value: make(size, value),
    st.sampled_from(
        [
            lambda size, value: torch.full((size,), value, dtype=torch.uint8),
            lambda size, value: np.full(size // 2, value, dtype=np.int16),
            lambda size, value: chr(value) * size,
        ]
    ),
    st.integers(0, 2 * LARGE_BYTES),
    st.integers(0, 99),
)


def content_of(batch):
    return [(type(part), np.asarray(part).dtype, bytes(np.asarray(part))) for part in batch]


def test_batches_of_any_sizes_pass_and_stay():
    """Through the same slabs, one after the other, some of them kept."""
    passage, kept = Passage(most_held=3), []

    @settings(max_examples=100, deadline=None)
    @given(st.lists(PARTS, max_size=6), st.booleans())
    def check(batch, keep):
        kept.append((passage(batch), content_of(batch)))
        passage.tell_freed()
        for found, content in kept:
            assert content_of(found) == content
        del kept[:-5]
        if not keep:
            del kept[-1]

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


LENGTHS = [0, 1, 70, LONG_BYTES, LONG_BYTES + 1, 100_000]


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
        sent.append((bytes([number]) * draws.choice(LENGTHS), path))
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


class Texts(Dataset):
    """Batches as large as their jobs, and pickled: their texts do not go through shared memory."""

    def __getitems__(self, indices):
        return [str(index) for index in indices]


def test_large_jobs_and_large_results_do_not_block_each_other():
    """The trainer writes jobs while the workers write results, each more than a pipe takes."""
    batches = [list(range(10**6 + n, 10**6 + n + 25_000)) for n in range(10)]
    options = {"num_workers": 2, "prefetch_factor": 3, "collate_fn": list}
    loader = DataLoader(Texts(), batch_sampler=batches, **options)
    assert list(loader) == [[str(index) for index in batch] for batch in batches]
