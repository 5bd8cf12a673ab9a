"""The bounds: calls at once, items that wait, threads that work, also where their number changes;
and the order of the output."""

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.gates import (
    PATIENCE_SECONDS,
    CountingSource,
    GatedOp,
    Hands,
    in_thread,
    no_leak,
    pipeline_of,
    result_of,
    same,
    spdl_threads,
    until,
)
from support.inside import run_of

from spdl_torch.engine.counters import ThreadCount
from spdl_torch.pipeline import PipelineBuilder

ORDERS = ["completion", "input"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("concurrency", "in_pool"), [(1, 0), (2, 0), (4, 0), (2, 8)])
def test_exactly_concurrency_calls_run_at_once(concurrency, in_pool, order):
    """With items in plenty, never one more, ordered or not; also on an executor of more threads."""
    op, source = GatedOp(), CountingSource(40)
    with ThreadPoolExecutor(in_pool or 1) as pool:
        executor = pool if in_pool else None
        pipe = {"concurrency": concurrency, "output_order": order, "executor": executor}
        with pipeline_of(source, op, **pipe).auto_stop() as p:
            op.wait_started(concurrency)
            # The source is stuck when it has filled its queue and holds one more item in hand: then
            # no further call can be on its way.
            capacity = run_of(p).queues[0].capacity
            until(lambda: source.num_taken == concurrency + capacity + 1)
            assert op.num_running == len(op.started) == concurrency
            op.open()
            assert len(list(p)) == 40
    assert op.max_running <= concurrency


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("is_generator", [False, True])
def test_num_threads_bounds_the_tasks_of_all_stages_together(is_generator, num_threads):
    """Two stages of 4: never more than ``num_threads`` ops run, and so many do. A generator holds
    a thread of the bound inside a step, and none between two outputs."""
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(num_threads)

    def op(item):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if item < num_threads:
            together.wait(PATIENCE_SECONDS)
        with lock:
            running -= 1
        return item + 1000

    def spread(item):
        yield op(item)
        yield op(item)

    first, sink = (spread, 1) if is_generator else (op, 3)
    build = {"num_threads": num_threads}
    with pipeline_of(range(50), first, op, concurrency=4, sink=sink, build=build).auto_stop() as p:
        expected = [n + 2000 for n in range(50) for _ in range(1 + is_generator)]
        assert sorted(p) == expected
    assert most == num_threads


def test_num_threads_does_not_count_a_stage_with_its_own_executor():
    """An executor has threads of its own: its calls go on while num_threads ops are stuck."""
    stuck = GatedOp()
    with ThreadPoolExecutor(1) as pool:
        builder = PipelineBuilder().add_source(range(10)).pipe(same, executor=pool)
        builder.pipe(stuck, concurrency=2)
        with builder.add_sink().build(num_threads=1).auto_stop() as p:
            stuck.wait_started(1)
            until(lambda: p.snapshot().stages[0].tasks.num_tasks >= 5)
            assert stuck.max_running == 1
            stuck.open()
            assert sorted(p) == list(range(10))


def test_tasks_that_wait_for_num_threads_never_begin_once_it_is_stopped():
    """The one under way ends first."""
    op = GatedOp()
    with pipeline_of(range(9), op, concurrency=3, build={"num_threads": 1}).auto_stop() as p:
        op.wait_started(1)
        until(lambda: run_of(p).queues[0].counters().num_got == 3)
        stopping = in_thread(p.stop)
        until(lambda: run_of(p).task_limit.closed or run_of(p).outlet.closed)
        op.open()
        result_of(stopping)
    assert len(op.started) == 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("buffer_size", [None, 1, 2, 4])
def test_at_most_buffer_size_items_wait_when_nobody_takes(buffer_size, order):
    """A consumer that stands still stops the source after a known number of items. Without a size
    given there is room for two of each thread: more is for items that are taken quickly."""
    source, concurrency, sink = CountingSource(), 2, 2
    pipe = {"concurrency": concurrency, "output_order": order, "buffer_size": buffer_size}
    p = pipeline_of(source, same, sink=sink, **pipe)
    run_of(p).queues[0].allow_bursts(1)  # none: this queue's size was not given
    with p.auto_stop():
        before = run_of(p).queues[0].capacity + 1  # and the one in the source's hand
        room = (buffer_size or 2 * concurrency) + sink  # the last queue has the sink's, too
        most = before + concurrency + room  # each worker holds one
        until(lambda: source.num_taken == most)
        queues = run_of(p).queues[:2]
        assert [len(q) for q in queues] == [q.capacity for q in queues]
        assert queues[1].capacity == room
    assert source.num_taken == most


def late_with(first, is_async):
    """An op that is late with its first item; what it was called with, and what it waits for."""
    started, go_on = [], threading.Event()

    def op(item):
        started.append(item)
        assert item != first or go_on.wait(PATIENCE_SECONDS)
        return item

    async def aop(item):
        started.append(item)
        while item == first and not go_on.is_set():
            await asyncio.sleep(0.001)
        return item

    return aop if is_async else op, started, go_on


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_async", [False, True])
def test_call_that_is_late_holds_nobody_up_before_the_room_is_used(is_async, order):
    """In order, too: others go on up to the room after the stage, where a place is kept for it."""
    op, started, go_on = late_with(0, is_async)
    p = pipeline_of(range(40), op, concurrency=4, output_order=order, buffer_size=4, sink=4)
    with no_leak(), p.auto_stop():
        until(lambda: len(started) >= 4 + (4 if order == "completion" else 3))
        assert order == "completion" or run_of(p).queues[1].counters().num_put == 0
        go_on.set()
        got = list(p)
    assert (got if order == "input" else sorted(got)) == list(range(40))


