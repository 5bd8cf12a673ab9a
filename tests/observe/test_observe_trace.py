"""Profiles and traces: what is written can be shown in full, read again, and merged."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.readings import pipeline_stats, stage_stats
from support.trace_check import check_trace, content_of
from torch.profiler import ProfilerActivity, profile, record_function

from spdl_torch.__main__ import main
from spdl_torch.engine.timeline import (
    Instant,
    Outcome,
    Part,
    QueueTrack,
    Row,
    Timeline,
    Turn,
    TwoClocks,
)
from spdl_torch.observe import Probes, Profile, make_report, merge_ranks, merge_with_torch
from spdl_torch.observe.trace.chrome_trace import chrome_trace, microseconds, nanoseconds
from spdl_torch.pipeline import QueuePerfStats, TaskPerfStats

CLOCK = TwoClocks(perf_ns=5_000_000_000, system_ns=1_800_000_000_123_456_739)
MS = 1_000_000


def report_with(stages=("decode", "collate")):
    """A report of 4 s."""
    content = {
        "tasks": TaskPerfStats(10, 1, 0.03, 0.2, 0.3, 4.0, 0.03, 0.05, 5.6),
        "queue": QueuePerfStats(4.0, 9, 0.01, 0.02, 1 / 3, get_wait_time=4.0),
        "concurrency": 2,
        "num_dropped": 3,
        "busy_ratio": 0.7,
        "wait_in_ratio": 0.2,
        "wait_out_ratio": 0.1,
    }
    stats = pipeline_stats(4.0, 0.3, tuple(stage_stats(name=name, **content) for name in stages))
    return make_report(stats, Probes(gil_seconds=1e-4, num_cores=2), pooled=("collate",))


def turn(since, started, ended, done, number, output=-1, **others):
    """A turn, its times in milliseconds."""
    times = (round(t * MS) for t in (since, started, ended, done))
    content = {"cpu_ns": -1, "num_before": -1, "num_after": -1, **others}
    return Turn(*times, number=number, output=output, **content)


def row(stage, position, turns, replica=0, role="stage", **others):
    """The row of a thread."""
    return Row(stage, position, replica, role, 4000 + position, tuple(turns), **others)


def small_timeline(number=0, start=0.0):
    """Two items: read, decoded by two threads, taken by the consumer."""
    t = start
    source = [turn(t, t, t + 1, t + 1, -1, 0), turn(t + 1, t + 1, t + 2, t + 2, -1, 1)]
    first = turn(t, t + 1, t + 6, t + 6, 0, 0, cpu_ns=2 * MS, num_before=1, num_after=1)
    second = turn(t, t + 2, t + 7, t + 9, 1, 1, cpu_ns=MS, num_before=0, num_after=2)
    steps = [turn(t, t + 6, t + 9, t + 9, 0, num_before=1), turn(t + 9, t + 9, t + 12, t + 12, 1)]
    part = Part("read", round((t + 3) * MS), round((t + 5) * MS), MS // 2)
    return Timeline(
        "DataLoader",
        number,
        CLOCK,
        (
            row("source", 0, source, role="source"),
            row("decode", 1, [first]),
            row("decode", 1, [second], replica=1, parts=(part,), num_lost=5),
            row("consumer", 2, steps, role="consumer"),
        ),
        (QueueTrack(0, "source", 4), QueueTrack(1, "decode", 2)),
        (Instant(round((t + 7) * MS), "failure", {"where": "x.jpg", "share": math.nan}),),
    )


def trace_of(*timelines, **options):
    """The trace as a dict."""
    content = {"rank": 0, "last_seconds": None, "max_events": 200_000, **options}
    return chrome_trace(timelines, **content)


def profile_with(*timelines, rank=0):
    """A profile with a report; by default of the small timeline."""
    return Profile(report_with(), timelines or (small_timeline(),), rank)


def events_of(trace, phase, **fields):
    """Events of a phase, with these fields."""
    found = [e for e in trace["traceEvents"] if e["ph"] == phase]
    return [e for e in found if all(e.get(key) == value for key, value in fields.items())]


def number_of(event):
    """The item or the batch of a slice."""
    return event["args"].get("item", event["args"].get("batch"))


def turns_in(trace):
    """The numbers and outcomes in the slices that show a turn's work."""
    work = [e for e in events_of(trace, "X") if e["name"] in ("Process", "Training Step")]
    return Counter((number_of(e), e["args"].get("outcome")) for e in work)


