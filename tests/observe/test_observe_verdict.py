"""The verdict: its properties, each cause on real threads, and the report as read."""

from __future__ import annotations

import gc
import itertools
import os
import random
import re
import sys
import threading
import zlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from support.datasets import Divided
from support.forks import found_in_fork
from support.readings import entries_of, ns, reading, shown, stage, stage_stats, write
from torch.utils.data import Dataset

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.machine.probes import probe_counters, start_probing, stop_probing
from spdl_torch.machine.readings import probes_between
from spdl_torch.observe import Cause, Placement, Probes, judge, make_report, report_of_file
from spdl_torch.pipeline import PipelineBuilder, QueuePerfStats, TaskPerfStats

QUIET = Probes(gil_seconds=1e-4, run_delay_ratio=0.01, num_cores=16, helper_cores=0.0)
"""A machine on which nothing is short."""


POOLED = ["fetch", "collate"]


def inline(stage):
    """The stage without workers: it fills no queue."""
    return replace(stage, queue_ns=0, held_ns=0)


@pytest.mark.parametrize("num_batches", [40_000, 4_000])
def test_workers_are_not_advised_for_batches_smaller_than_their_hand_over(num_batches):
    """What they take of the loop for each is more than it takes to make one of 0.04 ms."""
    counts = {"num_tasks": num_batches, "num_delivered": num_batches}
    stages = [
        inline(stage(name, busy=busy, threads=1, **counts))
        for name, busy in (("fetch", 0.03), ("collate", 0.13))
    ]
    probes = replace(QUIET, num_cores=8, cores_used=1.0, gil_seconds=None)
    report = make_report(reading(0.2, *stages), probes, pooled=POOLED)
    assert report.verdict.cause is Cause.THREADS
    is_small = num_batches == 40_000
    assert ("Raise num_workers" in report.verdict.action) != is_small
    found = report.what_if(num_workers=2)
    assert (found.high < found.base_rate) == is_small


@pytest.mark.parametrize(("wait_in", "share"), [(0.0, "71 %"), (0.65, None)])
def test_report_says_where_the_rest_of_the_workers_time_is(wait_in, share):
    """Of a loader: what is in no column; without workers it is the trainer's."""
    fetch = stage("fetch", busy=0.1, wait_in=wait_in, threads=2)
    collate = stage("collate", busy=0.19, wait_in=wait_in, threads=2)
    report = make_report(reading(0.9, fetch, collate), QUIET, pooled=POOLED)
    words = "of the workers' time outside of the stages"
    assert (f"{share} {words}" in shown(report)) == (share is not None)
    assert words not in shown(make_report(reading(0.9, fetch, collate), QUIET))
    alone = reading(0.9, inline(fetch), inline(collate))
    assert words not in shown(make_report(alone, QUIET, pooled=POOLED))


@given(
    st.sampled_from([None, 3e-4, 1e-3, 0.006]),
    st.sampled_from([None, 0.0, 0.05]),
    st.integers(2, 16),
)
def test_more_threads_are_never_advised_where_all_use_one_core_together(gil, run_delay, threads):
    """As they do that take the GIL in turns, whether the probe has looked at it or not yet."""
    for cores in (0.75, 1.0, 1.3):
        stats = reading(0.9, stage("fetch", busy=0.97, cpu=cores / threads / 0.97, threads=threads))
        probes = Probes(gil_seconds=gil, run_delay_ratio=run_delay, num_cores=64)
        for pooled in ([], POOLED):
            assert "Raise" not in judge(stats, probes, pooled=pooled).action


