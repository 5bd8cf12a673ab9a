"""Headspace: steps over kept batches, and how much longer those with loading take."""

import statistics
from time import perf_counter_ns

import pytest
from support.datasets import MapData
from support.gates import no_leak
from support.inside import state_of
from support.loaders import ThreadLoader as DataLoader
from support.readings import shown

from spdl_torch import PipelineDataset
from spdl_torch.pipeline import PipelineBuilder


def busy_for(milliseconds):
    end = perf_counter_ns() + int(milliseconds * 1e6)
    while perf_counter_ns() < end:
        pass


def loader_of(num_samples=40):
    return DataLoader(MapData(num_samples), batch_size=2, num_workers=2)


def dataset_of(num_items=20):
    return PipelineDataset(PipelineBuilder().add_source(range(num_items)).pipe(abs).add_sink())


@pytest.mark.parametrize("make", [loader_of, dataset_of])
def test_the_kept_batches_come_over_and_over(make):
    """The first ones of an epoch, the very same objects, for as many steps as were asked for. The
    figures of the epoch before stay."""
    loader = make()
    expected, before = [*loader][:3], loader.report()
    with no_leak():
        batches = list(loader.headspace(3, num_steps=8))
    assert [batch is batches[n % 3] for n, batch in enumerate(batches)] == [True] * 8
    assert [str(batch) for batch in batches[:3]] == [str(batch) for batch in expected]
    assert loader.report().stats == before.stats


@pytest.mark.parametrize("make", [loader_of, dataset_of])
def test_the_report_tells_how_much_longer_steps_take(make):
    """The median step of the epoch over that with kept batches; what else it says stays."""
    loader = make()
    for _ in loader.headspace(2, num_steps=7):
        busy_for(0.5)
    for _ in loader:
        busy_for(1)
    slowdown = loader.report().probes.step_slowdown
    (timeline,) = loader.profile().timelines
    turns = next(row for row in timeline.rows if row.role == "consumer").turns
    step = statistics.median(turn.ended_ns - turn.started_ns for turn in turns[3:]) / 1e9
    cached_step = state_of(loader).cached_step if make is loader_of else loader._cached_step
    assert (slowdown + 1) * cached_step == pytest.approx(step)
    assert (cached_step >= 0.5e-3, step >= 1e-3) == (True, True)  # no step was shorter
    assert f"step over cached batches {slowdown:+.0%}" in shown(loader.report())
    assert (loader.report().placement is None) == (make is dataset_of)


@pytest.mark.parametrize("option", ["num_batches", "num_steps"])
def test_a_number_that_is_none_is_refused(option):
    """At the call, not at the first batch."""
    with pytest.raises(ValueError, match=f"headspace: {option} must be >= 1, got 0"):
        loader_of().headspace(**{option: 0})
