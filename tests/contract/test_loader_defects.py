"""Datasets that met a defect of the loader once: they load, or say what is wrong, as torch's do."""

from __future__ import annotations

import threading
from collections import namedtuple
from dataclasses import dataclass
from itertools import islice
from unittest import mock

import pytest
import torch
from _datasets import Indices
from _loader_helpers import (
    PATIENCE_SECONDS,
    DataLoader,
    ThreadLoader,
    assert_threads_end,
    no_thread_left,
    torch_loader,
)
from hypothesis import given, strategies as st
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    get_worker_info,
)

from spdl_torch.loader.backends import worker_thread as worker_module
from spdl_torch.loader.backends.dataset_copies import own_copy
from spdl_torch.loader.rng.keys import Purpose, StreamKey
from spdl_torch.testing import assert_reproducible

__all__ = ["no_thread_left"]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def batches_of(loader):
    """As lists of numbers."""
    return [batch.tolist() for batch in loader]


# -- copies of the dataset ---------------------------------------------------------------------


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
    "Subset": (lambda data: Subset(data, [0, 1]), lambda own: own.dataset),
    "ConcatDataset": (lambda data: ConcatDataset([Indices(), data]), lambda own: own.datasets[1]),
    "StackDataset": (lambda data: StackDataset(data), lambda own: own.datasets[0]),
    "StackDataset of names": (lambda data: StackDataset(x=data), lambda own: own.datasets["x"]),
    "namedtuple": (lambda data: Holder(Pair(data, data)), lambda own: own.parts.right),
    "tuple": (lambda data: Holder((data, 3)), lambda own: own.parts[0]),
    "list": (lambda data: Holder(Listed([data])), lambda own: own.parts[0]),
    "dict": (lambda data: Holder({"a": {}, "b": data}), lambda own: None),
    "deep": (
        lambda data: Subset(ConcatDataset([Subset(data, [2])]), [0]),
        lambda own: own.dataset.datasets[0].dataset,
    ),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_attributes_of_a_copy_are_its_own(kind):
    """Apart from the trainer's dataset and from the other workers', wherever the dataset is."""
    wrap, find = HOLDERS[kind]
    data = OneDict()
    holder = wrap(data)
    copies = [own_copy(holder, threading.Lock()) for _ in range(2)]
    if find(copies[0]) is None:
        assert copies[0].parts["b"] is data, "the first entry says whether it holds datasets"
        return
    for number, own in enumerate(map(find, copies)):
        assert type(own) is OneDict
        own.owner = number
    assert [find(own).owner for own in copies] == [0, 1]
    assert not hasattr(data, "owner")
    assert type(getattr(copies[0], "parts", None)) is type(getattr(holder, "parts", None))


class SharedOut(OneDict, IterableDataset):
    """Notes its worker in itself; every item is what the note says when it is made."""

    opened = threading.Barrier(2)

    def __iter__(self):
        self.me = get_worker_info().id
        return iter(self._items())

    def _items(self):
        if threading.current_thread() is not threading.main_thread():
            self.opened.wait(PATIENCE_SECONDS)  # both have noted themselves
        for _ in range(4):
            yield self.me


def test_workers_with_one_dict_between_copies_are_torchs():
    """Each worker's note is its own, as in worker processes."""
    ours = batches_of(ThreadLoader(SharedOut(), num_workers=2))
    assert ours == batches_of(torch_loader(SharedOut(), num_workers=2)) == [[0], [1]] * 4


# -- workers that cannot start -----------------------------------------------------------------


