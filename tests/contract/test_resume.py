"""Resuming, beside the histories: what a state counts, whose epoch it is, what is refused."""

import io
import json
import random
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from _datasets import (
    Drawn,
    DrawnStream,
    Indices,
    Live,
    LiveIterators,
    MapData,
    Position,
    StatefulStream,
    StreamData,
)
from _loader_helpers import DataLoader, batches_of, epoch_of as events_of, frozen, resumed
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

import spdl_torch
from spdl_torch.testing import assert_resume_exact

ON_THREADS = {"num_workers": 2, "isolation": "thread"}
none_or_threads = pytest.mark.parametrize("workers", [{}, ON_THREADS], ids=["none", "threads"])


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def test_another_batch_size_goes_on_behind_the_same_sample():
    """The state counts samples; it only has to stand between two batches. A dataset that is too
    small is noticed by that, too, where the state does not name it."""

    def make(length, batch_size):
        return DataLoader(Indices(length), batch_size, shuffle=True, generator=generator())

    loader = make(24, 4)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert torch.equal(torch.cat([*resumed(make(24, 2), state)]), torch.cat([*batches]))
    for odd in (make(24, 5), make(6, 4)):
        odd.load_state_dict({**state, "made_by": {}})
        with pytest.raises(ValueError, match=r"after 8 samples, (which is not between|but the)"):
            iter(odd)


class NotingStream(StatefulStream):
    """Keeps its own state, and notes the items that it makes."""

    made: list = []  # noqa: RUF012

    def __iter__(self):
        for drawn in super().__iter__():
            self.made.append(int(drawn[0]))
            yield drawn


def test_a_stateful_iterable_makes_nothing_twice():
    """Its state is asked for, so that what was handed out is not made again to be thrown away.

    Where the worker waits for a core, asking may look expensive: then the state says how many items
    came since it was asked, and no others are made again.
    """

    def make():
        return DataLoader(NotingStream(40), 4, num_workers=1, isolation="thread")

    loader = make()
    loader.state_dict()  # from now on somebody wants states
    assert len([*islice(loader, 5)]) == 5
    state = loader.state_dict()
    loader.close()
    NotingStream.made.clear()
    batches_of(resumed(make(), state))
    (worker,) = state["workers"]
    assert min(NotingStream.made) == 20 - worker["num_after"]
    assert worker["num_after"] <= 16, "it was asked at least once"


