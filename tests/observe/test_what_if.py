"""The model of other settings: its promises, and a loader in numbers as its oracle."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from itertools import product

import pytest
from support.datasets import SafeIndices
from support.readings import pipeline_stats, shown, stage_stats

from spdl_torch import DataLoader
from spdl_torch.observe import Placement, Probes, make_report
from spdl_torch.pipeline import QueuePerfStats, TaskPerfStats

MS = 1e-3

SAMPLES = {
    "waits": {"waits": 2 * MS},
    "holds the GIL": {"gil": 2 * MS},
    "computes without it": {"cpu": 2 * MS},
    "a bit of each": {"waits": 2 * MS, "gil": 0.5 * MS, "cpu": 0.5 * MS},
}


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Seconds that each sample takes, of what."""

    num_workers: int
    waits: float = 0.0
    gil: float = 0.0
    """Computing with the GIL."""
    cpu: float = 0.0
    """Computing without it."""
    step: float = 0.0
    num_cores: int = 2
    in_processes: bool = False
    num_samples: int = 8
    """In a batch."""

    @property
    def places(self):
        """Batches a second that each place lets through; the order decides between equals."""
        each = {
            "step": self.step,
            "gil": 0.0 if self.in_processes else self.gil * self.num_samples,
            "cores": (self.gil + self.cpu) * self.num_samples / self.num_cores,
            "workers": (self.waits + self.gil + self.cpu) * self.num_samples / self.num_workers,
        }
        return {name: 1 / seconds for name, seconds in each.items() if seconds}

    @property
    def rate(self):
        """Batches a second."""
        return min(self.places.values())


def report_of(loader, num_batches):
    """Return the report that a loader would make of so many batches."""
    workers, seconds = loader.num_workers, num_batches / loader.rate
    calls = num_batches * loader.num_samples
    limit = min(loader.places, key=loader.places.__getitem__)
    needed = calls * (loader.waits + loader.gil + loader.cpu)
    # Workers that the training loop does not hold up are busy, if only with waits for each other.
    busy = needed if limit == "step" else seconds * workers
    cpu, gil_held = calls * (loader.gil + loader.cpu), calls * loader.gil
    waited = max(0.0, seconds - num_batches * loader.step)
    time = busy / calls
    fetch = stage_stats(
        name="fetch",
        concurrency=workers,
        tasks=TaskPerfStats(calls, 0, time, time, time, seconds, cpu / calls, time, busy),
        queue=QueuePerfStats(seconds, num_batches, 0.0, 0.0, 0.5, get_wait_time=waited),
        busy_ratio=busy / seconds / workers,
        wait_in_ratio=1 - busy / seconds / workers,
    )
    of_threads = {
        "gil_seconds": 5e-3 if limit == "gil" else 1e-4,
        "gil_held_ratio": min(1.0, gil_held / seconds),
        "run_delay_ratio": (busy - needed) / seconds / workers if limit == "cores" else 0.0,
    }
    probes = Probes(
        num_cores=loader.num_cores,
        helper_cores=0.0,
        own_gil=loader.in_processes,
        cores_used=cpu / seconds,
        **({} if loader.in_processes else of_threads),
    )
    stats = pipeline_stats(seconds, waited / seconds, (fetch,))
    num_processes = workers if loader.in_processes else 0
    placement = Placement(num_workers=workers, num_processes=num_processes, reason="made up")
    return replace(make_report(stats, probes, pooled=("fetch",)), placement=placement)


def simulated(num_batches=600, **loader):
    """The report of a loader in numbers."""
    return report_of(Loader(**loader), num_batches)


