"""Ops, sources and hooks that are ``async``: one task an item, on one loop of the pipeline."""

import asyncio
import contextlib
import contextvars
import itertools
import threading

import anyio
import numpy as np
import pytest
from support.gates import PATIENCE_SECONDS, asame, no_leak, pipeline_of, same, spdl_threads, until
from support.inside import run_of

from spdl_torch.pipeline import TaskHook

pytestmark = pytest.mark.usefixtures("quiet")

request = contextvars.ContextVar("request", default=None)


async def for_ever(item):
    await asyncio.Event().wait()


async def outputs_for_ever(item):
    yield item
    await asyncio.Event().wait()


async def aspread(item):
    yield item
    yield item


class Around(TaskHook):
    """A task hook made of a function."""

    def __init__(self, around):
        self.task_hook = contextlib.asynccontextmanager(around)


def hooked(*hooks, **build):
    return {"task_hook_factory": lambda info: list(hooks), **build}


@pytest.mark.parametrize("op", [for_ever, outputs_for_ever])
def test_timeout_of_a_hook_ends_an_op_that_hangs(op):
    """The item fails with TimeoutError, and the pipeline goes on."""

    async def limited(item=None):
        async with asyncio.timeout(0.01):
            with anyio.fail_after(0.01):
                yield

    build = hooked(Around(limited), max_failures=2)
    with no_leak(), pipeline_of([1, 2], op, concurrency=2, build=build).auto_stop() as p:
        assert sorted(p) == ([1, 2] if op is outputs_for_ever else [])
    assert p.num_lost == 2


def test_timeout_of_a_hook_while_an_output_waits_for_the_epoch_before():
    """The output is passed on when its turn comes, and the item fails: both are in order. Items may
    be arrays, of which nobody may ask whether two are equal."""
    first, gate, calls = np.zeros(2), threading.Event(), itertools.count()

    async def op(item):
        if next(calls) == 0:
            while not gate.is_set():
                await asyncio.sleep(0.001)
        yield item

    async def limited(item=None):
        async with asyncio.timeout(0.01 if next(entered) == 1 else None):
            yield

    entered = itertools.count()
    build = hooked(Around(limited), max_failures=1)
    with pipeline_of([first], op, concurrency=2, continuous=True, build=build).auto_stop() as p:
        until(lambda: p.num_lost)
        gate.set()
        for _ in range(3):
            (got,) = p
            assert got is first


@pytest.mark.parametrize("op", [same, asame, aspread])
def test_context_variable_that_a_hook_sets_is_reset(op):
    """The token is of the same context; what one item's hook sets, another's does not see."""
    seen = []

    async def named(item=None):
        seen.append(request.get())
        token = request.set(item)
        yield
        request.reset(token)

    build = hooked(Around(named), max_failures=0)
    assert set(pipeline_of(range(5), op, concurrency=2, build=build)) == set(range(5))
    assert seen == [None] * 5


def test_plain_op_between_asynchronous_hooks_may_run_a_loop():
    """No loop runs on its thread meanwhile; anyio's scope is left in the task that entered it."""

    async def around(item=None):
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 0)
            yield

    def op(item):
        return asyncio.run(asame(item))

    build = hooked(Around(around), max_failures=0)
    assert sorted(pipeline_of(range(5), op, concurrency=2, build=build)) == list(range(5))


@pytest.mark.parametrize("order", ["completion", "input"])
def test_thousand_coroutines_need_no_thread_each(order):
    """They are all in work at once, and never one more, on a few threads."""
    barrier, threads, running, most = None, [], 0, 0

    async def fetch(item):
        nonlocal barrier, running, most
        barrier = barrier or asyncio.Barrier(1000)
        running += 1
        most = max(most, running)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await barrier.wait()
        running -= 1
        threads.append(threading.get_ident())
        assert len(spdl_threads()) <= 20
        return item

    p = pipeline_of(range(2000), fetch, concurrency=1000, output_order=order)
    with no_leak(), p.auto_stop():
        assert sorted(p) == list(range(2000))
    assert (len(set(threads)), most) == (1, 1000)


