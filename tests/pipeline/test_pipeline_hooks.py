"""Hooks, callbacks and the truth of the figures they get."""

import asyncio
import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.gates import (
    PATIENCE_SECONDS,
    BlockedSource,
    Boom,
    Each,
    GatedOp,
    asame,
    aspread,
    in_thread,
    no_leak,
    pipeline_of,
    result_of,
    same,
    spread,
    until,
)
from support.inside import run_of

from spdl_torch.engine.statistics import queue_stats
from spdl_torch.pipeline import (
    PipelineBuilder,
    PipelineFailure,
    PipelineStopped,
    StatsQueue,
    TaskHook,
    TaskStatsHook,
)

pytestmark = pytest.mark.usefixtures("quiet")


class Tracing(TaskHook):
    """Writes down every entry and exit; plain or asynchronous."""

    def __init__(self, name, log, asynchronous=False):
        self.name = name
        self.log = log
        self.asynchronous = asynchronous

    def _context(self, *what):
        @contextlib.contextmanager
        def plain():
            self.log.append(("enter", self.name, *what))
            try:
                yield
            except Exception as error:
                self.log.append(("error", self.name, type(error).__name__, *what))
                raise
            finally:
                self.log.append(("exit", self.name, *what))

        @contextlib.asynccontextmanager
        async def asynchronous():
            with plain():
                yield

        return asynchronous() if self.asynchronous else plain()

    def stage_hook(self):
        return self._context("stage")

    def task_hook(self, input_item=None):
        return self._context("task", input_item)


def fail(item):
    raise Boom(item)


async def afail_late(item):
    yield item
    raise Boom(item)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("op", [same, asame, spread, aspread, Each])
def test_hooks_nest_in_the_order_of_the_list(op, asynchronous):
    """The first hook is the outermost one, around the stage and around each task; around the flush
    of an aggregator, too, for which there is no item."""
    log = []
    hooks = [Tracing("a", log, asynchronous), Tracing("b", log)]
    builder = PipelineBuilder().add_source([7, 8])
    builder = builder.aggregate(op()) if op is Each else builder.pipe(op)
    assert list(builder.add_sink().build(task_hook_factory=lambda info: hooks)) == [7, 8]

    def around(*what, inside=()):
        entered = [("enter", "a", *what), ("enter", "b", *what)]
        return [*entered, *inside, ("exit", "b", *what), ("exit", "a", *what)]

    tasks = [7, 8, None] if op is Each else [7, 8]
    inside = [entry for item in tasks for entry in around("task", item)]
    assert log == around("stage", inside=inside)


@pytest.mark.parametrize("when", ["call", "enter", "exit"])
@pytest.mark.parametrize("op", [same, asame, spread, "aggregate"])
def test_task_hook_that_raises_fails_its_item_alone(op, when):
    """The item (or group) is dropped, named by its number and counted; the others come."""
    error = Boom(2)

    @contextlib.contextmanager
    def around(bad):
        if bad and when == "enter":
            raise error
        yield
        if bad and when == "exit":
            raise error

    class Raising(TaskHook):
        def task_hook(self, input_item=None):
            bad = input_item in (2, [2])
            if when == "call" and bad:
                raise error
            return around(bad)

    builder = PipelineBuilder().add_source(range(5))
    builder = builder.aggregate(1) if op == "aggregate" else builder.pipe(op)
    p = builder.add_sink().build(task_hook_factory=lambda info: [Raising()], max_failures=1)
    got = list(p)
    expected = [0, 1, 3, 4]
    if op is spread and when == "exit":
        expected.insert(2, 2)  # it had left before the hook was
    assert got == ([[n] for n in expected] if op == "aggregate" else expected)
    assert run_of(p).num_lost == 1
    assert ", item 2: " in error.__notes__[0]


