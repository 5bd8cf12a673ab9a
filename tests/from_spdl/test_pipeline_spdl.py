"""Programs written for SPDL pass, subclass and annotate the same names; only imports change. Its
loaders have its results."""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import itertools
import queue
import threading
from fractions import Fraction
from typing import get_type_hints

import pytest
from hypothesis import given, strategies as st
from support.gates import Boom, asame, no_leak, pipeline_of, same, until
from support.inside import run_of

import spdl_torch.pipeline
from spdl_torch.errors import PipelineFailure
from spdl_torch.pipeline import Pipeline, PipelineBuilder, StatsQueue, build_pipeline
from spdl_torch.spdl.dataloader import CacheDataLoader, DataLoader
from spdl_torch.spdl.pipeline import defs

pytestmark = pytest.mark.usefixtures("quiet")


def fail(item):
    raise Boom(item)


class LoggingQueue(StatsQueue):
    """As in SPDL's example: an argument of its own in second place, filled in by a partial."""

    def __init__(self, info, buffer, buffer_size=1, interval=59):
        super().__init__(info, buffer_size=buffer_size, interval=interval)
        self.buffer = buffer

    async def interval_stats_callback(self, stats):
        await super().interval_stats_callback(stats)
        self.buffer.put((self.name, stats.num_items))


class KeywordQueue(StatsQueue):
    """SPDL's own signature."""

    def __init__(self, info, *, buffer_size=1, interval=-1):
        super().__init__(info, buffer_size=buffer_size, interval=interval)


class PlainQueue(StatsQueue):
    """Knows of no interval."""

    def __init__(self, info, *, buffer_size):
        super().__init__(info, buffer_size)


@pytest.mark.parametrize(
    ("queue_class", "interval", "expected"),
    [
        (functools.partial(LoggingQueue, buffer=queue.Queue()), None, 59),
        (functools.partial(LoggingQueue, buffer=queue.Queue(), interval=7), 30.0, 7),
        (KeywordQueue, None, -1),
        (KeywordQueue, 30.0, 30.0),
        (PlainQueue, 30.0, 30.0),
        (lambda info, **options: StatsQueue(info, **options), 30.0, 30.0),
    ],
)
def test_queue_class_is_called_as_spdl_calls_it(queue_class, interval, expected):
    """The size by name; those without an interval of their own have that of ``build``."""
    build = {"queue_class": queue_class, "report_stats_interval": interval}
    p = pipeline_of(range(5), same, sink=7, build=build)
    assert [q.interval for q in run_of(p).queues] == [expected] * 3
    assert run_of(p).queues[-1].capacity == 7
    assert list(p) == list(range(5))
    if expected == 59 and interval is None:  # SPDL's example, its figures complete
        buffer = queue_class.keywords["buffer"]
        entries = dict(buffer.get_nowait() for _ in range(buffer.qsize()))
        assert entries == {"0:0:src_queue": 5, "0:1:same_queue": 5, "0:2:sink_queue": 5}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stage_hook_of_a_queue_class_is_entered(asynchronous):
    """Before its first item, and left after its last, around SPDL's ``super().stage_hook()``."""
    log = []

    def note(queue, what):
        log.append((what, queue.info.stage_name, queue.counters().num_put))

    class Plain(StatsQueue):
        @contextlib.contextmanager
        def stage_hook(self):
            with super().stage_hook():
                note(self, "enter")
                yield
                note(self, "leave")

    class Asynchronous(StatsQueue):
        @contextlib.asynccontextmanager
        async def stage_hook(self):
            async with super().stage_hook():
                note(self, "enter")
                yield
                note(self, "leave")

    build = {"queue_class": Asynchronous if asynchronous else Plain}
    list(pipeline_of(range(5), same, build=build))
    names = ["src", "same", "sink"]
    assert log[:3] == [("enter", n, 0) for n in names]
    assert sorted(log[3:]) == sorted(("leave", n, 5) for n in names)


