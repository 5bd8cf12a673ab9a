"""DistributedSampler: every sample once over the ranks, and on from anywhere with other ranks."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
import weakref
from functools import partial

import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given, strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from spdl_torch.loader.sampling.distributed_sampler import DistributedSampler
from spdl_torch.testing import assert_resume_exact

lengths = st.integers(0, 60)
worlds = st.integers(1, 7)


def shares(dataset, world, *, epoch=0, **options):
    samplers = [DistributedSampler(dataset, world, rank, **options) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def in_turns(parts):
    """The order that the ranks walk through together."""
    rounds = itertools.zip_longest(*parts)
    return [index for dealt in rounds for index in dealt if index is not None]


@given(st.integers(1, 60), worlds, st.booleans(), st.booleans(), st.integers(0, 3))
def test_indices_are_torchs(length, world, shuffle, drop, epoch):
    """Whoever changes over in the middle of a project sees the same order."""
    if drop and length < world:
        return  # torch's own count of samples is below 0 there
    state, tail = torch.get_rng_state(), "drop" if drop else "pad"
    parts = shares(length, world, shuffle=shuffle, seed=5, epoch=epoch, tail=tail)
    assert torch.equal(torch.get_rng_state(), state)  # the trainer's generator has no part in it
    for rank, ours in enumerate(parts):
        oracle = torch_data.DistributedSampler(
            range(length), world, rank, shuffle=shuffle, seed=5, drop_last=drop
        )
        oracle.set_epoch(epoch)
        assert ours == list(oracle)
        sampler = DistributedSampler(length, world, rank, tail=tail)
        assert len(sampler) == sampler.num_samples == len(oracle)
        assert sampler.total_size == oracle.total_size


@given(lengths, worlds, st.integers(1, 5))
def test_valid_counts_leave_out_what_is_padding(length, world, batch_size):
    """Evaluation with ``tail="pad"`` counts each sample once."""
    counted = []
    for rank in range(world):
        sampler = DistributedSampler(length, world, rank, shuffle=False, tail="pad")
        num_valid = 0
        for number, batch in enumerate(BatchSampler(sampler, batch_size, drop_last=False)):
            counted += batch[: sampler.num_valid(number, batch_size)]
            num_valid += min(len(batch), sampler.num_valid(number, batch_size))
        assert num_valid == len(sampler) - sampler.num_padded
    assert sorted(counted) == list(range(length))


def test_rank_is_asked_for_when_it_is_needed(monkeypatch):
    """Lightning makes the process group after the sampler."""
    sampler = DistributedSampler(range(10), shuffle=False)
    assert len(sampler) == 10
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (sampler.rank, sampler.num_replicas, len(sampler)) == (1, 3, 3)
    assert list(sampler) == [1, 4, 7]
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RuntimeError, match="DistributedSampler: this process is LOCAL_RANK=2"):
        list(sampler)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset": -1}, ValueError, "a length must be >= 0, got -1"),
        ({"dataset": RandomSampler(range(3))}, TypeError, "got the sampler RandomSampler"),
        ({"tail": "keep"}, ValueError, "tail must be .* got 'keep'"),
    ],
)
def test_argument_is_refused_when_it_makes_no_sense(options, error, message):
    """At once, with what was given."""
    with pytest.raises(error, match=message):
        DistributedSampler(**{"dataset": 10, **options})
    for epoch in (-1, 1.0, True):  # a loop variable that went wrong
        with pytest.raises((TypeError, ValueError), match="epoch must be "):
            DistributedSampler(3).set_epoch(epoch)


stops = st.lists(st.tuples(worlds, st.integers(0, 9)), max_size=5)


@given(lengths, stops, st.sampled_from(("drop", "pad", "uneven")), st.booleans())
def test_any_ranks_go_on_where_others_were(length, history, tail, shuffle):
    """Each time where all have stopped, after looking at iter(); together they have the order of
    one rank. The pass after it is whole again, and so is len()."""
    start, seen = 0, []
    make = partial(DistributedSampler, length, tail=tail, shuffle=shuffle)
    for world, number in [*history, (1, None)]:
        samplers = [make(world, rank) for rank in range(world)]
        for sampler in samplers:
            sampler.start_at(start)
        whole = [len(sampler) for sampler in samplers]
        assert tail != "uneven" or sum(whole) == length == samplers[0].total_size
        for sampler in samplers:
            iter(sampler)  # only to look
        taken = [[*itertools.islice(sampler, number)] for sampler in samplers]
        seen += in_turns(taken)
        start = min(length, start + len(taken[0]) * world)
    (expected,) = shares(length, 1, shuffle=shuffle)
    assert seen[:length] == expected[: len(seen)]
    assert len(seen) == length or tail != "uneven"
    assert abs(len(seen) - length) < max([1, *(world for world, _ in history)])
    assert [len(list(sampler)) for sampler in samplers] == whole == [length]


def test_start_belongs_to_its_epoch():
    """A loop that names the epoch of the checkpoint goes on; naming another begins it."""
    sampler = DistributedSampler(8, 2, 0, shuffle=False)
    sampler.set_epoch(3)
    sampler.start_at(4)
    iter(sampler)  # only to look
    twin = pickle.loads(pickle.dumps(sampler))
    assert list(twin) == [4, 6]
    sampler.set_epoch(3)
    assert list(sampler) == [4, 6]
    sampler.start_at(4)
    sampler.set_epoch(4)
    assert list(sampler) == [0, 2, 4, 6]
    with pytest.raises(ValueError, match="num_consumed must be between 0 and 8"):
        sampler.start_at(9)
    padded = DistributedSampler(8, 3, 2, shuffle=False, tail="pad")
    padded.start_at(9)  # 3 samples on each of 3 ranks
    assert list(padded) == []


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loader_resumes_it():
    """Its StatefulDataLoader saves samplers that have a state."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make_loader():
        sampler = DistributedSampler(range(11), 2, 0, tail="pad")
        return stateful.StatefulDataLoader(range(11), batch_size=1, sampler=sampler)

    assert_resume_exact(make_loader, num_epochs=1)


def test_memory_is_below_eight_bytes_a_sample(monkeypatch):
    """A permutation of four bytes a sample; a rank keeps its part. Never Python ints."""
    length = 400_000
    made = []
    randperm = torch.randperm

    def measured(*args, **kwargs):
        made.append(randperm(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "randperm", measured)
    sampler = DistributedSampler(length, 2, 0)
    tracemalloc.start()
    indices = iter(sampler)
    first = next(indices)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (permutation,) = made
    assert permutation.nbytes == 4 * length
    assert peak < length, "Python objects"
    assert first == permutation[0]
    kept = weakref.ref(made.pop())
    del permutation
    assert kept() is None
