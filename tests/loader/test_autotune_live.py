"""Loaders and pipelines that are tuned while they run: the same results, each decision reported."""

import copy
import itertools
import logging
import os
import pickle
import random
import threading

import pytest
import torch
from _datasets import BulkData, Made, MapData, StreamData
from _gates import PATIENCE_SECONDS, until
from _inside import backend_of, is_tuned, resize
from _loader_helpers import ThreadLoader as DataLoader, epoch_of
from _tuners import RandomTuner, auto

from spdl_torch import PipelineDataset
from spdl_torch.autotune import PerfParams, tuning as tuning_module
from spdl_torch.autotune.tuner import Bounds
from spdl_torch.data.dataset import _transfer_stage
from spdl_torch.loader.auto_workers import LoaderTuner
from spdl_torch.pipeline import PipelineBuilder

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


AUGMENTED = Made(
    lambda n: torch.tensor([n, random.random(), torch.rand(()).item()], dtype=torch.float64), 60
)
RESHUFFLED = {"seed": 3, "shuffle": True, "persistent_workers": True, "prefetch_factor": 5}


@pytest.mark.parametrize(
    ("isolation", "dataset", "options"),
    [
        ("thread", MapData(60, {7: ValueError, 50: KeyError}), {}),
        ("thread", BulkData(61), {"drop_last": True}),
        ("thread", MapData(60, dict.fromkeys(range(0, 60, 9), ValueError)), {"on_error": "skip"}),
        ("thread", MapData(60), {"in_order": False}),
        ("thread", AUGMENTED, RESHUFFLED),
        pytest.param("process", MapData(60, {7: ValueError}), {"in_order": False}, marks=FORKS),
        pytest.param("process", AUGMENTED, RESHUFFLED, marks=FORKS),
    ],
)
def test_batches_are_those_of_any_fixed_number(dataset, options, isolation, at_random):
    """Whatever the tuner does, in every epoch: order, samples, random bits, errors."""
    options = {"batch_size": 2, "isolation": isolation, **options}
    options |= {"error_budget": 150} if "on_error" in options else {}

    def epochs(num_workers, **more):
        torch.manual_seed(5)
        loader = DataLoader(dataset, num_workers=num_workers, **{**options, **more})
        return [epoch_of(loader) for _ in range(3)], loader

    found, loader = epochs(auto(2, **at_random))
    assert len({decision.to_count for decision in loader.decisions}) > 2
    assert loader.report().placement.num_workers == loader.num_workers
    expected, _ = epochs(3, in_order=True)
    if not options.get("in_order", True):
        found, expected = ([sorted(map(str, each)) for each in both] for both in (found, expected))
    assert found == expected


def test_workers_that_are_about_to_leave_are_not_counted(monkeypatch):
    """Their numbers are free when they have left: nobody joins in their place before, and later the
    last one does not leave for them."""
    threads = type(backend_of(iter(DataLoader(MapData(1), num_workers=1))))
    may_leave, leaving, is_surplus = threading.Event(), [], threads._is_surplus

    def slowly(workers):
        if not is_surplus(workers):
            return False
        leaving.append(threading.current_thread())
        return may_leave.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(threads, "_is_surplus", slowly)
    loader = DataLoader(Made(int, 200), num_workers=auto(1, max_threads=2))
    batches = iter(loader)
    resize(batches, 2)
    resize(batches, 1)
    got = [next(batches)]
    until(lambda: leaving)
    resize(batches, 2)
    assert loader.num_workers == 1
    resize(batches, 1)
    may_leave.set()
    assert len([*got, *batches]) == 200


def test_worker_that_joins_and_cannot_start_ends_the_epoch():
    """The loop has its error, and then the end."""
    loader = DataLoader(
        MapData(30),
        num_workers=auto(1, max_threads=6),
        worker_init_fn=lambda number: {0: "a licence"}[number],
    )
    batches = iter(loader)
    backend_of(batches).resize(3, 6)
    with pytest.raises(KeyError, match=r"[12]"):
        list(batches)
    assert next(batches, None) is None


def test_prefetch_fits_into_the_memory():
    """Ten batches of 800 bytes: 4 workers make 8 ahead where there is room, else 5, at least 4."""
    state = tuning_module.TuningState(PerfParams.auto().tuning, "test")
    loader = DataLoader(MapData(4), num_workers=auto(4))

    def most(memory_bytes):
        loader.prefetch_factor = 2
        tuner = LoaderTuner(loader, state, backend=None)
        tuner._batch_bytes = 800
        state.tuner.bounds = Bounds(threads=8, cores=4, memory_bytes=memory_bytes)
        return tuner.max_outstanding

    assert [most(n) for n in (None, 10_400, 8_000, 100)] == [8, 8, 5, 4]


@pytest.mark.parametrize(
    ("dataset", "options"), [(StreamData(60, split=True), {}), (MapData(60), {"rng": "worker"})]
)
def test_number_stays_where_it_would_show(dataset, options, at_random):
    """An iterable dataset divides itself among its workers; with rng="worker" each has a stream."""
    loader = DataLoader(dataset, num_workers=auto(2, **at_random), **options)
    number = loader.num_workers
    assert not is_tuned(loader)
    fixed = DataLoader(dataset, num_workers=int(number), **options)
    torch.manual_seed(0)
    found = epoch_of(loader)
    torch.manual_seed(0)
    assert found == epoch_of(fixed)
    assert (loader.num_workers, loader.decisions) == (number, [])


