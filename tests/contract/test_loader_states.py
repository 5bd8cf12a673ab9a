"""States that datasets and samplers keep themselves: asked for when somebody wants one, exact, and
apart from what goes on."""

import copy
import json
import logging
import pickle
from itertools import islice, product

import pytest
import torch
from _datasets import (
    Asked,
    Drawn,
    Endless,
    ForSomebodyElse,
    Live,
    LiveIterators,
    NotReady,
    OnlyFor,
    Shuffled,
    Uncopyable,
)
from _loader_helpers import DataLoader, batches_of, resumed
from torch.utils.data import DistributedSampler, Sampler

from spdl_torch import PipelineDataset
from spdl_torch.loader.checkpoint import user_state as own_state
from spdl_torch.loader.checkpoint.user_state import OwnState, WorkerState
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing import assert_resume_exact

KINDS = {
    "none": {"num_workers": 0},
    "threads": {"num_workers": 2, "isolation": "thread"},
    "persistent": {"num_workers": 2, "persistent_workers": True, "isolation": "thread"},
    "processes": {"num_workers": 2, "isolation": "process"},
}


class OptedOut(ForSomebodyElse):
    """Litdata's stream under a loader that counts, as the error says."""

    state_dict = None


class Broken(OnlyFor):
    """A map-style dataset that cannot tell its state."""

    def state_dict(self):
        raise LookupError("no cursor yet")


