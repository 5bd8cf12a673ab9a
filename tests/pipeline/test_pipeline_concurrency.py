"""A stage's concurrency changes while it runs, and nothing else does."""

from __future__ import annotations

import itertools
import re
import threading

import pytest
from _gates import (
    PATIENCE_SECONDS,
    GatedOp,
    Hands,
    no_leak,
    spdl_threads,
    until,
)

import spdl_torch.engine.counters as headcount_module
from spdl_torch.engine.counters import ThreadCount
from spdl_torch.pipeline import PipelineBuilder, PipelineFailure


def at_work(run, stage="op"):
    """The number of a stage's threads, without those that are about to leave."""
    return next(each for each in run.stages if each.spec.name == stage).thread_count.count


def workers_of(stage):
    """Live threads of a stage."""
    return [t for t in spdl_threads() if t.name.startswith(f"spdl-{stage}-")]


def tuned(source, op, *, tuner, sink=3, **pipe):
    """A pipeline of one stage called ``op``."""
    builder = PipelineBuilder().add_source(source).pipe(op, name="op", **pipe).add_sink(sink)
    return builder.build(tuner=tuner)


@pytest.mark.parametrize("num_threads", [None, 2])
def test_growth_runs_so_many_calls_at_once(num_threads):
    """From 1 to 4: four calls are inside the op, or ``num_threads``, which stays the bound; and
    results come in the order of the source."""
    hands, op, most = Hands(), GatedOp(), num_threads or 4
    builder = PipelineBuilder().add_source(range(40)).pipe(op, name="op", output_order="input")
    pipeline = builder.add_sink(3).build(num_threads=num_threads, tuner=hands)
    with no_leak(), pipeline.auto_stop() as items:
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

    pipeline = tuned(range(40), op, tuner=hands, concurrency=4, output_order="input")
    with no_leak(), pipeline.auto_stop() as items:
        until(lambda: len(started) == 4)
        hands.run.set_concurrency("op", 2)
        gates[0].set()
        until(lambda: len(started) == 6 and at_work(hands.run) == 2)
        gates[1].set()
        assert list(items) == list(range(40))


def test_threads_that_left_are_started_again():
    """They count where they did, so nothing grows with the changes."""
    hands = Hands()
    pipeline = tuned(iter(int, 1), lambda item: item + 1, tuner=hands, output_order="input")
    with pipeline.auto_stop() as items:
        for _ in range(10):
            hands.run.set_concurrency("op", 3)
            assert items.get_item() == 1
            until(lambda: at_work(hands.run) == 3)
            hands.run.set_concurrency("op", 1)
            until(lambda: items.get_item() and at_work(hands.run) == 1)
        until(lambda: len(workers_of("op")) == 1)
        assert len(hands.run._threads.threads()) < 10
        rows = [row for row in items.timeline().rows if row.stage == "op"]
        assert [row.replica for row in rows] == [0, 1, 2]
    assert sum(s.tasks.num_tasks for s in items.snapshot().stages) >= 10


@pytest.mark.parametrize("end", ["stop", "data", "exit", "drop"])
def test_stage_that_shrank_ends_as_others(end):
    """However those do: no thread is left, and nobody before the stage waits for room for ever."""
    hands, leave = Hands(), threading.Event()

    def source():
        for item in itertools.count():
            if end == "data" and leave.is_set():
                return
            yield item

    def op(item):
        if end == "exit" and leave.is_set():
            raise SystemExit
        return item

    with no_leak():
        pipeline = tuned(source(), op, tuner=hands, concurrency=4, sink=1)
        next(iter(pipeline))
        hands.run.set_concurrency("op", 1)
        while at_work(hands.run) > 1:
            pipeline.get_item()  # those that wait for room pass their item on first
        leave.set()
        if end == "stop":
            pipeline.stop()
        elif end == "exit":
            with pytest.raises(PipelineFailure, match="broke"):
                list(pipeline)
        elif end == "data":
            list(pipeline)
        del pipeline


@pytest.mark.parametrize(
    ("stage", "count"), [("aggregate(2)", 2), ("nothing", 2), ("coroutine", 2), ("op", 0)]
)
def test_stage_is_refused_when_it_cannot_be_changed(stage, count):
    """An aggregate has a list in its hands, coroutines share a thread."""

    async def coroutine(item):
        return item

    hands = Hands()
    builder = PipelineBuilder().add_source([1, 2]).pipe(abs, name="op").pipe(coroutine)
    builder.aggregate(2).add_sink().build(tuner=hands)
    with pytest.raises(ValueError, match=f"set_concurrency: stage must be.*{re.escape(stage)}"):
        hands.run.set_concurrency(stage, count)


def test_change_has_no_effect_when_the_run_has_ended():
    """No thread is started that nobody would join."""
    hands = Hands()
    with no_leak():
        with tuned([1, 2], abs, tuner=hands, output_order="input").auto_stop() as items:
            assert list(items) == [1, 2]
        hands.run.set_concurrency("op", 8)
        assert not workers_of("op")


def test_data_ends_where_the_system_has_no_more_threads(monkeypatch):
    """The threads that there are go on; one more is tried with the next change."""
    hands = Hands()

    def refuse(*threads):
        raise RuntimeError("can't start new thread")

    pipeline = tuned(range(40), abs, tuner=hands, output_order="input")
    with no_leak(), pipeline.auto_stop() as items:
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
    monkeypatch.setattr(headcount_module, "perf_counter_ns", lambda: now)
    count = ThreadCount(2)
    now = 10
    assert count.thread_ns(10) == 20
    count.change(6)
    now = 15
    assert (count.thread_ns(15), count.thread_ns(5), count.thread_ns(6)) == (50, 30, 32)
    count.end()
    now = 1000
    assert count.thread_ns(15) == 50