SAMPLERS = {"torch": DistributedSampler, "ours": spdl_torch.DistributedSampler}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)])
@pytest.mark.parametrize("in_batches", [False, True])
def test_any_number_of_ranks_with_the_same_global_batch(kind, before, after, in_batches):
    """Together the ranks go on after the samples of all ranks, with the same random numbers as any
    number of them."""

    def ranks(world):
        loaders = []
        for rank in range(world):
            sampler = SAMPLERS[kind](Drawn(48), num_replicas=world, rank=rank, seed=2)
            sampler.set_epoch(3)
            options = {"batch_size": 8 // world, "sampler": sampler}
            if in_batches:
                options = {"batch_sampler": BatchSampler(sampler, 8 // world, drop_last=False)}
            loaders.append(DataLoader(Drawn(48), seed=9, **options))
        return loaders

    def steps(loaders):
        """The global batches, sorted, for the ranks' order in one is another."""
        return [sorted(torch.cat(step).tolist()) for step in zip(*loaders, strict=True)]

    whole = steps(ranks(before))
    assert whole == steps(ranks(after))
    loaders = ranks(before)
    for iterator in [iter(loader) for loader in loaders]:
        next(iterator)
        next(iterator)
    states = [loader.state_dict() for loader in loaders]
    own = {"generators", "base_seed"}  # here the ranks share torch's global generator
    (common,) = {json.dumps({k: v for k, v in s.items() if k not in own}) for s in states}
    assert '"rank"' not in common, "rank 0's state serves all"
    others = ranks(after)
    for loader in others:
        sampler = loader.batch_sampler.sampler
        sampler.set_epoch(0)
        loader.load_state_dict(states[0])
        assert sampler.epoch == 3
    assert steps(others) == whole[2:]


@none_or_threads
@pytest.mark.parametrize("batch_size", [4, None])
def test_an_epoch_named_behind_iter_counts_if_it_was_heard(workers, batch_size):
    """Without workers the order may be drawn at the first ``next()``, as torch does it."""

    def make():
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0)
        return DataLoader(Indices(12), batch_size, sampler=sampler, **workers)

    loader = make()
    batches = iter(loader)
    loader.sampler.set_epoch(1)
    next(batches)
    state = loader.state_dict()
    again = resumed(make(), state)
    assert list(map(frozen, again)) == list(map(frozen, batches))


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


def with_epochs(name, workers, **options):
    return DataLoader(Indices(12), 2, sampler=KeepsEpoch(name, **options), **workers)


def stopped_in_an_epoch(name, num_batches, workers, epoch=2):
    """The state of a loader in epoch 2, or after it with epoch 3 named, and the rest of it."""
    loader = with_epochs(name, workers)
    loader.sampler.set_epoch(epoch)
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches, None)
    if num_batches > 6:
        loader.sampler.set_epoch(3)
    state = json.loads(json.dumps(loader.state_dict()))
    return state, batches_of(loader if num_batches > 6 else batches)


@none_or_threads
@pytest.mark.parametrize("num_batches", [0, 2, 7])
@pytest.mark.parametrize(("name", "epoch"), [("_epoch", 2), ("epoch", np.int64(2))])
def test_the_epoch_of_a_sampler_is_read_where_samplers_keep_it(name, epoch, num_batches, workers):
    """As a number of any type; -1 is none that a state could give back. Of a state between two
    epochs it is the one that was named, whether or not it is named again."""
    state, rest = stopped_in_an_epoch(name, num_batches, workers, epoch)
    for named_again in (False, True):
        again = with_epochs(name, workers)
        again.sampler.set_epoch(0)
        again.load_state_dict(state)
        if named_again:
            again.sampler.set_epoch(3 if num_batches > 6 else 2)
        assert batches_of(again) == rest
    before = with_epochs("epoch", workers, default=-1).state_dict()
    assert before["sampler_epoch"] is None


@none_or_threads
def test_an_epoch_that_cannot_be_read_is_asked_for(workers):
    """Named again, it goes on, also by a sampler that has been mended since; else what follows is
    in another order, which an error says."""
    state, rest = stopped_in_an_epoch("number", 2, workers)
    asks = r"lacks the number of the epoch, since KeepsEpoch .* Call set_epoch\(\)"
    again = with_epochs("number", workers)
    with pytest.warns(UserWarning, match=asks):
        again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"sampler_epoch: .* gives other .* Call set_epoch\(\)"):
        list(again)
    with pytest.warns(UserWarning, match=asks):
        again.load_state_dict(state)
    for loader in (again, resumed(with_epochs("epoch", workers), state)):
        loader.sampler.set_epoch(2)
        assert batches_of(loader) == rest


class Counting(Drawn):
    """A map-style dataset that changes what it gives, and keeps count of it."""

    def __init__(self, length):
        super().__init__(length)
        self.count = 0

    def __getitem__(self, index):
        self.count += 1
        return index, self.count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_a_stateful_map_style_dataset_keeps_its_own_state():
    """If there is one of it: worker threads have a copy each."""
    assert_resume_exact(lambda: DataLoader(Counting(10), batch_size=3))
    assert DataLoader(Counting(10), num_workers=1).state_dict()["dataset"] is None


def test_a_state_loads_with_weights_only():
    """As checkpoints are loaded by default."""
    loader = DataLoader(Drawn(8), batch_size=2, shuffle=True, num_workers=1)
    next(iter(loader))
    torch.save(loader.state_dict(), file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=True) == loader.state_dict()


def test_a_state_is_not_taken_from_what_is_no_state():
    """Nor from a newer release, or an older one's format."""
    loader = DataLoader(Drawn(8))
    state = loader.state_dict()
    no_state, other = r"what DataLoader\.state_dict", "not a state of a DataLoader"
    for wrong, told in (
        *((bad, no_state) for bad in ({}, None, {"epoch": 3})),
        ({**state, "version": 99}, "version 99, this release knows up to 4"),
        ({**state, "version": 3}, r"version 3, .* DataLoader knows version 4 alone"),
        *(({**state, "workers": bad}, other) for bad in ([{"item": 3}], [3])),
        *(({**state, **bad}, other) for bad in ({"something": 1}, {"ahead": 2})),
    ):
        with pytest.raises(ValueError, match=told):
            loader.load_state_dict(wrong)