def readings(draw):
    """A report on readings of any kind that fit together, by a random source."""
    is_inline = draw.random() < 0.1  # a loader without workers, for which nobody probes
    threads = 1 if is_inline else draw.choice([1, 2, 3, 4, 8, 16])
    num_cores = draw.choice([1, 2, 4, 8, 64])
    busy = draw.choice([0.3, 0.8, 0.97])
    cpu = min(1.0, num_cores / threads) * draw.choice([0.02, 0.15, 0.3, 0.5, 0.9, 1.0])
    cores = threads * busy * cpu
    own_gil = draw.random() < 0.3
    gil = None if own_gil or is_inline else draw.choice([None, 1e-5, 2e-4, 3e-4, 2e-3, 0.01])
    held = None if gil is None else draw.choice([0.0, 0.2] if gil < 5e-4 else [0.5, 0.7, 0.95])
    probes = Probes(
        gil_seconds=gil,
        gil_held_ratio=held,
        run_delay_ratio=draw.choice([None, 0.0, 0.05, 0.15, 0.5]),
        num_cores=draw.choice([None, *[num_cores] * 5]),
        own_gil=own_gil,
        cores_used=draw.choice([None, min(num_cores, cores + draw.choice([0.0, 0.1, 1.0, 9.0]))]),
    )
    busy_seconds = 10.0 * threads * busy
    mean, p50 = busy_seconds / 1000, busy_seconds / 1000 * draw.random()
    num_items = draw.choice([5, 100])
    queue = QueuePerfStats(0.0 if is_inline else 10.0, num_items, 0.0, 0.0, 0.5)
    tasks = TaskPerfStats(1000, 0, mean, mean, 0.03, 10.0, cpu * mean, p50)
    load = stage_stats("fetch", threads, tasks, queue, busy_ratio=busy)
    other = stage("transfer", busy=draw.choice([0.0, 0.1, 0.6]), threads=1, num_delivered=num_items)
    stages = (load,) if is_inline or draw.random() < 0.5 else (load, other)
    wait = draw.choice([0.0, 0.06, 0.15, 0.5, 0.9, 0.99, 1.0])
    pooled = ("fetch", "collate") if is_inline else draw.choice([(), ("fetch", "collate")])
    return make_report(reading(wait, *stages), probes, pooled=pooled)


def any_report(draw):
    """One whose readings may also be missing, in a window of any length, with calls that failed."""
    report, choice = readings(draw), draw.choice
    others = {
        "gc_ratio": choice([None, 0.0, 0.3]),
        "step_slowdown": choice([None, 0.0, 0.3]),
        "helper_cores": choice([None, 0.0, 0.5, 3.0]),
        "sampling_ratio": choice([None, 0.0, 0.3, 0.9]),
    }
    stage = report.stats.stages[0]
    num_failures = choice([0, 10, stage.num_tasks])
    good_ns = stage.good_ns * (stage.num_tasks - num_failures) // stage.num_tasks
    waited_ns = round(choice([0.0, 0.5, 0.9]) * stage.thread_ns)
    stage = replace(stage, num_failures=num_failures, good_ns=good_ns, wait_in_ns=waited_ns)
    stats = replace(report.stats, stages=(stage, *report.stats.stages[1:]))
    if choice([False, True]):
        stats = replace(stats, elapsed_ns=ns(choice([0.1, 1.9, 2.0])))
    return make_report(stats, replace(report.probes, **others), pooled=report.pooled)


@given(st.randoms())
@settings(max_examples=50, deadline=None)
def test_verdict_names_nothing_that_was_not_measured(draw):
    """Neither the GIL, nor a core, nor storage, nor steps, where the figure for it is missing. Its
    sentences are wrapped, below the first of their words; the table of the stages is not."""
    report = any_report(draw)
    table = "stage ", "fetch ", "transfer "
    lines = [line for line in str(report).splitlines() if line and not line.startswith(table)]
    assert all(len(line) < 100 for line in lines)
    words = ("VERDICT", "WHY", "NEXT", "window", "checks", "workers", "data", "note", "WHAT IF")
    assert all(line.startswith((*words, " " * 9)) for line in lines)
    probes, cause, found = report.probes, report.verdict.cause, report.verdict.finding
    text = shown(report)
    if report.stats.elapsed < 2:
        has_nothing = "Nothing was delivered" in found
        assert cause is (Cause.UNKNOWN if has_nothing else Cause.SHORT)
        assert "Raise" not in text
        assert "faster" not in text
        return
    if cause is Cause.GIL:
        assert probes.gil_seconds is not None
        assert not probes.own_gil
    if cause is Cause.CPU:
        assert probes.run_delay_ratio is not None
    if cause is Cause.INTERFERENCE:
        assert ("than with cached batches" in found) == (probes.step_slowdown is not None)
        assert ("waits for the GIL" in found) == (probes.step_slowdown is None)
        assert probes.step_slowdown is not None or probes.gil_seconds is not None
    if cause is Cause.IO:
        assert probes.run_delay_ratio is not None
        assert probes.helper_cores is not None or probes.cores_used is not None
        stage = next(each for each in report.stats.stages if each.name == report.verdict.stage)
        measured = probes.own_gil or stage.concurrency == 1 or probes.gil_seconds is not None
        assert measured
        assert any(each.tasks.num_failures < each.tasks.num_tasks for each in report.stats.stages)
    assert ("wait for a core" in found) <= (probes.run_delay_ratio is not None)
    assert ("storage" in found) == (cause is Cause.IO)
    assert ("no core for" in text) == (probes.run_delay_ratio is not None)
    assert ("time without a core" in text) == (probes.run_delay_ratio is None)
    assert "None" not in text
    assert not probes.own_gil or "GIL" not in found + report.verdict.action