@pytest.mark.parametrize("op", [same, asame, spread, aspread])
def test_stop_while_an_output_waits_for_room_is_no_error_to_the_hooks(op):
    """The op has done its work; that nobody takes it is not its error."""
    log = []
    hooks = {"task_hook_factory": lambda info: [Tracing("a", log)]}
    p = pipeline_of(itertools.count(), op, sink=1, buffer_size=1, build=hooks)
    with p.auto_stop():
        next(iter(p))
        until(lambda: run_of(p).outlet.counters().put_wait[1] == 1)
    assert not [entry for entry in log if entry[0] == "error"]
    assert log[-1] == ("exit", "a", "stage")


@pytest.mark.parametrize("op", [fail, afail_late])
def test_task_hook_that_swallows_fails_the_item(op):
    """A hook cannot turn a failing op into a silent None."""
    hook = TaskHook()
    hook.task_hook = lambda item: contextlib.suppress(Exception)
    build = {"task_hook_factory": lambda info: [hook], "max_failures": 0}
    with pytest.raises(PipelineFailure, match="1 of 1 tasks failed") as caught:
        list(pipeline_of([1], op, build=build))
    assert "must not swallow" in str(caught.value.exceptions[0])


@pytest.mark.parametrize("when", ["enter", "exit"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("owner", ["op", "src", "sink"])
def test_stage_hook_that_raises_fails_the_pipeline(owner, asynchronous, when):
    """Before the first task or after the last, a stage's or a queue's: the error is raised after
    the good items, and no thread is left."""

    def around(*_):
        if when == "enter":
            raise Boom("stage")
        yield
        raise Boom("stage")

    async def aaround(*_):
        for each in around():
            yield each

    make = contextlib.asynccontextmanager if asynchronous else contextlib.contextmanager
    raising = make(aaround if asynchronous else around)

    class Queue(StatsQueue):
        def stage_hook(self):
            return raising() if self.info.stage_name == owner else super().stage_hook()

    hook = TaskHook()
    if owner == "op":
        hook.stage_hook = raising
    build = {"queue_class": Queue, "task_hook_factory": lambda info: [hook]}
    p, got = pipeline_of(range(3), same, build=build), []
    with no_leak(), pytest.raises(PipelineFailure, match=r"hook|broke") as caught:
        got.extend(p)
    assert isinstance(caught.value.exceptions[0], Boom)
    assert got == ([] if when == "enter" else [0, 1, 2])
    assert "[closed]" in repr(p)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("refused", ["spdl-same-1", "spdl-src"])
def test_hooks_are_left_where_the_system_has_too_few_threads(refused, asynchronous, monkeypatch):
    """Of a stage whose threads did not all begin, and of a queue."""
    log, begin = [], threading.Thread.start

    def start(thread):
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        begin(thread)

    class Queue(StatsQueue):
        def stage_hook(self):
            return Tracing(self.info.stage_name, log, asynchronous).stage_hook()

    hooks = [Tracing("op", log, asynchronous)]
    build = {"queue_class": Queue, "task_hook_factory": lambda info: hooks}
    p = pipeline_of([1, 2], same, concurrency=2, build=build)
    monkeypatch.setattr(threading.Thread, "start", start)
    with no_leak(), pytest.raises(RuntimeError, match="can't start"), p.auto_stop():
        pass
    around = itertools.product(("enter", "exit"), ("src", "same", "op", "sink"), ["stage"])
    assert sorted(log) == sorted(around)


def collecting(base, asynchronous):
    """A subclass of ``base`` that keeps what its callback gets, by name."""
    got = {}

    class Collecting(base):
        def interval_stats_callback(self, stats):
            got.setdefault(str(getattr(self, "name", self.info)), []).append(stats)
            return asyncio.sleep(0) if asynchronous else None

    return Collecting, got


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("interval", [None, -1, 1e-3, 3600.0])
def test_callbacks_add_up_to_what_was_processed(interval, asynchronous):
    """Over intervals shorter and longer than the run, nothing is lost; EOF is not an item."""
    queue_class, queues = collecting(StatsQueue, asynchronous)
    hook_class, tasks = collecting(TaskStatsHook, asynchronous)

    def op(item):
        if item % 10 == 9:
            raise Boom(item)
        return item

    builder = PipelineBuilder().add_source(range(200)).pipe(op, name="decode", concurrency=2)
    builder.aggregate(10).add_sink()
    options = {"queue_class": queue_class, "max_failures": 1.0, "report_stats_interval": interval}
    p = builder.build(task_hook_factory=lambda info: [hook_class(info, interval)], **options)
    assert len(list(p)) == 18
    num_items = [(name, sum(s.num_items for s in stats)) for name, stats in queues.items()]
    ours = [("0:0:src", 200), ("0:1:decode[2]", 180), ("0:2:aggregate(10)", 18), ("0:3:sink", 18)]
    assert sorted(num_items) == [(f"{name}_queue", number) for name, number in ours]
    num_tasks = [(name, sum(s.num_tasks for s in stats)) for name, stats in tasks.items()]
    assert sorted(num_tasks) == [("0:1:decode[2]", 200), ("0:2:aggregate(10)", 18)]
    assert sum(s.num_failures for s in tasks["0:1:decode[2]"]) == 20
    if interval != 1e-3:
        assert {len(stats) for stats in (*queues.values(), *tasks.values())} == {1}


def test_callback_that_blocks_holds_up_no_asynchronous_op():
    """Callbacks come while the run goes on, with the open wait of the consumer in them. They have a
    thread of their own and, for what they keep open, one loop."""
    called, go_on, loops = threading.Event(), threading.Event(), set()

    class Queue(StatsQueue):
        async def interval_stats_callback(self, stats):
            loops.add(asyncio.get_running_loop())
            if self.info.stage_name == "sink" and stats.ave_get_time > 0:
                called.set()
                assert go_on.wait(PATIENCE_SECONDS)

    def source():
        assert called.wait(PATIENCE_SECONDS)
        yield from range(3)

    build = {"queue_class": Queue, "report_stats_interval": 1e-3}
    with pipeline_of(source(), asame, build=build).auto_stop() as p:
        try:
            assert [p.get_item(timeout=PATIENCE_SECONDS / 2) for _ in range(3)] == [0, 1, 2]
        finally:
            go_on.set()
    assert len(loops) == 1


def test_last_interval_has_the_tasks_that_end_after_stop():
    """stop() does not cut the figures off: an op that was running is in the last callback."""
    hook_class, got = collecting(TaskStatsHook, False)
    op = GatedOp()
    build = {"task_hook_factory": lambda info: [hook_class(info)]}
    p = pipeline_of(range(9), op, name="slow", concurrency=3, build=build)
    p.start()
    op.wait_started(3)
    stop = in_thread(p.stop)
    until(lambda: "[stopping]" in repr(p))
    op.open()
    result_of(stop)
    assert sum(stats.num_tasks for stats in got["0:1:slow[3]"]) == len(op.finished) == 3


def test_last_interval_is_delivered_when_the_pipeline_is_dropped():
    """`break` and forget: the callbacks still come."""
    queue_class, got = collecting(StatsQueue, True)
    for _ in pipeline_of(range(10**9), same, build={"queue_class": queue_class}):
        break
    until(lambda: len(got) == 3)
    assert got["0:2:sink_queue"][0].num_items == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_callback_that_raises_does_not_stop_the_pipeline(asynchronous, caplog):
    """It is logged; the items and the other callbacks come."""
    caplog.set_level("ERROR", "spdl_torch.pipeline")

    async def araise_boom(self, stats):
        raise Boom("callback")

    def raise_boom(self, stats):
        raise Boom("callback")

    class Queue(StatsQueue):
        interval_stats_callback = araise_boom if asynchronous else raise_boom

    hook_class, got = collecting(TaskStatsHook, False)
    build = {"queue_class": Queue, "task_hook_factory": lambda info: [hook_class(info)]}
    assert list(pipeline_of(range(50), same, build=build)) == list(range(50))
    assert "0:1:same_queue: interval_stats_callback failed" in caplog.text
    assert got["0:1:same"][-1].num_tasks == 50


def test_default_callback_logs_one_line_for_each_stage_and_queue(caplog):
    """Without any option the figures are in the log at the end."""
    caplog.set_level("INFO", "spdl_torch.pipeline")
    list(pipeline_of(range(20), same, name="decode"))
    text = caplog.text
    assert "0:1:decode: 20 tasks, 0 failed" in text
    for name in ("0:0:src_queue", "0:1:decode_queue", "0:2:sink_queue"):
        assert f"{name}: 20 items" in text


@pytest.mark.parametrize("op", [same, asame])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_task_hook_overridden_around_the_base_still_counts(op, asynchronous):
    """``with super().task_hook(item)``, or SPDL's ``async with``, times the task once."""
    seen = []

    class Plain(TaskStatsHook):
        @contextlib.contextmanager
        def task_hook(self, input_item=None):
            with super().task_hook(input_item):
                seen.append(input_item)
                yield

    class Asynchronous(TaskStatsHook):
        @contextlib.asynccontextmanager
        async def task_hook(self, input_item=None):
            async with super().task_hook(input_item):
                seen.append(input_item)
                yield

    build = {"task_hook_factory": lambda info: [(Asynchronous if asynchronous else Plain)(info)]}
    with pipeline_of(range(30), op, concurrency=2, build=build).auto_stop() as p:
        list(p)
    assert p.snapshot().stages[0].tasks.num_tasks == 30
    assert sorted(seen) == list(range(30))


@pytest.mark.parametrize("kind", ["function", "failing", "generator", "executor"])
def test_task_time_is_taken_inside_the_worker_when_threads_are_few(clock, kind):
    """Eight workers share one, also of an executor: a task shows its 100 ns, not its wait (D3)."""

    def op(item):
        clock.advance(100, cpu_ns=30)
        if kind == "failing" and item % 2:
            raise Boom(item)
        return item

    def generator(item):
        clock.advance(60, cpu_ns=30)
        yield item
        clock.advance(40)

    build = {"num_threads": 1, "max_failures": 1.0}
    with ThreadPoolExecutor(1) as pool:
        executor = pool if kind == "executor" else None
        op = generator if kind == "generator" else op
        p = pipeline_of(range(40), op, concurrency=8, executor=executor, build=build)
        list(p)
    stage = p.snapshot().stages[0]
    assert stage.tasks.num_tasks == 40
    assert stage.tasks.ave_time == pytest.approx(100e-9)
    assert stage.tasks.p99_time == pytest.approx(100e-9, rel=0.063)
    if kind != "failing":
        assert stage.busy_ratio == pytest.approx(1 / 8)
        assert stage.tasks.ave_cpu_time == pytest.approx(30e-9)
        assert stage.cpu_ratio == pytest.approx(0.3)
    assert stage.tasks.elapsed == pytest.approx(40 * 100e-9)
    assert stage.capacity == pytest.approx(8 / 100e-9)


def test_task_time_does_not_include_waiting_for_room(clock):
    """A worker that cannot pass its result on is not busy; its wait is the queue's."""

    def op(item):
        clock.advance(10)
        return item

    with pipeline_of(range(10), op, sink=1, buffer_size=1).auto_stop() as p:
        until(lambda: run_of(p).outlet.counters().put_wait[1] == 1)
        clock.advance(1_000)
        stage = p.snapshot().stages[0]
        assert stage.queue.ave_put_time > 0
        assert stage.wait_out_ratio > 0.5
        list(p)
    assert p.snapshot().stages[0].tasks.ave_time == pytest.approx(10e-9)


def test_hook_that_raises_before_a_generator_takes_no_time_away(clock):
    """The wait for room is that of the item before, whose outputs waited."""

    class Raising(TaskHook):
        def task_hook(self, input_item=None):
            if input_item == 1:
                raise Boom(1)
            return contextlib.nullcontext()

    def op(item):
        yield from [item] * 9

    build = {"task_hook_factory": lambda info: [TaskStatsHook(info), Raising()], "max_failures": 1}
    with pipeline_of([0, 1], op, sink=1, buffer_size=1, build=build).auto_stop() as p:
        until(lambda: run_of(p).outlet.counters().put_wait[1] == 1)
        clock.advance(1_000)
        assert list(p) == [0] * 9
    assert p.snapshot().stages[0].tasks.busy_time >= 0


def test_starved_pipeline_shows_empty_queues_and_open_waits(clock):
    """Blocked consumer, silent source: occupancy 0 and the wait so far, in every queue (D1). A
    report on an interval within one wait says what a queue's callback does."""
    source = BlockedSource()
    p = pipeline_of(source, same)
    get = in_thread(p.get_item)
    assert source.blocked.wait(PATIENCE_SECONDS)
    queues = run_of(p).queues
    until(lambda: all(queue.counters().get_wait[1] == 1 for queue in queues))
    clock.advance(3_000)
    before, counted = p.snapshot(), [queue.counters() for queue in queues]
    clock.advance(5_000)
    for queue, begun in zip(queues, counted, strict=True):
        for counters, waited in ((queue.counters(), 8e-6), (queue.counters().since(begun), 5e-6)):
            stats = queue_stats(counters)
            assert (stats.num_items, stats.occupancy_rate) == (0, 0.0)
            assert stats.ave_get_time == pytest.approx(waited)
    stage = p.snapshot().stages[0]
    assert (stage.wait_in_ratio, stage.busy_ratio) == (pytest.approx(1.0), 0)
    assert p.snapshot().since(before).stages[0].queue == stats
    p.stop()
    assert isinstance(get.exception(PATIENCE_SECONDS), PipelineStopped)
    source.released.set()


@pytest.mark.parametrize("end", ["data", "stop", "failure"])
def test_figures_of_a_run_that_is_over_stay(clock, end):
    """Time that passes after the end, or after a stop, changes no figure of the report."""

    def op(item):
        clock.advance(10)
        if end == "failure" and item == 5:
            raise Boom(item)
        return item

    p = pipeline_of(range(8), op, build={"max_failures": 0})
    clock.advance(1_000_000)  # a queue is made here, and counts from the start
    with p.auto_stop():
        if end == "stop":
            next(iter(p))
        elif end == "data":
            list(p)
        else:
            with pytest.raises(PipelineFailure, match="1 of 6 tasks failed"):
                list(p)
    stats, report = p.snapshot(), str(p.report())
    queues = [queue_stats(queue.counters()) for queue in run_of(p).queues]
    clock.advance(1_000_000)
    assert p.snapshot() == stats
    assert 0 < max(stage.queue.elapsed for stage in stats.stages) <= stats.elapsed
    assert str(p.report()) == report
    assert [queue_stats(queue.counters()) for queue in run_of(p).queues] == queues


def test_async_stage_hook_runs_when_a_loop_runs_already():
    """A notebook's cells run inside an event loop, on the thread that starts the pipeline."""
    seen, hook = [], TaskHook()

    @contextlib.asynccontextmanager
    async def around():
        seen.append(asyncio.get_running_loop())
        yield
        seen.append(asyncio.get_running_loop())

    async def cell():
        hook.stage_hook = around
        return list(pipeline_of([1, 2], same, build={"task_hook_factory": lambda _: [hook]}))

    assert asyncio.run(cell()) == [1, 2]
    assert seen[0] is seen[1]