@pytest.mark.parametrize("is_async", [False, True])
def test_only_the_end_of_an_epoch_waits_for_an_item_that_is_late(is_async):
    """Of the next epoch as many are in work as there are threads, or coroutines, beside it."""
    epochs, (op, started, go_on) = itertools.count(), late_with((0, 0), is_async)

    class Epochs:
        def __iter__(self):
            epoch = next(epochs)
            return iter([(epoch, 0), (epoch, 1)])

    p = pipeline_of(Epochs(), op, concurrency=3, continuous=True)
    with no_leak(), p.auto_stop():
        assert p.get_item() == (0, 1)
        until(lambda: {(1, 0), (1, 1)} <= set(started))
        go_on.set()
        assert p.get_item() == (0, 0)
        with pytest.raises(EOFError, match="the epoch has ended"):
            p.get_item()
        assert sorted(p) == [(1, 0), (1, 1)]


def at_work(run, stage="op"):
    """The number of a stage's threads, without those that are about to leave."""
    return next(each for each in run.stages if each.spec.name == stage).thread_count.count


def tuned(source, op, hands, num_threads=None, **options):
    """A pipeline of one stage called ``op``, in the order of its source."""
    options |= {"name": "op", "output_order": "input"}
    return pipeline_of(source, op, build={"num_threads": num_threads, "tuner": hands}, **options)


@pytest.mark.parametrize("num_threads", [None, 2])
def test_growth_runs_so_many_calls_at_once(num_threads):
    """From 1 to 4: four calls are inside the op, or ``num_threads``, which stays the bound; and
    results come in the order of the source."""
    hands, op, most = Hands(), GatedOp(), num_threads or 4
    with no_leak(), tuned(range(40), op, hands, num_threads).auto_stop() as items:
        op.wait_started(1)
        hands.run.set_concurrency("op", 4)
        op.wait_started(most)
        until(lambda: at_work(hands.run) == 4)
        assert op.num_running == most
        op.open()
        assert list(items) == list(range(40))
        assert op.max_running == most


def test_shrinking_lets_calls_end_and_then_runs_fewer():
    """From 4 to 2: the four that run end, and never again are there more than two."""
    hands, started, gates = Hands(), [], [threading.Event(), threading.Event()]

    def op(item):
        started.append(item)
        assert gates[item >= 4].wait(PATIENCE_SECONDS)
        return item

    with no_leak(), tuned(range(40), op, hands, concurrency=4).auto_stop() as items:
        until(lambda: len(started) == 4)
        hands.run.set_concurrency("op", 2)
        gates[0].set()
        until(lambda: len(started) == 6 and at_work(hands.run) == 2)
        gates[1].set()
        assert list(items) == list(range(40))


def test_threads_that_left_are_started_again():
    """They count where they did, so nothing grows with the changes."""
    hands = Hands()
    with tuned(iter(int, 1), lambda item: item + 1, hands).auto_stop() as items:
        for _ in range(10):
            hands.run.set_concurrency("op", 3)
            assert items.get_item() == 1
            until(lambda: at_work(hands.run) == 3)
            hands.run.set_concurrency("op", 1)
            until(lambda: items.get_item() and at_work(hands.run) == 1)
        until(lambda: sum(t.name.startswith("spdl-op-") for t in spdl_threads()) == 1)
        assert len(hands.run._threads.threads()) < 10
        rows = [row for row in items.timeline().rows if row.stage == "op"]
        assert [row.replica for row in rows] == [0, 1, 2]
    assert sum(s.tasks.num_tasks for s in items.snapshot().stages) >= 10


def test_data_ends_where_the_system_has_no_more_threads(monkeypatch):
    """The threads that there are go on; one more is tried with the next change."""
    hands = Hands()

    def refuse(*threads):
        raise RuntimeError("can't start new thread")

    with no_leak(), tuned(range(40), abs, hands).auto_stop() as items:
        got = [items.get_item()]
        with monkeypatch.context() as patches:
            patches.setattr("spdl_torch.engine.threads.start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                hands.run.set_concurrency("op", 3)
        assert at_work(hands.run) == 1
        hands.run.set_concurrency("op", 2)
        assert at_work(hands.run) == 2
        assert got + list(items) == list(range(40))


def test_room_grows_with_the_threads_but_not_where_the_user_gave_it():
    """To the size of a pipeline that was built with so many threads."""
    hands = Hands()
    builder = PipelineBuilder().add_source([]).pipe(abs, name="a", output_order="input")
    builder.pipe(abs, name="b", output_order="input", buffer_size=5)
    pipeline = builder.add_sink().build(tuner=hands)
    hands.run.set_concurrency("b", 8)
    assert [queue.capacity for queue in hands.run.queues[:-1]] == [2, 16, 5 + 3]
    pipeline.stop()


def test_shares_are_of_the_time_that_threads_were_there(monkeypatch):
    """2 threads for 10 s, then 6 for 5 s: 50 thread-seconds, of the last 5 s 30."""
    now = 0
    monkeypatch.setattr("spdl_torch.engine.counters.perf_counter_ns", lambda: now)
    count = ThreadCount(2)
    now = 10
    assert count.thread_ns(10) == 20

    class Changes(list):
        def append(self, change):
            super().append(change)
            assert count.thread_ns(10) == 20, "another thread may ask before the count is set"

    count._changes = Changes()
    count.change(6)
    now = 15
    assert (count.thread_ns(15), count.thread_ns(5), count.thread_ns(6)) == (50, 30, 32)
    count.watch.stop()
    now = 1000
    assert count.thread_ns(15) == 50
