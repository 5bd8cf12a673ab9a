"""Random loaders under random use beside torch's: the same batches, errors and lengths."""

import json
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from _datasets import BulkData, MapData, StreamData
from _fuzz import run_long, run_short
from _inside import state_of
from _loader_helpers import (
    DataLoader,
    ModelLoader,
    ThreadLoader,
    assert_threads_end,
    frozen,
    loader_threads,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning"),
]

DATASETS = {"map": MapData, "bulk": BulkData, "stream": StreamData}
ERRORS = [ValueError, KeyError, OSError, ZeroDivisionError]
CAN_RESUME = hasattr(DataLoader, "state_dict")
NUM_ITERATORS = 2
"""How many iterators of one loader are under way at once."""


class EpochBatches:
    """A user's batch sampler: batches of uneven sizes in an order of each epoch's own."""

    def __init__(self, length):
        self.length = length
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch))
        indices = order.tolist()
        for size in range(self.length):
            if not indices:
                return
            batch, indices = indices[: 1 + size % 4], indices[1 + size % 4 :]
            yield batch

    def set_epoch(self, epoch):
        self.epoch = epoch


SAMPLERS = {
    "random": lambda data, _: RandomSampler(data, replacement=True, num_samples=len(data) + 3),
    "weighted": lambda data, _: WeightedRandomSampler([1.0, 2.0] * len(data), len(data)),
    "distributed": lambda data, rank: DistributedSampler(data, num_replicas=3, rank=rank),
    "distributed, dropping": lambda data, rank: DistributedSampler(
        data, num_replicas=2, rank=rank % 2, shuffle=False, drop_last=True
    ),
    "reversed": lambda data, _: list(reversed(range(len(data)))),
    "one beyond the end": lambda data, _: [*range(len(data)), len(data)],
}


@st.composite
def recipes(draw):
    """What a loader is made of, for a map-style or iterable dataset."""
    kind = draw(st.sampled_from(sorted(DATASETS)))
    length = draw(st.integers(1, 30))
    num_workers = draw(st.sampled_from([0, 1, 2, 4]))
    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        options["persistent_workers"] = draw(st.booleans())
        options["prefetch_factor"] = draw(st.integers(1, 3))
    order = "none" if kind == "stream" else draw(st.sampled_from(["none", "shuffle", *SAMPLERS]))
    if kind != "stream" and draw(st.integers(0, 5)) == 0:
        order = "batch_sampler"
    if order != "batch_sampler":
        options["batch_size"] = draw(st.none() | st.integers(1, 7))
        options["drop_last"] = options["batch_size"] is not None and draw(st.booleans())
    return {
        "kind": kind,
        "length": length,
        "bad": draw(st.dictionaries(st.integers(0, 30), st.sampled_from(ERRORS), max_size=3)),
        "split": draw(st.booleans()),
        "order": order,
        "rank": draw(st.integers(0, 2)),
        "own_generator": draw(st.booleans()),
        "options": options,
    }