def queues(**methods):
    """Queues with methods of their own."""
    return {"queue_class": type("Own", (StatsQueue,), methods)}


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (queues(put=asame), r"Own\.put is a coroutine function.*_stats_callback"),
        (queues(get=same), r"Own\.get would never be called.*get_numbered"),
        (
            {"queue_class": lambda info, buffer_size: queue.Queue()},
            "must make a .*StatsQueue, got Queue",
        ),
        (
            {"queue_class": lambda info: StatsQueue(info, 1)},
            "unexpected keyword argument 'buffer_size'",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_build(build, match):
    """Not in the middle of the run; with its class, its stage and what to write."""
    with no_leak(), pytest.raises(TypeError, match=match):
        pipeline_of(range(5), same, name="decode", build=build)


@pytest.mark.parametrize(
    ("stage", "build"),
    [
        ({}, {"max_failures": -1, "report_stats_interval": -1}),
        *[({"max_failures": -1}, {"max_failures": limit}) for limit in (None, 0, Fraction(1, 10))],
    ],
)
def test_minus_one_is_no_limit(stage, build):
    """SPDL's default, of a pipeline or of one stage; here none is 10 %, which loses no data."""
    p = pipeline_of(range(200), fail, **stage, build=build)
    assert list(p) == []
    assert p.snapshot().stages[0].tasks.num_failures == 200
    for none in ({}, {"max_failures": None}):
        with pytest.raises(PipelineFailure, match=r"max_failures is 0\.1 of all"):
            list(pipeline_of(range(200), fail, build=none))


def test_arguments_without_effect_here_are_accepted():
    """``start(timeout, daemon)``, ``use_thread_output_queue``."""
    p = pipeline_of(range(3), same, build={"use_thread_output_queue": True})
    p.start(timeout=3, daemon=True)
    assert list(p.get_iterator(timeout=30)) == [0, 1, 2]
    p.stop(timeout=30)


def test_stage_id_is_where_the_names_of_stages_begin():
    """For hooks and queues alike."""
    names = []

    def hooks(info):
        names.append(str(info))
        return []

    p = pipeline_of([], same, name="decode", build={"stage_id": 5, "task_hook_factory": hooks})
    assert names == ["0:6:decode"]
    names = [q.name for q in run_of(p).queues]
    assert names == ["0:5:src_queue", "0:6:decode_queue", "0:7:sink_queue"]


def test_names_in_annotations_take_parameters():
    """As SPDL's do, at run time too."""

    def build(
        config: defs.PipelineConfig[list[int]],
        builder: PipelineBuilder[int, str],
        stages: list[defs.PipeConfig[int, str]],
        others: tuple[defs.SourceConfig[int], defs.SinkConfig[int]],
    ) -> Pipeline[...]:
        raise NotImplementedError

    assert set(get_type_hints(build)) == set(inspect.signature(build).parameters) | {"return"}
    assert isinstance(PipelineBuilder[int, str]().add_source([]), PipelineBuilder)
    parts = defs.SourceConfig[int]([1]), [], defs.SinkConfig[int](3)
    assert list(build_pipeline(defs.PipelineConfig[int](*parts))) == [1]


@pytest.mark.parametrize("name", ["QueuePerfStats", "TaskPerfStats", "StageInfo"])
def test_fields_that_programs_read_are_there(name):
    """By SPDL's names."""
    spdl = pytest.importorskip("spdl.pipeline", reason="SPDL, an optional peer, is not installed")
    theirs = {field.name for field in dataclasses.fields(getattr(spdl, name))}
    assert theirs <= {f.name for f in dataclasses.fields(getattr(spdl_torch.pipeline, name))}
    assert hasattr(spdl_torch.pipeline.QueuePerfStats, "qps")


def test_pipeline_reports_and_profiles_itself():
    """As PipelineDataset and DataLoader do; before it was started there is nothing."""
    p = pipeline_of(range(50), same, name="decode")
    for ask in (p.report, p.profile):
        with pytest.raises(RuntimeError, match="no figures, nothing was loaded yet"):
            ask()
    list(p)
    assert "decode" in str(p.report())
    assert p.profile().statistics()["decode"]["num_tasks"] == 50


def double(item):
    """Of one; drops every fifth."""
    return None if item % 5 == 4 else 2 * item


def twice(item):
    """Two of one."""
    yield from (item, -item)


async def plus_one(item):
    """As a coroutine."""
    return item + 1


def total(items):
    """Of a list, or of one item."""
    return sum(items) if isinstance(items, list) else items


@given(
    num_items=st.integers(0, 13),
    preprocessor=st.sampled_from([None, double, twice, plus_one]),
    batch_size=st.none() | st.integers(1, 5),
    drop_last=st.booleans(),
    aggregator=st.sampled_from([None, total]),
    transfer_fn=st.sampled_from([None, repr]),
    num_threads=st.integers(1, 3),
)
def test_batches_are_as_the_functions_make_them(
    num_items, preprocessor, batch_size, drop_last, aggregator, transfer_fn, num_threads
):
    """In the order of the source where that is asked for, in every pass."""
    items = list(range(num_items))
    if preprocessor is twice:
        items = [each for item in items for each in twice(item)]
    elif preprocessor is not None:
        make = double if preprocessor is double else (lambda item: item + 1)
        items = [made for item in items if (made := make(item)) is not None]
    if batch_size is not None:
        lists = [items[k : k + batch_size] for k in range(0, len(items), batch_size)]
        items = [each for each in lists if len(each) == batch_size or not drop_last]
    for function in (aggregator, transfer_fn):
        items = items if function is None else list(map(function, items))
    loader = DataLoader(
        range(num_items),
        preprocessor=preprocessor,
        batch_size=batch_size,
        drop_last=drop_last,
        aggregator=aggregator,
        transfer_fn=transfer_fn,
        num_threads=num_threads,
        output_order="input",
    )
    assert list(loader) == items == list(loader)


def test_source_may_be_asynchronous_or_iterable_once():
    """An iterator that is used up is an error, where SPDL has an epoch without a batch."""

    async def numbers():
        for number in range(5):
            yield number

    assert list(DataLoader(numbers(), preprocessor=plus_one)) == [1, 2, 3, 4, 5]
    loader = DataLoader(iter(range(3)))
    assert list(loader) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="src, a range_iterator, can be iterated only once"):
        list(loader)


