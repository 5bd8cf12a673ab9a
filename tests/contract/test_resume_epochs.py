"""Whose epoch a state is of: named, read from the sampler, begun, left; and which comes next.
States that datasets and samplers keep themselves: asked for when somebody wants one, exact, and
apart from what goes on."""

import copy
import itertools
import logging
import pickle
import random
from itertools import islice

import numpy as np
import pytest
import torch
from support.datasets import (
    Asked,
    Divided,
    Drawn,
    Endless,
    Indices,
    Live,
    LiveIterators,
    Position,
    Shuffled,
)
from support.gates import FakeClock
from support.loaders import DataLoader, batches_of, resumed, stored
from support.seats import FORKED, NONE, THREADS, in_every_seat_by_pairs, in_seats
from torch.utils.data import DistributedSampler, Sampler

from spdl_torch import PipelineDataset
from spdl_torch.loader.checkpoint import user_state
from spdl_torch.loader.checkpoint.user_state import OwnState, WorkerState
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing import assert_resume_exact

none_or_threads = in_seats(NONE, THREADS)


@none_or_threads
@pytest.mark.parametrize("batch_size", [4, None])
def test_an_epoch_named_behind_iter_counts_if_it_was_heard(seat, batch_size):
    """Without workers the order may be drawn at the first ``next()``, as torch does it."""

    def make():
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0)
        return seat.loader(Indices(12), batch_size, sampler=sampler)

    loader = make()
    batches = iter(loader)
    loader.sampler.set_epoch(1)
    next(batches)
    again = resumed(make(), loader.state_dict())
    assert batches_of(again) == batches_of(batches)


class KeepsEpoch(Sampler):
    """Shuffles by the number given to ``set_epoch``, which it keeps in an attribute of any name."""

    def __init__(self, name, default=0):
        self.name = name
        setattr(self, name, default)

    def set_epoch(self, epoch):
        setattr(self, self.name, epoch)

    def __len__(self):
        return 12

    def __iter__(self):
        order = [*range(12)]
        random.Random(int(getattr(self, self.name))).shuffle(order)
        return iter(order)


def with_epochs(name, seat, **options):
    return seat.loader(Indices(12), 2, sampler=KeepsEpoch(name, **options))


def stopped_in_an_epoch(name, num_batches, seat, epoch=2):
    """The state of a loader in epoch 2, or after it with epoch 3 named, and the rest of it."""
    loader = with_epochs(name, seat)
    loader.sampler.set_epoch(epoch)
    batches = iter(loader)
    batches_of(islice(batches, num_batches))
    if num_batches > 6:
        loader.sampler.set_epoch(3)
    return stored(loader), batches_of(loader if num_batches > 6 else batches)


@none_or_threads
@pytest.mark.parametrize("num_batches", [0, 2, 7])
@pytest.mark.parametrize(("name", "epoch"), [("_epoch", 2), ("epoch", np.int64(2))])
def test_the_epoch_of_a_sampler_is_read_where_samplers_keep_it(name, epoch, num_batches, seat):
    """As a number of any type; -1 is none that a state could give back. Of a state between two
    epochs it is the one that was named, whether or not it is named again."""
    state, rest = stopped_in_an_epoch(name, num_batches, seat, epoch)
    for named_again in (False, True):
        again = with_epochs(name, seat)
        again.sampler.set_epoch(0)
        again.load_state_dict(state)
        if named_again:
            again.sampler.set_epoch(3 if num_batches > 6 else 2)
        assert batches_of(again) == rest
    before = with_epochs("epoch", seat, default=-1).state_dict()
    assert before["sampler_epoch"] is None


@none_or_threads
def test_an_epoch_that_cannot_be_read_is_asked_for(seat):
    """Named again, it goes on, also by a sampler that has been mended since; else what follows is
    in another order, which an error says."""
    state, rest = stopped_in_an_epoch("number", 2, seat)
    asks = r"lacks the number of the epoch, since KeepsEpoch .* Call set_epoch\(\)"
    again = with_epochs("number", seat)
    with pytest.warns(UserWarning, match=asks):
        again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"order: .* gives other .* call its set_epoch\(\)"):
        list(again)
    with pytest.warns(UserWarning, match=asks):
        again.load_state_dict(state)
    for loader in (again, resumed(with_epochs("epoch", seat), state)):
        loader.sampler.set_epoch(2)
        assert batches_of(loader) == rest


