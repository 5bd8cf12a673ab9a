"""pack and bucket: every sample once, within the budget, the same groups from anywhere on."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.loaders import frozen
from support.readings import shown
from torch.utils.data import default_collate

import spdl_torch
from spdl_torch.data import bucket, cached, mix, pack, pad_collate
from spdl_torch.data.packing.rule import bucketed, packed
from spdl_torch.data.sources import as_source
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing import assert_resume_exact

sizes_and_budgets = st.integers(1, 300).flatmap(
    lambda budget: st.tuples(st.lists(st.integers(1, budget), max_size=60), st.just(budget))
)


def document(number, size):
    """Tokens that say where they come from: the document's number, and the place in it."""
    return torch.stack([torch.full((size,), number), torch.arange(size)], 1)


def some_sizes(number, budget, seed=0):
    """Sizes as texts have them: many short ones, few long ones."""
    drawn = np.random.default_rng(seed).lognormal(np.log(budget / 15), 1.1, number)
    return np.clip(drawn.astype(int), 1, budget).tolist()


def first_fit_decreasing(sizes, budget):
    """The textbook: each sample, from the largest down, goes to the first pack that has room."""
    packs = []
    for size in sorted(sizes, reverse=True):
        for pack_ in packs:
            if sum(pack_) + size <= budget:
                pack_.append(size)
                break
        else:
            packs.append([size])
    return sorted(sorted(pack_) for pack_ in packs)


def groups_of(grouping, sizes, budget):
    places, ends = grouping(np.array(sizes, np.int32), budget)
    assert sorted(places.tolist()) == list(range(len(sizes)))  # each sample once
    return [places[a:b].tolist() for a, b in itertools.pairwise([0, *ends])]


@given(sizes_and_budgets)
def test_packs_are_those_of_first_fit_decreasing(drawn):
    """The tables find the packs that the textbook finds, sample by sample."""
    sizes, budget = drawn
    packs = [sorted(sizes[n] for n in group) for group in groups_of(packed, sizes, budget)]
    assert sorted(packs) == first_fit_decreasing(sizes, budget)


def test_pack_is_within_the_budget_when_sizes_are_large():
    """Sizes of pixels are counted in units, which must not exceed the budget."""
    sizes = np.random.default_rng(0).integers(1, 10**4, 2000)
    for group in groups_of(packed, sizes, 10**6 + 7):
        assert sizes[group].sum() <= 10**6 + 7


@pytest.mark.parametrize("num_dimensions", [1, 2])
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=40), st.integers(0, 99))
def test_buckets_are_within_the_budget_and_full(num_dimensions, shapes, extra):
    """Padded to its largest size in each dimension; and the next sample would not fit."""
    shapes = np.array(shapes, np.int32).reshape(-1, 2)[:, :num_dimensions]
    budget = int(shapes.prod(1).max(initial=1)) + extra
    places, ends = bucketed(shapes[:, 0] if num_dimensions == 1 else shapes, budget)
    assert sorted(places.tolist()) == list(range(len(shapes)))
    assert [0, *ends][-1] == len(shapes)
    for begin, end in itertools.pairwise([0, *ends]):
        assert shapes[places[begin:end]].max(0).prod() * (end - begin) <= budget
        more = shapes[places[begin : end + 1]]
        assert end == len(shapes) or more.max(0).prod() * len(more) > budget


