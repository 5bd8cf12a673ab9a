"""States that datasets and samplers keep themselves: asked for when somebody wants one, exact, and
apart from what goes on."""

import copy
import itertools
import logging
import pickle

import pytest
from _datasets import Asked, Divided, Indices, Live, LiveIterators, Shuffled
from _loader_helpers import batches_of, resumed
from _seats import FORKED, NONE, THREADS, in_seats

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.loader.checkpoint import user_state as own_state
from spdl_torch.loader.checkpoint.user_state import OwnState, WorkerState
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing import assert_resume_exact

SEATS = (NONE, THREADS, FORKED)
near = in_seats(*SEATS)


class ForSomebodyElse(Divided):
    """Its methods are not meant for a loader, as those of litdata's streams."""

    def __init__(self, length=12):
        super().__init__(length)

    def state_dict(self, num_samples_yielded, num_workers, batch_size):
        raise AssertionError("nobody may call it")

    def load_state_dict(self, state):
        raise AssertionError("nobody may call it")


class OptedOut(ForSomebodyElse):
    """Litdata's stream under a loader that counts, as the error says."""

    state_dict = None


class NotReady(ForSomebodyElse):
    """Cannot tell its state."""

    def state_dict(self):
        raise LookupError("no cursor yet")


class Uncopyable(ForSomebodyElse):
    """Its state cannot be sent from a process."""

    def state_dict(self):
        return {"cursor": lambda: 0}


class OnlyFor(Indices):
    """Map-style, or a sampler, with methods that are not for loaders."""

    def __iter__(self):
        return iter(range(12))

    def state_dict(self, destination):
        raise AssertionError("nobody may call it")

    def load_state_dict(self, state):
        raise AssertionError("nobody may call it")


class Broken(OnlyFor):
    """The same, which cannot tell its state."""

    def state_dict(self):
        raise LookupError("no cursor yet")


@near
def test_plain_loading_asks_nobody_for_a_state(seat):
    """However their methods look, of datasets, iterators and samplers."""
    Asked.num_asked = 0
    for dataset in (ForSomebodyElse(), NotReady(), Live(), LiveIterators(), OnlyFor()):
        loader = seat.loader(dataset, 3, seed=1)
        sizes = [len(batch) for _ in range(2) for batch in loader]
        assert sum(sizes) == 2 * getattr(dataset, "length", 12), dataset
    for dataset in (OnlyFor(), Broken()):
        loader = seat.loader(range(12), 4, sampler=dataset)
        assert len(batches_of(loader)) == 3
    assert Asked.num_asked == 0


@pytest.mark.parametrize(
    ("seat", "dataset", "match"),
    [
        *((seat, ForSomebodyElse, "missing 3 required positional") for seat in SEATS),
        *((seat, NotReady, "no cursor yet") for seat in SEATS),
        (FORKED, Uncopyable, "pickle|local object"),
    ],
    ids=str,
)
def test_error_of_a_state_is_an_error_of_state_dict(seat, dataset, match):
    """Whenever one is asked for: first the user's own, with a note, then its text. All batches
    come, then and afterwards."""
    loader = seat.loader(dataset(), 2)
    loader.state_dict()  # nothing of the dataset's is in it yet
    batches = iter(loader)
    received = [*next(batches), *next(batches)]
    for number in range(2):
        # Of what cannot be pickled by Python's version.
        kinds = (LookupError, AttributeError, TypeError, RuntimeError, pickle.PicklingError)
        with pytest.raises(kinds, match=match) as caught:
            loader.state_dict()
        if dataset is NotReady and not number:
            assert type(caught.value) is LookupError
            assert "in NotReady.state_dict(), asked by a loader's" in caught.value.__notes__[0]
    received += [index for batch in batches for index in batch]
    assert sorted(received) == list(range(12))


@pytest.mark.parametrize("what", ["dataset", "sampler"])
def test_error_of_a_map_style_state_is_an_error_of_state_dict(what):
    """Without workers the dataset is asked, and a sampler always."""
    for part, error in ((OnlyFor(), TypeError), (Broken(), LookupError)):
        loader = DataLoader(**{"dataset": range(12), what: part}, batch_size=4)
        next(iter(loader))
        with pytest.raises(error, match=r"missing 1|no cursor"):
            loader.state_dict()


@near
@pytest.mark.parametrize("dataset", [Live, LiveIterators, Shuffled, OptedOut])
def test_first_state_of_an_epoch_is_exact_though_nobody_had_asked(seat, dataset, caplog):
    """Items are counted until somebody asks, and who resumes makes them again, drawing what they
    drew; a warning says so where the dataset has a state that would have spared it."""
    loader, again = (seat.loader(dataset(), 3, seed=2, persistent_workers=True) for _ in range(2))
    batches = iter(loader)
    batches_of(itertools.islice(batches, 3))
    with caplog.at_level(logging.WARNING, "spdl_torch.data"):
        state = loader.state_dict()
        assert loader.state_dict() == state
    assert batches_of(resumed(again, state)) == batches_of(batches)
    has_asked = seat is not NONE and dataset in (Live, LiveIterators)
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

    def load_state_dict(self, state):
        self.place = state


def test_source_of_a_pipeline_is_asked_when_somebody_wants_a_state():
    """Plain passes ask nothing; states are exact and apart from what goes on."""

    def make(**options):
        return PipelineDataset(PipelineBuilder().add_source(Source(**options)).add_sink())

    Asked.num_asked = 0
    assert list(make()) == list(make(misfit=True)) == list(range(12))
    assert Asked.num_asked == 0
    assert_resume_exact(make)


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
    loader = THREADS.loader(Live(), 2)
    loader.state_dict()
    Asked.num_asked = 0
    batches_of(copy.copy(loader))
    assert Asked.num_asked == 0
    batches_of(loader)
    assert Asked.num_asked > 0
