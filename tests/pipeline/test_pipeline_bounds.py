"""The bounds: calls at once, items that wait, threads that work; and the order of the output."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from _gates import (
    PATIENCE_SECONDS,
    CountingSource,
    GatedOp,
    in_thread,
    pipeline_of,
    result_of,
    same,
    until,
)
from _inside import run_of

from spdl_torch.pipeline import PipelineBuilder

ORDERS = ["completion", "input"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("concurrency", "in_pool"), [(1, 0), (2, 0), (4, 0), (2, 8)])
def test_exactly_concurrency_calls_run_at_once(concurrency, in_pool, order):
    """With items in plenty, `concurrency` calls run and never one more, ordered or not; also on an
    executor of more threads."""
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


def test_num_threads_does_not_count_a_stage_with_its_own_executor():
    """An executor has threads of its own: its calls go on while num_threads ops are stuck."""
    stuck = GatedOp()
    with ThreadPoolExecutor(1) as pool:
        p = (
            PipelineBuilder()
            .add_source(range(10))
            .pipe(lambda n: n, executor=pool)
            .pipe(stuck, concurrency=2)
            .add_sink()
            .build(num_threads=1)
        )
        with p.auto_stop():
            stuck.wait_started(1)
            until(lambda: p.snapshot().stages[0].tasks.num_tasks >= 5)
            assert stuck.max_running == 1
            stuck.open()
            assert sorted(p) == list(range(10))


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


def test_input_order_is_kept_when_the_first_call_is_the_last_to_end():
    """Later items wait for the first one, in the room that the buffer has."""
    first = threading.Event()
    others = threading.Semaphore(0)

    def op(item):
        if item == 0:
            assert first.wait(PATIENCE_SECONDS)
        else:
            others.release()
        return item

    p = pipeline_of(range(30), op, concurrency=4, output_order="input", buffer_size=4)
    with p.auto_stop():
        for _ in range(6):  # 3 in the buffer, whose 4th place is kept for item 0; 3 in hand
            assert others.acquire(timeout=PATIENCE_SECONDS)
        assert run_of(p).queues[1].counters().num_put == 0
        first.set()
        assert list(p) == list(range(30))