@pytest.mark.parametrize("dataset", [Drawn, DrawnStream])
def test_a_field_that_every_state_has_is_not_left_out(dataset):
    """A default in its place could begin the epoch again in silence."""
    loader = DataLoader(dataset(8), 2)
    next(iter(loader))
    state = loader.state_dict()
    for left_out in state:
        damaged = {name: state[name] for name in state if name != left_out}
        told = "without a version" if left_out == "version" else f"{left_out} is missing"
        with pytest.raises(ValueError, match=told):
            DataLoader(dataset(8), 2).load_state_dict(damaged)
    for number, worker in enumerate(state["workers"]):
        for left_out in worker:
            damaged = {name: worker[name] for name in worker if name != left_out}
            with pytest.raises(ValueError, match=rf"workers\[{number}\]\.{left_out} is missing"):
                loader.load_state_dict({**state, "workers": [damaged]})


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "isolation": "thread"}])
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("kind", [MapData, StreamData])
def test_an_error_counts_as_handed_out(kind, batch_size, workers):
    """A loop that went on after a bad sample goes on after it when it resumes, too."""

    def make():
        return DataLoader(kind(8, {3: KeyError}), batch_size=batch_size, **workers)

    loader = make()
    batches = iter(loader)
    for _ in range(3 // (batch_size or 1)):
        next(batches)
    with pytest.raises(KeyError, match="bad 3"):
        next(batches)
    again = resumed(make(), loader.state_dict())
    assert events_of(again) == [frozen(batch) for batch in batches]


@settings(max_examples=40, deadline=None)
@given(
    dataset=st.sampled_from([Indices, Live, LiveIterators]),
    length=st.integers(0, 25),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    num_workers=st.sampled_from([0, 1]),
    stop=st.integers(0, 12),
    see_end=st.booleans(),
    was_asked=st.booleans(),
)
def test_torchdata_resumes_at_the_same_batch(
    dataset, length, batch_size, drop_last, num_workers, stop, see_end, was_asked
):
    """The rest, and the next epoch, equal StatefulDataLoader's, which asks a dataset for its state
    after every batch; an end that the loop saw begins the next epoch, one that it did not see
    leaves an empty tail."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def items(batches):
        return [(batch if dataset is Indices else batch[:, 0]).tolist() for batch in batches]

    def history(cls, **workers):
        options = {"drop_last": drop_last and dataset is Indices, **workers}
        loader = cls(dataset(length), batch_size, **options)
        if was_asked:
            loader.state_dict()
        iterator = iter(loader)
        taken = [next(iterator, None) is not None for _ in range(stop)]
        rest = items(iterator) if see_end else []
        again = resumed(
            cls(dataset(length), batch_size, **options), json.loads(json.dumps(loader.state_dict()))
        )
        return taken, rest, items(again), items(again)

    with warnings.catch_warnings(action="ignore"):
        expected = history(StatefulDataLoader)
    on_threads = {"num_workers": 1, "isolation": "thread"}
    assert history(DataLoader, **(on_threads if num_workers else {})) == expected


@pytest.mark.parametrize("persistent", [False, True])
def test_assert_resume_exact_agrees(persistent):
    """The shipped check finds nothing to complain of, also with workers that stay or another number
    of them, and in epochs of fewer batches than the times that it resumes in one."""
    options = {**ON_THREADS, "persistent_workers": persistent, "shuffle": True}
    make_resumed = None if persistent else lambda: DataLoader(Drawn(17), 4, shuffle=True)
    assert_resume_exact(lambda: DataLoader(Drawn(17), 4, **options), make_resumed=make_resumed)
    for length in (0, 2, 6):
        assert_resume_exact(lambda: DataLoader(NotingStream(length), 2))  # noqa: B023


class Forgetful(Position):
    """Says that it keeps its state, and does not."""

    def load_state_dict(self, state):
        pass


class OfSets(Position):
    """Its state is not made of what JSON can hold."""

    def state_dict(self):
        return {"seen": {1, 2}}


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        (Forgetful, "resumed in epoch 0 after batch 1, epoch 0, batch 0"),
        (OfSets, "must be made of what JSON can hold"),
    ],
)
def test_assert_resume_exact_tells_what_is_wrong(sampler, told):
    """From which state, and where."""
    with pytest.raises(AssertionError, match=told):
        assert_resume_exact(lambda: DataLoader(Drawn(12), 3, sampler=sampler(12)))