class Side:
    """One of the two loaders, with random generators of its own."""

    def __init__(self, loader_class, recipe):
        self.rng_state = torch.Generator().manual_seed(5).get_state()
        options = dict(recipe["options"])
        if recipe["own_generator"]:
            options["generator"] = torch.Generator().manual_seed(7)
        split = {"split": recipe["split"]} if recipe["kind"] == "stream" else {}
        data = DATASETS[recipe["kind"]](recipe["length"], dict(recipe["bad"]), **split)
        with self.turn():
            if recipe["order"] == "shuffle":
                options["shuffle"] = True
            elif recipe["order"] == "batch_sampler":
                options["batch_sampler"] = EpochBatches(len(data))
            elif recipe["order"] != "none":
                options["sampler"] = SAMPLERS[recipe["order"]](data, recipe["rank"])
            self.loader = loader_class(data, **options)
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

    def start_alone(self, place):
        with self.turn():
            self.start(place)

    def step(self, place):
        return next(self.iterators[place])

    def set_epoch(self, epoch):
        for sampler in (self.loader.sampler, self.loader.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


class LoaderMachine(RuleBasedStateMachine):
    """Whatever is done to ours is done to torch's, and the same must come of it.

    torch's worker processes are played by ``ModelLoader``.
    """

    ours: Any = ThreadLoader

    @initialize(recipe=recipes())
    def build(self, recipe):
        self.sides = [Side(ModelLoader, recipe), Side(self.ours, recipe)]
        self.has_begun = False
        self.recipe = recipe
        self.started = [False] * NUM_ITERATORS
        self.latest: int | None = None  # whose epoch is the loader's, and has not ended
        self.epoch: int | None = None
        self.was_resumed = False

    places = st.integers(0, NUM_ITERATORS - 1)

    def both(self, what):
        theirs, ours = (side.do(what) for side in self.sides)
        assert ours == theirs
        if not self.was_resumed:  # its order was drawn again, not its generator wound forward
            assert torch.equal(self.sides[0].rng_state, self.sides[1].rng_state)
        return ours

    @rule(place=places)
    def start_epoch(self, place):
        """Also in the middle of another one: of persistent workers that is its end."""
        if self.was_resumed and (self.latest is not None or not self.started[place]):
            return  # how far generators are in mid-epoch depends on the number of workers
        self.both(lambda side: side.start(place))
        self.started[place] = self.has_begun = True
        self.latest = place

    def step_once(self, place):
        event = self.both(lambda side: side.step(place))
        # Persistent workers have one iterator, which begins anew for each place.
        is_latest = place == self.latest or self.sides[0].loader.persistent_workers
        if event[0] is StopIteration and is_latest:
            self.latest = None
        return event

    @rule(place=places, count=st.integers(1, 12))
    def step(self, place, count):
        if not self.started[place]:
            return
        for _ in range(count):
            self.step_once(place)

    @rule(place=places)
    def finish(self, place):
        if not self.started[place]:
            return
        for _ in range(500):
            if self.step_once(place)[0] is StopIteration:
                return
        raise AssertionError("the epoch does not end")

    @rule()
    def whole_epoch(self):
        """As a training loop does it."""
        self.start_epoch(0)
        self.finish(0)

    @rule(place=places)
    def drop(self, place):
        if self.was_resumed:
            return
        self.started[place] = False
        self.latest = None if self.latest == place else self.latest
        for side in self.sides:
            side.iterators[place] = None

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        if self.was_resumed and self.latest is not None:
            return  # without workers a sampler may not have begun, and would listen
        self.epoch = epoch
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

    @rule(num_workers=st.sampled_from([0, 1, 3]))
    def resume(self, num_workers):
        """Ours goes on in another loader, in the middle of its epoch; torch's just goes on."""
        place, old = self.latest, self.sides[1]
        if not CAN_RESUME or place is None or self.started.count(True) != 1:
            return
        state = json.loads(json.dumps(old.loader.state_dict()))
        recipe = {**self.recipe, "bad": old.loader.dataset.bad}
        if recipe["kind"] != "stream":  # each of its workers has a place of its own
            given = recipe["options"]
            options = {name: given[name] for name in ("batch_size", "drop_last") if name in given}
            if given.get("persistent_workers"):  # which draw one base seed for all their epochs
                num_workers = max(1, num_workers)
                options["persistent_workers"] = True
            recipe["options"] = {**options, "num_workers": num_workers}
        new = self.sides[1] = Side(self.ours, recipe)
        new.rng_state = old.rng_state.clone()  # as training programs restore it
        with new.turn():
            new.loader.load_state_dict(state)
        new.start_alone(place)
        if self.epoch is not None:
            new.set_epoch(self.epoch)
        self.was_resumed = True

    @rule()
    def look(self):
        """Reading figures changes nothing."""
        loader = self.sides[1].loader
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
