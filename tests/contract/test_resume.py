"""Resuming: from every batch of an epoch, the tail is the one that would have come."""

import io
import itertools
import json
import random
import warnings

import _loader_helpers as loader_helpers
import numpy as np
import pytest
import torch
from _datasets import Drawn, DrawnStream, MapData, StatefulStream, StreamData
from _loader_helpers import MixedLoader as DataLoader, frozen
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from spdl_torch.testing import assert_resume_exact

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class NotingStream(StatefulStream):
    """Keeps its own state, and notes the items that it makes."""

    made: list = []  # noqa: RUF012

    def __iter__(self):
        for drawn in super().__iter__():
            self.made.append(int(drawn[0]))
            yield drawn


class StatefulIterator(IterableDataset):
    """Its iterator keeps the state, as torchdata's do."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return Counter(self.length)


class Counter:
    def __init__(self, length):
        self.length, self.position = length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return torch.tensor(self.position - 1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def flat(lists):
    return list(itertools.chain(*lists))


def epoch_of(loader):
    return [batch.tolist() for batch in loader]


def run(make, num_epochs):
    """Batches of every epoch of an undisturbed loader, and the state behind each, through JSON.

    With each state that of torch's global generator, which is the trainer's to restore.
    """
    torch.manual_seed(0)
    loader, epochs, states = make(), [], []

    def save(epoch, position):
        text = json.dumps(loader.state_dict(), allow_nan=False)
        states.append((epoch, position, json.loads(text), torch.get_rng_state()))

    save(0, 0)
    for epoch in range(num_epochs):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.tolist())
            save(epoch, len(epochs[-1]))
        save(epoch + 1, 0)
    return epochs, states


def check_exact(make, num_epochs=3, make_again=None):
    """From every state another loader gives the tail, and the epochs behind it."""
    epochs, states = run(make, num_epochs)
    for epoch, position, state, rng in states:
        if epoch == num_epochs:
            continue
        torch.set_rng_state(rng)
        loader = (make_again or make)()
        loader.load_state_dict(state)
        assert torch.equal(torch.get_rng_state(), rng), "loading a state draws nothing"
        assert loader.state_dict() == state, "until iter(), the state is what was loaded"
        tail = epoch_of(loader)
        assert tail == epochs[epoch][position:], (epoch, position)
        if position:  # what follows depends on the trainer's own draws in between, unless
            continue
        rest = [epoch_of(loader) for _ in range(epoch + 1, num_epochs)]
        assert rest == epochs[epoch + 1 :], (epoch, position)
    return epochs, states


SAMPLING = {
    "sequential": lambda: {"batch_size": 4},
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": generator()},
    "drop_last": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "no batches": lambda: {"batch_size": None, "shuffle": True, "generator": generator()},
    "sampler": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(23), generator=generator(7)),
    },
    "replacement": lambda: {
        "batch_size": 5,
        "sampler": RandomSampler(range(23), replacement=True, num_samples=40),
    },
    "weighted": lambda: {
        "batch_size": 4,
        "sampler": WeightedRandomSampler(range(1, 24), 23, generator=generator()),
    },
    "batch_sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(23), generator=generator()), 3, False)
    },
    "uneven batches": lambda: {"batch_sampler": [[0, 1], [2], [3, 4, 5, 6], [7]]},
}


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_tail_is_exact_from_every_batch(sampling, num_workers):
    """Indices and random numbers, for whatever draws the order."""
    length = 7 if sampling == "no batches" else 23
    options = {"num_workers": num_workers}
    check_exact(lambda: DataLoader(Drawn(length), **options, **SAMPLING[sampling]()), 2)


@pytest.mark.parametrize(
    ("sampling", "num_workers"), [("shuffle", 1), ("generator", 2), ("sequential", 1)]
)
def test_tail_is_exact_with_persistent_workers(sampling, num_workers):
    """Their later epochs draw no base seed, and resume all the same; on threads, in processes."""

    def make():
        options = {**SAMPLING[sampling](), "num_workers": num_workers}
        return DataLoader(Drawn(13), persistent_workers=True, **options)

    check_exact(make)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        *((saved, resumed) for saved in (0, 2, 3) for resumed in (0, 2, 3) if saved + resumed != 4),
        pytest.param(2, 2, marks=pytest.mark.long),
    ],
)
def test_the_number_of_workers_does_not_matter(saved, resumed):
    """A state saved with any number of workers resumes with none, in processes and on threads."""

    def make(num_workers):
        return lambda: DataLoader(Drawn(13), num_workers=num_workers, **SAMPLING["generator"]())

    check_exact(make(saved), 2, make(resumed))


@pytest.mark.parametrize("num_workers", [0, 3, pytest.param(2, marks=pytest.mark.long)])
def test_a_given_generator_makes_every_later_epoch_exact(num_workers):
    """Whatever else draws from torch's global generator meanwhile."""

    def make():
        return DataLoader(Drawn(10), num_workers=num_workers, seed=1, **SAMPLING["generator"]())

    epochs, states = run(make, 3)
    for epoch, position, state, _ in states:
        torch.manual_seed(epoch * 100 + position)
        loader = make()
        loader.load_state_dict(state)
        got = [epoch_of(loader) for _ in range(epoch, 3)]
        assert got == ([epochs[epoch][position:], *epochs[epoch + 1 :]] if epoch < 3 else [])


