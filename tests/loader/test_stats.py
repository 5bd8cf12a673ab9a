"""Counters, percentiles and the figures computed from them."""

import logging
import os
from time import perf_counter

import pytest
from hypothesis import given, settings, strategies as st
from support.datasets import Indices
from support.gates import FakeClock, until
from support.inside import backend_of
from support.seats import FORKED, NONE, SERVED, THREADS, in_seats

from spdl_torch import DataLoader
from spdl_torch.engine import counters as counters_module
from spdl_torch.engine.counters import QueueCounters, TaskCell
from spdl_torch.engine.statistics import queue_stats, task_stats
from spdl_torch.loader.backends.processes import worker_process
from spdl_torch.loader.fetching import batch_maker as maker_module
from spdl_torch.loader.fetching.batch_maker import timed
from spdl_torch.loader.stats.stats import WorkersStats
from spdl_torch.machine.histogram import Histogram, percentile
from spdl_torch.pipeline import StageInfo, TaskStatsHook

durations = st.integers(0, 2**62) | st.just(2**63 - 1)
few_durations = st.lists(durations | st.integers(0, 10_000), min_size=1, max_size=200)


def histogram_of(values):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram.counts()


def exact_percentile(values, share):
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return next(v for n, v in enumerate(ordered, 1) if n >= share * len(ordered))


@settings(deadline=None, max_examples=100)
@given(
    values=few_durations | st.just([]),
    num_zero=st.just(0) | st.integers(0, 300),
    share=st.sampled_from([0.5, 0.9, 0.99, 1.0]),
)
def test_percentile_is_within_6_3_percent_of_the_exact_one(values, num_zero, share):
    """Whatever the distribution: no value is lost at either end of the range, bucketing moves a
    percentile by at most 6.3 %, and calls that did not wait count as values of 0."""
    counts = histogram_of(values)
    assert sum(counts) == len(values)
    exact = exact_percentile(values + [0] * num_zero, share) if values or num_zero else 0
    assert percentile(counts, share, num_zero) == pytest.approx(exact, rel=0.063, abs=0)


def work():
    """Some work in Python; return its seconds."""
    began = perf_counter()
    assert sum(range(50_000)) == 1_249_975_000
    return perf_counter() - began


def worked_through(loader):
    """Work for each batch; return the iterator, the time of the work, and that in the loader."""
    began = perf_counter()
    batches, own = iter(loader), 0.0
    for _ in batches:
        own += work()
    return batches, own, perf_counter() - began - own


class SlowOrder(list):
    """A sampler, or batch sampler, that works for each of its indices, and counts how long."""

    seconds = 0.0

    def __iter__(self):
        for number, index in enumerate(super().__iter__(), 1):
            self.seconds += work()
            if number == len(self):
                self.in_last_draw()
            yield index


def seconds_waited(stats):
    """What the statistics say of the loop's waits."""
    return stats.consumer_wait_ratio * stats.elapsed


@pytest.mark.parametrize("kind", ["sampler", "samples", "batch_sampler"])
@in_seats(NONE, THREADS, FORKED)
def test_loop_waits_while_it_draws_from_the_sampler(seat, kind):
    """In each draw, while it lasts as well, and in nothing that the loop does by itself; it is no
    wait for workers, which more of them would shorten."""
    order = SlowOrder([[0, 5], [3], [7, 1, 2]] if kind == "batch_sampler" else list(range(12)))
    options = {"batch_sampler": order} if kind == "batch_sampler" else {"sampler": order}
    options["batch_size"] = {"sampler": 4, "samples": None, "batch_sampler": 1}[kind]
    # The last index is drawn once the loop has begun.
    loader, live = seat.loader(Indices(12), prefetch_factor=1, **options), []
    order.in_last_draw = lambda: live.append((order.seconds, seconds_waited(loader.snapshot())))
    batches, _, inside = worked_through(loader)
    report = loader.report()
    assert seconds_in_queue(batches) + order.seconds <= seconds_waited(report.stats)
    ((by_then, seen),) = live
    assert by_then <= seen
    assert order.seconds <= report.probes.sampling_ratio * report.stats.elapsed
    assert order.seconds <= seconds_waited(report.stats) <= inside


