"""Whose epoch a state is of: named, read from the sampler, begun, left; and which comes next."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from _datasets import (
    Drawn,
    Endless,
    Indices,
)
from _loader_helpers import DataLoader, batches_of, resumed, stored
from _seats import NONE, THREADS, in_seats
from torch.utils.data import DistributedSampler, Sampler

none_or_threads = in_seats(NONE, THREADS)


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


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


@none_or_threads
def test_state_taken_while_an_epoch_begins_has_that_epoch_before_it(seat):
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
        return seat.loader(range(20), batch_sampler=Order(seed))

    loader = made(3)
    epochs = [batches_of(loader) for _ in range(2)]
    assert [batches_of(resumed(made(5), state)) for state in states] == epochs


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


class BeginsAnew(GoesOn):
    """One without a length whose epochs end, and begin at the beginning."""

    def __iter__(self):
        for self.given in range(1, 13):
            yield self.given


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": None}])
@pytest.mark.parametrize("sampler", [GoesOn, BeginsAnew])
@in_seats(NONE, THREADS)
def test_a_question_changes_no_epoch_after_a_break(seat, sampler, options):
    """Where the sampler goes on, and where it begins anew."""

    def epochs_of(*, asks):
        loader, epochs = seat.loader(list(range(24)), sampler=sampler(), **options), []
        if sampler is BeginsAnew:
            epochs.append(batches_of(loader))
        for _ in range(3):
            epoch = []
            for batch in loader:
                epoch += batches_of([batch])
                if asks:
                    loader.state_dict()
                if len(epoch) == 2:
                    break
            epochs.append(epoch)
        return epochs

    assert epochs_of(asks=True) == epochs_of(asks=False)


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


@none_or_threads
def test_state_after_an_epoch_and_before_the_next_batch_has_the_datasets_own(seat):
    """The second epoch goes on where the first has left the dataset, though nobody had asked."""

    def make():
        return seat.loader(Endless(), 2, persistent_workers=True)

    loader = make()
    first = batches_of(loader)
    after, batches = stored(loader), iter(loader)
    state, second = stored(loader), batches_of(batches)
    assert sorted(sum(second, []))[:4] == [4, 5, 6, 7] != sorted(sum(first, []))[:4]  # noqa: RUF017
    assert batches_of(resumed(make(), after)) == batches_of(resumed(make(), state)) == second