def test_the_trainer_s_generator_is_left_as_it_is():
    """Going on in the middle of an epoch draws nothing from torch's global generator."""
    torch.manual_seed(3)
    loader = DataLoader(Drawn(12), batch_size=2, shuffle=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = torch.manual_seed(99).get_state()
    again = DataLoader(Drawn(12), batch_size=2, shuffle=True)
    again.load_state_dict(state)
    assert epoch_of(again) == epoch_of(iterator)
    assert torch.equal(torch.get_rng_state(), before)


def test_three_resumes_in_one_epoch():
    """A state of a resumed epoch is as good as one of an undisturbed epoch."""

    def make():
        return DataLoader(Drawn(30), num_workers=2, **SAMPLING["shuffle"]())

    torch.manual_seed(1)
    whole = epoch_of(make())
    torch.manual_seed(1)
    loader, seen = make(), []
    for _ in range(4):
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) % 2 == 0:
                break
        state = loader.state_dict()
        loader = make()
        loader.load_state_dict(state)
    assert seen + epoch_of(loader) == whole


def test_another_batch_size_goes_on_behind_the_same_sample():
    """The state counts samples; it only has to stand between two batches."""
    loader = DataLoader(MapDataOfNumbers(24), batch_size=4, shuffle=True, generator=generator())
    iterator = iter(loader)
    seen = [next(iterator).tolist(), next(iterator).tolist()]
    state = loader.state_dict()
    rest = flat(epoch_of(iterator))
    again = DataLoader(MapDataOfNumbers(24), batch_size=2, shuffle=True, generator=generator(6))
    again.load_state_dict(state)
    assert flat(epoch_of(again)) == rest
    assert sorted(flat(seen) + rest) == list(range(24))
    odd = DataLoader(MapDataOfNumbers(24), batch_size=5, shuffle=True, generator=generator(6))
    odd.load_state_dict(state)
    with pytest.raises(ValueError, match="after 8 samples, which is not between two batches"):
        iter(odd)


class MapDataOfNumbers(Drawn):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("num_workers", "stops"), [(0, range(21)), (3, range(0, 21, 2)), (2, (0, 1, 19))]
)
def test_batches_out_of_order_are_not_repeated(num_workers, stops):
    """With ``in_order=False`` what came before its turn is passed over as well."""

    def make():
        options = {"batch_size": 2, "num_workers": num_workers, "in_order": False}
        return DataLoader(MapDataOfNumbers(40), **options)

    for stop in stops:
        loader = make()
        iterator = iter(loader)
        seen = [next(iterator).tolist() for _ in range(stop)]
        state = json.loads(json.dumps(loader.state_dict()))
        again = make()
        again.load_state_dict(state)
        assert sorted(flat(seen) + flat(epoch_of(again))) == list(range(40))


