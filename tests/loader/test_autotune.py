"""The tuner on a model of a pipeline whose optimum is known, and its bounds."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from spdl_torch.autotune import PerfParams
from spdl_torch.autotune.tuner import Bounds, Tuner, Window, window_of
from spdl_torch.observe import Probes
from spdl_torch.pipeline import PipelineStats, StageStats


@dataclass
class ModelStage:
    """Seconds that one item takes, and what its threads share."""

    name: str
    seconds: float
    cpu: float = 0.0
    """Share of them on a core."""
    at_most: float = float("inf")
    """Calls that make headway at once: 1 holds the GIL, 6 is a store with 6 connections."""
    is_free: bool = True


@dataclass
class Model:
    """Stages in a row under saturation: the slowest passes on its rate to all."""

    stages: list[ModelStage]
    step: float = 0.0
    """Seconds of the consumer's own work."""
    source: float = float("inf")
    """Items a second that there are."""
    cores: float = 1000.0
    bytes_per_thread: int = 0
    gil_seconds: float | None = None
    noise: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self):
        self.counts = {s.name: self.counts.get(s.name, 1) for s in self.stages}

    def capacity(self, stage, count):
        """Items a second of one stage."""
        return min(count, stage.at_most) / stage.seconds

    def rate(self, counts):
        """Items a second that the consumer gets."""
        rates = [self.source, *(self.capacity(s, counts[s.name]) for s in self.stages)]
        cpu = sum(s.seconds * s.cpu for s in self.stages)
        rates += [1 / self.step] if self.step else []
        rates += [self.cores / cpu] if cpu else []
        return min(rates)

    def window(self, seconds=2.0):
        """What would be measured."""
        rate = self.rate(self.counts) * (1 + self.random.gauss(0, self.noise))
        stages = []
        for stage in self.stages:
            count = self.counts[stage.name]
            busy = min(1.0, rate / self.capacity(stage, count))
            cpu_seconds = min(rate * stage.seconds * stage.cpu, self.cores) * seconds
            thread_ns = round(count * seconds * 1e9)
            times = {"thread_ns": thread_ns, "busy_ns": round(busy * thread_ns)}
            times |= {
                "cpu_ns": round(cpu_seconds * 1e9),
                "wait_in_ns": thread_ns - times["busy_ns"],
            }
            stages.append(StageStats(name=stage.name, concurrency=count, **times))
        waited = max(0.0, seconds * (1 - rate * self.step))
        return Window(
            stats=PipelineStats(round(seconds * 1e9), round(waited * 1e9), tuple(stages)),
            num_items=max(1, round(rate * seconds)),
            tunable={stage.name for stage in self.stages if stage.is_free},
            noise=self.noise,
            probes=Probes(gil_seconds=self.gil_seconds, run_delay_ratio=0.0),
            memory_bytes=self.bytes_per_thread * sum(self.counts.values()) or None,
        )

    def optimum(self, bounds):
        """The best rate within the bounds: one thread more for the slowest, as long as it helps."""
        counts = {s.name: 1 if s.is_free else self.counts[s.name] for s in self.stages}
        free = {s.name for s in self.stages if s.is_free}
        best = self.rate(counts)
        while sum(counts[name] for name in free) < self.most(bounds):
            slowest = min(self.stages, key=lambda s: self.capacity(s, counts[s.name]))
            if slowest.name not in free:
                break
            counts[slowest.name] += 1
            best = max(best, self.rate(counts))
        return best

    def most(self, bounds):
        """Threads within the bounds."""
        if not self.bytes_per_thread or bounds.memory_bytes is None:
            return bounds.threads
        return min(bounds.threads, bounds.memory_bytes // self.bytes_per_thread)


def tune(model, bounds, windows=40):
    """Run the tuner on the model until it rests: the tuner, its decisions, and the windows that it
    took. No bound is exceeded, but by one thread for each stage, the least there is."""
    tuner, decisions = Tuner(bounds), []
    free = [s.name for s in model.stages if s.is_free]
    for number in range(1, windows + 1):
        change, found = tuner.step(model.window())
        model.counts.update([change] if change else [])
        decisions += found
        assert sum(model.counts[name] for name in free) <= max(model.most(bounds), len(free))
        assert all(model.counts[name] >= 1 for name in free)
        if tuner.is_settled:
            return tuner, decisions, number
    raise AssertionError("it never settled")


seconds_of_stages = st.lists(st.floats(0.0001, 0.0003), max_size=3).flatmap(
    lambda quick: st.floats(0.02, 0.2).map(lambda slow: [*quick, slow])
)


@settings(max_examples=150, deadline=None)
@given(seconds_of_stages, st.integers(4, 64))
def test_tuner_ends_at_the_optimum_within_its_bounds(seconds, threads):
    """Whatever the slow stage takes: within 15 windows, at 95 % of what the threads allow."""
    model = Model([ModelStage(f"s{n}", s) for n, s in enumerate(seconds)])
    bounds = Bounds(threads=threads, cores=1000)
    start = model.rate(model.counts)
    _, decisions, settled = tune(model, bounds)
    assert settled <= 15, decisions
    rate = model.rate(model.counts)
    assert rate >= 0.98 * start
    assert rate >= 0.95 * model.optimum(bounds), (model.counts, decisions)


@settings(max_examples=80, deadline=None)
@given(seconds_of_stages, st.floats(0.002, 0.1))
def test_tuner_gives_the_consumer_what_it_wants_and_not_much_more(seconds, step):
    """It stops when the consumer does not wait; threads are at most a few times what that takes."""
    model = Model([ModelStage(f"s{n}", s) for n, s in enumerate(seconds)], step=step)
    tune(model, Bounds(threads=1000, cores=1000))
    assert model.window().stats.consumer_wait_ratio <= 0.06
    for stage in model.stages:
        needed = stage.seconds / step
        assert model.counts[stage.name] <= max(2, 1.5 * needed + 1)


@pytest.mark.parametrize(
    ("stages", "options", "reason"),
    [
        ([ModelStage("slow", 0.01, cpu=1.0, at_most=1)], {"gil_seconds": 0.005}, "gil"),
        ([ModelStage("slow", 0.02, cpu=1.0)], {"cores": 4}, "cpu"),
        ([ModelStage("slow", 0.05, at_most=6)], {}, "io-limit"),
        ([ModelStage("slow", 0.05)], {}, "max"),
        ([ModelStage("slow", 0.05)], {"bytes_per_thread": 100}, "memory"),
        ([ModelStage("quick", 0.001), ModelStage("slow", 0.1, is_free=False)], {}, "max"),
        ([ModelStage("slow", 0.001)], {"step": 0.01}, "consumer"),
        ([ModelStage("quick", 0.01)], {"source": 20.0}, "source"),
    ],
)
def test_reason_is_given_when_nothing_is_left_to_gain(stages, options, reason):
    """The last decision says what holds the consumer back; the rate is the best there is. That
    nobody is busy is said after three windows: one may be an exception."""
    model = Model(stages, **options)
    bounds = Bounds(threads=32, cores=options.get("cores", 1000), memory_bytes=1000)
    _, decisions, settled = tune(model, bounds)
    assert (3 if reason in ("consumer", "source") else 1) <= settled <= 15
    assert decisions[-1].reason == reason
    assert model.rate(model.counts) >= 0.95 * model.optimum(bounds)


def test_step_is_taken_back_that_takes_too_much_memory():
    """However much it gains: the threads that it added keep more in flight than was known."""
    model = Model([ModelStage("slow", 0.05)], counts={"slow": 4}, bytes_per_thread=100)
    tuner = Tuner(Bounds(threads=64, cores=1000, memory_bytes=1000))
    model.counts.update([tuner.step(model.window())[0]])
    model.bytes_per_thread *= 2
    change, decisions = tuner.step(model.window())
    assert change == ("slow", 4)
    assert [*map(str, decisions)] == ["slow: 6 -> 4, 80.0 -> 120.0 items/s: memory"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.floats(0.0, 0.05))
def test_noise_does_not_keep_it_from_ending(seed, noise):
    """It settles, near the optimum, also where windows differ by some per cent."""
    stages = [ModelStage("read", 0.001), ModelStage("decode", 0.06)]
    model = Model(stages, noise=noise, random=random.Random(seed))
    bounds = Bounds(threads=40, cores=1000)
    tune(model, bounds, windows=100)
    assert model.rate(model.counts) >= 0.5 * model.optimum(bounds)


def test_it_looks_again_when_the_data_changes():
    """Decoding takes four times as long from now on."""
    model = Model([ModelStage("decode", 0.02)], step=0.01)
    bounds = Bounds(threads=64, cores=1000)
    tuner, *_ = tune(model, bounds)
    model.stages[0].seconds = 0.08
    reasons = []
    for _ in range(20):
        change, decisions = tuner.step(model.window())
        model.counts.update([change] if change else [])
        reasons += [d.reason for d in decisions]
    assert reasons[0] == "drift"
    assert model.window().stats.consumer_wait_ratio <= 0.06


def test_option_of_auto_is_refused_when_out_of_range():
    """The message names it and what was given."""
    match = "PerfParams.auto: max_threads must be an int or None, got 2.5"
    with pytest.raises(TypeError, match=re.escape(match)):
        PerfParams.auto(max_threads=2.5)


def test_pause_of_the_consumer_is_left_out_of_a_window():
    """A validation of a minute between two batches does not count as slow loading."""

    def part(seconds, num_items, waited):
        stats = PipelineStats(int(seconds * 1e9), int(waited * 1e9), ())
        return Window(stats=stats, num_items=num_items)

    usual, pause = part(0.5, 50, 0.1), part(60.0, 50, 0.1)
    found = window_of([usual, usual, pause, usual])
    assert (found.num_items, found.stats.elapsed) == (150, 1.5)
    assert found.noise < 0.01
    assert window_of([part(1.0, 10, 0.0), part(1.0, 30, 0.0)]).noise > 0.4
