"""mix: every position has one sample, in the shares that were asked for, from anywhere on."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.datasets import Indices, Made
from support.readings import shown

import spdl_torch
from spdl_torch.data import MixedSource, mix
from spdl_torch.data.mixing import plan as lookup
from spdl_torch.data.mixing.mix import shares_of
from spdl_torch.data.mixing.plan import MAX_POSITIONS, shuffled_indices
from spdl_torch.data.sources import ListSource, as_source
from spdl_torch.pipeline import PipelineBuilder

NAMES = ("a", "b", "c")
lengths = st.tuples(*[st.integers(1, 40)] * 3)
some_weights = st.tuples(*[st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.0])] * 3).filter(any)
schedules = st.dictionaries(st.integers(1, 9000), some_weights, max_size=2)


def named(weights):
    return dict(zip(NAMES, weights, strict=True))


def lists(sizes):
    """Sources whose samples say which they are."""
    return {n: [(n, i) for i in range(size)] for n, size in zip(NAMES, sizes, strict=True)}


@settings(max_examples=25)
@given(some_weights, schedules, st.integers(0, 2**62), st.data())
def test_plan_is_the_same_from_anywhere(weights, schedule, seed, data):
    """Counts, sources and draws at any position are those of walking there from the beginning, and
    at every position each source has its share, within 2 samples a phase."""
    phases = {0: named(weights), **{first: named(each) for first, each in schedule.items()}}
    mixture = mix(lists((3, 4, 5)), phases, seed=seed, stop="never", num_samples=10_000)
    walked = [mixture.locate(position) for position in range(10_000)]
    probe = mix(lists((3, 4, 5)), phases, seed=seed, stop="never", num_samples=1)
    for position in data.draw(st.lists(st.integers(0, 9999), min_size=5, max_size=5)):
        assert probe.locate(position) == walked[position]
        tally = Counter(name for name, _ in walked[:position])
        assert probe.counts(position) == {name: tally[name] for name in NAMES}
    expected, seen = dict.fromkeys(NAMES, 0.0), Counter()
    firsts = sorted(phases)
    for position, (name, _) in enumerate(walked):
        now = phases[max(first for first in firsts if first <= position)]
        seen[name] += 1
        for each in NAMES:
            expected[each] += now[each] / sum(now.values())
            assert abs(seen[each] - expected[each]) < 2 * len(phases)


@settings(max_examples=25)
@given(lengths, some_weights, st.integers(0, 99))
def test_each_pass_of_a_source_has_every_sample_once(sizes, weights, seed):
    """Whatever the shares: a source repeats only after all its samples have come. The order of the
    dict does not matter, the seed does."""
    options = {"stop": "never", "num_samples": 300}
    mixture = mix(lists(sizes), named(weights), seed=seed, **options)
    drawn = defaultdict(list)
    for name, index in mixture:
        drawn[name].append(index)
    for name, size in zip(NAMES, sizes, strict=True):
        for first in range(0, len(drawn[name]), size):
            one_pass = drawn[name][first : first + size]
            assert len(set(one_pass)) == len(one_pass)
    turned = dict(reversed(lists(sizes).items()))
    assert list(mix(turned, named(weights), seed=seed, **options)) == list(mixture)
    if min(sizes) > 9:
        assert list(mix(turned, named(weights), seed=seed + 1, **options)) != list(mixture)


@settings(max_examples=40)
@given(lengths, some_weights.filter(all), st.integers(0, 99))
def test_epoch_ends_where_a_source_would_begin_again(sizes, weights, seed):
    """The first source that ends, or the last one: the next sample would repeat one of it."""
    endless = mix(lists(sizes), named(weights), seed=seed, stop="never", num_samples=1)
    seen, ends = Counter(), {}
    for position in itertools.count():
        name, _ = endless.locate(position)
        if seen[name] == len(endless.datasets[name]):
            ends.setdefault(name, position)
            if len(ends) == 3:
                break
        seen[name] += 1
    assert len(mix(lists(sizes), named(weights), seed=seed)) == min(ends.values())
    assert len(mix(lists(sizes), named(weights), seed=seed, stop="all")) == max(ends.values())


def test_far_positions_are_reached_at_once():
    """The last position of all has its sample, and shares hold there as at the beginning."""
    mixture = mix(lists((3, 4, 5)), named((1, 2, 5)), stop="never", num_samples=8)
    other = mix(lists((3, 4, 5)), named((1, 2, 5)), seed=1, stop="never", num_samples=8)
    far = MAX_POSITIONS - 9000
    names = [[each.locate(far + n)[0] for n in range(99)] for each in (mixture, other)]
    assert names[0] != names[1]  # the sources, and not only their samples, come in another order
    located = Counter(mixture.locate(far + n) for n in range(8000))
    for name, size, share in zip(NAMES, (3, 4, 5), (1000, 2000, 5000), strict=True):
        numbers = [located[name, index] for index in range(size)]
        assert max(numbers) - min(numbers) <= 2  # each pass has every sample once
        assert mixture.counts(far + 8000, far)[name] == sum(numbers)
        assert abs(sum(numbers) - share) <= 2
    with pytest.raises(IndexError, match=r"position must be between 0 and 274877906943, got -1"):
        mixture[-1]


def test_positions_give_the_same_in_any_order(monkeypatch):
    """However few blocks are kept: in order, at random, by threads at once, and in a copy."""
    phases = {0: named((1, 2, 5)), 20_001: named((3, 0, 1))}
    walked = mix(lists((3, 40, 500)), phases, stop="never", num_samples=1)
    expected = [walked.locate(position) for position in range(40_000)]
    monkeypatch.setattr(lookup, "_MOST_BLOCKS", 1)
    mixture = mix(lists((3, 40, 500)), phases, stop="never", num_samples=1)
    order = np.random.default_rng(0).integers(0, 40_000, 400).tolist()
    orders = [order, range(8100, 8300), range(39_999, 39_900, -1), order[::-1]]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda order: [mixture.locate(n) for n in order], orders))
    assert found == [[expected[n] for n in order] for order in orders]
    assert 1 <= len(mixture._positions._blocks) <= 1 + 4
    again = pickle.loads(pickle.dumps(mixture))
    assert [again.locate(n) for n in order[:9]] == [expected[n] for n in order[:9]]


def test_report_names_the_shares():
    """How much of an epoch each source is, and how often it repeats."""
    mixture = mix({"web": range(100), "code": range(10)}, stop="all")
    loader = spdl_torch.DataLoader(mixture, batch_size=4, sampler=mixture.sampler())
    list(loader)
    text = shown(loader.report())
    assert "is 50.2% code (10 times its samples), 49.8% web (1 times its samples)." in text


def test_error_of_a_source_names_source_and_sample():
    """The user's own exception, with a note."""
    sources = {"good": Indices(3), "bad": Indices(1, bad=[0])}
    assert mix(sources).__getitems__ is None
    with pytest.raises(ValueError, match="bad 0") as raised:
        list(mix(sources, stop="all", shuffle=False))
    assert "in sample 0 of the source 'bad'" in raised.value.__notes__