# -- iterable datasets -------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("dataset", [DrawnStream, NotingStream, StatefulIterator])
def test_iterables_go_on_where_each_worker_was(dataset, batch_size, num_workers):
    """By their own state, or by passing over what was handed out."""
    if dataset is StatefulIterator and num_workers == 3:
        pytest.skip("it does not divide itself")
    length = 8 if batch_size is None else 23
    options = {"batch_size": batch_size, "num_workers": num_workers, "seed": 3}
    check_exact(lambda: DataLoader(dataset(length), **options), 2)


def test_a_stateful_iterable_makes_nothing_twice():
    """Its state is asked for, so that what was handed out is not made again to be thrown away.

    Where the worker waits for a core, asking may look expensive: then the state says how many items
    came since it was asked, and no others are made again.
    """
    loader = DataLoader(NotingStream(40), batch_size=4, num_workers=1)
    loader.state_dict()  # from now on somebody wants states
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    NotingStream.made.clear()
    again = DataLoader(NotingStream(40), batch_size=4, num_workers=1)
    again.load_state_dict(state)
    epoch_of(again)
    (worker,) = state["workers"]
    assert min(NotingStream.made) == 20 - worker["num_after"]
    assert worker["num_after"] <= 16, "it was asked at least once"


def test_iterables_keep_their_number_of_workers():
    """They divide themselves by it."""
    loader = DataLoader(DrawnStream(20), num_workers=2)
    next(iter(loader))
    again = DataLoader(DrawnStream(20), num_workers=1)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="with num_workers=2, this one has num_workers=1"):
        iter(again)
    inline = DataLoader(DrawnStream(20))
    inline.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="with num_workers=2, this one has num_workers=0"):
        iter(inline)


# -- samplers ----------------------------------------------------------------------------------