@settings(max_examples=30)
@given(sizes_and_budgets, st.integers(0, 3), st.integers(1, 4), st.sampled_from([pack, bucket]))
def test_epoch_has_every_sample_once_over_the_ranks(drawn, epoch, world, group):
    """In any windows, and ranks have the same number of groups without asking each other."""
    sizes, budget = drawn
    texts = group(range(len(sizes)), budget, size_of=sizes, seed=1)
    texts.plan().window = 16  # as if there were many more samples
    parts = {}
    for tail in ("drop", "uneven"):
        samplers = [texts.sampler(world, rank, tail=tail) for rank in range(world)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts[tail] = [list(sampler) for sampler in samplers]
        assert [len(sampler) for sampler in samplers] == [len(part) for part in parts[tail]]
    assert len({len(part) for part in parts["drop"]}) == 1
    groups = [members for part in parts["uneven"] for members in part]
    assert sorted(itertools.chain(*groups)) == list(range(len(sizes)))
    for own in ([sizes[n] for n in members] for members in groups):
        assert (sum(own) if group is pack else max(own) * len(own)) <= budget


def test_epochs_are_other_groups_with_little_waste():
    """Texts of usual lengths fill more than 99 % of the packs, and meet others in every epoch:
    few packs of two come again."""
    sizes = some_sizes(20_000, 8192)
    texts = pack(range(len(sizes)), 8192, size_of=sizes, seed=3)
    assert texts.waste() < 0.01
    assert texts.waste() == pytest.approx(1 - sum(sizes) / 8192 / len(texts.sampler()))
    first, second = texts.sampler(), texts.sampler()
    second.set_epoch(1)
    packs = [{frozenset(group) for group in epoch if len(group) > 1} for epoch in (first, second)]
    assert len(packs[0] & packs[1]) < len(packs[0]) / 20
    assert list(first) == list(texts.sampler())  # epoch 0 again, after epoch 1
    remarks, groups = texts.loading_remarks(), texts.plan().groups(1)
    assert texts.loading_remarks() == remarks
    assert texts.plan().groups(1) is groups  # not planned again for a report


def pieces_of(row):
    """The documents in a pack, as attention kernels and position embeddings keep them apart."""
    ends = row["cu_seqlens"].tolist()
    pieces = [row["input_ids"][begin:end] for begin, end in itertools.pairwise(ends)]
    assert row["cu_seqlens"].dtype == torch.int32
    assert row["position_ids"].tolist() == [n for piece in pieces for n in range(len(piece))]
    assert row["max_seqlen"] == max(map(len, pieces))
    return pieces


def test_padded_packs_make_batches():
    """Rows of one length, with the number of each token's document, padding as one more."""
    sizes = [3, 4, 6]
    documents = [{"input_ids": [1] * n, "labels": [2.5] * n} for n in sizes]
    texts = pack(documents, 8, size_of=sizes, pad={"labels": -100})
    (batch,) = spdl_torch.DataLoader(texts, batch_size=2, sampler=texts.sampler())
    assert [*batch] == ["input_ids", "labels", "position_ids", "document_ids"]
    longest, other = sorted(zip(*(rows.tolist() for rows in batch.values()), strict=True), key=str)
    ids, labels = [1] * 6 + [0] * 2, [2.5] * 6 + [-100.0] * 2
    assert longest == (ids, labels, [*range(6), 0, 0], [0] * 6 + [1] * 2)
    assert other[3] == [0, 0, 0, 0, 1, 1, 1, 2]


class AtOnce(list):
    """Reads the documents of a pack in one call, as the datasets of Hugging Face do."""

    __getitem__ = None

    def __getitems__(self, indices):
        return [{"input_ids": [*self][index]} for index in indices]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 12) | st.just(60))
def test_documents_of_packs_are_whole_together(sizes, budget):
    """End to end, every token once; split, in pieces of the budget and the rest."""
    documents = [document(n, size) for n, size in enumerate(sizes)]
    options = {"budget": budget, "oversize": "split" if budget < 50 else "error"}
    texts = pack(documents, size_of=sizes, **options)
    at_once = pack(AtOnce(documents), size_of=sizes, **options)
    stream = pack(as_source(lambda: iter(documents)), size_of=len, **options)
    expected = sorted(torch.cat(documents).tolist())
    loaded = spdl_torch.DataLoader(texts, batch_size=None, sampler=texts.sampler())
    for rows in (loaded, map(at_once.__getitem__, at_once.sampler()), stream):
        tokens = []
        for row in rows:
            assert len(row["input_ids"]) <= budget
            for piece in pieces_of(row):
                number, first = piece[0].tolist()
                assert piece.equal(documents[number][first : first + len(piece)])
            tokens += row["input_ids"].tolist()
        assert sorted(tokens) == expected


