"""Programs written for SPDL pass, subclass and annotate the same names; only imports change."""

import contextlib
import dataclasses
import functools
import inspect
import queue
from fractions import Fraction
from typing import get_type_hints

import pytest
from support.gates import Boom, asame, no_leak, pipeline_of, same
from support.inside import run_of

import spdl_torch.pipeline
from spdl_torch.errors import PipelineFailure
from spdl_torch.pipeline import Pipeline, PipelineBuilder, StatsQueue, build_pipeline
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