@pytest.mark.parametrize("name", SAMPLES)
def test_no_loader_in_numbers_is_faster_than_the_bound(name):
    """Nor is the bound far above the rate in most cases."""
    ratios = []
    for num_workers, (num_cores, step) in product((1, 2, 4), ((2, 0.0), (8, 6 * MS))):
        cores = {"num_cores": num_cores, "step": step}
        loader = Loader(num_workers=num_workers, **cores, **SAMPLES[name])
        report = report_of(loader, 480)
        more = [report.what_if(num_workers=n).high for n in (1, 2, 3, 4, 8, 64)]
        known = [high for high in more if high is not None]
        assert known == sorted(known), "more workers never lose"
        assert not step or all(high <= 1.1 / step for high in known)
        for asked, changed in (
            *(({"num_workers": n}, {"num_workers": n}) for n in (1, 2, 8)),
            ({"processes": 4, "num_workers": 4}, {"num_workers": 4, "in_processes": True}),
            ({"read_speedup": 2.0}, {"waits": loader.waits / 2}),
        ):
            found = report.what_if(**asked)
            if found.high is not None:
                ratios.append(found.high / replace(loader, **changed).rate)
    ratios.sort()
    assert len(ratios) >= 15
    assert ratios[0] > 0.99
    assert ratios[len(ratios) // 2] < 1.25


@pytest.mark.parametrize("num_workers", [1, 4])
def test_cache_may_be_as_fast_as_a_loader_that_does_nothing_else(num_workers):
    """What a start takes of a slow loader's worker, loop and cores is not of each batch."""
    slow = simulated(num_workers=num_workers, num_cores=8, waits=20 * MS, cpu=0.1 * MS)
    (fetch,) = slow.stats.stages
    worker_ns, waited_ns = int(0.96 * fetch.thread_ns), int(0.98 * fetch.queue_ns)
    fetch = replace(fetch, busy_ns=worker_ns, wait_in_ns=0, get_ns=waited_ns)
    slow = replace(slow, stats=replace(slow.stats, stages=(fetch,)))
    slow = without(slow, cores_used=slow.probes.cores_used + 0.05)
    found = slow.what_if(cache=True)
    assert found.high > Loader(num_workers=num_workers, cpu=0.03 * MS).rate, found


@pytest.mark.parametrize("gil_seconds", [1e-4, 6e-3])
def test_no_bound_of_what_takes_nothing_away_is_below_the_measured_rate(gil_seconds):
    """Where samples are found sooner than in a cache, several ranks' cores are in use, and workers
    wait for the GIL outside of their stages, too."""
    report = simulated(1_000_000, num_workers=2, num_cores=2, cpu=2e-6)
    (fetch,) = report.stats.stages
    fetch = replace(fetch, busy_ns=int(0.6 * fetch.thread_ns), wait_in_ns=0)
    report = replace(report, stats=replace(report.stats, stages=(fetch,)))
    report = without(report, cores_used=2.5, gil_seconds=gil_seconds, gil_held_ratio=1.0)
    asked = {"cache": True}, {"num_workers": 4}, {"read_speedup": 2}, {"processes": 2}
    found = [report.what_if(**each) for each in asked]
    assert all(each.gain >= 0 for each in found), found


TRAINS = {"num_workers": 4, "num_cores": 8, "step": 40 * MS, "cpu": 2 * MS}


@pytest.mark.parametrize(
    ("loader", "asked", "limit", "gain"),
    [
        *(
            ({"num_workers": n, "gil": 2 * MS}, {"num_workers": 4 * n}, "the GIL", 0)
            for n in (2, 4)
        ),
        ({"num_workers": 2, "gil": 2 * MS}, {"num_workers": 4, "processes": 4}, "the workers", 3),
        # Where they hardly wait, more of them only take the cores from each other.
        (
            {"num_workers": 2, "num_cores": 2, "cpu": 2 * MS, "waits": 0.05 * MS},
            *({"num_workers": 8}, "the cores", 0),
        ),
        # Samples that took long are there at once.
        (
            {"num_workers": 2, "num_cores": 2, "step": 10 * MS, "waits": 4 * MS, "cpu": 2 * MS},
            *({"cache": True}, "the training loop", 1.4),
        ),
        (TRAINS, {"num_workers": 8}, "the training loop", 0),
        (TRAINS, {"processes": 4}, "the training loop", 0),
        (TRAINS, {"cache": True}, "the training loop", 0),
        (TRAINS, {"read_speedup": 2}, "the training loop", 0),
    ],
)
def test_prediction_names_what_is_the_limit_then(loader, asked, limit, gain):
    """And the report does not say otherwise anywhere: it asks for no workers that gain nothing."""
    report = simulated(**{"num_cores": 8, **loader})
    found = report.what_if(**asked)
    assert found.limit == limit
    assert found.gain == pytest.approx(gain, abs=0.1)
    if not gain:
        assert "Raise" not in str(report)
    if loader is TRAINS:
        assert report.predictions == ()
        assert "WHAT IF" not in str(report)


def without(report, **changes):
    """The report with other probes, and the verdict that follows."""
    probes = replace(report.probes, **changes)
    made = make_report(report.stats, probes, pooled=report.pooled)
    return replace(made, placement=report.placement)


def shortened(report, elapsed, num_items):
    """The report of a window of that length, with so many batches delivered."""
    stage = report.stats.stages[0]
    stage = replace(stage, num_items=num_items)
    stats = pipeline_stats(elapsed, report.stats.consumer_wait_ratio, (stage,))
    return replace(report, stats=stats)


def test_what_cannot_be_known_is_said_to_be_unknown():
    """With the reason, and without a figure."""
    good = simulated(num_workers=2, num_cores=4, cpu=2 * MS)
    assert good.what_if(num_workers=4).high is not None
    fetch = good.stats.stages[0]
    share = fetch.thread_ns // 10
    idle = replace(fetch, busy_ns=share, wait_in_ns=9 * share)
    idle = replace(good.stats, stages=(idle,))
    cases = {
        "nothing was delivered": shortened(good, 5.0, 0),
        "the window is short, 0.4 s": shortened(good, 0.4, 400),
        "only 3 batches": shortened(good, 5.0, 3),
        "number of cores is unknown": without(good, num_cores=None),
        "CPU time of the training process": without(good, cores_used=None),
        "other programs took them": without(good, run_delay_ratio=0.6, cores_used=0.5),
        "the start of the pass": make_report(idle, good.probes, pooled=good.pooled),
        "the source": make_report(idle, good.probes),
    }
    for reason, report in cases.items():
        found = report.what_if(num_workers=4)
        assert found.high is found.gain is None
        assert reason in found.reason
        assert "cannot be known" in str(found)


def test_long_calls_do_not_take_more_than_the_workers_have():
    """Those that began before the window count as a whole."""
    report = simulated(num_workers=2, num_cores=8, waits=2 * MS)
    (fetch,) = report.stats.stages
    stats = replace(report.stats, stages=(replace(fetch, busy_ns=3 * fetch.busy_ns),))
    assert replace(report, stats=stats).what_if(num_workers=4).gain == pytest.approx(1)


def test_processes_do_not_show_what_threads_would_do():
    """Nobody looked at the training process's GIL with them."""
    report = simulated(num_workers=2, in_processes=True, gil=2 * MS)
    assert "share the training process's GIL" in report.what_if(processes=0).reason
    assert report.what_if(num_workers=1).gain == pytest.approx(-0.47, abs=0.1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "expected a setting to change"),
        ({"num_workers": -1}, "num_workers must be >= 0 or None, got -1"),
        ({"read_speedup": float("nan")}, "read_speedup must be > 0, got nan"),
        ({"num_workers": 2, "processes": 4}, "must be num_workers or 0, got 4 and num_workers=2"),
    ],
)
def test_question_that_makes_no_sense(asked, message):
    """Says what was expected."""
    with pytest.raises((TypeError, ValueError), match=message):
        simulated(20, num_workers=2, cpu=2 * MS).what_if(**asked)


