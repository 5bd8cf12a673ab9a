"""Loaders and pipelines that are tuned while they run: the same results, each decision reported;
``num_workers="auto"``: workers join and leave as an epoch runs."""

import copy
import gc
import itertools
import logging
import os
import pickle
import random
import select
import signal
import threading
import weakref

import pytest
import torch
from support.datasets import BulkData, Indices, Made, MapData, StreamData
from support.gates import num_fds, until
from support.inside import backend_of, children_of, give_out, is_tuned, resize, tuning_of
from support.isolated import children, nothing_left, release_what_has_ended
from support.loaders import (
    PATIENCE_SECONDS,
    DataLoader,
    ThreadLoader,
    assert_threads_end,
    epoch_of,
    loader_threads,
)
from support.readings import shown
from support.tuners import RandomTuner, auto
from torch.utils.data import Dataset, get_worker_info

from spdl_torch import PipelineDataset
from spdl_torch.autotune import PerfParams, tuning as tuning_module
from spdl_torch.autotune.tuner import Bounds
from spdl_torch.loader.auto_workers import LoaderTuner
from spdl_torch.pipeline import PipelineBuilder

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


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
        ("process", MapData(60, {7: ValueError}), {"in_order": False}),
        ("process", AUGMENTED, RESHUFFLED),
    ],
)
def test_batches_are_those_of_any_fixed_number(dataset, options, isolation, at_random):
    """Whatever the tuner does, in every epoch: order, samples, random bits, errors."""
    options = {"batch_size": 2, "isolation": isolation, **options}
    options |= {"error_budget": 150} if "on_error" in options else {}

    def epochs(num_workers, **more):
        torch.manual_seed(5)
        loader = ThreadLoader(dataset, num_workers=num_workers, **{**options, **more})
        return [epoch_of(loader) for _ in range(3)], loader

    found, loader = epochs(auto(2, **at_random))
    assert len({decision.to_count for decision in loader.decisions}) > 2
    assert loader.report().placement.num_workers == loader.num_workers
    expected, _ = epochs(3, in_order=True)
    if not options.get("in_order", True):
        found, expected = ([sorted(map(str, each)) for each in both] for both in (found, expected))
    assert found == expected


def test_worker_that_joins_and_cannot_start_ends_the_epoch():
    """The loop has its error, and then the end."""
    loader = ThreadLoader(
        MapData(30),
        num_workers=auto(1, max_threads=6),
        worker_init_fn=lambda number: {0: "a licence"}[number],
    )
    batches = iter(loader)
    backend_of(batches).resize(3, 6)
    with pytest.raises(KeyError, match=r"[12]"):
        list(batches)
    assert next(batches, None) is None


@pytest.mark.parametrize(
    ("dataset", "options"), [(StreamData(60, split=True), {}), (MapData(60), {"rng": "worker"})]
)
def test_number_stays_where_it_would_show(dataset, options, at_random):
    """An iterable dataset divides itself among its workers; with rng="worker" each has a stream."""
    loader = ThreadLoader(dataset, num_workers=auto(2, **at_random), **options)
    number = loader.num_workers
    assert not is_tuned(loader)
    fixed = ThreadLoader(dataset, num_workers=int(number), **options)
    torch.manual_seed(0)
    found = epoch_of(loader)
    torch.manual_seed(0)
    assert found == epoch_of(fixed)
    assert (loader.num_workers, loader.decisions) == (number, [])


def test_number_is_an_int_and_stays_auto_in_copies():
    """torch, Lightning and Accelerate take it for a number and build loaders from it."""
    loader = ThreadLoader(MapData(8), num_workers="auto")
    assert isinstance(loader.num_workers, int)
    assert loader.num_workers >= 1
    again = ThreadLoader(MapData(8), num_workers=loader.num_workers)
    for each in (loader, again, copy.copy(loader), pickle.loads(pickle.dumps(again))):
        assert is_tuned(each)
        assert each.num_workers == loader.num_workers
    assert not is_tuned(ThreadLoader(MapData(8), num_workers=int(loader.num_workers)))
    assert ThreadLoader(MapData(8), num_workers="auto", prefetch_factor=3).prefetch_factor == 3
    with pytest.raises(ValueError, match=r'num_workers="auto" needs figures.*stats=False'):
        ThreadLoader(MapData(8), num_workers="auto", stats=False)