class Awkward(Indices):
    """Something that only loaders look at goes wrong."""

    def __init__(self, how):
        self.how = how
        self.pairs = Pair(OneDict(), OneDict())
        if how == "itself":
            self.inner = self

    @property
    def dataset(self):
        if self.how == "property":
            raise KeyError("not opened yet")
        return self.inner if self.how == "itself" else None

    @property
    def state_dict(self):
        raise KeyError("not opened yet")

    def __copy__(self):
        if self.how == "copy":
            raise ZeroDivisionError("cannot be copied")
        if self.how == "exit":
            raise SystemExit("cannot be copied")
        own = object.__new__(Awkward)
        own.__dict__ = dict(self.__dict__)
        return own


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", ["namedtuple", "property", "itself", "copy"])
def test_dataset_that_cannot_be_looked_at_loads(how, num_workers):
    """Attributes that torch does not look at decide nothing."""
    expected = batches_of(torch_loader(Awkward(how), 4))
    loader = DataLoader(Awkward(how), 4, num_workers=num_workers)
    assert batches_of(loader) == expected
    assert loader.report()


def test_error_before_a_worker_is_ready_is_the_loops():
    """It comes as an error of ``worker_init_fn`` does, at the first batch; nobody waits for it."""
    batches = iter(ThreadLoader(Awkward("exit"), 4, num_workers=2))
    with pytest.raises(RuntimeError, match="cannot be copied") as caught:
        next(batches)
    assert type(caught.value.__cause__) is SystemExit
    assert "in copying the dataset" in caught.value.__notes__[0]
    assert next(batches, None) is None


@pytest.mark.parametrize("num_workers", [1, 2])
def test_failing_thread_of_the_loader_is_no_hang(monkeypatch, num_workers, caplog):
    """A bug in the loader itself raises in the loop, and the log has the traceback."""

    def fail(*_args, **_cells):
        raise LookupError("a mistake of ours")

    loader = ThreadLoader(Indices(), 2, num_workers=num_workers)
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


# -- the user's own errors ---------------------------------------------------------------------


class Mute(Exception):
    """Cannot say its text."""

    def __str__(self):
        raise TypeError("no text")


@dataclass(frozen=True)
class Frozen(Exception):
    """Takes no note."""

    code: int


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


class Raises(Indices):
    """Fails for every index."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        raise self.error


class RaisesBatches(Raises):
    """The same for a whole batch."""

    def __getitems__(self, indices):
        raise self.error


# Made anew by each test: an error that was raised keeps the frames of the loop that it met.
ERRORS = {
    "whose text raises": lambda: (Raises(Mute()), {"batch_size": 3}),
    "that takes no note": lambda: (Raises(Frozen(3)), {"batch_size": 3}),
    "with notes that are none": lambda: (Raises(Noted()), {"batch_size": 3}),
    "of an index that cannot be shown": lambda: (
        Raises(KeyError("a")),
        {"batch_size": None, "sampler": [Key()]},
    ),
    "of a slice": lambda: (RaisesBatches(KeyError("a")), {"batch_sampler": [slice(0, 4)]}),
    "of a number": lambda: (RaisesBatches(KeyError("a")), {"batch_sampler": [7]}),
}


def error_of(loader):
    """What the first batch raises; it may be one that cannot be matched by its text."""
    try:
        next(iter(loader))
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ERRORS)
def test_note_never_replaces_the_error(kind, num_workers):
    """The user's own object arrives, as torch's loader without workers raises it."""
    data, options = ERRORS[kind]()
    ours = ThreadLoader(data, **options, num_workers=num_workers)
    assert error_of(torch_loader(data, **options)) is data.error
    assert error_of(ours) is data.error
    if type(data) is Raises:
        skipping = ThreadLoader(
            data, **options, num_workers=num_workers, on_error="skip", error_budget=99
        )
        assert list(skipping) == []
        assert len(skipping.skipped) in (1, 12)
    # Its frames hold the loaders, which later tests would find among the live ones.
    data.error.with_traceback(None)


# -- order does not matter ---------------------------------------------------------------------


class Stuck(IterableDataset):
    """Worker 0 waits for ever."""

    def __init__(self, gate):
        self.gate = gate

    def __iter__(self):
        if get_worker_info().id == 0:
            assert self.gate.wait(2 * PATIENCE_SECONDS)
        yield from range(30)


class StuckSample(Indices):
    """The worker that draws sample 0 waits for ever."""

    def __init__(self, gate):
        self.gate = gate

    def __getitem__(self, index):
        if index == 0:
            assert self.gate.wait(2 * PATIENCE_SECONDS)
        return index


@pytest.mark.parametrize("options", [{}, {"rng": "worker"}])
def test_stuck_worker_does_not_stop_the_others(options):
    """Out of order, all that others can make comes while one is stuck, as with torch's."""
    from torch import multiprocessing

    def delivered(loader, gate, count):
        batches = iter(loader)
        try:
            return sorted(batch.item() for batch in islice(batches, count))
        finally:
            gate.set()

    def numbers(kind, gate):
        return (Stuck(gate), 30) if not options else (kind(gate), 9)

    settings = {"num_workers": 2, "in_order": False, "timeout": PATIENCE_SECONDS}
    gate = threading.Event()
    data, count = numbers(StuckSample, gate)
    found = [delivered(ThreadLoader(data, **settings, **options), gate, count)]
    for make, more in ((DataLoader, options), (torch_loader, {})):
        gate = multiprocessing.get_context("fork").Event()
        data, _ = numbers(StuckSample, gate)
        found.append(delivered(make(data, **settings, **more), gate, count))
    if not options:
        assert found == [list(range(30))] * 3
    # Two places in all stay with the stuck worker; the rest is the other's.
    assert [len(each) for each in found] == [count] * 3


