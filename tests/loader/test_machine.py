"""Facts about the machine have one owner: whoever asks for the cores gets the same number."""

import hashlib
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from _datasets import SafeIndices
from _gates import PATIENCE_SECONDS, in_thread, result_of
from _readings import shown

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.autotune import Limits
from spdl_torch.loader import user_warnings
from spdl_torch.machine import limits
from spdl_torch.machine.probes import probe_counters
from spdl_torch.machine.readings import probes_between
from spdl_torch.observe import Cause, flight_recorder, make_report, recording
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


def test_count_of_cores_is_the_same_on_a_bound_thread():
    """Report and tuner count those of the process, and so does what a thread asks."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores, and Linux, to run on one of them alone")

    def count():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return limits.usable_cores(), len(os.sched_getaffinity(0))

    assert result_of(in_thread(count)) == (limits.usable_cores(), 1)


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
    """Those of hooks, recordings and a flight recorder wait most of the time: the share of the
    workers', over whose time their own waits are added up, stays as it is without them."""
    gate = threading.Barrier(3)

    def op(item):
        gate.wait(PATIENCE_SECONDS)
        gate.wait(PATIENCE_SECONDS)

    class Hook(TaskStatsHook):
        def interval_stats_callback(self, stats):
            pass

    builder = PipelineBuilder().add_source(range(2)).pipe(op, name="op", concurrency=2).add_sink()
    pipeline = builder.build(task_hook_factory=lambda info: [Hook(info, 3600)])
    with recording(pipeline, tmp_path / "run.db"), flight_recorder(tmp_path), pipeline.auto_stop():
        gate.wait(PATIENCE_SECONDS)
        before, _, after = probe_counters(), time.sleep(0.3), probe_counters()
        names = {each.name for each in threading.enumerate() if each.name.startswith("spdl-")}
        gate.wait(PATIENCE_SECONDS)
    at_work = names & {"spdl-src", "spdl-op-0", "spdl-op-1"}
    assert len(names - at_work) == 6  # of hooks, of the recording three, the recorder, the probe
    num_counted = (after.thread_ns - before.thread_ns) / (after.wall_ns - before.wall_ns)
    assert num_counted == pytest.approx(len(at_work), abs=0.1)


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


class OnThreads(SafeIndices):
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
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("threads", [0, 2])
def test_cpu_of_threads_that_an_op_starts_is_counted(isolation, threads):
    """As a library's own threads, which are gone when the call returns; and nobody else's."""
    loader = DataLoader(OnThreads(threads), num_workers=1, isolation=isolation)
    assert [int(batch) for batch in loader] == [*range(8)]
    report = loader.report()
    fetch = report.stats.stages[0].tasks
    own = fetch.ave_cpu_time * fetch.num_tasks
    helpers = report.probes.helper_cores * report.stats.elapsed
    assert helpers > own if threads else helpers < own / 4
