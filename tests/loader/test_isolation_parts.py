"""The parts of isolation="process": batches in slabs, messages on a wire."""

import os
import random
import signal
from itertools import count

import numpy as np
import pytest
import torch
from _at_call import AtCall
from _datasets import Made
from _gates import until
from _isolated import isolated, mapped_slabs, num_mapped_slabs
from _isolation_data import Images
from torch.utils.data import Dataset

from spdl_torch import DataLoader
from spdl_torch.io import batch_storage
from spdl_torch.loader.backends.processes.wire import LONG_BYTES, File, Wire, socket_pair
from spdl_torch.loader.fetching.collating import LARGE_BYTES

pytestmark = pytest.mark.skipif(os.name != "posix", reason="passes descriptors")


def parts_of(index):
    """Some parts of any size: tensors, arrays, texts."""
    draws = random.Random(index)
    sizes = [draws.randrange(2 * LARGE_BYTES) for _ in range(draws.randrange(6))]
    kinds = [
        lambda size: torch.full((size,), index % 99, dtype=torch.uint8),
        lambda size: np.full(size // 2, index % 99, dtype=np.int16),
        lambda size: chr(index % 99) * size,
    ]
    return [draws.choice(kinds)(size) for size in sizes]


def content_of(batch):
    return [(type(part), np.asarray(part).dtype, bytes(np.asarray(part))) for part in batch]


@pytest.mark.parametrize("has_memfd", [True, False])
def test_batches_of_any_sizes_pass_and_stay(has_memfd, monkeypatch):
    """Through the same slabs, one after the other, some of them kept, or a view of a view; also
    where slabs are nameless files, as on macOS. One that is too small is replaced."""
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    kept, most = [], 0
    loader = isolated(Made(parts_of, 100), None, num_workers=1, collate_fn=list)
    for index, batch in enumerate(loader):
        assert content_of(batch) == content_of(parts_of(index))
        if index % 3 == 0:
            views = [part[1:][::2] for part in batch]
            kept = [*kept[-3:], (views, content_of(views))]
        for views, content in kept:
            assert content_of(views) == content
        most = max(most, num_mapped_slabs() if has_memfd else 1)
    assert 0 < most <= 4 + 2 + 3  # kept, the loop's and under way


class Keeping(Dataset):
    """A batch is made in its slab, and a part of some is kept; of three one fails after that. With
    it is told how many slabs its process has."""

    def __init__(self):
        self.kept = []

    def __len__(self):
        return 90

    def __getitems__(self, indices):
        (index,) = indices
        made = batch_storage().tensor((1, LARGE_BYTES)).fill_(index)
        if index % 3 == 0:
            raise KeyError(index)
        if index % 3 == 1:
            self.kept = [*self.kept[-2:], (index, made[0, :9])]
        assert all((part == number).all() for number, part in self.kept)
        return [(made[0], len(mapped_slabs()))]


def test_slab_that_the_child_views_is_not_written_again():
    """A dataset may keep samples that were made in it; and a batch that gets no further gives its
    slab back."""
    batches, most = iter(isolated(Keeping(), 1, num_workers=1)), 0
    for index in range(90):
        if index % 3 == 0:
            with pytest.raises(KeyError, match=str(index)):
                next(batches)
            continue
        made, num_slabs = next(batches)
        assert bytes(made.numpy()) == bytes([index]) * LARGE_BYTES
        most = max(most, num_slabs.item())
    assert 3 < most <= 3 + 2 + 3


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


def test_messages_of_any_size_come_in_order_with_their_own_files(tmp_path):
    """Though nobody reads meanwhile: more than a socket takes is sent, in parts, as it is read. An
    end with something unread, as of a child that is killed, is the end."""
    (ours, theirs), draws, sent, found = map(Wire, socket_pair()), random.Random(0), [], []
    for number in range(60):
        path = tmp_path / str(number) if draws.random() < 0.3 else None
        size = draws.choice([0, 1, 70, LONG_BYTES, LONG_BYTES + 1, 100_000])
        sent.append((bytes([number]) * size, path))
        files = [] if path is None else [File(os.open(path, os.O_CREAT | os.O_RDWR))]
        ours.send(sent[-1][0], *files)
    while len(found) < len(sent):
        theirs.read()
        found += [(bytes(content), files) for content, files in iter(theirs.next, None)]
        ours.flush()
    for (expected, path), (content, files) in zip(sent, found, strict=True):
        assert (content, len(files)) == (expected, path is not None)
        for file in files:
            assert os.path.samestat(os.fstat(file), os.stat(path))
    ours.send(b"a job")
    theirs.close()
    ours.read()
    assert ours.next() is None
    assert ours.is_over
    ours.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="lists what is open")
def test_signal_costs_no_descriptor_and_is_not_taken_for_the_other_sides_end():
    """Wherever it comes as messages come and go, one with a file: what its handler raises is
    raised, though it is an OSError."""
    before = signal.signal(signal.SIGUSR1, _raise_too_late)
    try:
        for place in count(1):
            opened, (ours, theirs) = os.listdir("/proc/self/fd"), map(Wire, socket_pair())
            ours.send(bytes(2 * LONG_BYTES))
            came = False
            try:
                with AtCall(place, signal.SIGUSR1) as at_call:
                    theirs.read()
                    theirs.send(b"an answer")
            except TimeoutError:
                came = True
            ours.close()
            theirs.close()
            assert os.listdir("/proc/self/fd") == opened, at_call.where
            assert came == (at_call.where is not None), at_call.where
            if not came:
                break
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert place > 4, "there are places where it comes"


def _raise_too_late(*_):
    raise TimeoutError


class Texts(Dataset):
    """Batches as large as their jobs, and pickled: their texts do not go through shared memory."""

    def __getitems__(self, indices):
        return [str(index) for index in indices]


@pytest.mark.parametrize("size", [6_300, 25_000])
def test_child_has_its_jobs_and_sends_its_batches_while_the_loop_is_away(size):
    """All of them, however large: of 31 KB each, of which a socket takes a few, or more than one
    takes at all."""
    batches = [list(range(10**6 + n, 10**6 + n + size)) for n in range(20)]
    options = {"num_workers": 1, "prefetch_factor": 16, "collate_fn": list}
    loader = DataLoader(Texts(), batch_sampler=batches, **options)
    rest = iter(loader)
    until(lambda: loader.snapshot().stages[1].tasks.num_tasks == 16)
    assert list(rest) == [[str(index) for index in batch] for batch in batches]


def test_rest_of_a_message_comes_after_a_timeout(monkeypatch):
    """A child that is stopped in the middle of one costs neither the loop its timeout nor the
    batch."""
    (reads, writes), trainer, flush = os.pipe(), os.getpid(), Wire.flush

    def stopping(wire):
        if os.getpid() != trainer and wire.unsent:
            content, _ = wire.unsent[0]
            wire.unsent[0] = content[wire.socket.send(content[:9]) :], ()
            os.read(reads, 1)
        flush(wire)

    monkeypatch.setattr(Wire, "flush", stopping)
    batches = iter(isolated([0, 1, 2, 3], num_workers=1, timeout=0.5))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.5 seconds"):
        next(batches)
    os.write(writes, b"12345678")
    assert [batch.item() for batch in batches] == [0, 1, 2, 3]
    os.close(reads)
    os.close(writes)
