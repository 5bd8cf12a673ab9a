"""Failing items, failing sources and dead executors: what is dropped, what is raised, and when."""

import asyncio
import concurrent.futures
import decimal
import gc
import os
import re
import threading
import weakref
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from fractions import Fraction
from multiprocessing import get_all_start_methods, get_context

import pytest
from support.forks import end_at_once
from support.gates import (
    PATIENCE_SECONDS,
    BlockedSource,
    Boom,
    join_spdl_threads,
    no_leak,
    pipeline_of,
    same,
)
from support.inside import check_balance

from spdl_torch.engine.channel import ChannelClosed
from spdl_torch.pipeline import PipelineBuilder, PipelineFailure

pytestmark = pytest.mark.usefixtures("quiet")


def failing_at(*bad):
    """An op that raises for the items in ``bad``, and the exceptions it raised."""
    raised = []

    def op(item):
        if item in bad:
            raised.append(Boom(item))
            raise raised[-1]
        return item

    return op, raised


def collect(pipeline):
    """What came before the failure, and the failure."""
    items = []
    with pytest.raises(PipelineFailure, match=r".") as caught, pipeline.auto_stop():
        items.extend(pipeline)
    return items, caught.value


@pytest.mark.parametrize(
    ("limit", "bad", "count", "failure"),
    [
        (0, [3], 20, "1 of 4 tasks failed, max_failures is 0"),
        (3, [0, 1, 2], 20, None),
        (3, [0, 1, 2, 3], 20, "4 of 4 tasks failed, max_failures is 3"),
        (1.0, range(150), 150, None),
        # A share is judged after 100 tasks, and at the end where nothing has succeeded.
        (0.1, range(10), 200, None),
        (0.1, [*range(10), 99], 200, r"11 of 100 tasks.*max_failures is 0\.1 of all"),
        (Fraction(1, 10), [*range(10), 100], 200, r"11 of 101 tasks.*max_failures is 0\.1 of all"),
        (None, range(7), 7, r"7 of 7 tasks failed, max_failures is 0\.1 of all"),
        (None, range(9, 300, 10), 300, None),
        (None, range(0, 300, 9), 300, r"max_failures is 0\.1 of all"),
    ],
)
@pytest.mark.parametrize("order", ["completion", "input"])
def test_budget_allows_exactly_so_many_failures(limit, bad, count, failure, order):
    """Up to the limit failing items are dropped; one more fails the pipeline, after good items."""
    op, raised = failing_at(*bad)
    concurrency = 1 if failure else 2
    pipe = {"concurrency": concurrency, "output_order": order, "build": {"max_failures": limit}}
    p = pipeline_of(range(count), op, **pipe)
    good = [item for item in range(count) if item not in bad]
    if failure is None:
        assert sorted(p) == good
        return
    items, error = collect(p)
    assert items == good[: len(items)]
    assert re.search(failure, error.message)
    assert list(error.exceptions)[:20] == raised[: len(error.exceptions)]


@pytest.mark.parametrize("is_async", [False, True])
def test_item_under_way_counts_for_those_after_it(is_async):
    """The 110th fails as the 11th, which are 10 %, while another thread is at work on the 109th."""
    bad, is_judged = {*range(10), 109}, threading.Event()

    def op(item):
        if item == 108:
            assert is_judged.wait(PATIENCE_SECONDS)
        elif item == 110:  # by the thread that the one before has failed on
            is_judged.set()
        if item in bad:
            raise Boom(item)
        return item

    async def aop(item):
        while item == 108 and not is_judged.is_set():
            await asyncio.sleep(0)
        return op(item)

    p = pipeline_of(range(200), aop if is_async else op, concurrency=2)
    assert sorted(p) == [item for item in range(200) if item not in bad]


def test_stage_budget_overrides_that_of_the_pipeline():
    """Each stage counts its own failures; its own limit goes before the pipeline's."""
    odd, _ = failing_at(*range(1, 20, 2))
    third, raised = failing_at(0, 6)

    def pipeline(limit):
        builder = PipelineBuilder().add_source(range(20)).pipe(odd, max_failures=10)
        builder.pipe(third, name="third", max_failures=limit)
        return builder.add_sink().build(max_failures=1)

    with pipeline(2).auto_stop() as p:
        assert list(p) == [n for n in range(0, 20, 2) if n not in (0, 6)]
        assert p.num_lost == 12
    _, failure = collect(pipeline(None))
    assert "stage 'third': 2 of" in failure.message
    assert list(failure.exceptions) == raised[-2:]