class StatefulSampler:
    """Draws from nothing that anyone could know of."""

    def __init__(self, length):
        self.length, self.position, self.begins_at = length, 0, 0

    def __iter__(self):
        self.position, self.begins_at = self.begins_at, 0
        while self.position < self.length:
            self.position += 1
            yield (self.position - 1) * 7 % self.length

    def __len__(self):
        return self.length

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.begins_at = state["position"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_sampler_keeps_its_own_state(num_workers):
    """As it was after the batches handed out, not after those prefetched."""

    def make(workers=num_workers):
        sampler = StatefulSampler(22)
        return DataLoader(Drawn(22), batch_size=3, sampler=sampler, num_workers=workers, seed=1)

    epochs, states = run(make, 1)
    for epoch, position, state, _ in states[1:-1]:
        loader = make(0)
        loader.load_state_dict(state)
        assert epoch_of(loader) == epochs[epoch][position:]


@pytest.mark.parametrize("kind", ["torch", "ours"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (4, 2), (2, 4), (4, 1)])
def test_any_number_of_ranks_with_the_same_global_batch(kind, before, after):
    """Together the ranks go on after the samples of all ranks, with the same random numbers."""
    from spdl_torch import DistributedSampler as Ours

    make_sampler = DistributedSampler if kind == "torch" else Ours

    def ranks(world):
        loaders = []
        for rank in range(world):
            sampler = make_sampler(Drawn(48), num_replicas=world, rank=rank, seed=2)
            sampler.set_epoch(3)
            loaders.append(DataLoader(Drawn(48), batch_size=8 // world, sampler=sampler, seed=9))
        return loaders

    def steps(loaders):
        """The global batches: each as a set, for the ranks' order in it is another."""
        return [sorted(flat(b.tolist() for b in step)) for step in zip(*loaders, strict=True)]

    whole = steps(ranks(before))
    loaders = ranks(before)
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
        next(iterator)
    states = [loader.state_dict() for loader in loaders]
    own = {"generators", "base_seed"}  # here the ranks share torch's global generator
    (common,) = {json.dumps({k: v for k, v in s.items() if k not in own}) for s in states}
    assert '"rank"' not in common, "rank 0's state serves all"
    resumed = ranks(after)
    for loader in resumed:
        loader.sampler.set_epoch(0)
        loader.load_state_dict(states[0])
        assert loader.sampler.epoch == 3
    assert steps(resumed) == whole[2:]


def test_naming_another_epoch_begins_it():
    """A user who sets the sampler's epoch after a load means that epoch, from its beginning."""
    sampler = DistributedSampler(range(12), num_replicas=1, rank=0)
    loader = DataLoader(MapDataOfNumbers(12), batch_size=4, sampler=sampler)
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    sampler.set_epoch(1)
    assert len(epoch_of(loader)) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_the_epoch_that_was_named_before_a_state_is_the_next_one(kind, num_workers):
    """Between two epochs: whether or not it is named again, before or after the state is loaded."""
    from spdl_torch import DistributedSampler as Ours

    make_sampler = DistributedSampler if kind == "torch" else Ours

    def make(epoch=None):
        sampler = make_sampler(Drawn(12), num_replicas=1, rank=0, seed=2)
        if epoch is not None:
            sampler.set_epoch(epoch)
        options = {"batch_size": 4, "sampler": sampler, "seed": 5, "num_workers": num_workers}
        return DataLoader(Drawn(12), **options)

    loader = make(0)
    epoch_of(loader)
    loader.sampler.set_epoch(3)
    state = loader.state_dict()
    expected = epoch_of(loader)
    for named_before, named_after in ((None, None), (3, None), (None, 3), (0, 3)):
        resumed = make(named_before)
        resumed.load_state_dict(state)
        assert resumed.sampler.epoch == 3
        if named_after is not None:
            resumed.sampler.set_epoch(named_after)
        assert epoch_of(resumed) == expected
    assert expected != epoch_of(make(0))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [4, None])
def test_an_epoch_named_behind_iter_counts_if_it_was_heard(num_workers, batch_size):
    """Without workers the order may be drawn at the first ``next()``, as torch does it."""

    def make():
        sampler = DistributedSampler(range(12), num_replicas=1, rank=0)
        options = {"batch_size": batch_size, "sampler": sampler, "num_workers": num_workers}
        return DataLoader(MapDataOfNumbers(12), **options)

    loader = make()
    batches = iter(loader)
    loader.sampler.set_epoch(1)
    next(batches)
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    assert list(map(frozen, resumed)) == list(map(frozen, batches))


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


def with_epochs(name, num_workers=0, **options):
    """A loader of such a sampler, in threads."""
    return DataLoader(
        MapDataOfNumbers(12),
        batch_size=2,
        sampler=KeepsEpoch(name, **options),
        num_workers=num_workers,
    )


def stopped_in_an_epoch(name, num_batches, epoch=2, num_workers=0):
    """The state of a loader in epoch 2, or after it with epoch 3 named, and the rest of it."""
    loader = with_epochs(name, num_workers)
    loader.sampler.set_epoch(epoch)
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches, None)
    if num_batches > 6:
        loader.sampler.set_epoch(3)
    state = json.loads(json.dumps(loader.state_dict()))
    return state, list(map(frozen, loader if num_batches > 6 else batches))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_batches", [0, 2, 7])
@pytest.mark.parametrize(("name", "epoch"), [("epoch", 2), ("_epoch", 2), ("epoch", np.int64(2))])
def test_the_epoch_of_a_sampler_is_read_where_samplers_keep_it(
    name, epoch, num_batches, num_workers
):
    """As a number of any type; -1 is none that a state could give back."""
    state, rest = stopped_in_an_epoch(name, num_batches, epoch, num_workers)
    again = with_epochs(name, num_workers)
    again.load_state_dict(state)
    assert list(map(frozen, again)) == rest
    before = with_epochs(name, default=-1).state_dict()
    assert before["sampler_epoch"] is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_that_cannot_be_read_is_asked_for(num_workers):
    """Named again, it goes on; else what follows is in another order, which an error says."""
    state, rest = stopped_in_an_epoch("number", 2, num_workers=num_workers)
    asks = r"lacks the number of the epoch, since KeepsEpoch .* Call set_epoch\(\)"
    again = with_epochs("number", num_workers)
    with pytest.warns(UserWarning, match=asks):
        again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"sampler_epoch: .* gives other .* Call set_epoch\(\)"):
        list(again)
    again = with_epochs("number", num_workers)
    with pytest.warns(UserWarning, match=asks):
        again.load_state_dict(state)
    again.sampler.set_epoch(2)
    assert list(map(frozen, again)) == rest