def test_prefetch_fits_into_the_memory():
    """Of batches of 800 bytes: 4 workers make 8 ahead where there is room, else 5, at least 4."""
    state, most = tuning_module.TuningState(PerfParams.auto().tuning, "test"), []
    loader = DataLoader(MapData(4), num_workers=auto(4))
    for memory_bytes in (None, 10_400, 8_000, 100):
        state.tuner.bounds = Bounds(threads=8, cores=4, memory_bytes=memory_bytes)
        tuner = LoaderTuner(loader, state, backend=None)
        tuner._batch_bytes = 800
        most.append(tuner.max_outstanding)
    assert most == [8, 8, 5, 4]


def test_decisions_reach_the_trace_and_the_log(at_random, caplog):
    """With the keys that are promised. The last thousand are kept; whoever has read them has what
    there was then."""
    caplog.set_level(logging.INFO, logger="spdl_torch.autotune")
    loader = ThreadLoader(MapData(100), num_workers=auto(2, **at_random))
    assert len(epoch_of(loader)) == 100
    decisions = loader.decisions
    instants = [i for i in loader.profile().timelines[0].instants if i.name == "decision"]
    assert [i.details for i in instants] == [d.as_details() for d in decisions]
    assert set(instants[0].details) == {"t", "stage", "from", "to", "before", "after", "reason"}
    assert str(decisions[0]) in caplog.text
    for _ in range(1100):
        tuning_of(loader)._report(decisions[0], None)
    assert len(loader.decisions) == 1000
    assert len(decisions) == len(instants)


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


def test_dataset_is_tuned_over_its_passes(at_random, backends):
    """Every pass gives the same items, also in a copy for a worker process, and two at a time. The
    transfer to a device keeps its one thread."""
    params = tuned_by(**at_random)
    builder = params.apply(tuned_builder(range(300)).aggregate(4).add_sink())
    dataset = PipelineDataset(builder, **params.build_options())
    expected = list(PipelineDataset(tuned_builder(range(300)).aggregate(4).add_sink()))
    for each in (dataset, dataset, copy.deepcopy(dataset)):
        assert list(each) == expected
    assert list(zip(dataset, dataset, strict=True)) == list(zip(expected, expected, strict=True))
    options = params.build_options()
    on_device = PipelineDataset(builder, device="cuda", **options)
    assert [list(on_device) for _ in range(3)] == [expected] * 3
    assert {decision.stage for decision in options["tuner"].decisions} <= {"a", "b", "kept"}


def test_apply_keeps_the_order_of_stages_that_may_grow():
    """Those with one thread; what is in keep stays; a name that no stage has is refused."""
    spec = PerfParams.auto(keep=["kept"]).apply(tuned_builder([]).aggregate(2).add_sink())
    orders = [stage.output_order for stage in spec.get_config().pipes]
    assert orders == ["input", "input", "completion", "completion"]
    with pytest.raises(ValueError, match="no stage 'other'"):
        PerfParams.auto(keep=["other"]).apply(tuned_builder([]).add_sink())


class WhoWaits(Dataset):
    """A sample says which thread made it, the only one of its process or not, whether that has
    begun as a worker, and as which. The first five wait until ``open`` is called; pipes, because a
    process may be killed while it waits."""

    begun = None

    def __init__(self):
        self.gate, self.inside = os.pipe(), os.pipe()
        weakref.finalize(
            self, lambda ends: [os.close(end) for end in ends], self.gate + self.inside
        )

    def open(self):
        os.write(self.gate[1], b".")  # nobody reads it

    def wait_inside(self, number):
        for _ in range(number):
            assert select.select([self.inside[0]], [], [], PATIENCE_SECONDS)[0]
            os.read(self.inside[0], 1)

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index < 5:
            os.write(self.inside[1], b".")
            assert select.select([self.gate[0]], [], [], PATIENCE_SECONDS)[0]
        info, thread = get_worker_info(), threading.get_native_id()
        return torch.tensor([index, thread, self.begun == thread, info.id, info.num_workers])


def begin(number):
    """A ``worker_init_fn``."""
    get_worker_info().dataset.begun = threading.get_native_id()


