"""Traces of real runs: of loaders and pipelines, of a block, and when something goes wrong."""

import gc
import logging
import math
import os
import threading
from fractions import Fraction
from functools import partial
from hashlib import sha256

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.datasets import Made, MapData
from support.gates import Boom, GatedOp, until
from support.loaders import ThreadLoader as DataLoader
from support.stages import add, plans
from support.trace_check import check_trace, content_of

from spdl_torch import PipelineDataset
from spdl_torch.observe import flight_recorder, trace_counter, trace_event, tracing
from spdl_torch.observe.trace import trace_file, tracing as tracing_module
from spdl_torch.pipeline import PipelineBuilder


@pytest.fixture
def path(tmp_path):
    """Of a trace."""
    return tmp_path / "run.json.gz"


def events_of(path, **fields):
    """The events of a trace that can be shown, with these fields."""
    check_trace(path)
    found = content_of(path)["traceEvents"]
    return [each for each in found if all(each.get(key) == fields[key] for key in fields)]


def slices_in(path, row):
    """The slices of the rows of that name."""
    tids = {e["tid"] for e in events_of(path, name="thread_name") if e["args"]["name"] == row}
    return [each for each in events_of(path, ph="X") if each["tid"] in tids]


def fail_in_loop(error):
    """When one of the workers has made its second batch: the first is recorded, as a sample takes
    long enough. The frame in the error's traceback keeps the loader."""
    hashed = Made(lambda index: sha256(bytes(10**6)).digest()[index], 8)
    loader = DataLoader(hashed, batch_size=2, num_workers=2)
    for number, _ in enumerate(loader):
        if number == 2:
            raise error


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_loader_s_trace_follows_every_batch_to_its_step(path, num_workers):
    """Each batch has a step, and an arrow from the worker that delivered it."""
    loader = DataLoader(MapData(20), batch_size=4, num_workers=num_workers)
    with tracing(path):
        for _ in loader:
            torch.ones(10).sum()
    workers = {f"worker[{n}]" for n in range(num_workers)}
    rows = {each["args"]["name"] for each in events_of(path, name="thread_name")}
    assert {"training"} <= rows <= {"training", *workers}, "who had nothing has none"
    steps = [each for each in slices_in(path, "training") if each["name"] == "Training Step"]
    assert [step["args"]["batch"] for step in steps] == list(range(5))
    arrows = {each["bind_id"] for each in events_of(path, flow_in=True)}
    assert check_trace(path).num_flows == len(arrows) == (5 if num_workers else 0)
    assert {step["bind_id"] for step in steps if "bind_id" in step} == arrows
    assert {"fetch", "collate"} <= {each["name"] for each in events_of(path, ph="X")}


@pytest.mark.parametrize("make", [
    lambda: DataLoader(MapData(8), batch_size=2, num_workers=2, persistent_workers=True),
    lambda: PipelineDataset(PipelineBuilder().add_source(range(8)).pipe(abs).add_sink()),
])  # fmt: skip
def test_profile_during_and_after_an_epoch(make):
    """``profile()`` may be asked for at any time; one that was not measured is refused."""
    list(loader := DataLoader(MapData(4), stats=False))
    with pytest.raises(RuntimeError, match="stats=False was given"):
        loader.profile()
    loader = make()
    with pytest.raises(RuntimeError, match="nothing was loaded yet"):
        loader.profile()
    iterator = iter(loader)
    next(iterator)
    assert loader.profile().timelines[0].rows
    list(iterator)
    assert loader.profile().report() == loader.report()
    list(loader)
    assert loader.profile().report().stats.stages[0].tasks.num_tasks == 8


@settings(max_examples=30, deadline=None)
@given(
    num_items=st.integers(1, 40),
    stages=st.lists(plans, min_size=1, max_size=3),
    most=st.integers(0, 40),
)
def test_the_trace_of_any_pipeline_is_well_formed(tmp_path_factory, pool, num_items, stages, most):
    """Slices nest, arrows have both ends and time goes forward, whatever the stages do."""
    builder = PipelineBuilder().add_source(range(num_items))
    for stage in stages:
        add(builder, stage, pool)
    pipeline = builder.add_sink(2).build(max_failures=10_000)
    path = tmp_path_factory.mktemp("trace") / "run.json"
    with tracing(path), pipeline.auto_stop():
        for number, _ in enumerate(pipeline):
            if number == most:
                break
    assert check_trace(path).num_slices > 0