class OrderOf:
    """A sampler whose methods are those of something else."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(range(12))

    def __len__(self):
        return 12

    def state_dict(self, *arguments):
        return self.dataset.state_dict(*arguments)

    def load_state_dict(self, state):
        raise AssertionError("nobody may call it")


@pytest.mark.parametrize("kind", KINDS)
def test_plain_loading_asks_nobody_for_a_state(kind):
    """However their methods look, of datasets, iterators and samplers."""
    Asked.num_asked = 0
    for dataset in (ForSomebodyElse(), NotReady(), Live(), LiveIterators(), OnlyFor()):
        loader = DataLoader(dataset, 3, **KINDS[kind], seed=1)
        sizes = [len(batch) for _ in range(2) for batch in loader]
        assert sum(sizes) == 2 * getattr(dataset, "length", 12), dataset
    for dataset in (OnlyFor(), Broken()):
        loader = DataLoader(range(12), 4, sampler=OrderOf(dataset), **KINDS[kind])
        assert len(batches_of(loader)) == 3
    assert Asked.num_asked == 0


UNFIT = (
    r"ForSomebodyElse\.state_dict\(num_samples_yielded, num_workers, batch_size\) cannot be "
    r"called as state_dict\(\).*set state_dict = None"
)


@pytest.mark.parametrize(
    ("dataset", "kind", "match"),
    [
        *((ForSomebodyElse, kind, UNFIT) for kind in KINDS),
        *((NotReady, kind, "no cursor yet") for kind in KINDS),
        (Uncopyable, "processes", "pickle|local object"),
    ],
)
def test_error_of_a_state_is_an_error_of_state_dict(dataset, kind, match):
    """Whenever one is asked for: that a method does not fit, and what to do; the user's own, with a
    note. All batches come, then and afterwards."""
    loader = DataLoader(dataset(), 2, **KINDS[kind])
    loader.state_dict()  # nothing of the dataset's is in it yet
    batches = iter(loader)
    received = [*next(batches), *next(batches)]
    for _ in range(2):
        # Of what cannot be pickled by Python's version.
        kinds = (LookupError, AttributeError, TypeError, RuntimeError, pickle.PicklingError)
        with pytest.raises(kinds, match=match) as caught:
            loader.state_dict()
    received += [index for batch in batches for index in batch]
    assert sorted(received) == list(range(12))
    if dataset is NotReady:
        assert type(caught.value) is LookupError
        assert "in NotReady.state_dict(), asked by a loader's" in caught.value.__notes__[0]


@pytest.mark.parametrize("what", ["dataset", "sampler"])
def test_error_of_a_map_style_state_is_an_error_of_state_dict(what):
    """Without workers the dataset is asked, and a sampler always."""
    for part, error in ((OnlyFor(), TypeError), (Broken(), LookupError)):
        sampler = OrderOf(part) if what == "sampler" else None
        loader = DataLoader(part if sampler is None else range(12), 4, sampler=sampler)
        next(iter(loader))
        with pytest.raises(error, match=r"cannot be called|missing 1|no cursor"):
            loader.state_dict()


@pytest.mark.parametrize("kind", ["none", "persistent"])
def test_state_after_an_epoch_and_before_the_next_batch_has_the_datasets_own(kind):
    """The second epoch goes on where the first has left the dataset, though nobody had asked."""

    def make():
        return DataLoader(Endless(), 2, **KINDS[kind])

    loader = make()
    first = batches_of(loader)
    after = json.loads(json.dumps(loader.state_dict()))
    batches = iter(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    second = batches_of(batches)
    assert sorted(sum(second, []))[:4] == [4, 5, 6, 7] != sorted(sum(first, []))[:4]  # noqa: RUF017
    assert batches_of(resumed(make(), after)) == batches_of(resumed(make(), state)) == second


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dataset", [Live, LiveIterators, Shuffled, OptedOut])
def test_first_state_of_an_epoch_is_exact_though_nobody_had_asked(dataset, kind, caplog):
    """Items are counted until somebody asks, and who resumes makes them again, drawing what they
    drew; a warning says so where the dataset has a state that would have spared it."""
    options = {**KINDS[kind], "batch_size": 3, "seed": 2}
    loader = DataLoader(dataset(), **options)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with caplog.at_level(logging.WARNING, "spdl_torch.data"):
        state = loader.state_dict()
        assert loader.state_dict() == state
    assert batches_of(resumed(DataLoader(dataset(), **options), state)) == batches_of(batches)
    has_asked = kind != "none" and dataset in (Live, LiveIterators)
    assert caplog.text.count("nobody had asked for a state before") == has_asked


class Source(Asked):
    """Of a pipeline: a live state."""

    def __init__(self, misfit=False):
        self.place = [0]
        if misfit:
            self.state_dict = lambda num_samples: None

    def __iter__(self):
        while self.place[0] < 12:
            self.place[0] += 1
            yield self.place[0] - 1
        self.place[0] = 0

    def state(self):
        return self.place

    def load(self, state):
        self.place = state


def test_source_of_a_pipeline_is_asked_when_somebody_wants_a_state():
    """Plain passes ask nothing; states are exact and apart from what goes on."""

    def make(**options):
        return PipelineDataset(PipelineBuilder().add_source(Source(**options)).add_sink())

    Asked.num_asked = 0
    assert list(make()) == list(make(misfit=True)) == list(range(12))
    assert Asked.num_asked == 0
    assert_resume_exact(make)
    misfit = make(misfit=True)
    iterator = iter(misfit)
    next(iterator)
    with pytest.raises(TypeError, match=r"Source\.state_dict\(num_samples\) cannot be called"):
        misfit.state_dict()
    iterator.close()


def test_dear_state_is_asked_for_now_and_then(monkeypatch):
    """One that takes 40 ms is asked for so often that this takes a twentieth of the time; in
    between the items since are counted."""
    clock, asked = [0], []

    class Dear(ForSomebodyElse):
        def state_dict(self):
            clock[0] += 40_000_000
            asked.append(clock[0])
            return {"number": len(asked)}

    monkeypatch.setattr(own_state, "perf_counter_ns", lambda: clock[0])
    own, reached = OwnState(iter(()), Dear(), WorkerState()), []
    for number in range(1, 1001):
        clock[0] += 10_000_000
        own.ask(number, ended=False)
        reached.append(own.reached(number, ended=False))
    assert 0.03 < 0.04 * len(asked) / (clock[0] / 1e9) < 0.06
    assert [each.num_items for each in reached] == list(range(1, 1001))
    at = [each.num_items - each.num_after for each in reached]
    assert at == sorted(at)
    assert len(set(at)) == len(asked)
    own.ask(1001, ended=False, now=True)
    assert own.reached(1001, ended=False).num_after == 0


def test_loader_and_copies_of_it_want_states_apart():
    """A copy of a loader has asked for nothing."""
    loader = DataLoader(Live(), 2, num_workers=2, isolation="thread")
    loader.state_dict()
    Asked.num_asked = 0
    batches_of(copy.copy(loader))
    assert Asked.num_asked == 0
    batches_of(loader)
    assert Asked.num_asked > 0


@pytest.mark.parametrize(
    ("kind", "has_generator", "seed", "stop"),
    [*product(("none", "persistent"), (False, True), (None, 4), (None, 2))],
)
def test_epoch_named_after_a_load_is_the_one_that_would_have_come(kind, has_generator, seed, stop):
    """A loop over epochs with a DistributedSampler names each before it begins: resumed between two
    epochs it has their samples and random numbers; so it has within one that the user leaves."""

    def make():
        sampler = DistributedSampler(range(12), num_replicas=2, rank=0)
        generator = torch.Generator().manual_seed(9) if has_generator else None
        options = {"generator": generator, "seed": seed, **KINDS[kind]}
        return DataLoader(Drawn(12), 2, sampler=sampler, **options)

    def epoch(loader, number, stop=None):
        loader.sampler.set_epoch(number)
        return [batch.tolist() for batch in islice(loader, stop)]

    torch.manual_seed(1)
    loader = make()
    epoch(loader, 0)
    epoch(loader, 1, stop)
    state, rng = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
    expected = [epoch(loader, number) for number in (2, 3)]
    again = make()
    torch.set_rng_state(rng)
    again.load_state_dict(state)
    assert [epoch(again, number) for number in (2, 3)] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_taken_while_an_epoch_begins_has_that_epoch_before_it(num_workers):
    """As a signal's handler may take it: draws that were made for the order come again."""
    states = []

    class Order(Sampler):
        def __init__(self, seed):
            self.generator = torch.Generator().manual_seed(seed)

        def __len__(self):
            return 5

        def __iter__(self):
            order = torch.randperm(20, generator=self.generator).view(5, 4).tolist()
            if self is loader.batch_sampler:
                states.append(loader.state_dict())
            return iter(order)

    def made(seed):
        return DataLoader(range(20), batch_sampler=Order(seed), num_workers=num_workers)

    loader = made(3)
    epochs = [batches_of(loader) for _ in range(2)]
    assert [batches_of(resumed(made(5), state)) for state in states] == epochs
