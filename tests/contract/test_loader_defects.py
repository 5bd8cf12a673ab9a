"""Datasets that met a defect of the loader once: they load, or say what is wrong, as torch's do."""

from __future__ import annotations

import threading
from collections import namedtuple
from dataclasses import dataclass
from itertools import islice
from unittest import mock

import pytest
from _datasets import Indices, Made, MapData
from _gates import eager_switching
from _loader_helpers import (
    PATIENCE_SECONDS,
    DataLoader,
    ThreadLoader,
    assert_threads_end,
    batches_of,
    epoch_of,
    torch_loader,
)
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    get_worker_info,
)

from spdl_torch.loader.backends import worker_thread as worker_module


class OneDict(Indices):
    """Its copies would have one ``__dict__`` between them, as Hugging Face's streams have."""

    def __getstate__(self):
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__ = state


Pair = namedtuple("Pair", "left right")


class Listed(list):
    """A list of the user's own."""


@dataclass
class Holder(Dataset):
    """Datasets in an attribute."""

    parts: object


HOLDERS = {
    "itself": (lambda data: data, lambda own: own),
    "StackDataset of names": (lambda data: StackDataset(x=data), lambda own: own.datasets["x"]),
    "namedtuple": (lambda data: Holder(Pair(data, data)), lambda own: own.parts.right),
    "tuple": (lambda data: Holder((data, 3)), lambda own: own.parts[0]),
    "list": (lambda data: Holder(Listed([data])), lambda own: own.parts[0]),
    "deep": (
        lambda data: Subset(ConcatDataset([Subset(data, [2])]), [0]),
        lambda own: own.dataset.datasets[0].dataset,
    ),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_attributes_of_a_copy_are_its_own(kind):
    """Apart from the trainer's dataset and from the other workers', wherever the dataset is."""
    wrap, find = HOLDERS[kind]
    data, copies = OneDict(), {}
    holder = wrap(data)

    def begin(number):
        copies[number] = get_worker_info().dataset
        find(copies[number]).owner = number

    assert list(ThreadLoader(holder, None, sampler=[], num_workers=2, worker_init_fn=begin)) == []
    assert [find(copies[number]).owner for number in range(2)] == [0, 1]
    assert {type(find(own)) for own in copies.values()} == {OneDict}
    assert not hasattr(data, "owner")
    assert type(getattr(copies[0], "parts", None)) is type(getattr(holder, "parts", None))


class Opening(Indices):
    """Opens its file in each worker, collates with it, and keeps something between samples."""

    handle = "closed"

    def __init__(self):
        self.transform = Counter()
        self.table = [*range(12)]

    def __getitem__(self, index):
        return self.handle, self.transform(index), self.table

    def open(self, worker_id):
        self.handle = f"file {worker_id}"

    def collate(self, samples):
        ((opened, transform, table),) = samples
        return opened, self.handle, id(transform), table


class Counter:
    """Counts its calls without a lock."""

    calls = 0

    def __call__(self, index):
        self.calls += 1
        return self


@pytest.mark.parametrize("loader_class", [DataLoader, ThreadLoader])
def test_what_a_worker_leaves_in_its_dataset_is_its_own(loader_class):
    """Bound methods act on the worker's copy, as in a forked worker; a transform that keeps state
    is each worker's own; a big table is the trainer's."""
    dataset = Opening()
    loader = loader_class(
        dataset, num_workers=2, worker_init_fn=dataset.open, collate_fn=dataset.collate
    )
    found = {}
    for opened, collated_by, transform, table in loader:
        assert opened == collated_by
        assert loader_class is DataLoader or table is dataset.table
        found.setdefault(opened, set()).add(transform)
    assert found.keys() <= {"file 0", "file 1"}
    if loader_class is ThreadLoader:
        assert all(len(own) == 1 for own in found.values())
        assert len(set.union(*found.values())) == len(found)
    assert (dataset.handle, dataset.transform.calls) == ("closed", 0)


class Uncopyable(MapData):
    """Holds something that refuses to be copied."""

    def __copy__(self):
        raise TypeError("cannot copy this")


def test_dataset_that_cannot_be_copied_still_loads(caplog):
    """A forked worker needs no copy protocol; a thread shares what it cannot copy, and says so."""
    loader = ThreadLoader(Uncopyable(8), num_workers=2)
    assert epoch_of(loader) == epoch_of(torch_loader(MapData(8)))
    assert "Uncopyable cannot be copied (TypeError: cannot copy this)" in caplog.text


class Copied(MapData):
    """Knows when two copies of it are under way, and loads in its own way while it is copied."""

    copying, met = threading.Lock(), []

    def __copy__(self):
        if not self.copying.acquire(blocking=False):
            self.met.append(threading.current_thread().name)
            raise TypeError("two threads copy at once")
        epoch_of(ThreadLoader(MapData(4), num_workers=2))
        self.copying.release()
        return MapData(len(self))


def test_workers_copy_the_dataset_one_after_another():
    """Python 3.11 crashes in a later garbage collection if two threads look at the ``__dict__`` of
    one object for the first time, which is what copying does. No other loader waits for it."""
    with eager_switching():
        for _ in range(5):
            assert len(epoch_of(ThreadLoader(Copied(8), num_workers=4))) == 8
    assert not Copied.met


class Awkward(Indices):
    """Something that only loaders look at goes wrong."""

    def __init__(self, how):
        self.how = how
        self.inner = self if how == "itself" else None

    @property
    def dataset(self):
        if self.how == "property":
            raise KeyError("not opened yet")
        return self.inner

    @property
    def state_dict(self):
        raise KeyError("not opened yet")

    def __copy__(self):
        raise SystemExit("cannot be copied")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", ["property", "itself"])
def test_dataset_that_cannot_be_looked_at_loads(how, num_workers):
    """Attributes that torch does not look at decide nothing."""
    loader = DataLoader(Awkward(how), 4, num_workers=num_workers)
    assert batches_of(loader) == batches_of(torch_loader(Awkward(how), 4))
    assert loader.report()


def test_error_before_a_worker_is_ready_is_the_loops():
    """It comes as an error of ``worker_init_fn`` does, at the first batch; nobody waits for it."""
    batches = iter(ThreadLoader(Awkward("exit"), 4, num_workers=2))
    with pytest.raises(RuntimeError, match="cannot be copied") as caught:
        next(batches)
    assert type(caught.value.__cause__) is SystemExit
    assert "in copying the dataset" in caught.value.__notes__[0]
    assert next(batches, None) is None


def test_failing_thread_of_the_loader_is_no_hang(monkeypatch, caplog):
    """A bug in the loader itself raises in the loop, and the log has the traceback."""

    def fail(*_args, **_cells):
        raise LookupError("a mistake of ours")

    loader = ThreadLoader(Indices(), 2, num_workers=2)
    monkeypatch.setattr(worker_module, "record_parts", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no fault of the dataset: LookupError"):
            next(iter(loader))
    assert "in fail" in caplog.text
    monkeypatch.undo()
    assert len(batches_of(loader)) == 6


@pytest.mark.parametrize("most", [0, 2])
def test_threads_end_when_the_system_has_no_more(monkeypatch, most):
    """Threads that were started end, and the next epoch begins as if nothing had happened."""
    start, started = threading.Thread.start, []

    def start_some(thread):
        if thread.name.startswith("spdl-loader"):
            if len(started) >= most:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    loader = ThreadLoader(Indices(), 2, num_workers=4)
    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(loader)
    monkeypatch.undo()
    assert len(started) == most
    assert_threads_end()
    assert len(batches_of(loader)) == 6


class Mute(Exception):
    """Cannot say its text."""

    def __str__(self):
        raise TypeError("no text")


class Noted(Exception):
    """Has notes of its own, which are none."""

    def __init__(self):
        self.__notes__ = 5


class Key:
    """An index that does not like to be looked at."""

    @property
    def shape(self):
        raise RuntimeError("no shape")

    def __repr__(self):
        raise RuntimeError("no text")


class InBatches(Made):
    """Whole batches in one call."""

    def __getitems__(self, indices):
        return self.make(indices)


# Made anew by each test: an error that was raised keeps the frames of the loop that it met.
ERRORS = {
    "whose text raises": (Made, Mute, {"batch_size": 3}),
    "with notes that are none": (Made, Noted, {"batch_size": 3}),
    "of an index that cannot be shown": (Made, KeyError, {"batch_size": None, "sampler": [Key()]}),
    "of a slice": (InBatches, KeyError, {"batch_sampler": [slice(0, 4)]}),
}


def error_of(loader):
    """What the first batch raises; it may be one that cannot be matched by its text."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        next(iter(loader))
    return caught.value


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ERRORS)
def test_note_never_replaces_the_error(kind, num_workers):
    """The user's own object arrives, as torch's loader without workers raises it."""
    make, error, options = ERRORS[kind]
    error = error()

    def fail(_):
        raise error

    ours = ThreadLoader(make(fail), **options, num_workers=num_workers)
    assert error_of(torch_loader(make(fail), **options)) is error
    assert error_of(ours) is error
    if make is Made:
        options = {**options, "num_workers": num_workers, "on_error": "skip", "error_budget": 99}
        skipping = ThreadLoader(make(fail), **options)
        assert list(skipping) == []
        assert len(skipping.skipped) in (1, 12)
    # Its frames hold the loaders, which later tests would find among the live ones.
    error.with_traceback(None)


@pytest.mark.parametrize("loader_class", [ThreadLoader, DataLoader, torch_loader])
@pytest.mark.parametrize("rng", ["sample", "worker"])
def test_stuck_worker_does_not_stop_the_others(loader_class, rng):
    """Out of order, all that others can make comes while one is stuck, as with torch's: of 12
    samples two places in all stay with the stuck worker, and 30 items are the other's."""
    from torch import multiprocessing

    gate = multiprocessing.get_context("fork").Event()

    def stuck_at_0(number):
        assert number or gate.wait(2 * PATIENCE_SECONDS)
        return number

    class Stream(IterableDataset):
        def __iter__(self):
            stuck_at_0(get_worker_info().id)
            return iter(range(30))

    data, count = (Stream(), 30) if rng == "sample" else (Made(stuck_at_0), 9)
    given = {} if loader_class is torch_loader else {"rng": rng}
    batches = iter(
        loader_class(data, num_workers=2, in_order=False, timeout=PATIENCE_SECONDS, **given)
    )
    try:
        found = sorted(batch.item() for batch in islice(batches, count))
    finally:
        gate.set()
    assert len(found) == count
    assert rng == "worker" or found == list(range(30))


def test_sampler_that_answers_to_every_name_is_no_endless_search():
    """As tests of frameworks pass them."""
    inner = mock.Mock(spec=[])
    inner.sampler = inner
    for sampler in (mock.Mock(), mock.MagicMock(), inner):
        assert DataLoader(range(3), sampler=sampler).sampler is sampler
