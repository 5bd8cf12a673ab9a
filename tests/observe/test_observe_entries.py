"""What is recorded of loaders and pipelines gives their reports again, one by one; figures of any
interval are numbers, and add up."""

from __future__ import annotations

import json
import math
import operator
import pickle
import threading
from collections import Counter
from dataclasses import fields, replace
from itertools import chain
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st
from support.readings import Follower, entries_of, found_in, pipeline_stats, stage_stats, write

from spdl_torch.engine.counters import QueueCounters, TaskCounters
from spdl_torch.machine.histogram import Histogram
from spdl_torch.observe import (
    Cause,
    EventLogEntry,
    Probes,
    log_stats_summary,
    make_report,
    pipelines_of_file,
    query_event_stats,
    query_queue_stats,
    query_task_stats,
    recording,
    report_of_file,
)
from spdl_torch.pipeline import (
    PipelineBuilder,
    PipelineStats,
    QueuePerfStats,
    StageStats,
    TaskPerfStats,
)


def test_pipeline_is_recorded_as_it_reports(tmp_path):
    """Every item, in however many intervals: its figures and its verdict, on the same probes."""

    def slow(item):  # as from storage
        threading.Event().wait(0.01)
        return item

    path = tmp_path / "s.db"
    builder = PipelineBuilder().add_source(range(60)).pipe(slow, name="read", concurrency=2)
    builder.pipe(lambda item: item if item % 2 else None, name="odd")
    pipeline = builder.aggregate(4).add_sink().build()
    with recording({"train": pipeline}, path, interval_seconds=0.01), pipeline.auto_stop():
        assert len(list(pipeline)) == 8
    assert pipelines_of_file(path) == {0: "train"}
    stored = report_of_file(path)
    assert stored == pipeline.report()
    assert found_in(stored)[1] == "read"
    counts = Counter()
    for row in query_task_stats(path):
        counts[row["name"], "tasks"] += row["num_tasks"]
        counts[row["name"], "dropped"] += row["num_dropped"]
    for row in query_queue_stats(path):
        counts[row["name"], "items"] += row["num_items"]
    assert counts["0:1:read[2]", "tasks"] == counts["0:1:read[2]_queue", "items"] == 60
    assert counts["0:2:odd", "dropped"] == counts["0:2:odd_queue", "items"] == 30
    assert counts["0:3:aggregate(4)", "tasks"] == counts["0:4:sink_queue", "items"] == 8
    assert "odd: the op dropped 30 items (None)." in stored.verdict.remarks


def test_pipelines_of_one_run_are_kept_apart(tmp_path):
    """Each has its number, its name and its probes; stages of the same name are not added up,
    neither in the summary nor in the report."""
    path, printed = tmp_path / "s.db", []
    reports = {0: reading(gil=0.004), 3: reading(gil=0.0, num_tasks=25)}
    entries = [entries_of(each, number=n, name=f"loader {n}") for n, each in reports.items()]
    write(path, *chain(*entries))
    assert pipelines_of_file(path) == {0: "loader 0", 3: "loader 3"}
    for number, report in reports.items():
        stored = report_of_file(path, pipeline=number)
        assert (stored.verdict, stored.probes) == (report.verdict, report.probes)
        assert (stored.verdict.cause is Cause.GIL) == (number == 0)
    assert report_of_file(path).verdict == reports[0].verdict
    assert [row["num_tasks"] for row in query_task_stats(path, "decode", pipeline=3)] == [25]
    with pytest.raises(ValueError, match=r"pipeline must be in run 1 \(0, 3\), got 1"):
        report_of_file(path, pipeline=1)
    log_stats_summary(path, write=printed.append)
    for number, num_tasks in ((0, 100), (3, 25)):
        stage = f"  Stage: {number}:1:decode[2]\n    Total tasks processed: {num_tasks}\n"
        assert stage in printed[0]
    assert printed[0].index("Stage: 0:") < printed[0].index("Stage: 3:")
    for number in reports:  # after SPDL's summary
        assert str(report_of_file(path, pipeline=number)) in printed[0]


def test_stage_is_one_when_its_concurrency_changes(tmp_path):
    """Its name as logged has the concurrency in it; its time counts with that of each lap, and the
    probes of each pass with its time."""
    write(
        tmp_path / "s.db",
        *entries_of(reading(concurrency=2, gil=0.001)),
        *entries_of(reading(concurrency=6, gil=0.005, elapsed=30.0)),
    )
    report = report_of_file(tmp_path / "s.db")
    assert report.probes.gil_seconds == pytest.approx(0.004)
    (stage,) = report.stats.stages
    assert (stage.concurrency, stage.tasks.num_tasks, stage.num_dropped) == (6, 200, 14)
    assert stage.busy_ratio == pytest.approx(0.9)


def reading(*, busy=0.9, gil=None, elapsed=10.0, concurrency=2, waited=5.0, num_tasks=100):
    """A report of one stage, for which the consumer waited so many seconds."""
    tasks = TaskPerfStats(
        num_tasks, 0, 0.18, 0.2, 0.3, elapsed, 0.18, 0.18, busy * elapsed * concurrency
    )
    queue = QueuePerfStats(elapsed, 100, 0.0, 0.05, 0.2, get_wait_time=waited)
    stage = stage_stats("decode", concurrency, tasks, queue, 7, busy, 1 - busy, 0.0)
    probes = Probes(gil_seconds=gil, run_delay_ratio=0.0, gc_ratio=0.0, num_cores=4)
    return make_report(pipeline_stats(elapsed, waited / elapsed, (stage,)), probes)


