"""``bench transfer``: copies to a GPU, on the stand-in for one."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from _lazy_device import LazyBackend
from _lazy_gpu import Cuda, as_torchs, gpu
from _loader_helpers import no_thread_left
from _measures_here import measure_here
from bench import device_copies
from bench.arguments import main
from bench.command import run_bench
from bench.tables import BenchOptions, load_table

__all__ = ["gpu", "no_thread_left"]

PROMPT = pytest.mark.parametrize("gpu", [{"is_prompt": True}], indirect=True)
WAYS = ("ours, pinned", "ours", "pin and copy", "plain")


@PROMPT
def test_smoke_run_measures_every_way_of_torch_and_ours(gpu, monkeypatch, tmp_path):
    """Each has its GB/s in the report, with the name of the device; nothing fails."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
    options = BenchOptions(table="transfer", rounds=1, smoke=True, json=tmp_path / "figures.json")
    with as_torchs(gpu, monkeypatch, device_copies):
        status = run_bench(options, io.StringIO(), io.StringIO(), run=measure_here)
    figures = json.loads(options.json.read_text())
    assert (status, figures["failures"]) == (0, {})
    assert figures["settings"]["device"] == "a stand-in"
    assert list(figures["rows"]) == ["pinned copy", *WAYS]
    assert all(row["gigabytes_per_second"]["median"] > 0 for row in figures["rows"].values())


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    """In one line, with exit status 2, and nothing is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["transfer", "--smoke"]) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error == (
        "bench: transfer measures copies to a GPU, and torch finds no CUDA device here "
        "(torch.cuda.is_available() is False).\n"
    )


def test_table_measures_every_way():
    """And a way's name is its row's."""
    table = load_table("transfer")
    assert [one.name for one in table.contenders[1:]] == list(device_copies.WAYS)
    assert {*WAYS, "SPDL"} == set(device_copies.WAYS)


@PROMPT
@pytest.mark.parametrize("name", WAYS)
def test_way_that_loses_a_batch_fails(gpu, monkeypatch, name):
    """Its figure would be of less work than the others'."""
    batch = device_copies.make_batch(2, 8)

    def losing(batches):
        return itertools.islice(device_copies.WAYS[name](batches), device_copies.WARM_UP + 3)

    with as_torchs(gpu, monkeypatch, device_copies):
        assert device_copies.seconds_of(device_copies.WAYS[name], batch, 4) > 0
        with pytest.raises(RuntimeError, match="arrived with other contents"):
            device_copies.seconds_of(losing, batch, 4)


@PROMPT
def test_error_of_a_thread_is_the_measurements(gpu, monkeypatch):
    """A row that fails says why."""
    monkeypatch.setattr(LazyBackend, "out_of_memory", True)
    batch = device_copies.make_batch(2, 8)
    with (
        as_torchs(gpu, monkeypatch, device_copies),
        pytest.raises(torch.OutOfMemoryError, match="lazy device is full"),
    ):
        device_copies.seconds_of(device_copies.WAYS["ours"], batch, 4)


def test_no_batch_is_begun_before_the_clock_starts():
    """Those that a thread is ahead by would count as done in no time."""
    begun = []

    class Go(threading.Event):
        def wait(self, timeout=None):
            self.num_begun = len(begun)
            return super().wait(timeout)

    go = Go()
    batches = device_copies.on_a_thread(
        lambda batch: begun.append(batch) or batch, device_copies.held_back("batch", 5, go)
    )
    warm_up = device_copies.WARM_UP
    assert list(itertools.islice(batches, warm_up)) == ["batch"] * warm_up
    go.set()
    assert list(batches) == ["batch"] * 5
    assert go.num_begun == warm_up


@PROMPT
@pytest.mark.parametrize("name", ["pinned copy", *WAYS])
def test_device_has_nothing_left_to_do_whenever_the_clock_is_read(gpu, monkeypatch, name):
    """Neither copies of the warm-up when it starts, nor measured ones when it stops."""
    moments = []

    def noted(what, function):
        def call(*args):
            moments.append(what)
            return function(*args)

        return call

    clock = SimpleNamespace(perf_counter=noted("clock", time.perf_counter))
    monkeypatch.setattr(device_copies, "time", clock)
    monkeypatch.setattr(device_copies, "_ends", noted("read", device_copies._ends))
    monkeypatch.setattr(Cuda, "synchronize", noted("synchronize", Cuda.synchronize))
    batch = device_copies.make_batch(2, 8)
    with as_torchs(gpu, monkeypatch, device_copies):
        if name == "pinned copy":
            device_copies.copy_alone(batch, 4)
        else:
            device_copies.seconds_of(device_copies.WAYS[name], batch, 4)
    just_before = [before for before, what in itertools.pairwise(moments) if what == "clock"]
    assert just_before == ["synchronize"] * 2
