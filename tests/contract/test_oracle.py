"""torch's DataLoader is the oracle: batches, order, errors, lengths, sampler pulls, RNG use.

Random loaders under random use. torch's worker processes are played by ``ModelLoader``, which is
held against real ones here.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.datasets import BulkData, Made, MapData, StreamData
from support.fuzz import QUICK
from support.inside import state_of
from support.loaders import (
    PATIENCE_SECONDS,
    DataLoader,
    ModelLoader,
    ThreadLoader,
    assert_threads_end,
    epoch_of,
    frozen,
)
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

pytestmark = pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
TorchLoader = torch.utils.data.DataLoader


class MortalStream(StreamData):
    """A generator: its error is its end, as Python has it."""

    def __iter__(self):
        yield from super().__iter__()


class EpochBatches:
    """A user's batch sampler: batches of uneven sizes in an order of each epoch's own."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        indices, size = torch.randperm(self.length, generator=generator).tolist(), 0
        while indices:
            size = 1 + size % 4
            yield indices[:size]
            del indices[:size]

    def set_epoch(self, epoch):
        self.epoch = epoch


class RecordingSampler:
    """Yields ``indices``; remembers how many were pulled and by which threads."""

    def __init__(self, indices):
        self.indices, self.pulled, self.threads = indices, 0, set()

    def __len__(self):
        return len(self.indices)

    def __repr__(self):
        return f"RecordingSampler({self.indices})"

    def __iter__(self):
        for index in self.indices:
            self.pulled += 1
            self.threads.add(threading.get_ident())
            yield index