# -- samplers, seeds, checks -------------------------------------------------------------------


@pytest.mark.parametrize("make", [mock.Mock, mock.MagicMock])
def test_sampler_that_answers_to_every_name_is_no_endless_search(make):
    """As tests of frameworks pass them."""
    for loader_class in (torch_loader, DataLoader):
        loader = loader_class(range(3), sampler=make())
        assert loader.sampler is not None
    inner = mock.Mock(spec=[])
    inner.sampler = inner
    assert DataLoader(range(3), sampler=inner).sampler is inner


class Seeds(Indices):
    """Sample i is the seed of the stream that it draws from."""

    def __getitem__(self, index):
        return torch.initial_seed()


@pytest.mark.parametrize("options", [{}, {"rng": "worker"}])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_initial_seed_fits_into_a_tensor(num_workers, options):
    """``default_collate`` makes int64 of it, as with torch's."""
    torch.manual_seed(3)  # a process's own may be any of 64 bits
    assert next(iter(torch_loader(Seeds(), 3))).dtype == torch.int64
    loader = DataLoader(Seeds(), 12, num_workers=num_workers, **options)
    (seeds,) = loader
    assert seeds.dtype == torch.int64
    assert (seeds >= 0).all()


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**40),
    purpose=st.sampled_from(Purpose),
    generator=st.integers(0, 2),
)
def test_seed_of_every_stream_is_one_of_torchs(seed, position, purpose, generator):
    """63 bits."""
    assert 0 <= StreamKey(seed).seed(position, purpose, generator) < 2**63


class DrawnBy(IterableDataset):
    """Items that show what they drew."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        return (torch.stack([torch.tensor(i), self.draw(i)]) for i in range(7))


def test_reproducible_iterable_passes_and_another_is_found():
    """Each number of workers is compared with itself; it ends, though the sampler does not."""
    assert_reproducible(
        lambda n: DataLoader(DrawnBy(lambda _: torch.randint(10**9, ())), 2, num_workers=n),
        num_workers=(0, 2),
    )
    count = iter(range(1000))
    with pytest.raises(AssertionError, match="num_workers=0 must again give the same batches"):
        assert_reproducible(
            lambda n: DataLoader(DrawnBy(lambda _: torch.tensor(next(count))), 2, num_workers=n),
            num_workers=(0, 2),
        )