def test_failure_holds_the_users_own_exceptions_with_notes():
    """PipelineFailure is an ExceptionGroup of the same objects; notes name stage and item. It is
    raised again on every later get, and does not become the end of the data."""
    op, raised = failing_at(2)
    pipeline = pipeline_of(range(9), op, name="decode", build={"max_failures": 0})
    items, failure = collect(pipeline)
    for _ in range(2):
        with pytest.raises(PipelineFailure, match="stage 'decode': 1 of 3 tasks failed"):
            pipeline.get_item()
    assert items[:2] == [0, 1]
    assert isinstance(failure, ExceptionGroup)
    assert failure.exceptions[0] is raised[0]
    assert raised[0].args == (2,)
    assert raised[0].__notes__ == ["in stage 'decode' (spdl-decode-0), item 2: 2"]
    caught = []
    try:
        raise failure
    except* Boom as group:
        caught.append(group)
    assert type(caught[0]) is PipelineFailure
    assert failure.subgroup(KeyError) is None


def test_dropped_items_are_logged_with_stage_and_item(caplog):
    """Each of the first ten failures is one line; the rest are counted at the end. Errors have
    names of files, which come from anybody: nothing of them controls a terminal. One that is raised
    again has the note of where it was last."""
    caplog.set_level("INFO", "spdl_torch.pipeline")
    error = Boom("\x1b[2J\u202e")

    def op(item):
        if item < 15:
            raise error
        return item

    list(pipeline_of(range(30), op, name="decode", build={"max_failures": 20}))
    lines = [r.message for r in caplog.records if "dropped" in r.message]
    assert len(lines) == 11
    assert lines[3] == (
        "in stage 'decode' (spdl-decode-0), item 3: 3: "
        r"Boom: \x1b[2J\u202e; the item is dropped."
    )
    assert "15 of 30 items failed and were dropped" in lines[-1]
    assert error.__notes__ == ["in stage 'decode' (spdl-decode-0), item 14: 14"]


def test_source_error_comes_after_the_good_items():
    """A source that raises always fails the pipeline, whatever the budget."""
    error = Boom("disk")

    def source():
        yield from range(25)
        raise error

    p = pipeline_of(source(), same, concurrency=2, build={"max_failures": 1.0})
    items, failure = collect(p)
    assert sorted(items) == list(range(25))
    assert failure.exceptions == (error,)
    assert error.__notes__ == ["in the source src(generator), after 25 items"]
    assert "the source raised" in failure.message


def test_failure_while_the_source_is_blocked_reaches_the_consumer():
    """Nobody waits for a source that is inside its own next(). The error refers to the loop's
    frames, and so to the pipeline: the run, which goes on, may not keep it."""
    op, raised = failing_at("bad")
    source = BlockedSource("good", "bad")
    p = pipeline_of(source, op, build={"max_failures": 0})
    items, failure = collect(p)
    assert (items, list(failure.exceptions)) == (["good"], raised)
    gone = weakref.ref(p)
    del p, failure
    gc.collect()
    is_gone = gone() is None
    source.released.set()
    join_spdl_threads()
    assert is_gone