def test_errors_reach_the_loop():
    """The function's own, and those of arguments when the loader is made."""
    with pytest.raises(PipelineFailure, match="fail") as failure:
        list(DataLoader(range(3), preprocessor=fail))
    assert {type(error) for error in failure.value.exceptions} == {Boom}
    for options, match in (
        ({"output_order": "any"}, "output_order must be 'completion' or 'input'"),
        ({"num_threads": 0}, "concurrency must be >= 1, got 0"),
        ({"batch_size": 0}, "n must be >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            DataLoader([1], preprocessor=str, **options)


def test_timeout_and_break_end_the_loop():
    """The first with an error; neither leaves a thread."""
    before = set(threading.enumerate())

    async def wait_forever(item):
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="no item"):
        list(DataLoader([1], preprocessor=wait_forever, timeout=0.01))
    for item in DataLoader(itertools.count(), preprocessor=str):
        assert item == "0"
        break
    until(lambda: set(threading.enumerate()) <= before)


def test_cached_batches_need_the_loader_no_more():
    """Its threads have ended before the first kept batch comes; its attributes can be read."""
    before = set(threading.enumerate())
    loader = CacheDataLoader(DataLoader(itertools.count(), preprocessor=str), 2, 3)
    batches = iter(loader)
    assert [next(batches) for _ in range(3)] == ["0", "1", "2"]
    assert set(threading.enumerate()) > before
    assert [next(batches) for _ in range(3)] == ["0", "1", "0"]
    assert set(threading.enumerate()) <= before
    assert loader._num_threads == 8
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = loader.nonesuch