@pytest.mark.parametrize(
    ("isolation", "kind"), [("thread", "worker"), ("process", "worker process")]
)
def test_workers_join_and_leave_in_an_epoch(isolation, kind):
    """Four samples are made at once after growth, by workers like any other: their ids are below
    the number that all see. Those that leave answer their jobs first, and end; figures and rows of
    all are kept."""
    list(DataLoader(Indices(4), num_workers=1, isolation="process"))  # opens what stays
    release_what_has_ended()
    before, dataset = num_fds(), WhoWaits()
    options = {"isolation": isolation, "worker_init_fn": begin}
    loader = DataLoader(dataset, num_workers=auto(1, max_threads=6), **options)
    batches = iter(loader)
    resize(batches, 4)
    give_out(batches)
    dataset.wait_inside(4)  # the first one has the second sample as well
    assert loader.num_workers == loader.snapshot().stages[0].concurrency == 4
    resize(batches, 1)
    dataset.open()
    made = torch.cat(list(batches)).tolist()
    assert [index for index, *_ in made] == list(range(60))
    assert len({thread for _, thread, *_ in made}) == 4
    assert {tuple(others) for _, _, *others in made} == {(1, number, 6) for number in range(4)}
    assert len({thread for index, thread, *_ in made if index >= 8}) == 1
    assert loader.snapshot().stages[0].tasks.num_tasks == 60
    assert loader.report().placement.num_processes == (isolation == "process")
    rows = [row.name for row in loader.profile().timelines[0].rows if row.role == "stage"]
    kind = "worker" if isolation == "thread" else "worker process"
    assert rows == [f"{kind}[{n}]" for n in range(4)]
    del loader, batches, dataset
    gc.collect()
    assert_threads_end()
    release_what_has_ended()
    assert num_fds() == before


def test_number_of_a_worker_that_left_is_given_again():
    """In the same epoch, to a thread that works."""
    loader = ThreadLoader(Indices(10_000), None, num_workers=auto(1, max_threads=2))
    batches = iter(loader)
    for number in (2, 1, 2):
        resize(batches, number)
        while sum(each.name.startswith("spdl-loader") for each in loader_threads()) != number:
            next(batches)  # who leaves has a job before
    loader.close()


def test_process_that_is_killed_while_it_leaves_loses_nothing(caplog):
    """Its jobs are made again, whoever is left."""
    dataset = WhoWaits()
    loader = DataLoader(dataset, num_workers=auto(3, max_threads=6))
    batches = iter(loader)
    resize(batches, 3)
    dataset.wait_inside(3)
    leaving = children_of(batches)[2].pid
    resize(batches, 1)
    os.kill(leaving, signal.SIGKILL)
    dataset.open()
    assert torch.cat(list(batches))[:, 0].tolist() == list(range(60))
    assert "was killed by SIGKILL" in caplog.text
    assert children() == []


class QuickInCompany(Indices):
    """Waits, as for storage, and so long for one process alone that it is busy, and a second one
    gains, whatever else the machine does."""

    def __init__(self):
        super().__init__(1_000_000)
        self.present = torch.zeros(4).share_memory_()

    def __getitem__(self, index):
        self.present[get_worker_info().id] = 1
        signal.sigtimedwait([], 0.05 if self.present.sum() < 2 else 0.001)
        return index


def test_number_settles(caplog):
    """From one process on, by the loop's speed; the report shows what was decided."""
    dataset, workers = QuickInCompany(), auto(1, max_threads=4, window_seconds=0.1)
    # One more worker means four more jobs, of which each has one, in turns.
    loader = DataLoader(dataset, num_workers=workers, batch_size=1, prefetch_factor=4)
    batches = iter(loader)
    for _ in batches:
        if tuning_of(loader).tuner.is_settled:
            break
        # A busy machine may start a process long after the window that is to judge it has begun.
        if dataset.present.sum() < loader.num_workers:
            give_out(batches)
            until(lambda: dataset.present.sum() >= loader.num_workers)
    assert loader.num_workers > 1
    assert f'num_workers="auto": {loader.decisions[-1]}' in shown(loader.report())


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


def test_number_stays_where_no_more_processes_can_be_started(monkeypatch, caplog):
    """The log says so, and the others go on."""
    options = {"isolation": "process", "num_workers": auto(1, max_threads=6)}
    loader = DataLoader(Indices(150), **options)
    batches = iter(loader)
    resize(batches, 1)

    def refuse(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr("spdl_torch.loader.backends.processes.worker_process.start_child", refuse)
    assert backend_of(batches).resize(3, 6) == 1
    assert backend_of(batches).resize(2, 4) == 1
    assert "no more processes" in caplog.text
    assert len(list(batches)) == 150
