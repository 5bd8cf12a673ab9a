"""torch's DataLoader is the oracle: batches, order, errors, lengths, sampler pulls, RNG use.

First random loaders over whole epochs, then random loaders under random use. torch's worker
processes are played by ``ModelLoader``, which is held against real ones here.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from _datasets import BulkData, Made, MapData, RecordingSampler, StreamData
from _fuzz import QUICK, run_long, run_short
from _inside import state_of
from _loader_helpers import (
    PATIENCE_SECONDS,
    DataLoader,
    ModelLoader,
    ThreadLoader,
    assert_threads_end,
    epoch_of,
    frozen,
    loader_threads,
)
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
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

    def play(self, loader_class):
        """Everything a training loop and the random generators can tell about the loader, in two
        epochs. Out of order it is the batches and errors alone, sorted."""
        torch.manual_seed(self.seed)
        generator = torch.Generator().manual_seed(self.seed + 1) if self.own_generator else None
        loader, sampler = self.build(loader_class, generator)
        story = []
        for _ in range(2):
            if not self.in_order:
                story += [length_of(loader), sorted(epoch_of(loader), key=repr)]
                continue
            story += [
                length_of(loader),
                epoch_of(loader) if sampler is None else _epoch_with_pulls(loader, sampler),
                torch.get_rng_state().tolist(),
                generator.get_state().tolist() if generator else None,
            ]
        return story


def length_of(loader):
    """What ``len`` gives; None = an error, as of a sampler without a length."""
    try:
        return len(loader)
    except TypeError:
        return None


def picky(number, batch):
    """A collate function of samples or of one."""
    if any(sample["y"] == number for sample in (batch if isinstance(batch, list) else [batch])):
        raise ZeroDivisionError("picky")
    return default_collate(batch) if isinstance(batch, list) else default_convert(batch)


def _epoch_with_pulls(loader, sampler):
    """As epoch_of, and after each step how many indices had been taken from the sampler, by the
    loop's thread."""
    sampler.pulled = 0
    batches = iter(loader)
    pulled = sampler.pulled
    events = epoch_of(
        batches,
        lambda batch: (frozen(batch), sampler.pulled),
        lambda error: (type(error), sampler.pulled),
    )
    assert sampler.threads <= {threading.get_ident()}
    return [pulled, *events, sampler.pulled]


ERRORS = [ValueError, KeyError, OSError, ZeroDivisionError]


@st.composite
def cases(draw, min_length=0, **given):
    """Any loader; ``given``: fields that are not drawn."""
    kind = draw(st.sampled_from(["map", "bulk", "map", "bulk", "stream", "split", "mortal"]))
    length, order, indices = draw(st.integers(min_length, 40)), "none", None
    if kind in ("map", "bulk"):
        others = [*SAMPLERS, "epoch batches"] if length else []
        order = draw(st.sampled_from(["none", "shuffle", "sampler", "batch_sampler", *others]))
        # One index past the end: a sampler's mistake must give the dataset's own error.
        index = st.integers(0, length)
        if order == "sampler":
            indices = draw(st.lists(index, max_size=40))
        elif order == "batch_sampler":
            indices = draw(st.lists(st.lists(index, min_size=min_length, max_size=6), max_size=12))
    drawn = {
        "data": kind,
        "length": max(1, length) if order == "shuffle" else length,
        "bad": draw(st.just({}) | st.dictionaries(st.integers(0, 40), st.sampled_from(ERRORS))),
        "order": order,
        "indices": indices,
        "batch_size": draw(st.none() | st.integers(1, 7)),
        "drop_last": draw(st.booleans()),
        "num_workers": draw(st.sampled_from([0, 1, 2, 4])),
        "prefetch_factor": draw(st.integers(1, 3)),
        "persistent_workers": draw(st.booleans()),
        "in_order": draw(st.integers(0, 3)) > 0,
        "own_generator": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "picky": draw(st.none() | st.none() | st.integers(0, 20)),
    }
    return Case(**{**drawn, **given})


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
        Case(data="mortal", bad={4: OSError}, persistent_workers=True),
        Case(order="batch_sampler", indices=[[3, 1], [4], [2]], picky=4),
    ],
    ids=repr,
)
def test_model_agrees_with_torch(case):
    """The oracle of the tests below tells the story torch's worker processes tell."""
    assert case.play(ModelLoader) == case.play(TorchLoader)


@pytest.mark.parametrize(
    ("kind", "num_examples"),
    [
        pytest.param(ThreadLoader, 150, id="threads"),
        pytest.param(DataLoader, 12, id="processes"),  # by default, for these datasets
        pytest.param(ThreadLoader, 800, id="long", marks=pytest.mark.long),
    ],
)
def test_epochs_equal_torchs(kind, num_examples):
    """Batches, order, errors, len, sampler pulls and generator states are torch's; round robin over
    the workers of an iterable; out of order nothing is lost and nothing comes twice."""

    @settings(QUICK, max_examples=num_examples)
    @given(case=cases())
    def check(case):
        assert case.play(kind) == case.play(ModelLoader)

    check()