def test_report_shows_predictions_everywhere(tmp_path):
    """In the text, the page and the JSON."""
    report = simulated(num_workers=2, num_cores=8, waits=2 * MS)
    more, *_ = report.predictions
    settings = [each.setting for each in report.predictions]
    assert settings == ["4 workers", "reads 2x as fast", "a cache"]
    assert more.gain == pytest.approx(1.05, abs=0.1)
    assert f"WHAT IF {more}" in shown(report)
    assert str(more).endswith("; then the workers are the limit.")
    listed = json.loads(report.as_json())["predictions"]
    assert [each["high"] for each in listed] == [each.high for each in report.predictions]
    assert listed[0]["gain"] == more.gain
    page = report.write_html(tmp_path / "page.html").read_text("utf-8")
    assert all(each.setting in page for each in report.predictions)


@pytest.mark.parametrize(("sampling", "limit"), [(0.6, "the sampler"), (0.01, "the training loop")])
@pytest.mark.parametrize("num_workers", [64, 0])
def test_sampler_is_named_where_it_takes_most_of_the_loop_s_time(num_workers, sampling, limit):
    """It is no faster with other workers, and no work of the trainer's."""
    report = simulated(num_workers=2, num_cores=8, waits=2 * MS, step=0.3 * MS)
    assert report.stats.consumer_wait_ratio > 0.6
    found = without(report, sampling_ratio=sampling).what_if(num_workers=num_workers)
    assert found.limit == limit
    assert f"then {limit} is the limit" in str(found)


@pytest.mark.parametrize(("number", "isolation"), [(0, "thread"), (1, "thread"), (1, "process")])
def test_loader_measures_what_the_model_needs(number, isolation):
    """CPU time of the program, its processes' too, and its cores, with workers and without; how
    long they had none. Where no GIL is shared nobody looks at one."""
    loader = DataLoader(SafeIndices(4096), 1024, num_workers=number, isolation=isolation)
    for _ in loader:
        pass
    report = loader.report()
    probes, is_process = report.probes, isolation == "process"
    assert probes.num_cores >= 1
    assert probes.cores_used > 0
    if is_process:
        assert (probes.own_gil, probes.gil_seconds) == (True, None)
        if os.path.exists("/proc/self/schedstat"):
            assert 0 <= probes.run_delay_ratio <= 1
    reason = report.what_if(num_workers=4).reason
    assert "the window is short" in reason or "only 4 batches were delivered" in reason
    assert report.predictions == ()