@pytest.mark.parametrize("is_stream", [False, True])
def test_buckets_of_images_have_the_waste_of_their_batches(is_stream):
    """Wide and high images of as many pixels do not meet, and what is padded is counted."""
    rng = np.random.default_rng(0)
    shapes = [tuple(map(int, rng.integers(5, 40, 2))) for _ in range(300)] + [(10, 40), (40, 10)]
    images, sampler = [torch.ones(1, *shape) for shape in shapes], None
    if is_stream:
        stream = as_source(lambda: iter(images))
        buckets = bucket(stream, 4000, size_of=lambda image: image.shape[1:])
    else:
        buckets = bucket(images, 4000, size_of=shapes)
        sampler = buckets.sampler()
    loader = spdl_torch.DataLoader(buckets, batch_size=None, sampler=sampler)
    sums = [(batch.numel(), int(batch.sum())) for batch in loader]
    assert all(room <= 4000 for room, _ in sums)
    room, filled = map(sum, zip(*sums, strict=True))
    assert filled == sum(height * width for height, width in shapes)
    assert 0 < 1 - filled / room < 0.25
    assert is_stream or buckets.waste() == pytest.approx(1 - filled / room)
    assert f"{1 - filled / room:.2%}" in shown(loader.report())


@pytest.mark.parametrize(
    ("group", "stop", "world", "workers"),
    [(bucket, "first", 2, 0), (pack, "all", 2, 0), (bucket, "never", 1, 2)],
)
def test_each_epoch_of_a_grouped_mixture_has_the_mixtures_samples(group, stop, world, workers):
    """Every epoch goes on through the sources, whatever the end of one, the ranks and workers."""
    options, longest = ({"oversize": "split"}, 40) if group is pack else ({}, 9)
    sizes = {"web": [5, longest, 2] * 100, "code": [3, 7] * 10}
    sources = {
        name: [torch.full((size,), 1000 * place + n) for n, size in enumerate(sizes[name], 1)]
        for place, name in enumerate(sizes)
    }
    limit = {"num_samples": 45} if stop == "never" else {}
    mixture = mix(sources, {"web": 2, "code": 1}, seed=4, stop=stop, **limit)
    grouped = group(mixture, 16, size_of=lambda place: len(mixture[place]), seed=9, **options)
    samplers = [grouped.sampler(world, rank, tail="uneven") for rank in range(world)]
    isolation = {"num_workers": workers, "isolation": "process" if workers else "auto"}
    loaders = [spdl_torch.DataLoader(grouped, None, sampler=each, **isolation) for each in samplers]
    size, epochs = len(mixture), []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        rows = [row["input_ids"] if group is pack else row for rank in loaders for row in rank]
        epochs.append([row.flatten().tolist() for row in rows])
        got = Counter(itertools.chain(*epochs[-1]))
        del got[0]  # padding
        first = epoch * size
        expected = [mixture[place].tolist() for place in range(first, first + size)]
        assert got == Counter(itertools.chain(*expected)), epoch
    assert epochs[0] != epochs[1]


STREAM_SIZES = some_sizes(230, 64, seed=4)
STREAM = as_source(lambda: itertools.starmap(document, enumerate(STREAM_SIZES)))


def stream_loader(world, rank, workers=0):
    """The loader of one of ``world`` ranks, each of which reads the whole stream and packs it."""
    rows = pack(STREAM, 64, size_of=len, look_ahead=50, seed=6, num_replicas=world, rank=rank)
    return spdl_torch.DataLoader(rows, batch_size=None, num_workers=workers, isolation="thread")