def names_of_rows(trace):
    """Names by (pid, tid), in the order in which they are shown."""
    order = events_of(trace, "M", name="thread_sort_index")
    order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in order}
    names = events_of(trace, "M", name="thread_name")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in names}
    return {key: names[key] for key in sorted(names, key=order.__getitem__)}


def ways_of(trace):
    """For each arrow the rows, as named, and the items that it goes over."""
    rows, ways = names_of_rows(trace), {}
    for event in events_of(trace, "X"):
        if "bind_id" in event:
            stop = rows[event["pid"], event["tid"]], number_of(event)
            ways.setdefault(event["bind_id"], []).append(stop)
    return list(ways.values())


def test_turn_becomes_three_slices():
    """Waiting, work with its part, waiting; times are of the system's clock, to 1/8 us, and CPU
    time; the consumer steps. A queue's length is read when a turn is done, on both sides of it, and
    equal readings in a row are one."""
    trace = trace_of(small_timeline())
    rows = {name: key for key, name in names_of_rows(trace).items()}
    assert list(rows) == ["source", "decode[0]", "decode[1]", "consumer"]
    pid, tid = rows["decode[1]"]
    slices = events_of(trace, "X", pid=pid, tid=tid)
    assert [(e["name"], e["dur"], e.get("tdur")) for e in slices] == [
        ("Wait on Input Queue", 2000.0, None),
        ("Process", 5000.0, 1000.0),
        ("read", 2000.0, 500.0),
        ("Wait on Output Queue", 2000.0, None),
    ]
    start_ns = trace["baseTimeNanoseconds"] + nanoseconds(slices[1]["ts"])
    assert abs(start_ns - CLOCK.system(2 * MS)) <= 63
    assert slices[1]["args"] == {"item": 1, "thread id": 4001}
    steps = events_of(trace, "X", pid=pid, tid=rows["consumer"][1])
    assert [e["name"] for e in steps] == ["Wait on Input Queue", "Training Step", "Training Step"]
    assert steps[1]["args"]["batch"] == 0
    (failure,) = events_of(trace, "i")
    assert failure["args"] == {"where": "x.jpg", "share": "nan"}, "what JSON has not is a text"
    origin = CLOCK.system(0) - trace["baseTimeNanoseconds"]
    seen = {}
    for event in events_of(trace, "C"):
        moment = round((nanoseconds(event["ts"]) - origin) / MS)
        seen.setdefault(event["name"], []).append((moment, event["args"]["items"]))
    assert seen == {
        "queue source (cap 4)": [(6, 1), (9, 0)],
        "queue decode (cap 2)": [(6, 1), (9, 2)],
    }


def test_flow_follows_the_last_sample_of_a_batch():
    """If several items become one, from the one that the others waited for."""
    fetch = [turn(0, 0, end, end, n, 0) for n, end in enumerate((1, 3, 2))]
    rows = [row("fetch", 0, [one], replica=n) for n, one in enumerate(fetch)]
    consumer = row("consumer", 1, [turn(0, 3, 4, 4, 0)], role="consumer")
    trace = trace_of(Timeline("DataLoader", 0, CLOCK, (*rows, consumer)))
    assert ways_of(trace) == [[("fetch[1]", 1), ("consumer", 0)]]


def test_rows_are_shared_by_epochs_unless_they_overlap():
    """The same thread of the next epoch continues its row."""
    trace = trace_of(small_timeline(start=100), small_timeline(), small_timeline(start=105))
    names = ("decode[0]", "decode[1]", "consumer")
    shown = ["source", *(each for name in names for each in (name, f"{name} (2)"))]
    assert list(names_of_rows(trace).values()) == shown
    assert check_trace(trace).num_flows == 6


