"""What is the machine's and the process's: cores, one number for whoever asks, the GIL, and what
several threads read at once."""

import hashlib
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import sleep

import pytest
from support.datasets import Indices, Position
from support.gates import PATIENCE_SECONDS, in_thread, result_of
from support.readings import reading, shown, stage
from support.seats import FORKED, THREADS, in_every_seat, in_seats

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.autotune import Limits
from spdl_torch.loader import user_warnings
from spdl_torch.loader.backends.jobs import SharedJob
from spdl_torch.loader.checkpoint.epoch import Given
from spdl_torch.loader.stats.stats import EpochStats
from spdl_torch.locks import SharedCounter
from spdl_torch.machine import limits, readings
from spdl_torch.machine.probes import probe_counters
from spdl_torch.machine.readings import probes_between
from spdl_torch.observe import Cause, Probes, flight_recorder, judge, make_report, recording
from spdl_torch.pipeline import PipelineBuilder, TaskStatsHook


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A container on a machine of 64 cores, by its quota in cores and the ranks in it."""

    def begin(quota, ranks=1):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text("0::/\n")
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{int(quota * 100_000)} 100000\n")
        monkeypatch.setattr(limits, "_ROOT", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return begin


@pytest.mark.parametrize(("quota", "ranks"), [(2, 1), (1.5, 1), (8, 4), (8, 1), (0.5, 1)])
def test_all_have_the_same_count_of_cores(container, quota, ranks, monkeypatch):
    """The quota's, divided among the ranks: report, tuner, the defaults of commands, and the
    warning of more workers than there are cores; 64 would be, by affinity."""
    container(quota, ranks)
    own, whole = quota / ranks, max(1, int(quota / ranks))
    now = probe_counters()
    assert probes_between(now, now).num_cores == own
    assert Limits.of_this_machine().own_cores == own
    loader = DataLoader(range(4), num_workers="auto")
    assert loader.num_workers == min(8, whole)
    assert limits.whole_cores() == whole
    monkeypatch.setattr(user_warnings, "_warned", set())
    with warnings.catch_warnings(action="error"):
        DataLoader(range(4), num_workers=int(own))
    with pytest.warns(UserWarning, match=f"create {whole + 1} workers .* on {quota} usable cores"):
        DataLoader(range(4), num_workers=whole + 1)


LINUX = pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="Linux's statistics")


def one_item():
    return PipelineBuilder().add_source(range(1)).pipe(str, name="op").add_sink()


SOURCES = {
    "no workers": lambda: DataLoader(range(4), batch_size=4),
    "threads": lambda: DataLoader(range(4), batch_size=4, num_workers=2),
    "processes": lambda: DataLoader(range(4), batch_size=4, num_workers=2, isolation="process"),
    "pipeline": lambda: one_item().build(),
    "dataset": lambda: PipelineDataset(one_item()),
}


@LINUX
@pytest.mark.parametrize("kind", SOURCES)
def test_one_batch_is_enough_to_measure_waits_for_a_core(kind):
    """They are read at the begin and the end of an epoch, and when a thread ends."""
    source = SOURCES[kind]()
    assert len(list(source)) == 1
    report = source.report()
    assert report.probes.run_delay_ratio is not None
    assert report.probes.helper_cores is not None
    assert report.probes.num_cores == limits.usable_cores()
    assert "no core for" in shown(report)


@LINUX
def test_threads_that_watch_have_no_part_in_waits_for_a_core(tmp_path):
    """Those of hooks, recordings and a flight recorder wait most of the time: only the time of
    those at work is what the waits are a share of."""
    gate = threading.Barrier(2)

    class Hook(TaskStatsHook):
        def interval_stats_callback(self, stats):
            pass

    def op(item):
        gate.wait(PATIENCE_SECONDS)
        gate.wait(PATIENCE_SECONDS)

    builder = PipelineBuilder().add_source(range(1)).pipe(op).add_sink()
    pipeline = builder.build(task_hook_factory=lambda info: [Hook(info, 3600)])
    with recording(pipeline, tmp_path / "run.db"), flight_recorder(tmp_path), pipeline.auto_stop():
        gate.wait(PATIENCE_SECONDS)
        before = after = probe_counters()
        while after.wall_ns - before.wall_ns < 2 * 10**8:
            after = probe_counters()
        gate.wait(PATIENCE_SECONDS)
    num_counted = (after.thread_ns - before.thread_ns) / (after.wall_ns - before.wall_ns)
    assert num_counted == pytest.approx(1, abs=0.1)


class OnThreads(Indices):
    """Each sample is computed on so many threads, which end with it."""

    def __init__(self, threads):
        super().__init__(8)
        self.threads = threads

    def __getitem__(self, index):
        work = partial(hashlib.pbkdf2_hmac, "sha256", b"x", b"y", 50_000)  # without the GIL
        if not self.threads:
            work()
        with ThreadPoolExecutor(max(1, self.threads)) as pool:
            for _ in range(self.threads):
                pool.submit(work)
        return index


@LINUX
@pytest.mark.parametrize("threads", [0, 2])
@in_seats(THREADS, FORKED)
def test_cpu_of_threads_that_an_op_starts_is_counted(seat, threads):
    """As a library's own threads, which are gone when the call returns; and nobody else's."""
    loader = seat.loader(OnThreads(threads), num_workers=1)
    assert len(list(loader)) == 8
    report = loader.report()
    fetch = report.stats.stages[0].tasks
    own = fetch.ave_cpu_time * fetch.num_tasks
    helpers = report.probes.helper_cores * report.stats.elapsed
    assert helpers > own if threads else helpers < own / 4


def test_pipeline_without_statistics_has_no_probes():
    """What was not measured is None, and is not shown as 0."""
    pipeline = one_item().build(stats=False)
    list(pipeline)
    report = pipeline.report()
    assert report.probes.run_delay_ratio is report.probes.cores_used is None
    assert "no core for" not in shown(report)
    longer = make_report(replace(report.stats, elapsed_ns=10**10, waited_ns=9 * 10**9))
    assert longer.verdict.cause is Cause.UNKNOWN
    assert "the stages keep no statistics" in longer.verdict.finding
    assert longer.verdict.action.startswith("Leave stats=False out")


HELD_UP = reading(0.5, stage("fetch", busy=0.98, cpu=0.25))
"""Training waits for threads that wait themselves, as for a GIL."""


LOOKS = (  # when the loop gets a batch, and what the report says then
    (1.0, HELD_UP, Probes(gil_seconds=6e-3)),
    (10.9, HELD_UP, Probes(gil_seconds=6e-3)),
    (11.0, HELD_UP, Probes(gil_seconds=1e-5, own_gil=True)),  # it is something else
    (21.0, replace(HELD_UP, elapsed_ns=10**9), Probes(gil_seconds=6e-3)),  # too young to say
    (23.5, HELD_UP, Probes(gil_seconds=6e-3, num_cores=4)),
    (99.0, HELD_UP, Probes(gil_seconds=6e-3)),
)


@in_every_seat
def test_threads_that_the_gil_holds_up_are_warned_of_once(seat, monkeypatch, caplog):
    """After ten seconds of loading, over several epochs, with what helps and how much. The loop
    that makes the batches itself, and processes, share no GIL with other workers."""
    caplog.set_level("WARNING", "spdl_torch.data")
    now = iter(LOOKS)
    look = next(now)
    monkeypatch.setattr(user_warnings, "perf_counter", lambda: look[0])
    monkeypatch.setattr(EpochStats, "report", lambda _: make_report(*look[1:], pooled=("fetch",)))
    loader, messages = seat.loader([0] * 6, batch_size=2), []
    for _ in range(2):
        for _ in loader:
            messages.append(len(caplog.messages))
            look = next(now, look)
    assert messages == ([0, 0, 0, 0, 1, 1] if seat.are_threads else [0] * 6)
    for message in caplog.messages:
        assert message.startswith("DataLoader: Training waits for data 50 % of the time")
        assert 'in processes (isolation="process"). At most 2.0x as fast; then' in message


def together(work):
    """Call ``work`` on each of four threads, which change places at any step."""
    begin = threading.Barrier(4)

    def step(frame, event, _):
        frame.f_trace_opcodes = True
        sleep(0)
        return step

    threading.settrace(step)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: (begin.wait(), work(number)), range(4)))
    threading.settrace(None)


def test_numbers_and_samples_are_given_once():
    """Of a counter, and of a job that workers share, whose last one finds all samples made."""
    counter, numbers = SharedCounter(), []
    together(lambda _: numbers.extend(next(counter) for _ in range(50)))
    assert sorted(numbers) == list(range(200))
    job, made, lasts = SharedJob(Given(0, list(range(200)), 0, False, 0)), [], []

    def work(worker):
        number = job.take()
        while number is not None:
            made.append(number)
            number = job.take_after(worker)
        if job.last_worker == worker:
            lasts.append(len(made))

    together(work)
    assert sorted(made) == list(range(200))
    assert lasts == [200]


MANY = 2_000
HALF_BAD = Indices(MANY, range(1, MANY, 2))


def test_skipped_samples_are_read_while_the_loop_goes_on():
    """By a recording, on a thread of its own; what is read is a beginning of what there is."""
    loader = DataLoader(HALF_BAD, batch_size=8, on_error="skip", error_budget=1.0)
    loop = in_thread(list, loader)
    while not loop.done():
        keys = [each.key for each in loader.skipped]
        assert keys == list(range(1, MANY, 2))[: len(keys)]
    assert len(result_of(loop)) == MANY // 8
    assert len(loader.skipped) == MANY // 2


def test_source_is_asked_for_its_state_while_it_goes_on():
    """On a thread of its own; a state is that of the loop's position."""
    dataset, again = (
        PipelineDataset(PipelineBuilder().add_source(Position(MANY)).add_sink(100)) for _ in "ab"
    )
    found = [(item, dataset.state_dict()) for item in dataset]
    again.load_state_dict(found[MANY - 10][1])
    assert list(again) == [item for item, _ in found[MANY - 9 :]]


@pytest.mark.parametrize("has_gil", [True, False])
def test_verdict_names_the_switch_of_a_python_that_can_do_without_its_gil(has_gil, monkeypatch):
    """An interpreter of the free-threaded build whose GIL is on; others have no such switch."""
    monkeypatch.setattr(readings.sysconfig, "get_config_var", lambda name: 1)
    monkeypatch.setattr(readings.sys, "_is_gil_enabled", lambda: has_gil, raising=False)
    assert readings.has_gil() is readings.could_go_without_gil() is has_gil
    verdict = judge(HELD_UP, probes=Probes(gil_seconds=6e-3, could_go_without_gil=has_gil))
    assert verdict.cause is Cause.GIL
    assert ("PYTHON_GIL=0" in verdict.action) is has_gil


def test_count_of_cores_is_the_same_on_a_bound_thread():
    """Report and tuner count those of the process, and so does what a thread asks."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores, and Linux, to run on one of them alone")

    def count():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return limits.usable_cores(), len(os.sched_getaffinity(0))

    assert result_of(in_thread(count)) == (limits.usable_cores(), 1)