def test_mixture_of_streams_can_be_packed():
    """Every rank mixes alike, and packs what it mixed."""
    streams = {
        name: as_source(lambda n=n: (torch.full((3,), n) for _ in range(40)))
        for n, name in enumerate("ab")
    }
    rows = pack(mix(streams, {"a": 3, "b": 1}), 12, size_of=len, look_ahead=40)
    tokens = torch.cat([row["input_ids"] for row in rows])
    assert 0.7 < tokens.eq(0).float().mean() < 0.8


@pytest.mark.parametrize("group", [pack, bucket])
def test_only_the_last_group_of_all_has_room_where_sizes_leave_none(group):
    """That of a window is filled by the next one."""
    texts = group(range(1000), 7, size_of=[1] * 1000)
    texts.plan().window = 16
    assert len(texts.sampler(tail="uneven")) == 143


def test_stream_has_the_same_packs_for_any_ranks_and_workers():
    """All ranks have as many; in turn they are those of one rank, up to the last whole round."""
    loader = stream_loader(1, 0)
    expected = [frozen(row) for row in loader]
    numbers = [n for row in stream_loader(1, 0) for n, place in row["input_ids"] if place == 0]
    assert sorted(numbers) == list(range(len(STREAM_SIZES)))
    waste = 1 - sum(STREAM_SIZES) / 64 / len(expected)
    assert f"{waste:.2%} of the groups' room so far is unused." in shown(loader.report())
    for world, workers in ((1, 2), (2, 0), (3, 2), (4, 1)):
        parts = [[*map(frozen, stream_loader(world, r, workers))] for r in range(world)]
        dealt = [row for step in zip(*parts, strict=True) for row in step]
        assert dealt == expected[: len(expected) // world * world]


@pytest.mark.parametrize("rank", range(2))
def test_stream_on_several_workers_resumes_at_any_pack(rank):
    """Also in the middle of a window, and where a round began in the window before."""
    assert_resume_exact(lambda: stream_loader(2, rank, 2), num_epochs=1)


@pytest.mark.parametrize(("length", "workers"), [(4, 0), (10, 1)])
def test_stream_that_cannot_be_resumed_is_an_error(workers, length):
    """One that ends before the window where it goes on, or within that window; and on several
    workers with other ranks, which are at different groups: better than doubled documents."""
    stopped, resumed = stream_loader(2, 0, 2), stream_loader(1, 0, 2)
    stopped.state_dict()
    next(iter(stopped))
    resumed.load_state_dict(stopped.state_dict())
    with pytest.raises(ValueError, match=r"is of 2 ranks, this run has 1.*at most one worker"):
        list(resumed)

    def loader_of(length):
        documents = as_source(lambda: iter([torch.ones(2)] * length))
        rows = pack(documents, 4, size_of=len, look_ahead=10, num_replicas=1, rank=0)
        return spdl_torch.DataLoader(rows, None, num_workers=workers, isolation="thread")

    stopped, resumed = loader_of(40), loader_of(length)
    stopped.state_dict()
    *_, state = [stopped.state_dict() for _ in itertools.islice(stopped, 7)]
    resumed.load_state_dict(state)
    with pytest.raises(ValueError, match=r"load_state_dict: .* makes .* but it ended after"):
        list(resumed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack([[1]], 0, size_of=[1]), "budget must be >= 1, got 0"),
        (
            lambda: pack([[1]] * 3, 4, size_of=[1, 9, 8]),
            "sample 1 has size 9, more than the budget of 4.*first of 2 such.*oversize=",
        ),
        (lambda: pack([[1]], 4, size_of=[1, 2]), "one size for each of the dataset's"),
        (lambda: bucket([0], 9, size_of=[(2, 0)]), "sample 0 has size 2 x 0; sizes"),
        (lambda: bucket([0, 0], 9, size_of=[(2, 2), (2,)]), "all have the same length"),
        (
            lambda: bucket(as_source([[1]]), 4, size_of=[1], look_ahead=3),
            "look_ahead is for streams; a ListSource is map-style.*Leave look_ahead out, got 3",
        ),
        (lambda: list(pack(STREAM, 4, size_of=len)), r"sample \d+ has size"),
        (lambda: pack([[1, 2]], 4, size_of=[1])[[0]], "sample 0 has 1 tokens.*has 2"),
        (
            lambda: pack([{"a": [1]}, {"b": [1]}], 4, size_of=[1, 1])[[0, 1]],
            r"sample 1 has \['b'\] and sample 0 \['a'\]",
        ),
    ],
)
def test_bad_budget_or_size_is_refused(call, message):
    """With the sample, what was expected, and what to do."""
    with pytest.raises(ValueError, match=message):
        call()