def test_pipelines_are_processes_of_their_own():
    """Above all others in the viewer, with a name and a number of their own."""
    trace = trace_of(small_timeline(3), small_timeline(8), rank=2)
    titles = {e["pid"]: e["args"]["name"] for e in events_of(trace, "M", name="process_name")}
    assert [*titles.values()] == [f"Data pipeline · rank 2 · DataLoader {n}" for n in (3, 8)]
    order = [e["args"]["sort_index"] for e in events_of(trace, "M", name="process_sort_index")]
    assert order[0] < order[1] < 0
    tids = [tid for _, tid in names_of_rows(trace)]
    assert len({*tids, *titles}) == len(tids) + len(titles) == 10
    assert min(*tids, *titles) > 2**22, "no process of the system has such an id"


def test_last_seconds_leave_out_what_ended_before():
    """Counted from the last moment that was recorded."""
    trace = trace_of(small_timeline(), last_seconds=0.004)
    names = [e["name"] for e in events_of(trace, "X", cat="consumer")]
    assert names == ["Wait on Input Queue", "Training Step", "Training Step"]
    assert not events_of(trace, "X", cat="source")


@given(st.sampled_from([0, 1_800_000_000 * 10**9, 7_900_000 * 10**9]), st.integers(0, 10**12))
def test_times_are_exact_in_floating_point(since, more):
    """Viewers that round and viewers that cut off compute the time that was written."""
    written = microseconds(since + more)
    assert nanoseconds(written) == Fraction(written) * 1000
    assert nanoseconds(written) == int(written * 1000.0) or written > 2**53 / 1000
    assert microseconds(nanoseconds(written)) == written