class Told(DataLoader):
    """Reports on readings that are made up."""

    reading = None

    def _measured(self):
        return SimpleNamespace(report=lambda: self.reading)


class Remarked(Dataset):
    """Of no length, with something to say in a report."""

    def loading_remarks(self):
        """Return it."""
        return ("one", "two")


TOLD = {
    "a stream": lambda: Told(Divided()),
    "persistent": lambda: Told(range(8), num_workers=1, persistent_workers=True),
    "remarks": lambda: Told(Remarked(), sampler=[]),
}


@pytest.mark.parametrize("kind", TOLD)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 3), min_size=1, max_size=2))
@settings(max_examples=25, deadline=None)
def test_stored_report_is_the_live_one(tmp_path_factory, kind, seed, passes):
    """Every figure and every sentence, of readings of any kind: of an epoch in any number of
    intervals, and of two epochs together."""
    draw, entries, whole = random.Random(seed), [], None
    loader, first = TOLD[kind](), any_report(draw)
    for num_intervals in passes:
        parts, lives = [], []
        while len(parts) < num_intervals:
            part = any_report(draw)
            if [s.name for s in part.stats.stages] != [s.name for s in first.stats.stages]:
                continue
            load, *others = part.stats.stages
            load = replace(load, good_ns=load.good_ns // draw.choice([1, 10_000]))
            counts = {"cache/found": draw.randrange(2), "packing/size": 2, "packing/room": 3}
            waited_ns = round(1.25 * part.stats.waited_ns)  # a clock may be read late
            changed = {"stages": (load, *others), "counts": counts, "waited_ns": waited_ns}
            parts.append(replace(part.stats, **changed))
            changed = {"switch_interval": 0.001, "could_go_without_gil": draw.random() < 0.5}
            probes = replace(part.probes, **changed)
            where = Placement(num_workers=2, num_processes=draw.choice([0, 2]), reason="so")
            made = make_report(sum(parts), probes, pooled=part.pooled)
            own = {"notes": ("of the workers",), "placement": draw.choice([None, where])}
            loader.reading = replace(made, **own)
            lives.append(loader.report())
        entries += entries_of(*lives, started=len(entries) * 1e3)
        whole = loader._report(whole)
    stored = report_of_file(write(tmp_path_factory.mktemp("run") / "s.db", *entries))
    assert str(stored) == str(whole)
    assert stored == whole


def test_advice_never_contradicts_the_prediction():
    """To add workers is advised where they may gain, and for no more than that."""
    draw, kinds = random.Random(0), Counter()
    for _ in range(1000):
        report = readings(draw)
        verdict, probes = report.verdict, report.probes
        assert verdict.gain >= 0
        advised = re.search(r"Raise .* from (\d+) to about (\d+)", verdict.action)
        if verdict.stage != "fetch":
            continue
        now = int(advised[1]) if advised else report.stats.stages[0].concurrency
        most = report.what_if(num_workers=int(advised[2]) if advised else now + 1).gain
        kinds[bool(advised), most is not None] += 1
        if not advised:
            assert "will not help" not in verdict.action or (most or 0.0) < 0.05, str(report)
            if "or run it in processes" in verdict.action:
                processes = report.what_if(processes=max(2, now)).gain
                assert processes is None or processes >= 0.05
            continue
        assert verdict.cause is not Cause.GIL
        assert int(advised[2]) > now
        if most is not None:
            assert most >= 0.05
            assert verdict.gain <= most + 1e-9
        elif None not in (probes.cores_used, probes.num_cores):
            assert verdict.gain <= probes.num_cores / probes.cores_used - 1
    assert min(kinds[key] for key in itertools.product((False, True), repeat=2)) >= 25, kinds


def test_python_without_a_gil_is_seen(monkeypatch):
    """Nothing is said of waits for a lock that is not there, and the verdict knows why."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    before = after = probe_counters()
    probes = probes_between(before, after)
    assert probes.own_gil
    assert probes.gil_seconds is probes.gil_held_ratio is None
    stats = reading(0.9, stage("fetch", busy=0.97, cpu=0.5, threads=2))
    assert "GIL" not in judge(stats, pooled=POOLED).action


def test_remark_is_made_whatever_the_verdict():
    """What was lost is always reported."""
    for wait in (0.0, 0.5):
        for part, probes, text in (
            (stage("decode", num_failures=10), QUIET, "decode: 10 of 1000 tasks failed (1.0 %)"),
            (stage("decode", num_failures=60), QUIET, "more than the 5 %"),
            (stage("filter", num_dropped=7), QUIET, "filter: the op dropped 7 items"),
            (stage("decode"), Probes(gc_ratio=0.03), "collection takes 3.0 % of the time"),
        ):
            assert any(text in remark for remark in judge(reading(wait, part), probes).remarks)
    assert judge(reading(0.5, stage("decode")), QUIET).remarks == ()
    short = replace(reading(0.5, stage("decode")), elapsed_ns=ns(0.2))  # one may be most of it
    assert judge(short, Probes(gc_ratio=0.9)).remarks == ()


def in_c(_, blob=os.urandom(1_500_000)):  # noqa: B008 - the same for all calls
    """Computes without the GIL, long enough for a thread that wakes to get the next item."""
    return len(zlib.compress(blob, 1))


def waiting(_):
    """Waits, as for a network."""
    return not threading.Event().wait(0.01)


CAUSES = {
    Cause.GIL: (itertools.count(), lambda _: sum(range(300_000)), 2, None),
    Cause.CPU: (itertools.count(), in_c, 3 * (os.cpu_count() or 1), None),
    Cause.IO: (itertools.count(), waiting, 2, None),
    Cause.CONSUMER: (itertools.count(), str, 1, in_c),
    Cause.SOURCE: (filter(waiting, itertools.count()), str, 2, None),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_is_found_on_real_threads(cause):
    """Two seconds of each kind of trouble; more where other programs disturb it."""
    source, op, concurrency, consume = CAUSES[cause]
    builder = PipelineBuilder().add_source(source).pipe(op, name="op", concurrency=concurrency)
    dataset = PipelineDataset(builder.add_sink())
    for number, item in enumerate(dataset):
        if consume is not None:
            consume(item)
        if number % 10 == 0:
            report = dataset.report()
            if report.verdict.cause is cause or report.stats.elapsed >= 20.0:
                break
    assert report.verdict.cause is cause, str(report)
    assert cause is not Cause.GIL or "More threads will not help" in report.verdict.action
    # Beside other programs more threads have more of the cores.
    assert cause is Cause.CPU or ("Raise" in report.verdict.action) == (cause is Cause.IO)
    assert report.verdict.stage == (None if cause in (Cause.CONSUMER, Cause.SOURCE) else "op")
    assert dataset.report().verdict.cause is cause, "the last report stays"


def test_collections_are_timed_while_somebody_probes():
    """Their share of the window; nothing is left in gc.callbacks."""
    before_callbacks = list(gc.callbacks)
    first, second = Named(), Named()
    for user in (first, second, second):
        start_probing(user)
    before = probe_counters()
    gc.collect()
    assert probes_between(before, probe_counters()).gc_ratio > 0
    stop_probing(first)
    stop_probing(first)
    assert gc.callbacks != before_callbacks
    stop_probing(second)
    assert gc.callbacks == before_callbacks


class Named:
    """Somebody who has the probe work."""


def test_probe_does_not_follow_into_a_fork():
    """A child has no probing thread and starts its own."""
    user = Named()
    start_probing(user)

    def child():
        start_probing(user)
        return any(t.name == "spdl-probe" for t in threading.enumerate())

    assert found_in_fork(child)
    stop_probing(user)


def test_report_reads_as_one_page():
    """The verdict, why, and what to do next; then the evidence."""
    read, decode = stage("read", busy=0.2, wait_out=0.8), stage("decode", 0.98, num_failures=14)
    batch = stage("batch", busy=0.05, wait_in=0.95, threads=1)
    probes = Probes(gil_seconds=0.0061, run_delay_ratio=0.03, gc_ratio=0.0)
    report = make_report(reading(0.5, read, decode, batch), probes)
    lines = str(report).splitlines()
    assert repr(report) == str(report), "a prompt shows it, too"
    assert lines[0] == "VERDICT  Training waits for data 50 % of the time (HIGHLY input-bound)."
    assert lines[1].startswith("WHY      Stage 'decode' is the bottleneck, ")
    headings = "stage threads busy CPU/wall wait in wait out p50 ms p99 ms items/s at most/s failed"
    found = [" ".join(line.split()) for line in lines]
    rows = {line.split()[0]: line for line in lines[found.index(headings) + 1 :][:3]}
    assert rows["read"].endswith("waits for room")
    assert rows["batch"].endswith("waits for items")
    assert rows["decode"].split()[-3:] == ["14", "BOTTLENECK", "(gil)"]
    text = " ".join(found)
    assert "GIL wait 6.1 ms, no core for 3.0 % of the threads' time" in text
    assert "step over cached batches" not in text, "it was not measured"
    action = text[text.index(" NEXT ") : text.index(" window ")]
    assert action.startswith(" NEXT More threads will not help.")
    assert action.endswith("At most 2.0x as fast; then training waits no more.")