class _Bulk(Dataset):
    """Takes a whole list as its index, torch's documented way to load in bulk."""

    def __getitem__(self, indices):
        return [index * 10 for index in indices]


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
        (_Bulk(), {"sampler": [[0, 1], [5]], "batch_size": None, "collate_fn": str}),
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


NUM_ITERATORS = 2
"""How many iterators of one loader are under way at once."""


class Side:
    """One of the two loaders, with random generators of its own."""

    def __init__(self, loader_class, case):
        self.rng_state = torch.Generator().manual_seed(5).get_state()
        generator = torch.Generator().manual_seed(7) if case.own_generator else None
        with self.turn():
            self.loader, _ = case.build(loader_class, generator)
        self.iterators: list[Any] = [None] * NUM_ITERATORS

    @contextmanager
    def turn(self):
        """Runs with this side's state of torch's global generator."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.rng_state)
        try:
            yield
        finally:
            self.rng_state = torch.get_rng_state()
            torch.set_rng_state(before)

    def do(self, what):
        """What came of it: a value, or an error's type and text."""
        with self.turn():
            try:
                return frozen(what(self))
            except Exception as error:
                return type(error), str(error)

    def start(self, place):
        # The new one is made before the old one is dropped, as ``for`` in a loop does.
        self.iterators[place] = iter(self.loader)

    def step(self, place):
        return next(self.iterators[place])

    def set_epoch(self, epoch):
        for sampler in (self.loader.sampler, self.loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


class LoaderMachine(RuleBasedStateMachine):
    """Whatever is done to ours is done to torch's, and the same must come of it."""

    ours: Any = ThreadLoader
    places = st.integers(0, NUM_ITERATORS - 1)

    @initialize(case=cases(min_length=1, in_order=True))
    def build(self, case):
        self.sides = [Side(ModelLoader, case), Side(self.ours, case)]
        self.has_begun, self.started = False, [False] * NUM_ITERATORS

    def both(self, what):
        theirs, ours = (side.do(what) for side in self.sides)
        assert ours == theirs
        assert torch.equal(self.sides[0].rng_state, self.sides[1].rng_state)
        return ours

    @rule(place=places)
    def start_epoch(self, place):
        """Also in the middle of another one: of persistent workers that is its end."""
        self.both(lambda side: side.start(place))
        self.started[place] = self.has_begun = True

    @rule(place=places, count=st.integers(1, 12))
    def step(self, place, count):
        for _ in range(count if self.started[place] else 0):
            self.both(lambda side: side.step(place))

    @rule(place=places)
    def finish(self, place):
        if not self.started[place]:
            return
        for _ in range(500):
            if self.both(lambda side: side.step(place))[0] is StopIteration:
                return
        raise AssertionError("the epoch does not end")

    @rule()
    def whole_epoch(self):
        """As a training loop does it."""
        self.start_epoch(0)
        self.finish(0)

    @rule(place=places)
    def drop(self, place):
        self.started[place] = False
        for side in self.sides:
            side.iterators[place] = None

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        for side in self.sides:
            side.set_epoch(epoch)

    @rule()
    def length(self):
        self.both(lambda side: len(side.loader))

    @rule(index=st.integers(0, 30), error=st.sampled_from([None, *ERRORS]))
    def change_data(self, index, error):
        """A sample goes bad, or good, between two epochs; in one, workers may be further ahead."""
        is_fixed = self.ours is DataLoader and self.sides[1].loader.persistent_workers
        if any(self.started) or (self.has_begun and is_fixed):
            return  # a process that lives on has the data of its beginning, as torch's has
        for side in self.sides:
            bad = side.loader.dataset.bad
            bad.pop(index, None)
            if error is not None:
                bad[index] = error

    @rule()
    def look(self):
        """Reading figures, or a state, changes nothing."""
        loader = self.sides[1].loader
        json.dumps(loader.state_dict())
        if state_of(loader).figures.stats is not None:
            assert len(loader.snapshot().stages) == 2
            assert str(loader.report())

    def teardown(self):
        for side in getattr(self, "sides", ()):  # a failure's traceback holds on to them
            side.loader, side.iterators = None, []
        if loader_threads():
            assert_threads_end()


class ProcessMachine(LoaderMachine):
    """Of the default, whose workers are processes here."""

    ours = DataLoader


@pytest.mark.timeout(240)  # 8 to 20 s here; room for a slow machine
@pytest.mark.parametrize(("machine", "examples"), [(LoaderMachine, 40), (ProcessMachine, 10)])
def test_random_use_of_random_loaders(machine, examples):
    """The short form, the same in every run."""
    run_short(machine, examples=examples, steps=20)


@pytest.mark.long
@pytest.mark.parametrize("machine", [LoaderMachine, ProcessMachine])
def test_random_use_of_random_loaders_for_long(machine, long_seconds):
    """Other loaders and uses in every run."""
    run_long(machine, steps=30, seconds=long_seconds)