@st.composite
def runs(draw):
    """A pipeline that works items off: stages of several threads, times in ns, some items lost."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    longest = draw(st.sampled_from([1, 700, 3000, 5 * MS]))
    start, num_stages = draw(st.integers(0, 10**15)), draw(st.integers(1, 3))
    arrivals, rows, queues = [start] * draw(st.integers(0, 12)), [], []
    for position in range(num_stages + 1):
        is_last, number = position == num_stages, itertools.count()
        threads = [([], []) for _ in range(1 if is_last else draw(st.integers(1, 3)))]
        for arrival in sorted(arrivals):
            turns, parts = min(threads, key=lambda each: each[0][-1].done_ns if each[0] else start)
            since = turns[-1].done_ns if turns else start
            started = max(since, arrival)
            ended = started + dice.randrange(longest)
            done = ended if is_last else ended + dice.choice([0, dice.randrange(longest)])
            lost = dice.random() < 0.1 and not is_last
            outcome = dice.choice([Outcome.DROPPED, Outcome.FAILED]) if lost else Outcome.PASSED
            cpu, depths = dice.choice([-1, ended - started]), dice.choices(range(-1, 4), k=2)
            times = since, started, ended, done
            turns.append(Turn(*times, cpu, next(number), -1, *depths, outcome))
            middle = dice.randint(started, ended)
            if started < ended:
                parts += [Part("half", started, middle, -1), Part("all", started, ended, 5)]
        passed = [t for turns, _ in threads for t in turns if t.outcome is Outcome.PASSED]
        passed.sort(key=lambda each: each.done_ns)
        outputs = {each.number: output for output, each in enumerate(passed)}
        role = "consumer" if is_last else "stage"
        for n, (turns, parts) in enumerate(threads):
            own = tuple(each._replace(output=outputs.get(each.number, -1)) for each in turns)
            kept = {"parts": tuple(parts), "num_lost": dice.randrange(3)}
            rows.append(Row(f"s{position}", position, n, role, n, own, **kept))
        queues += [] if is_last else [QueueTrack(position, f"q{position}", 2)]
        arrivals = [each.done_ns for each in passed]
    instants = (Instant(start + dice.randrange(10 * longest), "gc", {"generation": 2}),)
    clock = TwoClocks(start + dice.randrange(10**9), draw(st.integers(10**18, 2 * 10**18)))
    number = draw(st.integers(0, 2))
    return Timeline("Pipeline", number, clock, tuple(rows), tuple(queues), instants)


@given(st.lists(runs(), min_size=1, max_size=3), st.integers(0, 5000))
@settings(max_examples=60, deadline=None)
def test_trace_can_be_shown_for_any_run(timelines, rank):
    """Slices nest, arrows have both ends, time goes forward, and every task is there with its
    outcome, if nothing was passed on. Every batch that the consumer took is the end of an arrow
    that came from the first stage."""
    trace = trace_of(*timelines, rank=rank)
    summary = check_trace(json.loads(json.dumps(trace, allow_nan=False)))
    assert {(e["pid"], e["tid"]) for e in events_of(trace, "X")} == names_of_rows(trace).keys()
    rows = [each for timeline in timelines for each in timeline.rows]
    words = {Outcome.DROPPED: "dropped", Outcome.FAILED: "failed"}
    turns = Counter((each.number, words.get(each.outcome)) for r in rows for each in r.turns)
    assert turns_in(trace) == turns
    assert summary.num_lost == sum(each.num_lost for each in rows)
    assert summary.num_left_out == 0
    assert summary.num_instants == len(timelines)
    ways, consumer = ways_of(trace_of(timelines[0])), timelines[0].rows[-1]
    reached = sorted(way[-1][1] for way in ways if way[-1][0] == consumer.name)
    assert reached == [one.number for one in consumer.turns]
    assert {way[0][0].partition("[")[0] for way in ways} <= {"s0"}


@given(runs(), st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_cap_keeps_the_latest(timeline, most):
    """No more events than asked for; what is left out ended before all that is kept."""
    trace = trace_of(timeline, max_events=most)
    summary, everything = check_trace(trace), check_trace(trace_of(timeline))
    assert sum(e["ph"] != "M" for e in trace["traceEvents"]) <= most
    assert summary.num_slices + summary.num_instants + summary.num_left_out == (
        everything.num_slices + everything.num_instants + everything.num_left_out
    )
    num_turns = turns_in(trace).total()
    assert len({(e["tid"], number_of(e)) for e in events_of(trace, "X")}) == num_turns
    turns = sorted((one.done_ns for r in timeline.rows for one in r.turns), reverse=True)
    if 0 < num_turns < len(turns):
        assert turns[num_turns - 1] > turns[num_turns]


def test_statistics_are_numbers_per_stage():
    """Seconds that threads spent, counts, percentiles; and the whole."""
    statistics = Profile(report_with(stages=("decode", "decode", "total"))).statistics()
    assert list(statistics) == ["decode", "decode (2)", "total (2)", "total"]
    assert statistics["decode"] == {
        "concurrency": 2,
        "busy_seconds": 5.6,
        "cpu_seconds": pytest.approx(0.3),
        "wait_in_seconds": pytest.approx(1.6),
        "wait_out_seconds": pytest.approx(0.8),
        "num_tasks": 10,
        "num_failures": 1,
        "num_dropped": 3,
        "task_seconds_mean": 0.03,
        "task_seconds_p50": pytest.approx(0.05, rel=0.063),
        "task_seconds_p90": pytest.approx(0.2, rel=0.063),
        "task_seconds_p99": pytest.approx(0.3, rel=0.063),
        "items_per_second": 2.5,
        "capacity_per_second": pytest.approx(2 / 0.03),
        "queue_occupancy_ratio": pytest.approx(1 / 3),
    }
    assert statistics["total"]["wait_seconds"] == pytest.approx(1.2)


@pytest.mark.parametrize("name", ["x.json", "r.1.b/deep/x.y.json.gz"])
def test_trace_is_written_under_any_name(name, tmp_path, monkeypatch):
    """Also with dots elsewhere, given relative to here; gzipped where it ends so."""
    monkeypatch.chdir(tmp_path)
    path = profile_with().write_trace(f"./{name}")
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")
    assert check_trace(path).num_flows == 2


def test_write_trace_refuses_what_would_be_no_trace(tmp_path):
    """No limit makes an empty file, and sums alone show nothing."""
    for name in ("last_seconds", "max_events"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            profile_with().write_trace(tmp_path / "x.json", **{name: 0})
    with pytest.raises(ValueError, match="holds sums and no single tasks"):
        Profile(report_with()).write_trace(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def torch_trace(path):
    """A real one, with a row of this thread; the moment of its span in ns since 1970."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        clock = TwoClocks.now()
        with record_function("train_step"):
            torch.ones(8) @ torch.ones(8)
    profiler.export_chrome_trace(str(path))
    return clock