@pytest.mark.parametrize(("then", "now"), [("number", "epoch"), ("epoch", "number")])
def test_a_state_is_resumed_whether_the_epoch_was_read_then_or_can_be_now(then, now):
    """By a sampler that has been mended since; or that has kept it where it can be read."""
    state, rest = stopped_in_an_epoch(then, 2)
    again = with_epochs(now)
    again.load_state_dict(state)
    if then == "number":
        again.sampler.set_epoch(2)
    assert list(map(frozen, again)) == rest


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


# -- the state ---------------------------------------------------------------------------------


def test_a_state_loads_with_weights_only():
    """As checkpoints are loaded by default."""
    loader = DataLoader(Drawn(8), batch_size=2, shuffle=True, num_workers=1)
    next(iter(loader))
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == loader.state_dict()


def test_a_state_is_not_taken_from_what_is_no_state():
    """Nor from a newer release, or an older one's format."""
    loader = DataLoader(Drawn(8))
    for bad in ({}, None, {"epoch": 3}):
        with pytest.raises(ValueError, match=r"what DataLoader\.state_dict"):
            loader.load_state_dict(bad)
    with pytest.raises(ValueError, match="version 99, this release knows up to 4"):
        loader.load_state_dict({**loader.state_dict(), "version": 99})
    with pytest.raises(ValueError, match=r"version 3, .* DataLoader knows version 4 alone"):
        loader.load_state_dict({**loader.state_dict(), "version": 3})
    for wrong in ({"something": 1}, {"workers": [{"item": 3}]}, {"workers": [3]}, {"ahead": 2}):
        with pytest.raises(ValueError, match="not a state of a DataLoader"):
            loader.load_state_dict({**loader.state_dict(), **wrong})


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


def test_a_generator_that_was_there_must_be_there():
    """Otherwise the order would be another, and nobody would notice."""
    loader = DataLoader(Drawn(8), shuffle=True, generator=generator())
    next(iter(loader))
    again = DataLoader(Drawn(8), shuffle=True)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"2 generator\(s\), this loader and its samplers have 1"):
        iter(again)


def test_a_smaller_dataset_is_noticed():
    """Also one that the state does not name: it is past its end."""
    loader = DataLoader(MapDataOfNumbers(20), batch_size=5)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    again = DataLoader(MapDataOfNumbers(10), batch_size=5)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(
        ValueError, match="made_by: the state is of another loader: length 10, was 20"
    ):
        iter(again)
    again.load_state_dict({**loader.state_dict(), "made_by": {}})
    with pytest.raises(ValueError, match="after 15 samples"):
        iter(again)


def test_an_error_counts_as_handed_out():
    """A loop that went on after a bad batch goes on after it when it resumes, too."""
    data = MapData(8, bad={2: ValueError})
    for num_workers in (0, 2):
        loader = DataLoader(data, batch_size=2, num_workers=num_workers)
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="2"):
            next(iterator)
        again = DataLoader(MapData(8), batch_size=2)
        again.load_state_dict(loader.state_dict())
        assert next(iter(again))["y"].tolist() == [4, 5]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_an_error_of_an_iterable_is_behind_what_comes_next(num_workers, batch_size):
    """It goes on after its bad item, and so does a loader that resumes there."""

    def make():
        data = StreamData(8, {3: KeyError})
        return DataLoader(data, batch_size=batch_size, num_workers=num_workers)

    loader = make()
    batches = iter(loader)
    for _ in range(3 // (batch_size or 1)):
        next(batches)
    with pytest.raises(KeyError, match="bad 3"):
        next(batches)
    again = make()
    again.load_state_dict(loader.state_dict())
    assert loader_helpers.epoch_of(again) == [frozen(batch) for batch in batches]


def test_ctrl_c_in_a_sample_leaves_its_batch_to_be_made_again():
    """Without workers it comes in the middle of the dataset's own code."""

    class Interrupted(Drawn):
        """Somebody presses Ctrl-C at sample 4, once."""

        presses = 1

        def __getitem__(self, index):
            if index == 4 and self.presses:
                self.presses = 0
                raise KeyboardInterrupt
            return index

    loader = DataLoader(Interrupted(8), batch_size=2)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyboardInterrupt, match="sample index 4"):
        next(batches)
    again = DataLoader(Interrupted(8), batch_size=2)
    again.dataset.presses = 0
    again.load_state_dict(loader.state_dict())
    assert len(list(again)) == 2