DATASETS = {
    "map": MapData,
    "bulk": BulkData,
    "stream": StreamData,
    "split": partial(StreamData, split=True),
    "mortal": MortalStream,
}
SAMPLERS = {
    "random": lambda data: RandomSampler(data, replacement=True, num_samples=len(data) + 3),
    "weighted": lambda data: WeightedRandomSampler([1.0, 2.0] * len(data), len(data)),
    "distributed": lambda data: DistributedSampler(data, num_replicas=3, rank=1),
    "distributed, dropping": lambda data: DistributedSampler(
        data, num_replicas=2, rank=0, shuffle=False, drop_last=True
    ),
    "one beyond the end": lambda data: [*range(len(data)), len(data)],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to build a loader; ``build`` gives the same loader for any class."""

    data: str = "map"
    length: int = 10
    bad: dict[int, type[Exception]] = field(default_factory=dict)
    order: str = "none"
    indices: Any = None
    batch_size: int | None = 3
    drop_last: bool = False
    num_workers: int = 2
    prefetch_factor: int = 2
    persistent_workers: bool = False
    in_order: bool = True
    own_generator: bool = True
    seed: int = 0
    picky: int | None = None
    """The sample that the collate function does not like."""

    def build(self, loader_class, generator):
        """Return the loader, and the sampler that counts pulls (None: another one)."""
        data = DATASETS[self.data](self.length, dict(self.bad))
        options: dict[str, Any] = {"num_workers": self.num_workers, "generator": generator}
        if self.picky is not None:
            options["collate_fn"] = partial(picky, self.picky)
        if self.num_workers:
            for name in ("prefetch_factor", "persistent_workers", "in_order"):
                options[name] = getattr(self, name)
        if self.order not in ("batch_sampler", "epoch batches"):
            options["batch_size"] = self.batch_size
            options["drop_last"] = self.drop_last and self.batch_size is not None
        counting = None
        if self.order == "shuffle":
            options["shuffle"] = True
        elif self.order in SAMPLERS:
            options["sampler"] = SAMPLERS[self.order](data)
        elif self.order == "epoch batches":
            options["batch_sampler"] = EpochBatches(self.length)
        elif self.order != "none":
            counting = options[self.order] = RecordingSampler(self.indices)
        return loader_class(data, **options), counting


def picky(number, batch):
    """A collate function of samples or of one."""
    if any(sample["y"] == number for sample in (batch if isinstance(batch, list) else [batch])):
        raise ZeroDivisionError("picky")
    return default_collate(batch) if isinstance(batch, list) else default_convert(batch)


ERRORS = [ValueError, KeyError, OSError, ZeroDivisionError]


@st.composite
def cases(draw):
    """Any loader."""
    kind = draw(st.sampled_from(["map", "bulk", "map", "bulk", "stream", "split", "mortal"]))
    length, order, indices = draw(st.integers(0, 40)), "none", None
    if kind in ("map", "bulk"):
        others = [*SAMPLERS, "epoch batches"] if length else []
        order = draw(st.sampled_from(["none", "shuffle", "sampler", "batch_sampler", *others]))
        # One index past the end: a sampler's mistake must give the dataset's own error.
        index = st.integers(0, length)
        if order == "sampler":
            indices = draw(st.lists(index, max_size=40))
        elif order == "batch_sampler":
            indices = draw(st.lists(st.lists(index, max_size=6), max_size=12))
    return Case(
        data=kind,
        length=max(1, length) if order == "shuffle" else length,
        bad=draw(st.just({}) | st.dictionaries(st.integers(0, 40), st.sampled_from(ERRORS))),
        order=order,
        indices=indices,
        batch_size=draw(st.none() | st.integers(1, 7)),
        drop_last=draw(st.booleans()),
        num_workers=draw(st.sampled_from([0, 1, 2, 4])),
        prefetch_factor=draw(st.integers(1, 3)),
        persistent_workers=draw(st.booleans()),
        in_order=draw(st.integers(0, 3)) > 0,
        own_generator=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        picky=draw(st.none() | st.none() | st.integers(0, 20)),
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(order="shuffle", own_generator=False, persistent_workers=True),
        Case(bad={1: ValueError, 4: KeyError, 5: ValueError}, drop_last=True),
        Case(data="bulk", order="batch_sampler", indices=[[3, 1], [], [11], [0, 0, 2]]),
        Case(order="sampler", indices=[4, 1, 9, 9], batch_size=None, num_workers=1),
        Case(data="stream", length=7, persistent_workers=True),
        Case(data="split", length=2, batch_size=2, num_workers=3, drop_last=True),
        Case(data="split", length=9, batch_size=None, bad={3: ValueError, 8: KeyError}),
        Case(data="mortal", bad={4: OSError}),
        Case(order="batch_sampler", indices=[[3, 1], [4], [2]], picky=4),
    ],
    ids=repr,
)
def test_model_agrees_with_torch(case):
    """The oracle of the tests below tells the story torch's worker processes tell."""
    kinds = ModelLoader, TorchLoader
    ours, theirs = ([*Use(each, case, type).story(TWO_EPOCHS)] for each in kinds)
    assert ours == theirs


IN_BULK = Made(lambda indices: [index * 10 for index in indices])
"""Takes a whole list as its index, torch's documented way to load in bulk."""


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        ([5, 6, 7], {}),
        (range(9), {"shuffle": True}),
        ({0: "a", 1: "b"}, {"sampler": [1, 0, 1]}),
        (TensorDataset(torch.arange(8), torch.rand(8, 2)), {"shuffle": True}),
        (Subset(MapData(9), [8, 1, 4]), {}),
        (ConcatDataset([MapData(3), BulkData(4)]), {"shuffle": True}),
        (StackDataset(a=MapData(4), b=range(4)), {}),
        (ChainDataset([StreamData(3), StreamData(2)]), {}),
        (IN_BULK, {"sampler": [[0, 1], [5]], "batch_size": None, "collate_fn": str}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_epochs_equal_torchs_for_common_datasets(dataset, options, num_workers):
    """Plain sequences and torch's own datasets and samplers give what torch gives."""
    stories = []
    for loader_class in (ThreadLoader, ModelLoader):
        torch.manual_seed(3)
        loader = loader_class(dataset, **{"batch_size": 2, "num_workers": num_workers, **options})
        stories.append([epoch_of(loader) for _ in range(2)])
    assert stories[0] == stories[1]


def test_batches_come_in_order_when_completed_out_of_order():
    """The first sample is ready after the second one."""
    second_is_made = threading.Event()

    def sample(index):
        assert index or second_is_made.wait(PATIENCE_SECONDS), "the second never came"
        second_is_made.set()
        return index

    assert list(ThreadLoader(Made(sample, 4), None, num_workers=2)) == [0, 1, 2, 3]


TWO_EPOCHS = [("whole",), ("look",)] * 2
PLACES = 2
"""How many iterators of one loader are under way at once."""


def steps(is_fixed):
    """What a program may do with a loader. ``is_fixed``: its workers have the data of its
    beginning."""
    place = st.integers(0, PLACES - 1)
    known = [
        st.tuples(st.just("start"), place),  # also in the middle of another epoch
        st.tuples(st.just("step"), place, st.integers(1, 12)),
        st.tuples(st.just("step"), place, st.just(500)),
        st.tuples(st.just("drop"), place),
        st.tuples(st.just("set_epoch"), st.integers(0, 3)),
        st.sampled_from([("whole",), ("look",)]),
    ]
    if not is_fixed:
        known.append(st.tuples(st.just("change"), st.integers(0, 30), st.sampled_from(ERRORS)))
    return st.lists(st.one_of(known), min_size=8, max_size=25)


class Use:
    """What comes of such steps."""

    def __init__(self, loader_class, case, told=lambda error: (type(error), str(error))):
        self.told = told  # of an error
        torch.manual_seed(case.seed)
        self.generator = torch.Generator().manual_seed(7) if case.own_generator else None
        self.loader, self.sampler = case.build(loader_class, self.generator)
        self.in_order, self.iterators = case.in_order, [None] * PLACES

    def start(self, place):
        # The new one is made before the old one is dropped, as ``for`` in a loop does.
        self.iterators[place] = iter(self.loader)

    def step(self, place, count):
        found = []
        for _ in range(count if self.iterators[place] is not None else 0):
            try:
                found.append((frozen(next(self.iterators[place])), self.num_pulled()))
            except StopIteration:
                found = found if self.in_order else sorted(found, key=repr)
                return [*found, "end", self.num_pulled()]
            except Exception as error:
                found.append((self.told(error), self.num_pulled()))
        assert count < 500 or not found, "the epoch does not end"
        return found

    def num_pulled(self):
        """How many indices were taken from a sampler that counts, by the loop's thread."""
        assert self.sampler is None or self.sampler.threads <= {threading.get_ident()}
        return self.sampler.pulled if self.sampler is not None and self.in_order else None

    def whole(self):
        self.start(0)
        return self.step(0, 500)

    def drop(self, place):
        self.iterators[place] = None

    def set_epoch(self, epoch):
        for sampler in (self.loader.sampler, self.loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def look(self):
        """Reading figures, or a state, changes nothing."""
        if isinstance(self.loader, DataLoader):
            json.dumps(self.loader.state_dict())
            if state_of(self.loader).stats is not None:
                assert len(self.loader.snapshot().stages) == 2
                assert str(self.loader.report())
        return len(self.loader)

    def change(self, index, error):
        """A sample goes bad, or good, between two epochs; in one, workers may be further ahead."""
        if not any(self.iterators):
            bad = self.loader.dataset.bad
            bad.pop(index, None) or bad.update({index: error})

    def story(self, steps):
        """All that came, and where the generators then stood. Out of order, of whole epochs alone:
        nothing is lost and nothing comes twice."""
        for name, *arguments in steps if self.in_order else TWO_EPOCHS:
            try:
                yield getattr(self, name)(*arguments)
            except Exception as error:
                yield type(error), str(error)
            yield self.in_order and torch.get_rng_state().tolist()
            yield self.in_order and self.generator and self.generator.get_state().tolist()


@pytest.mark.parametrize(
    ("kind", "num_examples"),
    [
        pytest.param(ThreadLoader, 120, id="threads"),
        pytest.param(DataLoader, 10, id="processes"),  # by default, for these datasets
        pytest.param(ThreadLoader, 600, id="threads-long", marks=pytest.mark.long),
        pytest.param(DataLoader, 200, id="processes-long", marks=pytest.mark.long),
    ],
)
def test_random_use_of_random_loaders(kind, num_examples):
    """Whatever is done to ours is done to torch's, and the same comes of it: batches, order,
    errors, len, sampler pulls and generator states; round robin over the workers of an iterable."""

    @settings(QUICK, max_examples=num_examples)
    @given(data=st.data(), case=cases())
    def check(data, case):
        done = data.draw(steps(is_fixed=kind is DataLoader and case.persistent_workers))
        theirs, ours = ([*Use(each, case).story(done)] for each in (ModelLoader, kind))
        assert ours == theirs

    check()
    assert_threads_end()
