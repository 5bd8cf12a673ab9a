"""PipelineDataset: the pipeline's items wherever a dataset goes, each rank and worker its part."""

from __future__ import annotations

import gc
import itertools
import pickle
import threading

import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given, settings, strategies as st
from support.gates import GatedOp, join_spdl_threads, no_leak, spdl_threads, spread, until

import spdl_torch
from spdl_torch import PipelineDataset, PipelineFailure, UnsupportedOptionError
from spdl_torch.data.sources import as_source
from spdl_torch.loader.sampling.distributed_sampler import DistributedSampler as OurSampler
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing import assert_resume_exact

sizes = st.integers(0, 40)
tails = st.sampled_from(["drop", "pad", "uneven"])


def double(item):
    """An op that a spawned process can find."""
    return 2 * item


def reciprocal(item):
    return 1 / item


def dataset_of(source, *ops, batch=None, drop_last=False, **options):
    builder = PipelineBuilder().add_source(source)
    for op in ops:
        builder.pipe(op, concurrency=2, output_order="input")
    if batch is not None:
        builder.aggregate(batch, drop_last=drop_last)
    return PipelineDataset(builder.add_sink(), **options)


class Parts:
    """Divides itself into contiguous parts, which their order distinguishes from strides."""

    def __init__(self, numbers):
        self.numbers = list(numbers)
        self.epochs = []

    def __len__(self):
        return len(self.numbers)

    def __iter__(self):
        return iter(self.numbers)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def shard(self, index, count):
        ends = [len(self.numbers) * i // count for i in range(count + 1)]
        return Parts(self.numbers[ends[index] : ends[index + 1]])


class Later:
    """An async iterable that begins anew each time."""

    def __init__(self, numbers):
        self.numbers = numbers

    async def __aiter__(self):
        for number in self.numbers:
            yield number


@pytest.mark.parametrize("make_source", [list, Later], ids=["list", "async"])
def test_items_come_again_when_it_is_iterated_again(make_source):
    """Every pass runs the pipeline from its beginning; two at once do not meet. Of an iterator an
    empty second epoch would be silent loss of data."""
    dataset = dataset_of(make_source(range(10)), double, batch=4)
    expected = [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    with no_leak():
        assert list(dataset) == expected
        assert [*zip(dataset, dataset, strict=True)] == [*zip(expected, expected, strict=True)]
    once = dataset_of(iter([1, 2]))
    assert list(once) == [1, 2]
    with pytest.raises(RuntimeError, match="list_iterator, can be iterated only once, and was"):
        list(once)


@pytest.mark.parametrize("end", ["drop", "close", "close of a loader"])
def test_threads_end_when_the_loop_ends_early(end):
    """Whatever ends the loop ends the pipeline; of a loader that is closed, though somebody keeps
    the iterator."""
    dataset = dataset_of(itertools.count(), double)
    loader = spdl_torch.DataLoader(dataset, None)
    iterator = iter(loader if end == "close of a loader" else dataset)
    next(iterator)
    assert spdl_threads()
    if end == "close":
        iterator.close()
    if end == "close of a loader":
        loader.close()
    else:
        del iterator
    gc.collect()
    assert not spdl_threads()


def test_repr_shows_every_stage():
    """And no items."""
    shown = repr(dataset_of([*range(100_000)], double)).splitlines()
    assert [line.split("(")[0].strip() for line in shown] == [
        "PipelineDataset",
        "src",
        "double",
        "sink",
    ]
    assert len("".join(shown)) < 1000


def test_first_pass_has_figures_while_it_ends():
    """Whatever has been noted of its end."""

    class Read(PipelineDataset):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if has_begun:
                assert self.snapshot().stages == ()

    has_begun = []
    dataset = Read(PipelineBuilder().add_source(range(3)).add_sink())
    has_begun.extend(dataset)
    assert has_begun == [0, 1, 2]


def test_failure_is_logged_when_the_loop_does_not_ask_for_more(caplog):
    """Lightning takes ``len()`` items; a failure after these must not go unnoticed."""
    dataset = dataset_of([1, 1, 1, 0], reciprocal, max_failures=0, length=1)
    iterator = iter(dataset)
    next(iterator)
    until(lambda: not any("reciprocal" in thread.name for thread in spdl_threads()))
    iterator.close()
    (record,) = (r for r in caplog.records if r.name == "spdl_torch.data")
    assert record.getMessage() == "PipelineDataset: the pass had failed"
    assert isinstance(record.exc_info[1], PipelineFailure)


def test_epochs_are_counted_and_set_on_the_source():
    """A pass is an epoch; ``set_epoch`` sets the next one. No thread and no epoch comes of iter(),
    which Lightning calls to look."""
    join_spdl_threads()  # of the tests before
    source = Parts(range(3))
    dataset = dataset_of(source)
    iter(dataset)
    assert not spdl_threads()
    list(dataset), list(dataset)
    dataset.set_epoch(7)
    list(dataset), list(dataset)
    assert source.epochs == [0, 1, 7, 8]


@settings(max_examples=30)
@given(sizes, st.integers(1, 5), st.booleans(), st.integers(1, 4), tails, st.data())
def test_len_is_what_comes(num_items, batch, drop_last, world, tail, data):
    """For any source length, batch size, drop_last and rank; sources that divide themselves too."""
    rank = data.draw(st.integers(0, world - 1))
    source = data.draw(st.sampled_from([list, Parts]))(range(num_items))
    options = {"num_replicas": world, "rank": rank, "tail": tail}
    dataset = dataset_of(source, double, batch=batch, drop_last=drop_last, **options)
    assert len(dataset) == len(list(dataset))


def test_len_that_cannot_be_known_is_given_or_fails():
    """As of any IterableDataset without a length, with the reason."""
    assert len(dataset_of(Later([1, 2]), length=2)) == 2
    with pytest.raises(TypeError, match="object of type 'Later' has no len"):
        len(dataset_of(Later([])))
    with pytest.raises(TypeError, match="stage 'spread' may pass on any number"):
        len(dataset_of([1, 2], spread))


class Uneven(Parts):
    """Its parts differ by more than one item."""

    def shard(self, index, count):
        return Parts(self.numbers[index * index : (index + 1) ** 2 if index < count - 1 else None])


@settings(max_examples=60)
@given(sizes, st.integers(1, 5), st.sampled_from([list, Parts, Uneven, Later]), tails)
def test_ranks_divide_the_source(num_items, world, make_source, tail):
    """No item is left out or comes twice, but for what ``tail`` says of the last ones: by default,
    they are dropped, as others would wait for ever for a rank that ends early."""
    source, ranks = make_source(range(num_items)), range(world)
    options = {"num_replicas": world} | ({} if tail == "drop" else {"tail": tail})
    datasets = [dataset_of(source, rank=rank, **options) for rank in ranks]
    parts = [list(dataset) for dataset in datasets]
    items = [*itertools.chain(*parts)]
    if tail == "uneven":
        assert sorted(items) == list(range(num_items))
        return
    assert len({*map(len, parts)}) == 1
    if tail == "drop":
        assert len(set(items)) == len(items)
        assert make_source is Uneven or len(items) == num_items // world * world
    else:
        assert set(items) == set(range(num_items))
        if make_source is not Later:  # which does not know how many are padding
            lengths = [len(part) - d.num_padded for part, d in zip(parts, datasets, strict=True)]
            kept = [part[:length] for part, length in zip(parts, lengths, strict=True)]
            assert sorted(itertools.chain(*kept)) == list(range(num_items))


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("make_source", [Uneven, as_source])
def test_part_that_was_made_to_fit_resumes_anywhere(make_source, tail):
    """Also where its padding has begun."""
    ranks = {"num_replicas": 3, "rank": 0 if make_source is Uneven else 2, "tail": tail}
    assert_resume_exact(lambda: dataset_of(make_source(range(7)), **ranks), num_epochs=1)


class Unsized:
    """Divides itself and does not know how."""

    def __iter__(self):
        return iter(range(5))

    def shard(self, index, count):
        return itertools.islice(range(5), index, None, count)


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_parts_of_unknown_length_are_refused_when_they_must_be_equal(tail):
    """At the first pass on several ranks, with what to do, in place of a hang at its end."""
    with pytest.raises(UnsupportedOptionError, match='Pass tail="uneven" and end every epoch'):
        list(dataset_of(Unsized(), num_replicas=2, rank=0, tail=tail))
    assert list(dataset_of(Unsized(), num_replicas=2, rank=0, tail="uneven")) == [0, 2, 4]
    assert list(dataset_of(Unsized(), tail=tail)) == list(range(5))


@pytest.mark.parametrize("make_sampler", [torch_data.DistributedSampler, OurSampler])
@pytest.mark.parametrize("wrap", ["bare", "batches", "loader", "source"])
def test_source_that_a_sampler_has_shared_out_is_not_again(make_sampler, wrap):
    """The sampler itself, and what is around it; its order changes, its part stays its own."""
    sampler = make_sampler(range(8), 2, 1)
    source, size = {
        "bare": (sampler, None),
        "batches": (torch_data.BatchSampler(sampler, 2, False), 2),
        "loader": (torch_data.DataLoader(range(8), sampler=sampler), 1),
        "source": (as_source(sampler), None),
    }[wrap]
    dataset, epochs = dataset_of(source, num_replicas=2, rank=1), []
    for epoch in range(2):
        if wrap in ("batches", "loader"):
            sampler.set_epoch(epoch)  # which is behind what is around it
        items = [item.tolist() if isinstance(item, torch.Tensor) else item for item in dataset]
        sampler.set_epoch(epoch)
        own = list(sampler)
        assert items == ([own[n : n + size] for n in range(0, 4, size)] if size else own)
        assert len(dataset) == len(items)
        epochs.append(own)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("loader_class", [torch_data.DataLoader, spdl_torch.DataLoader])
def test_loader_passes_its_items_on(loader_class, monkeypatch):
    """``batch_size=None``: what the pipeline makes is the batch; each worker has its own part of
    the rank's, which comes from torchrun's variables where there is no group."""
    dataset = dataset_of(range(10), torch.tensor, batch=4)
    loader = loader_class(dataset, batch_size=None, num_workers=0)
    batches = [torch.stack(batch).tolist() for batch in loader]
    assert batches == [[*range(4)], [*range(4, 8)], [8, 9]]
    assert len(loader) == 3
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RuntimeError, match="LOCAL_RANK=1, but there is neither a process group"):
        list(dataset_of(range(4)))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = dataset_of(range(11), double)
    assert len(dataset) == 5
    assert sorted(loader_class(dataset, batch_size=None, num_workers=2)) == [*range(2, 22, 4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": -1}, "length must be >= 0 or None, got -1"),
        ({"num_replicas": 2}, "num_replicas and rank go together, got 2 and None"),
        ({"num_replicas": 2, "rank": 2}, "rank must be between 0 and 1, got 2"),
    ],
)
def test_argument_is_refused_when_it_makes_no_sense(options, message):
    """At construction, not in the first pass."""
    with pytest.raises((TypeError, ValueError), match=message):
        dataset_of([1], **options)
    for epoch in (-1, 1.0, True, "1"):
        with pytest.raises((TypeError, ValueError), match="set_epoch: epoch must be "):
            dataset_of([1]).set_epoch(epoch)
    with pytest.raises(TypeError, match="builder must be a PipelineBuilder, got list"):
        PipelineDataset([1, 2])


def test_failure_keeps_its_class_from_a_worker_process_of_torchs_loader():
    """Its text has the stage and the errors; the good items come first."""
    builder = PipelineBuilder().add_source([1, 2, *[0] * 20]).pipe(reciprocal, max_failures=3)
    loader = torch_data.DataLoader(PipelineDataset(builder.add_sink()), None, num_workers=2)
    seen = []
    with pytest.raises(PipelineFailure, match=r"stage 'reciprocal'(.|\n)*division") as caught:
        seen.extend(batches := iter(loader))
    batches._shutdown_workers()  # which waits for 5 s where it is garbage
    assert set(seen) <= {1, 0.5}
    assert [type(each) for each in caught.value.exceptions] == [RuntimeError]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.message) == (PipelineFailure, caught.value.message)


def test_pickle_runs_on_its_own():
    """A spawned worker gets a dataset that has loaded nothing yet."""
    dataset = dataset_of(range(4), double)
    iterator = iter(dataset)
    next(iterator)
    again = pickle.loads(pickle.dumps(dataset))
    assert list(again) == [0, 2, 4, 6]
    assert threading.active_count() > 1, "the first one goes on"
    assert list(iterator) == [2, 4, 6]


def test_loop_goes_on_when_an_op_outlasts_its_end(monkeypatch, caplog):
    """An op that never returns is left after a while, and named."""
    monkeypatch.setattr("spdl_torch.data.dataset._STOP_SECONDS", 0.01)
    gate = GatedOp()
    dataset = dataset_of([1, 2], lambda item: item if item == 1 else gate(item))
    iterator = iter(dataset)
    assert next(iterator) == 1
    gate.wait_started(1)
    iterator.close()
    assert "PipelineDataset: the loop has ended, but stop: still running" in caplog.text
    gate.open()
    join_spdl_threads()