# -- torchdata's loader as the oracle ----------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(0, 25),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    num_workers=st.sampled_from([0, 1, 2]),
    stop=st.integers(0, 12),
    see_end=st.booleans(),
)
def test_torchdata_resumes_at_the_same_batch(
    length, batch_size, drop_last, num_workers, stop, see_end
):
    """The rest, and the next epoch, equal StatefulDataLoader's; an end that the loop saw begins the
    next epoch, one that it did not see leaves an empty tail."""

    from torchdata.stateful_dataloader import StatefulDataLoader

    def history(cls, workers):
        options = {"batch_size": batch_size, "drop_last": drop_last, "num_workers": workers}
        loader = cls(MapDataOfNumbers(length), **options)
        iterator = iter(loader)
        got = 0
        for _ in range(stop):
            if next(iterator, None) is None:
                break
            got += 1
        if see_end:
            list(iterator)
        again = cls(MapDataOfNumbers(length), **options)
        again.load_state_dict(loader.state_dict())
        return got, epoch_of(again), epoch_of(again)

    with warnings.catch_warnings(action="ignore"):
        expected = history(StatefulDataLoader, 0)
    assert history(DataLoader, num_workers) == expected


def test_samplers_in_order_need_no_drawing():
    """A sequential order resumes whatever happened to the generators."""
    loader = DataLoader(MapDataOfNumbers(9), sampler=SequentialSampler(range(9)), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    torch.manual_seed(1234)
    again = DataLoader(MapDataOfNumbers(9), sampler=SequentialSampler(range(9)), batch_size=2)
    again.load_state_dict(state)
    assert epoch_of(again) == [[2, 3], [4, 5], [6, 7], [8]]


# -- spdl_torch.testing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "workers", "persistent"),
    [
        *itertools.product(["sequential", "batch_sampler"], [1], [False, True]),
        *itertools.product(["shuffle"], [3], [False, True]),
        ("generator", 2, False),
        pytest.param("generator", 2, True, marks=pytest.mark.long),
    ],
)
def test_assert_resume_exact_agrees(sampling, workers, persistent):
    """The shipped check finds nothing to complain of, also with another number of workers; two of
    them are processes.
    """

    def make(num_workers=workers):
        options = {**SAMPLING[sampling](), "persistent_workers": persistent and num_workers > 0}
        return DataLoader(Drawn(17), num_workers=num_workers, **options)

    assert_resume_exact(make)
    if not persistent:
        assert_resume_exact(make, make_resumed=lambda: make(0))


def test_assert_resume_exact_of_an_iterable():
    """With a state of its own, in processes, and without, on threads."""
    assert_resume_exact(lambda: DataLoader(NotingStream(9), 3, num_workers=2))
    assert_resume_exact(lambda: DataLoader(DrawnStream(17), 4, num_workers=3))


@pytest.mark.parametrize("num_batches", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Drawn, DrawnStream, NotingStream])
def test_assert_resume_exact_agrees_on_few_batches(kind, num_batches):
    """Fewer than the times that it resumes in one epoch."""
    assert_resume_exact(lambda: DataLoader(kind(2 * num_batches), 2))


class Forgetful(StatefulSampler):
    """Says that it keeps its state, and does not."""

    def load_state_dict(self, state):
        pass


def test_assert_resume_exact_tells_what_differs():
    """From which state, and where."""
    with pytest.raises(AssertionError, match=r"resumed in epoch 0 after batch 1, epoch 0, batch 0"):
        assert_resume_exact(lambda: DataLoader(Drawn(12), 3, sampler=Forgetful(12)))


def test_assert_resume_exact_refuses_what_json_cannot_hold():
    """A checkpoint of tensors or sets in a dataset's state."""

    class Odd(NotingStream):
        def state_dict(self):
            return {"seen": {1, 2}}

    with pytest.raises(AssertionError, match="must be made of what JSON can hold"):
        assert_resume_exact(lambda: DataLoader(Odd(4)))