def endless_oracle(mixed, lengths, stop):
    """Cut what a mixture of streams would give without an end where ``stop`` says."""
    seen, ended, kept = Counter(), set(), []
    for name, index in mixed:
        if seen[name] and index == 0:
            ended.add(name)
            if stop == "first" or (stop == "all" and len(ended) == len(lengths)):
                break
        seen[name] += 1
        kept.append((name, index))
    return kept


def unknown_length(items):
    """The items as a stream that does not know how many there are."""
    return as_source(lambda: iter(items))


@pytest.mark.parametrize("known", [True, False])
@settings(max_examples=15)
@given(sizes=lengths, weights=some_weights.filter(all), stop=st.sampled_from(["first", "all"]))
def test_mixed_source_ends_and_begins_anywhere(known, sizes, weights, stop):
    """Where the sources' ends say, and ``iterate(start)`` is the rest from there."""
    as_stream, phases = as_source if known else unknown_length, shares_of(NAMES, named(weights))
    given_sources = {name: as_stream(items) for name, items in lists(sizes).items()}
    mixed = mix(given_sources, named(weights), seed=3, stop=stop, shuffle=False)
    assert isinstance(mixed, MixedSource) or known
    if known:  # lists alone are map-style
        mixed = MixedSource(given_sources, phases, seed=3, stop=stop)
    endless = MixedSource(given_sources, phases, seed=3, stop="never")
    items = list(mixed)
    assert items == endless_oracle(endless, sizes, stop)
    if known:
        assert len(mixed) == len(items)
    for source in (endless, *([] if known else [mixed])):
        with pytest.raises(TypeError, match="has no len"):
            len(source)
    for start in {0, 1, len(items) // 2, len(items) - 1, len(items), len(items) + 5}:
        assert list(mixed.iterate(start)) == items[start:]


def test_mixed_source_is_a_pipelines_source():
    """Its parts have nothing in common; equal ones need to know how long each source is."""

    def ranks(source, stop, tail="uneven"):
        sources = {"a": as_source(range(40)), "b": source}
        mixed = MixedSource(sources, shares_of(("a", "b"), {"a": 2, "b": 1}), seed=1, stop=stop)
        builder = PipelineBuilder().add_source(mixed).pipe(str, output_order="input").add_sink()
        options = {"num_replicas": 2, "tail": tail}
        return [spdl_torch.PipelineDataset(builder, rank=rank, **options) for rank in range(2)]

    stream = unknown_length(range(1000, 1020))
    one, two = ({*map(int, dataset)} for dataset in ranks(stream, "all"))
    assert one | two == {*range(40), *range(1000, 1020)}
    one, two = ({*map(int, dataset)} for dataset in ranks(stream, "first"))
    assert one
    assert two
    assert not one & two
    with pytest.raises(spdl_torch.UnsupportedOptionError, match="needs to know how long each"):
        next(iter(ranks(stream, "all", tail="drop")[0]))
    equal = ranks(as_source(range(1000, 1021)), "all", tail="drop")
    lengths = [len(list(dataset)) for dataset in equal]
    assert lengths[0] == lengths[1] == len(equal[0]) >= 29


def piped_mixture(rank=0, world=1, tail="drop", **options):
    """A pipeline over a mixture of lists of all kinds, some of which are shuffled; the mixture."""
    shuffled = ListSource([*range(100, 120)]).shuffle(3)
    sources = {"a": as_source(range(40)), "b": shuffled, "c": [*range(200, 230)]}
    mixture = mix(sources, named((2, 1, 1)), seed=1, **options)
    builder = PipelineBuilder().add_source(mixture).add_sink()
    dataset = spdl_torch.PipelineDataset(builder, num_replicas=world, rank=rank, tail=tail)
    return dataset, mixture


def noted(items, read, index):
    read.append(items[index])
    return items[index]


@pytest.mark.parametrize("stop", ["first", "all"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_mixture_of_lists_is_a_pipelines_source(stop, shuffle):
    """Its epochs are those of a loader with the mixture's sampler, whoever sets them; ranks have
    every n-th sample, and read no other."""
    dataset, mixture = piped_mixture(stop=stop, shuffle=shuffle)
    sampler = mixture.sampler(1, 0)
    expected = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        expected.append([mixture[position] for position in sampler])
    assert [list(dataset) for _ in range(3)] == expected[:3]
    assert len(dataset) == len(mixture)
    assert len({tuple(epoch) for epoch in expected}) == 4
    for tail in ("drop", "uneven", "pad"):
        for rank in range(3):
            part, of_rank = piped_mixture(rank, 3, tail, stop=stop, shuffle=shuffle)
            part.set_epoch(3)
            own, read = expected[3][rank::3], []
            for name, items in of_rank.datasets.items():
                of_rank.datasets[name] = Made(partial(noted, items, read), len(items))
            items = list(part)
            assert items[: len(own)] == own[: len(items)]
            assert abs(len(items) - len(mixture) / 3) < 1
            assert len(items) == len(part)
            if tail != "pad":
                assert read == items


def test_part_of_a_mixture_is_a_source_of_its_own():
    """It begins anywhere, is divided again, has its own epoch, and moves none of a loader."""
    _, mixture = piped_mixture()
    part = mixture.shard(1, 2)
    part.set_epoch(3)
    size = len(mixture)
    expected = [mixture[3 * size + place] for place in range(1, size, 2)]
    assert list(part) == expected
    assert list(part.iterate(5)) == expected[5:]
    assert list(part.shard(2, 3)) == expected[2::3]
    assert len(part.shard(2, 3)) == len(expected[2::3])
    assert list(pickle.loads(pickle.dumps(part))) == expected
    assert mixture.epoch == 0
    assert list(mixture) == [mixture[place] for place in range(size)]
    loader = spdl_torch.DataLoader(mixture, batch_size=None, sampler=mixture.sampler(1, 0))
    before = list(loader)
    mixture.set_epoch(1)
    assert list(loader) == before
    with pytest.raises(spdl_torch.UnsupportedOptionError, match="a mixture is shuffled by mix"):
        part.shuffle()
    with pytest.raises(ValueError, match=r"Mixture.set_epoch: epoch must be >= 0, got -1"):
        mixture.set_epoch(-1)
    with pytest.raises(ValueError, match=r"index must be in 0..count-1, got index 2 of 2"):
        mixture.shard(2, 2)


GOOD, EVEN = {"a": range(3), "b": range(4)}, {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ({"a": []}, {}, ValueError, "the source 'a' is empty"),
        (GOOD, {"weights": {"a": 0, "b": 0}}, ValueError, "weights must be finite numbers >= 0"),
        (GOOD, {"weights": {"a": 1}}, ValueError, "has no 'b'. Give 0 to leave a source out"),
        (GOOD, {"weights": {5: EVEN}}, ValueError, "schedule must begin at sample 0"),
        (GOOD, {"stop": "never"}, TypeError, "num_samples must be an int, got None"),
        (
            GOOD,
            {"stop": "all", "weights": {0: EVEN, 2: {"a": 1, "b": 0}}},
            ValueError,
            "every source has to come to its end, but the weight of one becomes 0 before",
        ),
    ],
)
def test_bad_mixture_is_refused(arguments, options, error, message):
    """With the argument, and what would be right."""
    with pytest.raises(error, match=message):
        mix(arguments, **options)
    # A stream that turns out empty would be asked for ever.
    mixed = mix({"a": unknown_length([]), "b": unknown_length([1])}, stop="never")
    with pytest.raises(ValueError, match="the source 'a' is empty"):
        list(itertools.islice(mixed, 10))


def test_orders_of_passes_are_all_permutations_alike():
    """Each of the 24 orders of 4 samples comes about as often: within 5 standard deviations."""
    orders = shuffled_indices(3, np.repeat(np.arange(24_000), 4), np.tile(range(4), 24_000), 4)
    found = Counter(map(tuple, orders.reshape(-1, 4).tolist()))
    assert len(found) == 24
    assert all(abs(number - 1000) < 5 * 31 for number in found.values())