def test_exception_of_the_block_passes_whatever_becomes_of_the_trace(path, monkeypatch, caplog):
    """It is the user's own, and what was before is in the trace. An error while writing is logged:
    it must not take the place of the training's own."""
    with pytest.raises(Boom, match="7"), tracing(path):
        fail_in_loop(Boom(7))
    assert events_of(path, ph="X")

    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(trace_file, "whole_file", refuse)
    with pytest.raises(Boom, match="7"), tracing(path):
        fail_in_loop(Boom(7))
    assert "no trace was written" in caplog.text
    assert "no space left" in caplog.text
    with pytest.raises(OSError, match="no space"), tracing(path):
        list(DataLoader(MapData(8)))


def test_a_counter_takes_whatever_is_one_number(path):
    """A loss is often a tensor, a metric a number of NumPy's; what has no place on a curve is left
    out. The name of a slice is a text, whatever was given."""
    values = [1.5, True, Fraction(3, 2), numpy.float32(1.5), torch.ones(1, 1), torch.tensor(2.5)]
    with tracing(path):
        for value in (*values, math.nan, torch.tensor(-math.inf)):
            trace_counter(0, value)
        with pytest.raises(TypeError, match="NoneType"):
            trace_counter(0, None)
        for name in (5, torch.tensor(1), b"x"):
            with trace_event(name):
                pass
    counts = [each["args"]["value"] for each in events_of(path, ph="C", name="counter 0")]
    assert counts == [1.5, 1, 1.5, 1.5, 1, 2.5]
    assert {each["name"] for each in events_of(path, ph="X")} == {"5", "tensor(1)", "b'x'"}


def test_a_garbage_collection_is_shown_once(path):
    """It belongs to the process, however many loaders ran at the time."""
    looked_at = [[] for _ in range(300_000)]  # takes long enough to be recorded
    with tracing(path):
        for _ in zip(DataLoader(MapData(4)), DataLoader(MapData(4)), strict=True):
            gc.collect()
    assert looked_at
    times = [each["ts"] for each in events_of(path, name="gc") if each["args"]["generation"] == 2]
    assert len(times) == len({*times}) == 4


def test_tracing_of_nothing_says_so(path, caplog):
    """No file, and a line in the log instead of an error."""
    with caplog.at_level(logging.WARNING, "spdl_torch.observe"), tracing(path):
        pass
    assert "nothing was loaded" in caplog.text
    assert not path.exists()


def test_failures_are_in_the_trace(path):
    """The moment, the stage, the item and what was said, which is cut where it is long."""

    def op(item):
        if item == 3:
            raise Boom("x" * 1000)
        return item

    pipeline = PipelineBuilder().add_source(range(5)).pipe(op, name="decode").add_sink().build()
    with tracing(path), pipeline.auto_stop():
        list(pipeline)
    (failure,) = events_of(path, ph="i", name="failure")
    error = "Boom: " + "x" * 194
    assert failure["args"].items() >= {"stage": "decode", "item": 3, "error": error}.items()


def test_a_stall_is_written_once(tmp_path, caplog):
    """A wait that is too long leaves one trace, which shows who waits, however often the recorder
    looks. The log says where none can be written."""
    op = GatedOp()
    pipeline = PipelineBuilder().add_source(range(3)).pipe(op).add_sink().build()
    traced = set()

    def dumps():
        tracing_module.trace_stalls(tmp_path, 0.05, 30, traced)
        return [*tmp_path.glob("stall-rank0-*.json.gz")]

    with pipeline.auto_stop():
        taker = threading.Thread(target=lambda: list(pipeline))
        taker.start()
        until(dumps)
        (path,) = {each for _ in range(10) for each in dumps()}
        tracing_module.trace_stalls(path / "folder", 0.05, 30, set())
        op.open()
        taker.join()
    assert "no trace of it was written" in caplog.text
    wait = slices_in(path, "training")[-1]
    assert (wait["name"], wait["dur"] >= 50_000) == ("Wait on Input Queue", True)  # µs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tracing, "this is a folder"),
        (lambda folder: tracing(f"{folder / 'none'}{os.sep}"), "this is a folder"),
        (partial(tracing, level="all"), 'level must be "item" or "batch", got \'all\''),
        (partial(flight_recorder, stall_seconds=0), "stall_seconds must be > 0, got 0"),
        (partial(flight_recorder, last_seconds=0), "last_seconds must be > 0, got 0"),
    ],
)
def test_bad_argument_is_refused_before_the_run(tmp_path, make, message):
    """Nobody trains for an hour to hear that the file's name is wrong."""
    with pytest.raises(ValueError, match=message), make(tmp_path):
        raise AssertionError("the block must not run")


def test_rank_comes_from_the_process_group(monkeypatch):
    """Whatever RANK the launcher sets, or none."""
    monkeypatch.setenv("RANK", "3")
    assert tracing_module.rank_of_process() == 3
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert tracing_module.rank_of_process() == 0
    finally:
        torch.distributed.destroy_process_group()