@in_seats(THREADS, FORKED)
def test_wait_of_workers_for_a_job_counts_while_it_lasts(seat):
    """Also in a later epoch of the same workers."""
    loader = seat.loader(Indices(12), 1, prefetch_factor=6, persistent_workers=True)

    def times():
        """Of the workers: what they waited for jobs, and all."""
        fetch = loader.snapshot().stages[0]
        return fetch.wait_in_ratio * fetch.thread_time, fetch.thread_time

    def share_since(waited, whole):
        now = times()
        return (now[0] - waited) / (now[1] - whole)

    for _ in range(2):
        next(batches := iter(loader))
        until(lambda: loader.snapshot().stages[0].tasks.num_tasks == 12)  # nothing is left to do
        early = times()
        until(lambda early=early: 0.9 < share_since(*early) < 1.1)
        assert loader.snapshot().stages[0].wait_in_ratio < 1
        assert len(list(batches)) == 11


@in_seats(THREADS, FORKED, SERVED)
def test_loop_waits_while_workers_start(seat, monkeypatch):
    """Until threads are ready, which more of them would not be sooner; and before the first process
    has begun the epoch, too: a fork server itself has to be started."""
    seconds, start_child = [], worker_process.start_child

    def slowly(*args):
        seconds.append(sum(work() for _ in range(20)))  # longer than all else that next() does
        return start_child(*args) if seat.are_processes else None

    monkeypatch.setattr(worker_process, "start_child", slowly)
    options = {"worker_init_fn": slowly} if seat.are_threads else {}
    loader = seat.loader(Indices(12), 4, num_workers=1, **options)
    batches, own, inside = worked_through(loader)
    whole = loader.snapshot()
    assert seconds[0] + seconds_in_queue(batches) <= seconds_waited(whole) <= inside
    assert whole.elapsed >= seconds_waited(whole) + own


def seconds_in_queue(batches):
    """What the loop has waited for workers alone."""
    own = batches.stats
    return seconds_waited(own.snapshot(of_workers=True)) if isinstance(own, WorkersStats) else 0.0


class WorkingHandler(logging.Handler):
    """Works for each record, and counts how long."""

    seconds = 0.0

    def emit(self, record):
        self.seconds += work()


HALF_BAD = Indices(12, bad=range(1, 12, 2))


@in_seats(NONE, THREADS, FORKED)
@pytest.mark.parametrize("options", [{"on_error": "skip", "error_budget": 1.0}, {}], ids=repr)
def test_all_of_next_is_a_wait_and_nothing_else(seat, options):
    """Also what is in no stage or queue: the program's own handler of what is logged by the loop's
    thread meanwhile. An error in place of a batch is handed over as a batch is."""
    handler, logger = WorkingHandler(), logging.getLogger("spdl_torch.data")
    loader = seat.loader(HALF_BAD, batch_size=4 if options else 1, **options)
    logger.addHandler(handler)
    try:
        batches, inside, num_failed = iter(loader), 0.0, 0
        before, in_queue = seconds_waited(loader.snapshot()), seconds_in_queue(batches)
        for _ in range(len(loader)):
            began = perf_counter()
            try:
                next(batches)
            except ValueError:
                num_failed += 1
            inside += perf_counter() - began
            work()
    finally:
        logger.removeHandler(handler)
    assert (num_failed, handler.seconds > 0) == (0 if options else 6, bool(options))
    in_queue = seconds_in_queue(batches) - in_queue
    assert handler.seconds + in_queue <= seconds_waited(loader.snapshot()) - before <= inside


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_counted_as_the_loop_gets_them(num_workers):
    """Whatever the workers have made meanwhile."""
    loader = DataLoader(range(12), 4, num_workers=num_workers, isolation="thread")
    for number, _ in enumerate(loader, start=1):
        assert {stage.queue.num_items for stage in loader.snapshot().stages} == {number}


def test_queue_of_a_process_is_as_full_as_its_clock_has_it():
    """However late the loop reads what the process has sent."""
    loader = FORKED.loader(Indices(4), batch_size=1, num_workers=1, prefetch_factor=4)
    batches = iter(loader)
    until(lambda: loader.snapshot().stages[0].tasks.num_tasks == 4)
    away = sum(work() for _ in range(20))
    next(batches)
    stats = loader.snapshot()
    is_empty = (1 - stats.stages[1].queue.occupancy_rate) * stats.elapsed
    assert 0 < is_empty <= stats.elapsed - away
    assert len(list(batches)) == 3


def clocked_run(calls):
    """Time calls that take these wall and CPU times, each after others in which none runs."""
    clock, cell = FakeClock(), TaskCell()
    with pytest.MonkeyPatch.context() as patch:
        clock.install(patch, maker_module, counters_module)
        for before, times in calls:
            clock.advance(*before)
            timed(cell, clock.advance, *times)
    hook = TaskStatsHook(StageInfo(0, 1, "decode"))
    hook.share(cell)
    return hook.counters()