@pytest.mark.parametrize("is_broken", [False, True])
def test_generator_that_is_left_is_closed_in_its_own_task(is_broken):
    """``finally`` runs, and may await, before the pipeline is closed; a stop that comes when the
    stage has broken cancels it no second time."""
    began, leaving, closed = set(), threading.Event(), []

    async def endless(item):
        try:
            async with asyncio.timeout(10 * PATIENCE_SECONDS):
                began.add(item)
                while True:
                    yield item
                    if is_broken and item == 1 and 2 in began:
                        raise SystemExit
        finally:
            if item == 2:
                leaving.set()
            while item == 2 and "[stopping]" not in repr(p):
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
            closed.append(item)

    def is_far_enough():
        with contextlib.suppress(TimeoutError):
            p.get_item(timeout=0.01)
        return leaving.is_set() or (not is_broken and len(began) == 2)

    p = pipeline_of([1, 2], endless, concurrency=2, sink=1)
    with no_leak(), p.auto_stop():
        until(is_far_enough)
    assert sorted(closed) == [1, 2]


def test_asynchronous_source_is_one_task():
    """A timeout or a scope that it holds around its items is left where it was entered."""
    tasks = set()

    async def source():
        async with asyncio.timeout(PATIENCE_SECONDS), anyio.create_task_group():
            for item in range(20):
                tasks.add(asyncio.current_task())
                await asyncio.sleep(0)
                yield item

    with no_leak(), pipeline_of(source(), asame, concurrency=3).auto_stop() as p:
        assert sorted(p) == list(range(20))
    assert len(tasks) == 1


def test_asynchronous_source_keeps_its_loop_over_epochs():
    """What it opens in the first one, such as a session, is of use in the others."""

    class Source:
        session = None

        async def __aiter__(self):
            self.session = self.session or asyncio.create_task(for_ever(None))
            await asyncio.sleep(0)
            yield self.session.done()

    with no_leak(), pipeline_of(Source(), continuous=True).auto_stop() as p:
        assert [list(p) for _ in range(3)] == [[False]] * 3


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_source_ends_with_its_pipeline(is_async, is_dropped):
    """Nobody takes from it any more, nor holds the pipeline: its ``finally`` runs. An asynchronous
    one that waits is cancelled at its ``await``."""
    ended = threading.Event()

    class Source:
        def __iter__(self):
            try:
                yield from itertools.count()
            finally:
                ended.set()

    async def source():
        try:
            yield 0
            await asyncio.Event().wait()
        finally:
            ended.set()

    with no_leak():
        p = pipeline_of(source() if is_async else Source(), same)
        assert p.get_item() == 0
        if not is_dropped:
            p.stop()
        del p
        assert ended.wait(PATIENCE_SECONDS)


def test_coroutines_without_an_item_wait_for_one_each(clock):
    """One thread takes items for all of them; the share is of all their time. The sums only grow: a
    reading in the middle of a call has the wait before it."""
    come, go_on, started = threading.Event(), threading.Event(), threading.Event()

    def source():
        assert come.wait(PATIENCE_SECONDS)
        yield 1

    async def op(item):
        started.set()
        while not go_on.is_set():
            await asyncio.sleep(0.001)
        return item

    with pipeline_of(source(), op, concurrency=4).auto_stop() as p:
        until(lambda: run_of(p).queues[0].counters().get_wait[1] == 1)
        clock.advance(5_000)
        stage = p.snapshot().stages[0]
        assert (stage.wait_in_ratio, stage.wait_out_ratio) == (pytest.approx(1.0), 0)
        come.set()
        assert started.wait(PATIENCE_SECONDS)
        assert p.snapshot().stages[0].wait_in_ns == 4 * 5_000
        go_on.set()
        assert list(p) == [1]


def test_coroutines_whose_results_have_no_room_wait_for_it_each(clock):
    """However few of them the thread that passes results on has in its hands."""
    p = pipeline_of(itertools.count(), asame, concurrency=4, buffer_size=1, sink=1)
    with p.auto_stop():
        stage = run_of(p).stages[0]
        until(lambda: stage.num_tasks == 2 + 4)
        clock.advance(5_000)
        stats = p.snapshot().stages[0]
        assert (stats.wait_in_ratio, stats.wait_out_ratio) == (0, pytest.approx(1.0))
