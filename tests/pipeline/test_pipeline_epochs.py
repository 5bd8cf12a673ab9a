"""Nothing lost, nothing twice: random pipelines, over one epoch and over all, against a plain
loop."""

import asyncio
import functools
import gc
import threading
import weakref
from dataclasses import replace
from itertools import chain, count, cycle, islice, pairwise

import pytest
from hypothesis import given, settings, strategies as st
from support.gates import (
    PATIENCE_SECONDS,
    Boom,
    GatedOp,
    Hands,
    join_spdl_threads,
    multiset,
    no_leak,
    pipeline_of,
    same,
    switching,
    until,
)
from support.inside import check_balance, run_of
from support.stages import add, evaluate, num_dropped, plans
from torch.utils.data import DistributedSampler

from spdl_torch.pipeline import Aggregator, PipelineBuilder, PipelineFailure, cache_iterator
from spdl_torch.spdl.dataloader import CacheDataLoader

pytestmark = pytest.mark.usefixtures("quiet")


class Epochs:
    """Gives ``sizes[n]`` items, distinct from those of all other epochs, in epoch ``n``; in each
    epoch after those as many as in the last."""

    def __init__(self, *sizes):
        self.sizes = sizes
        self.num_begun = 0

    def items(self, epoch):
        size = self.sizes[min(epoch, len(self.sizes) - 1)]
        return list(range(epoch * 1000, epoch * 1000 + size))

    def __iter__(self):
        self.num_begun += 1
        return iter(self.items(self.num_begun - 1))


class AsyncEpochs(Epochs):
    __iter__ = None

    async def __aiter__(self):
        for item in Epochs.__iter__(self):
            await asyncio.sleep(0)
            yield item


continuous = functools.partial(pipeline_of, continuous=True)


@settings(deadline=None, max_examples=160)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    stages=st.lists(plans, max_size=4),
    sink=st.integers(1, 4),
    num_threads=st.none() | st.integers(1, 8),
    tail=st.none() | st.tuples(st.integers(1, 5), st.booleans()),
    is_async=st.booleans(),
    continuous=st.booleans(),
)
def test_each_iterator_gives_what_a_plain_loop_makes_of_one_epoch(
    pool, sizes, stages, sink, num_threads, tail, is_async, continuous
):
    """Random stages: no item is lost or comes twice, none crosses from epoch to epoch, the order is
    kept where every stage keeps it, lists end with their epoch, empty epochs are empty; failures
    and drops are counted, and no thread is left."""
    if not continuous:
        sizes = [3 * sizes[0]]
    source = (AsyncEpochs if is_async else Epochs)(*sizes)
    builder, ordered = PipelineBuilder().add_source(source, continuous=continuous), True
    plan, failures, dropped = [], 0, 0
    for stage in stages:
        if "dropping the last" in stage.kind and not ordered:
            stage = replace(stage, kind="aggregate, disaggregate")  # which items were last?
        plan.append(stage)
        add(builder, stage, pool)
        ordered = ordered and stage.keeps_order
    if tail is not None:
        builder.aggregate(tail[0], drop_last=tail[1])
    pipeline = builder.add_sink(sink).build(num_threads=num_threads, max_failures=10_000)
    with switching(), pipeline.auto_stop():
        for epoch in range(len(sizes) + continuous):
            expected = source.items(epoch)
            for stage in plan:
                dropped += num_dropped(stage, expected)
                expected, num_failures = evaluate(stage, expected)
                failures += num_failures
            got = list(pipeline)
            if tail is not None:
                size, drop_last = tail
                assert [len(group) for group in got[:-1]] == [size] * (len(got) - 1)
                num_left_over = len(expected) % size if drop_last else 0
                dropped += num_left_over
                got = [item for group in got for item in group]
                assert len(got) == len(expected) - num_left_over
                expected = expected[: len(got)] if ordered else expected
            if ordered:
                assert got == expected
            assert not multiset(got) - multiset(expected)
            assert len(got) == len(expected) or (tail is not None and tail[1])
        if continuous:
            next(iter(pipeline), None)
    check_balance(pipeline)
    assert "[closed]" in repr(pipeline)
    join_spdl_threads()
    counted = pipeline.snapshot().stages
    for expected, found in (
        (failures, sum(stage.tasks.num_failures for stage in counted)),
        (dropped, sum(stage.num_dropped for stage in counted)),
    ):
        assert found == expected or (continuous and found > expected)


def test_epochs_that_nobody_takes_are_bounded():
    """Empty epochs have no items that could fill the buffers; their ends do."""
    source = Epochs(0)
    pipeline = continuous(source, same, sink=2)
    queues = run_of(pipeline).queues
    for each in queues:
        each.allow_bursts(1)  # none
    with no_leak(), pipeline.auto_stop():
        assert [list(pipeline) for _ in range(5)] == [[]] * 5
        until(lambda: all(each.counters().put_wait[1] == 1 for each in queues))
        assert source.num_begun <= 5 + sum(each.capacity for each in queues) + len(queues)


