"""on_error="skip": failing samples are left out or replaced, and reported to the loop."""

import gc
import json
import pickle
import threading
import weakref
from contextlib import nullcontext
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.datasets import Made, MapData, Sized, StreamData
from support.inside import state_of
from support.loaders import PATIENCE_SECONDS, DataLoader, epoch_of
from support.seats import FORKED, NONE, ONE, THREADS, in_seats
from torch.utils.data import DistributedSampler, IterableDataset, Subset

from spdl_torch.engine.channel import Channel
from spdl_torch.errors import PipelineFailure

everywhere = in_seats(NONE, THREADS, FORKED)
none_or_one = in_seats(NONE, ONE)


class Noisy(Sized):
    """A sample is its index and a number that it draws; the bad ones draw, then fail."""

    def __init__(self, length, bad, *, error=ValueError):
        super().__init__(length)
        self.bad, self.error = bad, error

    def __getitem__(self, index):
        drawn = torch.rand(()).item()
        if index in self.bad:
            raise self.error(f"bad {index}")
        return index, drawn


class NoisyBulk(Noisy):
    """The same by torch's bulk protocol, as a loader that gives every sample its stream asks."""

    sample_context = None

    def __getitems__(self, indices):
        samples = []
        for place, index in enumerate(indices):
            with self.sample_context(place) if self.sample_context else nullcontext():
                samples.append(self[index])
        return samples


def as_is(batch):
    return batch


def skipping(seat, dataset, **options):
    options = {"collate_fn": as_is, "error_budget": 1.0, "seed": 3, **options}
    return seat.loader(dataset, on_error="skip", **options)


def expected(order, good_of, batch_size, *, drop_last=False):
    """Batches of ``order`` with what ``good_of`` says of each position; empty ones left out."""
    numbered = [*enumerate(order)]
    if drop_last:
        del numbered[len(order) // batch_size * batch_size :]
    size = batch_size or 1
    batches = [numbered[n : n + size] for n in range(0, len(numbered), size)]
    found = [[good for each in batch if (good := good_of(*each)) is not None] for batch in batches]
    return [batch if batch_size else batch[0] for batch in found if batch]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 24),
    bad=st.sets(st.integers(0, 23)),
    batch_size=st.none() | st.integers(1, 7),
    seat=st.sampled_from([NONE, THREADS, FORKED]),
    kind=st.sampled_from([Noisy, NoisyBulk]),
    replace=st.booleans(),
    drop_last=st.booleans(),
    in_subset=st.booleans(),
    data=st.data(),
)
def test_batches_are_the_oracles_whatever_is_bad(
    length, bad, batch_size, seat, kind, replace, drop_last, in_subset, data
):
    """Good samples keep their places and their random numbers; a bad one is left out, or is the
    next good index, which draws what the bad one would have drawn."""
    order = data.draw(st.permutations(range(length)))
    bad = bad & set(order)
    if len(bad) == length:
        bad = bad - {order[0]}
    drawn = [value for [(_, value)] in DataLoader(Noisy(length, ()), seed=3, collate_fn=list)]

    def good_of(position, index):
        if index in bad and not replace:
            return None
        while index in bad:
            index = (index + 1) % length
        return index, drawn[position]

    dataset = kind(length, bad)
    if in_subset:
        dataset = Subset(dataset, range(length))
    drop_last = drop_last and batch_size is not None
    options = {"batch_size": batch_size, "drop_last": drop_last, "replace": replace}
    loader = skipping(seat, dataset, sampler=list(order), **options)
    batches = list(loader)
    assert batches == expected(order, good_of, batch_size, drop_last=drop_last)
    if replace:
        assert len(batches) == len(loader)
    elif not drop_last:
        assert [sample.key for sample in loader.skipped] == [i for i in order if i in bad]


class BulkOnly(Sized):
    """Has no way to ask for one sample but a batch of one."""

    def __getitems__(self, indices):
        if 5 in indices:
            raise ValueError("bad 5")
        return list(indices)


@none_or_one
@pytest.mark.parametrize("rng", ["sample", "worker"])
def test_bad_sample_is_found_when_the_dataset_takes_whole_batches_alone(seat, rng):
    """__getitems__ without __getitem__ is asked for batches of one; the call that failed is not
    counted beside its samples. With one stream for each worker, too."""
    loader = skipping(seat, BulkOnly(8), batch_size=4, rng=rng, seed=None)
    assert list(loader) == [[0, 1, 2, 3], [4, 6, 7]]
    assert loader.skipped == [(5, "fetch", "ValueError: bad 5")]
    tasks = loader.snapshot().stages[0].tasks
    assert (tasks.num_tasks, tasks.num_failures) == (5, 1)


