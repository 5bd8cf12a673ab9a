"""``bench transfer`` and ``bench hand-over``: copies to a GPU, on the stand-in for one."""

from __future__ import annotations

import io
import itertools
import json

import pytest
import torch
from _gpus import OnHost, as_torchs, gpu
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
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize("name", ["ours, threads, GPU", "ours, processes, GPU", "torch, GPU"])
def test_hand_over_is_measured_on_a_gpu(gpu, monkeypatch, name):
    """Of ours and of torch's, which the loop moves."""
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.device.drain)
    table = load_table("hand-over")
    with OnHost():
        found = table.measure(table.contender(name), {"num_workers": 2, "batches": 10})
    assert found["median_us"] >= found["receiving_us"] > 0