def test_epoch_may_be_taken_in_parts():
    """Nothing is lost by ``break``; an iterator that has ended stays ended; ``get_item`` tells each
    end once. The next epoch is under way before it is asked for."""
    source, op = Epochs(5, 2, 0, 1), GatedOp()
    op.open()
    pipeline = continuous(source, op, sink=2)
    with no_leak(), pipeline.auto_stop():
        assert list(islice(pipeline, 2)) == [0, 1]
        rest = iter(pipeline)
        assert [list(rest), list(rest)] == [[2, 3, 4], []]
        op.wait_started(6)
        got = []
        for _ in range(6):
            try:
                got.append(pipeline.get_item(PATIENCE_SECONDS))
            except EOFError:
                got.append(None)
        assert got == [1000, 1001, None, None, 3000, None]


def test_an_iterator_that_begins_anew_has_epochs():
    """In its ``__iter__``, which returns itself."""

    class Source:
        def __iter__(self):
            self.rest = iter([3, 2, 1])
            return self

        def __next__(self):
            return next(self.rest)

    with continuous(Source()).auto_stop() as pipeline:
        assert [list(pipeline) for _ in range(3)] == [[3, 2, 1]] * 3


@pytest.mark.parametrize("first", [0, 7])
def test_source_with_set_epoch_is_given_the_numbers_of_epochs(first):
    """From where it stands; nobody outside could know when, while epochs are loaded ahead."""
    ours, expected = (DistributedSampler(range(9), 1, 0) for _ in range(2))
    ours.set_epoch(first)
    with continuous(ours).auto_stop() as pipeline:
        for epoch in range(first, first + 3):
            expected.set_epoch(epoch)
            assert list(pipeline) == list(expected)


class Sums(Aggregator):
    """Adds up until 10 is reached."""

    def __init__(self):
        self.sum = 0
        self.flushed = []

    def accumulate(self, item):
        if item == 13:
            raise Boom(item)
        self.sum += item
        return self.flush() if self.sum >= 10 else None

    def flush(self):
        total, self.sum = self.sum, 0
        self.flushed.append(total)
        return total or None


@pytest.mark.parametrize("drop_last", [False, True])
def test_aggregator_is_flushed_at_the_end_of_each_epoch(drop_last):
    """Once; the rest that it returns is passed on, or dropped with drop_last."""

    builder, sums = PipelineBuilder().add_source([4, 4, 4, 13, 5], continuous=True), Sums()
    pipeline = builder.aggregate(sums, drop_last=drop_last).add_sink().build(max_failures=-1)
    with pipeline.auto_stop():
        assert [list(pipeline) for _ in range(3)] == [[12] if drop_last else [12, 5]] * 3
    assert sums.flushed[:6] == [12, 5] * 3
    assert pipeline.snapshot().stages[0].tasks.num_failures >= 3


def test_aggregator_is_of_one_run_at_a_time():
    """Else their items would be mixed; one run after another may have it: of a pipeline that was
    dropped it is free as soon as that has stopped, and without its items."""
    builder = PipelineBuilder().add_source(range(1, 100)).aggregate(Sums()).add_sink()
    first, second = builder.build(), builder.build()
    with first.auto_stop():
        next(iter(first))
        with pytest.raises(RuntimeError, match="its Sums is in use by another run"):
            second.start()
    assert list(second)[:2] == [10, 11]
    assert [next(iter(builder.build())) for _ in range(5)] == [10] * 5


def test_error_of_flush_says_that_it_is_of_flush():
    """There is no item."""

    class Failing(Sums):
        def flush(self):
            raise Boom("flushed")

    builder = PipelineBuilder().add_source([1, 2, 3]).aggregate(Failing()).add_sink()
    pipeline = builder.build(max_failures=0)
    with pytest.raises(PipelineFailure, match="aggregate") as caught, pipeline.auto_stop():
        list(pipeline)
    (note,) = caught.value.exceptions[0].__notes__
    assert note == "in stage 'aggregate(Failing)' (spdl-aggregate(Failing)-0), in flush()"


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("how", ["break", "error"])
def test_aggregator_is_emptied_where_a_run_ends_early(how, drop_last):
    """However much was in it then; the next run of its builder is whole."""
    sums, held = Sums(), threading.Event()

    class Source:
        is_first = True

        def __iter__(self):
            yield from [4, 4, 4, 5]
            if not self.is_first:
                return
            self.is_first = False
            until(lambda: sums.sum == 5)
            if how == "error":
                raise Boom
            held.set()
            yield from iter(int, 1)

    builder = PipelineBuilder().add_source(Source()).aggregate(sums, drop_last=drop_last)
    builder.add_sink(1)
    with builder.build().auto_stop() as pipeline:
        assert next(iter(pipeline)) == 12
        if how == "error":
            with pytest.raises(PipelineFailure, match="source"):
                list(pipeline)
        else:
            assert held.wait(PATIENCE_SECONDS)
    assert sums.sum == 0
    assert list(builder.build()) == ([12] if drop_last else [12, 5])
    assert sums.sum == 0