@everywhere
@pytest.mark.parametrize("batch_size", [None, 4])
def test_iterable_goes_on_behind_a_bad_item(seat, batch_size):
    """An iterator that can go on is asked for the next item; batches stay whole."""
    bad = {2: ValueError, 3: KeyError, 9: ValueError}
    dataset = StreamData(11, bad, split=True)
    loader = skipping(seat, dataset, batch_size=batch_size)
    found = [item for batch in loader for item in ([batch] if batch_size is None else batch)]
    assert sorted(item["y"] for item in found) == [n for n in range(11) if n not in bad]
    errors = ["KeyError: 'bad 3'", "ValueError: bad 2", "ValueError: bad 9"]
    assert sorted(sample.error for sample in loader.skipped) == errors


class Cut(IterableDataset):
    """Ends at its first error, as generators do: it is one, or an iterator around one."""

    def __init__(self, *, around):
        self.around = around

    def __iter__(self):
        def lines():
            yield 1
            raise ValueError("cut short")

        return map(int, lines()) if self.around else lines()


@none_or_one
def test_generator_is_not_skipped_over(seat, caplog):
    """The rest of the data would be lost unseen. Inside of another iterator it ends without a word,
    which is logged."""
    batches = iter(skipping(seat, Cut(around=False), batch_size=None))
    assert next(batches) == 1
    with pytest.raises(ValueError, match="cut short") as caught:
        next(batches)
    assert "a generator ends at its first error" in caught.value.__notes__[-1]
    assert list(skipping(seat, Cut(around=True), batch_size=None)) == [1]
    assert "the rest of its data is lost" in caplog.text


@everywhere
@pytest.mark.parametrize("kind", [MapData, partial(StreamData, split=True)])
def test_resumed_epoch_skips_what_is_left_of_it(seat, kind):
    """A skipped sample counts as handed out, and was reported when its turn came; the list begins
    anew."""
    data = kind(11, dict.fromkeys((0, 4, 7, 8), ValueError))
    loader, again = (skipping(seat, data, batch_size=2) for _ in range(2))
    batches = iter(loader)
    next(batches), next(batches)
    before = list(loader.skipped)
    again.load_state_dict(loader.state_dict())
    assert epoch_of(again) == epoch_of(batches)
    assert before
    assert before + again.skipped == loader.skipped


@none_or_one
def test_iterator_that_only_fails_ends_the_loop(seat):
    """A hundred errors in a row are not taken for bad samples: the loop gets them."""

    class Offline(IterableDataset):
        """A storage that has gone."""

        def __iter__(self):
            return self

        def __next__(self):
            raise ConnectionError("no route")

    with pytest.raises(PipelineFailure, match="100 samples in a row") as caught:
        next(iter(skipping(seat, Offline())))
    assert {type(error) for error in caught.value.exceptions} == {ConnectionError}


@everywhere
@pytest.mark.parametrize("kind", [Noisy, NoisyBulk])
def test_what_is_no_exception_is_raised(seat, kind):
    """SystemExit and its kind mean the program, not a sample; on a worker it is the cause of an
    error that shows where the program was to end."""
    loader = skipping(seat, kind(8, {3}, error=SystemExit), batch_size=4)
    with pytest.raises((SystemExit, RuntimeError), match="bad 3") as caught:
        list(loader)
    assert type(caught.value if seat is NONE else caught.value.__cause__) is SystemExit
    if seat is not NONE:
        assert "on a worker, where it does not end the program. Its trace" in str(caught.value)
        assert [each["stage"] for each in failures_in(loader)] == ["worker"]