def test_what_is_loaded_in_a_pause_counts_and_its_time_does_not(tmp_path):
    """Of the dataset, too; a wait for a shard is time."""
    entries, source = [], SimpleNamespace()
    follower = Follower(source, 0, "", log=entries.append)
    part = replace(reading().stats, counts={"cache/found": 3, "shards/wait_ms": 50})
    for number, look in enumerate((follower.write, follower.end_pause, follower.write), start=1):
        report = make_report(sum(number * [part]))
        source.report = lambda report=report: report
        look()
    stored = report_of_file(write(tmp_path / "s.db", *entries)).stats
    assert (stored.elapsed, stored.stages[0].num_tasks) == (20.0, 300)
    assert stored.data == {"cache/found": 9, "shards/wait_ms": 100}


def test_intervals_are_seen_by_spdls_queries(tmp_path):
    """A row for every stage and queue, named like those of a pipeline, and one of the sink."""
    path = tmp_path / "s.db"
    write(path, *entries_of(reading(), number=2, name="val"))
    task, sink, queue = found = [*query_task_stats(path), *query_queue_stats(path)]
    names = ["2:1:decode[2]", "2:2:sink_queue", "2:1:decode[2]_queue"]
    assert [(each["name"], each["timestamp"]) for each in found] == [(name, 10.0) for name in names]
    assert (task["num_dropped"], queue["num_items"]) == (7, 100)
    assert sink["get_wait_time"] == pytest.approx(5.0), "half of the trainer's 10 s"
    assert query_task_stats(path, "decode", end_time=9.0) == []


def test_values_that_json_lacks_break_no_query(tmp_path):
    """Nor an event of the program that has the name of our table."""
    path = tmp_path / "s.db"
    (entry,) = entries_of(reading())
    bad = replace(entry, details={**entry.details, "probes": {"gil_seconds": math.nan}})
    write(path, entry, bad, EventLogEntry(1.0, "interval", {"loss": math.inf}))
    assert len(query_task_stats(path)) == 2
    assert query_event_stats(path, "interval")[0].details == {"loss": None}
    assert report_of_file(path).stats.stages[0].num_tasks == 200


few = st.integers(0, 5)
durations = st.lists(st.integers(1, 10**9), max_size=4)


def histogram(values):
    """Their counts."""
    found = Histogram()
    for value in values:
        found.add(value)
    return found.counts()


@st.composite
def stages(draw):
    """What a stage has counted."""
    good, puts, gets = draw(durations), draw(durations), draw(durations)
    num_failures = draw(few)
    busy_ns = sum(good)
    tasks = TaskCounters(
        elapsed_ns=draw(st.integers(0, 10**10)),
        num_tasks=len(good) + num_failures,
        num_failures=num_failures,
        busy_ns=busy_ns + num_failures,
        failed_ns=num_failures,
        cpu_ns=busy_ns // 2,
        clocked_ns=busy_ns,
        histogram=histogram(good),
    )
    queue = QueueCounters(
        elapsed_ns=tasks.elapsed_ns,
        num_put=len(puts) + draw(few),
        num_got=len(gets) + draw(few),
        put_wait=(sum(puts), draw(few), histogram(puts)),
        get_wait=(sum(gets), draw(few), histogram(gets)),
        empty_ns=tasks.elapsed_ns // 3,
    )
    waits = {"wait_in_ns": draw(st.integers(0, 10**9)), "wait_out_ns": draw(few)}
    thread_ns = 2 * tasks.elapsed_ns
    return StageStats.of("decode", 2, tasks, queue, thread_ns=thread_ns, **waits)


intervals = st.builds(
    PipelineStats, st.integers(0, 10**10), st.integers(0, 10**9), st.tuples(stages())
)


@given(st.lists(intervals, min_size=1, max_size=4))
def test_intervals_of_a_run_add_up_to_it(parts):
    """Each is the difference of two readings, and goes through a pickle or through JSON."""
    readings = [parts[0]]
    for part in parts[1:]:
        readings.append(readings[-1] + part)
    cut = [readings[0], *map(operator.sub, readings[1:], readings)]
    assert cut == parts
    sent = [pickle.loads(pickle.dumps(part)) for part in cut]
    stored = [PipelineStats.from_dict(json.loads(json.dumps(part.as_dict()))) for part in cut]
    assert sum(sent) == sum(stored) == readings[-1]


@given(intervals)
def test_no_figure_is_other_than_a_number(stats):
    """Not even of no time, or of no item; and the verdict on it is one."""
    (stage,) = stats.stages
    figures = [getattr(each, f.name) for each in (stage.tasks, stage.queue) for f in fields(each)]
    figures += [stage.busy_ratio, stage.wait_in_ratio, stage.wait_out_ratio, stage.cpu_ratio]
    figures += [stage.capacity, stats.consumer_wait_ratio, stats.elapsed]
    assert all(map(math.isfinite, figures))
    assert min(figures) >= 0
    json.loads(make_report(stats).as_json())


def test_interval_after_an_earlier_run_is_all_of_the_later_one():
    """Fewer calls, other stages, or less time."""
    earlier = PipelineStats(10, 5, (StageStats(name="a", concurrency=1, num_tasks=3),))
    later = PipelineStats(20, 6, (StageStats(name="a", concurrency=1, num_tasks=4),))
    assert later.since(earlier) == later - earlier
    for other in (
        None,
        PipelineStats(30, 5, earlier.stages),
        PipelineStats(10, 5, (StageStats(name="b", concurrency=1),)),
        PipelineStats(10, 5, (StageStats(name="a", concurrency=1, num_tasks=9),)),
        PipelineStats(10, 5, ()),
    ):
        assert later.since(other) is later