@none_or_threads
@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize(("seed", "stop"), [(None, None), (4, None), (4, 2)])
def test_epoch_named_after_a_load_is_the_one_that_would_have_come(seat, has_generator, seed, stop):
    """A loop over epochs with a DistributedSampler names each before it begins: resumed between two
    epochs it has their samples and random numbers; so it has, with a seed, within one that the
    user leaves."""

    def make():
        sampler = DistributedSampler(range(12), num_replicas=2, rank=0)
        generator = torch.Generator().manual_seed(9) if has_generator else None
        options = {"generator": generator, "seed": seed, "persistent_workers": True}
        return seat.loader(Drawn(12), 2, sampler=sampler, **options)

    def epoch(loader, number, stop=None):
        loader.sampler.set_epoch(number)
        return batches_of(islice(loader, stop))

    torch.manual_seed(1)
    loader = make()
    epoch(loader, 0)
    epoch(loader, 1, stop)
    state, rng = stored(loader), torch.get_rng_state()
    expected = [epoch(loader, number) for number in (2, 3)]
    again = make()
    torch.set_rng_state(rng)
    again.load_state_dict(state)
    assert [epoch(again, number) for number in (2, 3)] == expected


class AtOnce(Sampler):
    """Draws the order of its batches when it is begun, and then calls ``then``."""

    def __init__(self, seed, then=lambda: None):
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.then = then

    def __len__(self):
        return 5

    def __iter__(self):
        order = torch.randperm(20, generator=self.generator).view(5, 4).tolist()
        self.then()
        return iter(order)


@none_or_threads
def test_state_taken_while_an_epoch_begins_has_that_epoch_before_it(seat):
    """As a signal's handler may take it: draws that were made for the order come again."""
    states = []
    loader = seat.loader(range(20), batch_sampler=AtOnce(3, lambda: states.append(stored(loader))))
    epochs = [batches_of(loader) for _ in range(2)]
    begun = [epoch for epoch in epochs for _ in range(1 + (seat is THREADS))]  # as often
    again = [seat.loader(range(20), batch_sampler=AtOnce(5)) for _ in states]
    assert [*map(batches_of, map(resumed, again, states))] == begun


@in_every_seat_by_pairs(persistent=[False, True], seeds=[(3, 5), (None, None)])
def test_order_that_is_drawn_at_once_is_torchs_and_comes_again(seat, persistent, seeds):
    """torch begins the sampler of a new iterator with workers twice: the second order counts."""

    def made(loader_class, seed, dataset):
        options = {"batch_sampler": AtOnce(seed), "persistent_workers": persistent}
        return loader_class(dataset, **options)

    torch.manual_seed(1)
    peer = made(seat.peer, seeds[0], range(20))
    order = [batches_of(peer) for _ in range(3)]
    torch.manual_seed(1)
    loader = made(seat.loader, seeds[0], Drawn(20))
    expected = [batches_of(loader) for _ in range(3)]
    assert [[[drawn[0] for drawn in batch] for batch in epoch] for epoch in expected] == order
    for epoch in range(2):
        torch.manual_seed(1)
        loader, again = (made(seat.loader, seed, Drawn(20)) for seed in seeds)
        for _ in range(epoch):
            batches_of(loader)
        begun = batches_of(islice(iter(loader), 2))
        resumed(again, stored(loader))
        rest, *others = (batches_of(again) for _ in range(epoch, 3))
        assert [begun + rest, *others] == expected[epoch:]


def test_ctrl_c_in_a_second_beginning_leaves_the_order_as_it_was():
    calls = iter((None, KeyboardInterrupt))

    def then():
        if (error := next(calls, None)) is not None:
            raise error

    loader, undisturbed = (
        THREADS.loader(range(20), batch_sampler=AtOnce(3, each)) for each in (then, lambda: None)
    )
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert batches_of(loader) == batches_of(undisturbed)