@pytest.mark.parametrize(("budget", "tried"), [(None, 120), (0.05, 120), (Fraction(1, 10), 220)])
@everywhere
def test_share_counts_from_100_samples_on(seat, budget, tried):
    """7 of the first 20 are bad: a share of fewer than 100 samples says little. 5 % is the
    default."""
    bad = {*range(7), 110} if tried == 120 else {*range(7), *range(200, 220)}
    batches = iter(skipping(seat, Noisy(300, bad), batch_size=20, error_budget=budget))
    assert len([next(batches) for _ in range(tried // 20 - 1)]) == tried // 20 - 1
    with pytest.raises(PipelineFailure, match=f"of {tried} samples failed") as caught:
        next(batches)
    assert {type(error) for error in caught.value.exceptions} == {ValueError}


@everywhere
def test_epoch_without_a_good_sample_fails(seat):
    """Too short for a share, but nothing came of it: an empty loop would look like success. A batch
    that cannot be filled is an error, too, not an endless search."""
    loader = skipping(seat, Noisy(6, set(range(6))), error_budget=0.5)
    with pytest.raises(PipelineFailure, match="6 of 6 samples failed"):
        list(loader)
    loader = skipping(seat, Noisy(500, set(range(500))), replace=True)
    with pytest.raises(PipelineFailure, match="100 samples in a row failed, the first is 0"):
        next(iter(loader))


@everywhere
@pytest.mark.parametrize("replace", [False, True])
def test_ranks_have_as_many_batches_as_each_other(seat, replace):
    """A batch without a good sample is an error where other ranks would wait for it."""
    counts = []
    for rank in range(2):
        dataset = Noisy(12, {0, 2, 4})
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank, shuffle=False)
        loader = skipping(seat, dataset, batch_size=2, sampler=sampler, replace=replace)
        if not replace and rank == 0:
            with pytest.raises(PipelineFailure, match="other ranks would wait"):
                list(loader)
        else:
            counts.append(len(list(loader)))
    assert counts == ([3, 3] if replace else [3])


@everywhere
def test_log_names_the_first_and_thins_out(seat, caplog):
    """10 lines, then one at 16, 32, ..., and one at the end. Names of files come from anybody: what
    would control a terminal is shown."""

    def fail(text):
        return OSError(f"\x1b[2J{text}\u202e")

    list(skipping(seat, Noisy(60, set(range(0, 60, 2)), error=fail), batch_size=5))
    lines = [record.message for record in caplog.records if record.name == "spdl_torch.data"]
    assert len(lines) == 12
    assert "sample 0 failed in stage 'fetch'" in lines[0]
    assert r"OSError: \x1b[2Jbad 0\u202e" in lines[0]
    assert "(16 of" in lines[10]
    assert "30 of 60 samples of the epoch" in lines[-1]


@everywhere
def test_tries_are_called_tries(seat, caplog):
    """With replace=True there are more of them than samples."""
    options = {"dataset": Noisy(12, {1, 5, 9}), "batch_size": 4, "replace": True}
    assert sum(map(len, skipping(seat, **options))) == 12
    assert "3 of 15 tries of the epoch failed" in caplog.text
    with pytest.raises(PipelineFailure, match="3 of 15 tries failed, error_budget is 2"):
        list(skipping(seat, error_budget=2, **options))


def failures_in(loader):
    """What the trace of the last epoch says of failures."""
    (timeline,) = loader.profile().timelines
    return [each.details for each in timeline.instants if each.name == "failure"]


@everywhere
def test_figures_and_report_and_trace_tell(seat):
    """Counted in the stage, named in a remark, and an instant in the trace for each, anew in every
    epoch; a copy of the loader has skipped nothing."""
    loader = skipping(seat, Noisy(20, {3, 11}), batch_size=5)
    assert loader.skipped == []
    for _ in range(2):
        list(loader)
        fetch = loader.snapshot().stages[0]
        assert (fetch.tasks.num_tasks, fetch.tasks.num_failures) == (20, 2)
        assert loader.skipped == [(n, "fetch", f"ValueError: bad {n}") for n in (3, 11)]
    report = loader.report()
    assert any("3 (ValueError: bad 3), 11 (Val" in remark for remark in report.verdict.remarks)
    assert "samples that were skipped" in str(json.loads(report.as_json())["verdict"]["remarks"])
    listed = sorted((each["key"], each["error"]) for each in failures_in(loader))
    assert listed == [("11", "ValueError: bad 11"), ("3", "ValueError: bad 3")]
    assert pickle.loads(pickle.dumps(loader)).skipped == []


def refuses_five(samples):
    """A collate function that fails for the batch with sample 5."""
    if 5 in [index for index, _ in samples]:
        raise KeyError("no five")
    return samples


@pytest.mark.parametrize(
    ("seat", "collate", "errors"),
    [
        *((each, refuses_five, KeyError) for each in (NONE, THREADS, FORKED)),
        (FORKED, lambda _: lambda: None, (AttributeError, pickle.PicklingError)),
    ],
)
def test_samples_left_out_of_a_batch_that_fails_afterwards_are_told(seat, collate, errors):
    """As it is collated, or sent from its process: it costs the batch, and its samples count."""
    loader = skipping(seat, Noisy(8, {4}), batch_size=4, collate_fn=collate)
    found = epoch_of(loader)
    assert issubclass(found[-1], errors)
    assert len(found) == 2
    assert loader.skipped == [(4, "fetch", "ValueError: bad 4")]


def test_error_does_not_keep_the_batch_alive():
    """A bad sample is remembered by its error alone, without its neighbours."""

    def sample(index):
        if index == 1:
            raise ValueError("bad 1")
        return {index}  # can be watched

    loader = skipping(NONE, Made(sample, 3), batch_size=3)
    batches = iter(loader)
    seen = [weakref.ref(item) for item in next(batches)]
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    assert "raise ValueError" in state_of(loader).stats.skipped.errors[0].__notes__[-1]
    del batches


def test_failures_are_in_the_trace_before_the_loop_has_their_batch(monkeypatch):
    """However long its worker takes to go on."""
    checked, put_at = threading.Event(), Channel.put_at

    def and_no_further(results, *result):
        put_at(results, *result)
        assert checked.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(Channel, "put_at", and_no_further)
    loader = skipping(THREADS, Noisy(8, {3, 5}), batch_size=8)
    next(batches := iter(loader))
    found = sorted(each["key"] for each in failures_in(loader))
    checked.set()
    assert found == ["3", "5"]
    del batches


@none_or_one
def test_a_batch_that_failed_is_in_the_trace(seat):
    """Without workers as with them."""
    loader = seat.loader(Noisy(4, {2}), batch_size=4)
    with pytest.raises(ValueError, match="bad 2"):
        list(loader)
    (failure,) = failures_in(loader)
    assert (failure["item"], failure["error"]) == (0, "ValueError: bad 2")