def test_groups_without_a_sampler_or_of_a_part_are_refused():
    """A loader's own sampler would ask for a length; the copy of a worker has no plan; ranks would
    each pack a part of their part."""
    texts = pack([[7], [8, 9]], 4, size_of=[1, 2])
    with pytest.raises(TypeError, match=r"Pass sampler=grouped.sampler\(\) to the loader"):
        list(spdl_torch.DataLoader(texts, batch_size=None))
    copied = pickle.loads(pickle.dumps(texts))
    assert copied[[0]]["input_ids"].tolist() == [7]
    with pytest.raises(RuntimeError, match="has no plan"):
        copied.sampler()
    builder = PipelineBuilder().add_source([document(0, 3)]).add_sink()
    with pytest.raises(TypeError, match="PipelineDataset gives each its own part"):
        pack(spdl_torch.PipelineDataset(builder), 4, size_of=len)
    whole = spdl_torch.PipelineDataset(builder, num_replicas=1, rank=0)
    assert len(list(pack(whole, 4, size_of=len))) == 1


def test_pad_collate_is_default_collate_where_shapes_agree():
    """Structures are kept; images are padded at the right and at the bottom."""
    samples = [{"a": [torch.ones(2), n], "b": "text"} for n in range(3)]
    assert str(pad_collate(samples)) == str(default_collate(samples))
    images = pad_collate([torch.ones(3, 2, 5), torch.ones(3, 4, 1)])
    assert images.shape == (2, 3, 4, 5)
    assert images[0, :, :2].eq(1).all()
    assert images[0].sum() == 30
    with pytest.raises(ValueError, match=r"same number of dimensions, got shapes \(2,\), \(1, 2\)"):
        pad_collate([torch.ones(2), torch.ones(1, 2)])


def test_sizes_of_a_mixtures_first_epoch_are_not_taken_for_those_of_later_ones():
    """The error says what to pass."""
    mixture = mix({"a": [[1]] * 9, "b": [[1, 2]] * 9})
    sampler = pack(mixture, 4, size_of=[len(row) for row in mixture]).sampler()
    assert len(list(sampler)) > 0
    sampler.set_epoch(1)
    with pytest.raises(ValueError, match="size_of must be a function of the position, got a list"):
        list(sampler)


def test_figures_of_nested_datasets_are_in_snapshot_and_report(tmp_path):
    """Packs of a mixture of caches: each dataset has its note."""
    sources = {
        name: cached([torch.arange(n % 7 + 1) for n in range(length)], tmp_path / name, version=1)
        for name, length in (("a", 60), ("b", 20))
    }
    mixture = mix(sources, {"a": 3, "b": 1}, stop="never", num_samples=100)
    packed = pack(mixture, 20, size_of=[len(mixture[position]) for position in range(100)])
    workers = {"num_workers": 2, "isolation": "process"}
    loader = spdl_torch.DataLoader(packed, batch_size=None, sampler=packed.sampler(), **workers)
    assert len(list(loader)) == len(packed.sampler())
    assert loader.snapshot().data["cache/found"] == 100
    remarks = loader.report().verdict.remarks
    assert sum("The cache is in" in remark for remark in remarks) == 2
