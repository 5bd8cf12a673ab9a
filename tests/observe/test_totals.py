"""Figures of any interval are numbers, and one after an earlier run is all of the later one."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import fields

from hypothesis import given, strategies as st

from spdl_torch.engine.counters import QueueCounters, TaskCounters
from spdl_torch.machine.histogram import Histogram
from spdl_torch.observe import make_report
from spdl_torch.pipeline import PipelineStats, StageStats

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
    cut = [readings[0], *map(difference, readings, readings[1:])]
    assert cut == parts
    sent = [pickle.loads(pickle.dumps(part)) for part in cut]
    stored = [PipelineStats.from_dict(json.loads(json.dumps(part.as_dict()))) for part in cut]
    assert sum(sent) == sum(stored) == readings[-1]


def difference(before, after):
    """The interval between two readings."""
    return after - before


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