class GoesOn:
    """A sampler that keeps its own state, never ends, and goes on in the next epoch."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while True:
            self.given += 1
            yield self.given % 24

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


@pytest.mark.parametrize("num_batches", [0, 1])
def test_a_sampler_that_goes_on_resumes_in_its_second_epoch(num_batches):
    """Where its last one was left, before its first batch and after it."""
    loader, again = (DataLoader(range(24), 3, sampler=GoesOn()) for _ in range(2))
    next(iter(loader))
    loader.state_dict()
    batches = iter(loader)
    batches_of(islice(batches, num_batches))
    resumed(again, stored(loader))
    assert batches_of(islice(again, 4)) == batches_of(islice(batches, 4))


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("sampler", [GoesOn, lambda: Position(24)])
@none_or_threads
def test_a_question_changes_no_epoch_after_a_break(seat, sampler, batch_size):
    """Where the sampler goes on, and where it begins anew."""

    def epochs_of(*, asks):
        loader, epochs = seat.loader(range(24), batch_size, sampler=sampler()), []
        for _ in range(3):
            epochs.append([])
            for batch in islice(loader, 2):
                epochs[-1] += batches_of([batch])
                if asks:
                    loader.state_dict()
        return epochs

    assert epochs_of(asks=True) == epochs_of(asks=False)


@none_or_threads
def test_state_between_two_epochs_has_the_datasets_own(seat):
    """The second epoch goes on where the first has left the dataset, though nobody had asked, also
    by a state from after it has begun."""

    def make():
        return seat.loader(Endless(), 2, persistent_workers=True)

    loader = make()
    first = batches_of(loader)
    after, batches = stored(loader), iter(loader)
    begun, second = stored(loader), batches_of(batches)
    assert not {*itertools.chain(*first)} & {*itertools.chain(*second)}
    assert batches_of(resumed(make(), after)) == batches_of(resumed(make(), begun)) == second


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


class OnlyFor(Indices):
    """Map-style, or a sampler, with methods that are not for loaders."""

    def __iter__(self):
        return iter(range(12))

    def state_dict(self, destination):
        raise AssertionError("nobody may call it")

    def load_state_dict(self, state):
        raise AssertionError("nobody may call it")


def no_cursor(self):
    raise LookupError("no cursor yet")


def with_state_dict(name, kind, state_dict):
    return type(name, (kind,), {"state_dict": state_dict})


# Litdata's stream under a loader that counts, as the error says.
OptedOut = with_state_dict("OptedOut", ForSomebodyElse, None)
NotReady = with_state_dict("NotReady", ForSomebodyElse, no_cursor)
Broken = with_state_dict("Broken", OnlyFor, no_cursor)
Unsendable = with_state_dict("Unsendable", ForSomebodyElse, lambda self: {"cursor": lambda: 0})


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
        (FORKED, Unsendable, "pickle|local object"),
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


def test_loader_and_copies_of_it_want_states_apart():
    """A copy of a loader has asked for nothing."""
    loader = THREADS.loader(Live(), 2)
    loader.state_dict()
    for each, is_asked in ((copy.copy(loader), False), (loader, True)):
        Asked.num_asked = 0
        batches_of(each)
        assert (Asked.num_asked > 0) is is_asked


def test_dear_state_is_asked_for_now_and_then(monkeypatch):
    """One that takes 40 ms is asked for so often that this takes a twentieth of the time; in
    between the items since are counted."""
    clock, asked = FakeClock(), []

    class Dear(ForSomebodyElse):
        def state_dict(self):
            clock.advance(40_000_000)
            asked.append(clock.wall_ns)
            return {"number": len(asked)}

    clock.install(monkeypatch, user_state)
    own, reached = OwnState(iter(()), Dear(), WorkerState()), []
    for number in range(1, 1001):
        clock.advance(10_000_000)
        own.ask(number, ended=False)
        reached.append(own.reached(number, ended=False))
    assert 0.03 < 0.04 * len(asked) / (clock.wall_ns / 1e9) < 0.06
    assert [each.num_items for each in reached] == list(range(1, 1001))
    at = [each.num_items - each.num_after for each in reached]
    assert at == sorted(at)
    assert len(set(at)) == len(asked)
    own.ask(1001, ended=False, now=True)
    assert own.reached(1001, ended=False).num_after == 0


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