def test_number_is_an_int_and_stays_auto_in_copies():
    """torch, Lightning and Accelerate take it for a number and build loaders from it."""
    loader = DataLoader(MapData(8), num_workers="auto")
    assert isinstance(loader.num_workers, int)
    assert loader.num_workers >= 1
    again = DataLoader(MapData(8), num_workers=loader.num_workers)
    for each in (loader, again, copy.copy(loader), pickle.loads(pickle.dumps(again))):
        assert is_tuned(each)
        assert each.num_workers == loader.num_workers
    assert not is_tuned(DataLoader(MapData(8), num_workers=int(loader.num_workers)))
    assert DataLoader(MapData(8), num_workers="auto", prefetch_factor=3).prefetch_factor == 3
    with pytest.raises(ValueError, match=r'num_workers="auto" needs figures.*stats=False'):
        DataLoader(MapData(8), num_workers="auto", stats=False)


def test_decisions_reach_the_trace_and_the_log(at_random, caplog):
    """With the keys that are promised."""
    caplog.set_level(logging.INFO, logger="spdl_torch.autotune")
    loader = DataLoader(MapData(100), num_workers=auto(2, **at_random))
    assert len(epoch_of(loader)) == 100
    decisions = loader.decisions
    instants = [i for i in loader.profile().timelines[0].instants if i.name == "decision"]
    assert [i.details for i in instants] == [d.as_details() for d in decisions]
    assert set(instants[0].details) == {"t", "stage", "from", "to", "before", "after", "reason"}
    assert str(decisions[0]) in caplog.text


def doubled(item):
    """A stage."""
    return 2 * item


def tuned_builder(source):
    """Two stages that may be tuned, and one that is kept."""
    builder = PipelineBuilder().add_source(source).pipe(doubled, name="a")
    return builder.pipe(abs, name="b", concurrency=2, output_order="input").pipe(
        lambda item: item + 1, name="kept"
    )


def tuned_by(**options):
    """As ``PerfParams.auto``, with these options."""
    return PerfParams(tuning=tuning_module.Tuning(**options))


def test_pipeline_gives_the_same_items_in_the_same_order(at_random):
    """And says what it did; the next run begins with what was found."""
    params = tuned_by(keep=frozenset(["kept"]), **at_random)
    options = params.build_options()
    builder = params.apply(tuned_builder(itertools.count()).add_sink())
    with builder.build(**options).auto_stop() as pipeline:
        for number, item in enumerate(pipeline):
            assert item == 2 * number + 1
            if number > 200 and len(options["tuner"].decisions) > 10:
                break
        kept = pipeline.snapshot().stages[-1]
        assert (kept.name, kept.concurrency) == ("kept", 1)
    until(lambda: not options["tuner"]._session.is_going_on)
    found = dict(options["tuner"].found)
    assert set(found) == {"a", "b"}
    pipeline = builder.build(**options)
    assert {s.name: s.concurrency for s in pipeline.snapshot().stages[:2]} == found
    pipeline.stop()


def test_dataset_is_tuned_over_its_passes(at_random):
    """Every pass gives the same items, also in a copy for a worker process, and two at a time."""
    params = tuned_by(**at_random)
    builder = params.apply(tuned_builder(range(300)).aggregate(4).add_sink())
    dataset = PipelineDataset(builder, **params.build_options())
    expected = list(PipelineDataset(tuned_builder(range(300)).aggregate(4).add_sink()))
    for each in (dataset, dataset, copy.deepcopy(dataset)):
        assert list(each) == expected
    assert list(zip(dataset, dataset, strict=True)) == list(zip(expected, expected, strict=True))


def test_transfer_of_a_dataset_with_a_device_keeps_its_one_thread():
    """As one of a user's does."""
    assert not _transfer_stage(None, threading.Event()).is_adjustable


def test_tuner_that_breaks_does_not_break_the_pipeline(at_random, monkeypatch, caplog):
    """The log has its error."""

    def broken(self, window):
        raise ZeroDivisionError("in the tuner")

    monkeypatch.setattr(RandomTuner, "step", broken)
    params = tuned_by(**at_random)
    builder = params.apply(tuned_builder(itertools.count()).add_sink())
    with builder.build(**params.build_options()).auto_stop() as pipeline:
        for _ in zip(pipeline, range(10**7), strict=False):
            if "in the tuner" in caplog.text:
                break
        assert "in the tuner" in caplog.text
        assert pipeline.get_item(PATIENCE_SECONDS) > 0


def test_apply_keeps_the_order_of_stages_that_may_grow():
    """Those with one thread; what is in keep stays; a name that no stage has is refused."""
    spec = PerfParams.auto(keep=["kept"]).apply(tuned_builder([]).aggregate(2).add_sink())
    orders = [stage.output_order for stage in spec.get_config().pipes]
    assert orders == ["input", "input", "completion", "completion"]
    with pytest.raises(ValueError, match="no stage 'other'"):
        PerfParams.auto(keep=["other"]).apply(tuned_builder([]).add_sink())