def of_wall_time(shortest, longest):
    """Wall and CPU times in ns."""
    walls = st.integers(shortest, longest)
    return walls.flatmap(lambda wall: st.tuples(st.just(wall), st.integers(0, wall)))


any_calls = st.tuples(
    st.one_of(st.just((0, 0)), of_wall_time(0, 400_000), of_wall_time(0, 10**9)),
    st.one_of(of_wall_time(0, 199_999), of_wall_time(200_000, 500_000), of_wall_time(0, 10**9)),
)


@settings(deadline=None, max_examples=30)
@given(calls=st.lists(any_calls, max_size=60))
def test_cpu_time_of_every_long_task_is_known(calls):
    """To 0.05 ms, whatever comes before it."""
    counters = clocked_run(calls)
    long = [(wall, cpu) for _, (wall, cpu) in calls if wall >= 200_000]
    assert counters.long_ns == sum(wall for wall, _ in long)
    exact = sum(cpu for _, cpu in long)
    assert counters.long_cpu_ns == pytest.approx(exact, abs=50_001 * len(long))
    if len(long) == len(calls) and all(before == (0, 0) for before, _ in calls):
        assert counters.long_cpu_ns == exact


@pytest.mark.parametrize("period", [8, 50])
@pytest.mark.parametrize(("short_cpu", "long_cpu"), [(0, 50_000_000), (100_000, 0)])
def test_cpu_time_of_tasks_of_very_different_lengths(period, short_cpu, long_cpu):
    """A long one in so many, of which either the long ones compute or the others."""
    short, long = (100_000, short_cpu), (50_000_000, long_cpu)
    calls = [((2_000, 2_000), short if n % period else long) for n in range(period // 2, 2000)]
    exact = sum(cpu for _, (_, cpu) in calls) / len(calls) / 1e9
    assert task_stats(clocked_run(calls)).ave_cpu_time == pytest.approx(exact, rel=0.02)


def test_figures_that_are_read_as_an_epoch_ends_are_whole():
    """Its counters are let go of while another thread reads them."""
    loader = DataLoader(range(12), 4, num_workers=2, isolation="thread")
    list(loader)
    next(iterator := iter(loader))
    counts = backend_of(iterator).counts
    readings = counts.readings

    def late(**options):
        counts.readings = readings
        assert len(list(iterator)) == 2
        return readings(**options)

    counts.readings = late
    assert [stage.num_tasks for stage in loader.snapshot().stages] == [12, 3]


def test_task_stats_time_successes_and_count_failures():
    """ave_time is of the calls that succeeded; counts and CPU time are of all."""
    hook = TaskStatsHook(StageInfo(0, 1, "decode"))
    cell, other = hook.new_cell(), hook.new_cell()
    cell.add(4_000, 1_000)
    other.add(8_000, 3_000)
    other.add_failure(1_000_000, 5_000)
    stats = task_stats(hook.counters())
    assert (stats.num_tasks, stats.num_failures) == (3, 1)
    assert stats.ave_time == pytest.approx(6e-6)
    assert stats.ave_cpu_time == pytest.approx(3e-6)
    assert stats.p99_time == pytest.approx(8e-6, rel=0.063)
    assert stats.elapsed >= 0


def test_queue_stats_average_over_calls_that_did_not_wait_too():
    """One wait of 8 µs in four gets is 2 µs a get; its p99 is the wait, its median is none."""
    waits = (8_000, 0, histogram_of([8_000]))
    stats = queue_stats(QueueCounters(elapsed_ns=2 * 10**9, num_got=4, num_put=4, get_wait=waits))
    assert stats.ave_get_time == pytest.approx(2e-6)
    assert stats.p99_get_time == pytest.approx(8e-6, rel=0.063)
    assert stats.p90_put_time == stats.ave_put_time == 0
    assert (stats.num_items, stats.qps) == (4, 2.0)


def test_workers_that_begin_after_the_first_batch_are_counted():
    """Though the loop does nothing that would receive anything of theirs."""
    reads, writes = os.pipe()
    options = {"prefetch_factor": 6, "worker_init_fn": lambda number: number and os.read(reads, 1)}
    try:
        loader = FORKED.loader(Indices(12), batch_size=1, **options)
        next(batches := iter(loader))
        os.write(writes, b".")
        until(lambda: loader.snapshot().stages[0].tasks.num_tasks == 12)
        assert len(list(batches)) == 11
    finally:
        os.close(reads)
        os.close(writes)