@pytest.mark.parametrize("order", ["completion", "input"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_exit_in_a_worker_fails_the_pipeline_when_stages_before_are_blocked(error, order):
    """SystemExit in the last of three stages ends all three; the good items come first."""

    def op(item):
        if item == 9:
            raise error("stop")
        return item

    with no_leak():
        builder = PipelineBuilder().add_source(range(1000))
        for _ in range(2):
            builder.pipe(same, concurrency=2, output_order=order)
        p = builder.pipe(op, name="last").add_sink().build()
        items, failure = collect(p)
        assert len(items) >= (9 if order == "input" else 1)
        assert "stage 'last' broke" in failure.message
        assert isinstance(failure.exceptions[0].__cause__, error)
        check_balance(p)


def test_exit_in_an_ordered_worker_does_not_hold_up_those_behind_it():
    """The worker that dies gives its place in the order away; what others made is delivered."""
    started = threading.Barrier(3)

    def op(item):
        if item < 3:
            started.wait(PATIENCE_SECONDS)
        if item == 0:
            raise SystemExit
        return item

    p = pipeline_of(range(1000), op, concurrency=3, output_order="input", buffer_size=1)
    items, failure = collect(p)
    assert items[:2] == [1, 2]
    assert items == sorted(items)
    assert "broke" in failure.message


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("kind", ["same", "spread", "asame", "aspread"])
def test_end_that_an_op_meets_elsewhere_is_a_failing_item(kind, is_cancelled):
    """An op may ask for what was cancelled, or wait at another pipeline's queue: that neither stops
    this one nor is it the end of its data."""
    cancelled = asyncio if kind.startswith("a") else concurrent.futures

    def same(item):
        if item == 3:
            raise cancelled.CancelledError if is_cancelled else ChannelClosed
        return item

    def spread(item):
        yield same(item)

    async def asame(item):
        return same(item)

    async def aspread(item):
        yield same(item)

    op = {each.__name__: each for each in (same, spread, asame, aspread)}[kind]
    p = pipeline_of(range(9), op, build={"max_failures": 1})
    assert list(p) == [n for n in range(9) if n != 3]
    assert p.snapshot().stages[0].tasks.num_failures == 1
    check_balance(p)


def die(item):
    end_at_once(3) if item == 5 else None
    return item


def spread_in_child(item):
    yield item, os.getpid()
    yield item, os.getpid()


def fail_in_child(item):
    raise Boom(item)


def test_process_pool_runs_the_op_in_its_processes():
    """Functions and generators run in the pool; a generator's items come all at once. An exception
    that crossed the process boundary gets its note here."""
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as processes:
        pipe = {"executor": processes, "concurrency": 2, "output_order": "input"}
        got = list(pipeline_of(range(6), spread_in_child, **pipe))
        assert list(pipeline_of(range(6), str, executor=processes)) == list("012345")
        p = pipeline_of([7], fail_in_child, executor=processes, build={"max_failures": 0})
        _, failure = collect(p)
    assert [item for item, _ in got] == [n for n in range(6) for _ in range(2)]
    assert os.getpid() not in {pid for _, pid in got}
    assert failure.exceptions[0].args == (7,)
    assert "item 0: 7" in failure.exceptions[0].__notes__[-1]


def precision_in_child(item):
    return decimal.getcontext().prec, os.getpid()


class WaitsInForks:
    """Waits for ever where it is deleted in another process, as libraries with threads do."""

    def __init__(self):
        self.pid = os.getpid()

    def __del__(self):
        if os.getpid() != self.pid:
            threading.Event().wait()


@pytest.mark.skipif("fork" not in get_all_start_methods(), reason="forks")
def test_process_pool_forks_the_thread_that_starts_the_pipeline():
    """Its processes have that one's precision of decimals, and what it keeps is not deleted."""
    local = threading.local()
    local.kept = WaitsInForks()
    pool = ProcessPoolExecutor(2, mp_context=get_context("fork"))
    with pool, decimal.localcontext() as context:
        context.prec = 40
        got = list(pipeline_of(range(6), precision_in_child, executor=pool, concurrency=2))
    assert {precision for precision, _ in got} == {40}
    assert os.getpid() not in {pid for _, pid in got}
    del local.kept


@pytest.mark.parametrize("order", ["completion", "input"])
@pytest.mark.parametrize("is_shut", [False, True])
def test_executor_that_takes_no_more_calls_fails_the_pipeline(is_shut, order):
    """A worker process that dies breaks the pool: the endless run ends with that error, which is
    no item's fault; so it does where the executor was shut down."""
    served = get_context("forkserver")
    pool = ThreadPoolExecutor(1) if is_shut else ProcessPoolExecutor(1, served)
    pipe = {"executor": pool, "concurrency": 2, "output_order": order, "max_failures": 1.0}
    builder = PipelineBuilder().add_source(iter(range(10**9))).pipe(abs, concurrency=2)
    with pool:
        if is_shut:
            pool.shutdown()
        builder.pipe(same).pipe(die, **pipe)
        items, failure = collect(builder.add_sink().build())
    assert 5 not in items  # the stages before may have changed the order
    assert "stage 'die' broke" in failure.message
    (error, *_) = failure.exceptions
    assert "cannot schedule" in str(error) if is_shut else isinstance(error, BrokenExecutor)
