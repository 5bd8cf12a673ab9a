"""Facts about the machine have one owner: whoever asks for the cores gets the same number."""

from __future__ import annotations

import os
import warnings

import pytest

from spdl_torch import DataLoader
from spdl_torch.autotune import Limits
from spdl_torch.data.loader import arguments
from spdl_torch.data.workers.budget import ThreadBudget
from spdl_torch.io._transfer import team
from spdl_torch.machine import limits
from spdl_torch.machine.probes import probe_counters, probes_between

QUOTAS = {
    "cgroup v2": {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "{quota} 100000\n"},
    "cgroup v1": {
        "proc/self/cgroup": "7:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "{quota}\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
    },
}


@pytest.fixture(params=QUOTAS)
def container(request, tmp_path, monkeypatch):
    """A container on a machine of 64 cores, by its quota in cores and the ranks in it."""

    def begin(quota, ranks=1):
        for name, text in QUOTAS[request.param].items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text.format(quota=int(quota * 100_000)))
        monkeypatch.setattr(limits, "_ROOT", tmp_path)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return begin


class Turns:
    """A pool of which the budget of threads asks nothing."""

    activities = ()


@pytest.mark.parametrize(("quota", "ranks"), [(2, 1), (1.5, 1), (8, 4), (8, 1), (0.5, 1)])
def test_all_have_the_same_count_of_cores(container, quota, ranks):
    """The quota's, divided among the ranks: report, tuner, budget of threads, copies, and the
    defaults of commands."""
    container(quota, ranks)
    own, whole = quota / ranks, max(1, int(quota / ranks))
    now = probe_counters()
    assert probes_between(now, now).num_cores == own
    assert Limits.of_this_machine().own_cores == own
    loader = DataLoader(range(4), num_workers="auto")
    assert loader.num_workers == min(8, whole)
    budget = ThreadBudget()
    budget.begin(Turns(), 64)
    assert budget._num_cores == limits.whole_cores() == whole
    assert team._num_useful() == (1 if whole < 3 else min(4, whole - 1))


@pytest.mark.parametrize(("quota", "ranks"), [(2, 1), (8, 4)])
def test_warning_of_more_workers_than_cores_counts_the_quota(container, quota, ranks, monkeypatch):
    """One more than there are cores is told, and as many are not; 64 would be, by affinity."""
    container(quota, ranks)
    monkeypatch.setattr(arguments, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(range(4), num_workers=2)
    with pytest.warns(UserWarning, match=f"create 3 workers in total.* on {quota} usable cores"):
        DataLoader(range(4), num_workers=3)