def test_ends_of_epochs_are_no_items():
    """No figure counts them, and they do not wait in a queue's length."""
    source = Epochs(4, 0, 3)
    pipeline = continuous(source, same, concurrency=2, output_order="input")
    with pipeline.auto_stop():
        for _ in range(3):
            list(pipeline)
        queue = run_of(pipeline).outlet
        assert queue.counters().num_got == 7
    taken = [q.counters() for q in run_of(pipeline).queues[:-1]]
    assert all(after.num_put <= before.num_got for before, after in pairwise(taken))
    assert pipeline.snapshot().stages[0].tasks.num_tasks == taken[0].num_got
    assert queue.counters().num_put - 7 == len(queue)


@pytest.mark.parametrize(
    ("limit", "bad", "message"),
    [(2, {0}, "max_failures is 2"), (None, {0, 1, 2}, r"max_failures is 0\.1 of all")],
)
def test_budget_counts_over_all_epochs(limit, bad, message):
    """A run ends in the epoch in which that shows, by a share from a stage's 100th task on."""

    def fail(item):
        if item % 1000 in bad:
            raise Boom(item)
        return item

    pipeline = continuous(Epochs(3), fail, build={"max_failures": limit})
    with no_leak(), pipeline.auto_stop(), pytest.raises(PipelineFailure, match=message):
        assert all(len(list(pipeline)) == 3 - len(bad) for _ in count())


@settings(deadline=None, max_examples=20)
@given(st.tuples(*[st.integers(1, 5)] * 6), st.sampled_from(["completion", "input"]))
def test_epochs_stay_apart_while_the_number_of_threads_changes(counts, order):
    """Threads that come and leave where epochs meet."""
    hands, source = Hands(), Epochs(5)
    pipe = {"name": "op", "concurrency": 2, "output_order": order, "build": {"tuner": hands}}
    pipeline = continuous(source, same, **pipe)
    with no_leak(), switching(), pipeline.auto_stop():
        for epoch, count in enumerate(counts):
            hands.run.set_concurrency("op", count)
            assert multiset(pipeline) == multiset(source.items(epoch))


def test_pipeline_that_is_dropped_between_epochs_ends_its_threads():
    """The garbage collector is enough."""
    with no_leak():
        pipeline = continuous(Epochs(2), same, concurrency=2)
        list(pipeline)
        gone = weakref.ref(pipeline)
        del pipeline
        gc.collect()
        assert gone() is None


@settings(deadline=None)
@given(
    count=st.integers(0, 9),
    num_caches=st.integers(1, 5),
    more=st.integers(0, 4),
    stop=st.none() | st.integers(0, 9),
)
def test_cache_iterator_gives_the_first_items_again(count, num_caches, more, stop):
    """After as many from the source as was said; a short source is repeated whole. SPDL's loader
    around it does the same."""
    after = num_caches + more
    stop = None if stop is None else after + stop
    given = [*range(min(count, after))]
    expected = [*islice(chain(given, cycle(given[:num_caches])), 30)][:stop]
    options = {"return_caches_after": after, "stop_after": stop}
    assert [*islice(cache_iterator(range(count), num_caches, **options), 30)] == expected
    cached = CacheDataLoader(range(count), num_caches, **options)
    assert [*islice(cached, 30)] == [*islice(cached, 30)] == expected
    assert len(cached) == count
    if not more:
        assert [*islice(cache_iterator(range(count), num_caches), 30)][:stop] == expected


@pytest.mark.parametrize("delete_src", [True, False])
def test_cache_iterator_lets_go_of_its_source(delete_src):
    """So that a pipeline's threads end while only kept items are given."""
    pipeline = PipelineBuilder().add_source(range(100)).pipe(lambda n: n + 1).add_sink().build()
    gone = weakref.ref(pipeline)
    items = cache_iterator(pipeline, 2, delete_src=delete_src)
    del pipeline
    assert list(islice(items, 3)) == [1, 2, 1]
    gc.collect()
    assert (gone() is None) is delete_src
    items.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_caches": 0}, "num_caches must be >= 1, got 0"),
        ({"num_caches": 3, "return_caches_after": 2}, "return_caches_after must be >= num_caches"),
        ({"num_caches": 3, "stop_after": 2}, "stop_after must be >= 3, .* got 2"),
        (
            {"num_caches": 1, "return_caches_after": 4, "stop_after": 3},
            "stop_after must be >= 4, .* got 3",
        ),
    ],
)
def test_cache_iterator_refuses_what_would_cache_nothing(options, match):
    """At the call, not at the first item."""
    with pytest.raises(ValueError, match=match):
        cache_iterator(range(9), **options)