def test_merge_with_torch_lays_both_on_one_clock(tmp_path):
    """torch's events stay as they are; ours are at their time, on rows of their own."""
    clock = torch_trace(tmp_path / "torch.json.gz")
    timeline = small_timeline(start=clock.perf_ns / MS)._replace(clock=clock)
    ours = profile_with(timeline).write_trace(tmp_path / "ours.json")
    path = merge_with_torch(ours, tmp_path / "torch.json.gz", tmp_path / "both.json.gz")

    both, torchs = content_of(path), content_of(tmp_path / "torch.json.gz")
    size = len(torchs["traceEvents"])
    before, own = both["traceEvents"][:size], both["traceEvents"][size:]
    assert {key: both[key] for key in torchs} | {"traceEvents": before} == torchs
    (span,) = events_of(torchs, "X", name="train_step")
    start = min(e["ts"] for e in own if "ts" in e)
    assert abs(span["ts"] - start) < 1e6  # the same second, not the same decade
    exact = both["baseTimeNanoseconds"] + nanoseconds(start)
    assert abs(exact - clock.system(clock.perf_ns)) <= 200
    theirs = {e[key] for e in torchs["traceEvents"] for key in ("pid", "tid") if key in e}
    assert not theirs & {e[key] for e in own for key in ("pid", "tid")}
    summary = check_trace(path)
    assert (summary.num_others, summary.num_flows) == (size, 2)
    with pytest.raises(ValueError, match="has rows of ours already"):
        merge_with_torch(ours, path, tmp_path / "x.json")


def test_merge_with_a_trace_that_counts_from_1970(tmp_path):
    """As those of old torch: neighbours meet, and all slices are there, with ids of their own."""
    ours = profile_with(small_timeline()).write_trace(tmp_path / "ours.json")
    event = {"ph": "X", "name": "theirs", "pid": 2**30, "tid": 2**30 + 1, "ts": 0, "dur": 1}
    (tmp_path / "torch.json").write_text(json.dumps({"traceEvents": [event]}))
    both = check_trace(merge_with_torch(ours, tmp_path / "torch.json", tmp_path / "both.json"))
    assert (both.num_slices, both.num_others) == (check_trace(ours).num_slices, 1)


def write_ranks(folder):
    """A file for each of three ranks; rank n starts n ms later."""
    return [
        profile_with(small_timeline(start=n), rank=n).write_trace(folder / f"rank{n}.json.gz")
        for n in range(3)
    ]


def test_merge_ranks_lays_files_on_one_clock(tmp_path):
    """Each rank has rows and arrows of its own."""
    path, starts = merge_ranks(write_ranks(tmp_path), tmp_path / "all.json"), {}
    for event in events_of(content_of(path), "X"):
        starts.setdefault(event["pid"], []).append(nanoseconds(event["ts"]))
    first, second, third = (min(starts[pid]) for pid in sorted(starts))
    assert (second - first, third - second) == (MS, MS)
    summary = check_trace(path)
    assert (summary.ranks, summary.num_rows, summary.num_flows) == ((0, 1, 2), 12, 6)
    again = [tmp_path / "rank0.json.gz"] * 2  # two processes of one rank
    summary = check_trace(merge_ranks(again, tmp_path / "two.json"))
    assert (summary.ranks, summary.num_rows, summary.num_flows) == ((0,), 8, 4)


def test_command_merges_ranks_and_torch(tmp_path, capsys):
    """Several files, or one with torch's trace; the path is printed."""
    paths = [str(path) for path in write_ranks(tmp_path)]
    torch_trace(tmp_path / "torch.json")
    out = str(tmp_path / "all.json")
    with_torch = [paths[0], "--torch", str(tmp_path / "torch.json")]
    for arguments, ranks in ((paths, (0, 1, 2)), (with_torch, (0,))):
        assert main(["trace", *arguments, "-o", out]) == 0
        assert capsys.readouterr().out == f"{out}\n"
        summary = check_trace(out)
        assert (summary.ranks, summary.num_others > 0) == (ranks, "--torch" in arguments)
