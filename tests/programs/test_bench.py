"""``python examples/bench``: every table in its short form, failures, Ctrl-C."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from _moving_noise import write_video
from bench import device_copies
from bench.arguments import main
from bench.command import run_bench
from bench.loaders import (
    Work,
    bare_threads,
    grain_threads,
    ours,
    spdl_batches,
    spdl_items,
    torch_loader,
)
from bench.peers import installed, left_out
from bench.tables import TABLES, BenchOptions
from PIL import Image
from support.datasets import Indices
from support.folders import ROOT
from support.measures_here import measure_here

BENCH = ROOT / "examples" / "bench"
KEYS = {"title", "settings", "metrics", "rows", "ratios", "failures", "remarks"}


LOADERS = {
    "ours": (ours, None),
    "torch": (torch_loader, None),
    "bare threads": (bare_threads, None),
    "SPDL, items": (spdl_items, "spdl"),
    "SPDL, batches": (spdl_batches, "spdl"),
    "Grain": (grain_threads, "grain"),
}


@pytest.mark.filterwarnings("ignore")  # of the peers, about themselves
@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_gives_each_sample_once(name):
    """So all of them are measured at the same work; the last batch is a part of one."""
    run, needs = LOADERS[name]
    if needs is not None and not installed(needs):
        pytest.skip(left_out(needs))
    workers = 0 if name == "torch" else 2
    work = Work(dataset=Indices(22), num_samples=22, batch_size=4, num_workers=workers)
    batches = [batch.tolist() for batch in run(work)()]
    assert sorted(itertools.chain(*batches)) == list(range(22))
    assert sorted(map(len, batches)) == [2, 4, 4, 4, 4, 4]


def bench(options):
    """Exit status and what was printed."""
    out, progress = io.StringIO(), io.StringIO()
    status = run_bench(options, out, progress, run=measure_here)
    return status, out.getvalue(), progress.getvalue()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Two classes of three small JPEGs."""
    folder = tmp_path_factory.mktemp("photographs")
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(3):
            image = Image.radial_gradient("L").resize((300, 260 + number)).convert("RGB")
            image.save(folder / name / f"{number}.jpg")
    return folder


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """One of three seconds."""
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "moving.mp4", seconds=3)
    return folder


@pytest.mark.filterwarnings("ignore")  # of the peers, about themselves
@pytest.mark.parametrize(
    "table",
    [
        pytest.param(name, marks=[pytest.mark.long] if name == "program" else [])
        for name in TABLES
        if name not in ("transfer", "ordinary")  # that needs a GPU, this has a file of its own
    ],
)
def test_smoke_run_of_a_table(table, photographs, videos, tmp_path):
    """Every table runs to its end: ours is measured, JSON is written."""
    data = videos if table == "clips" else photographs
    figures = tmp_path / "figures.json"
    options = BenchOptions(table=table, rounds=1, smoke=True, data=data, json=figures)
    status, printed, progress = bench(options)
    figures = json.loads(options.json.read_text())
    assert (status, figures["failures"]) == (0, {}), progress
    assert set(figures) == KEYS
    assert figures["rows"]
    for row, metrics in figures["rows"].items():
        assert any(line.startswith(row) for line in printed.splitlines()), printed
        assert set(metrics) <= set(figures["metrics"])
        for summary in metrics.values():
            assert len(summary["values"]) == 1
    if table != "program":
        assert any("ours" in row for row in figures["rows"])


def test_contender_that_fails_is_a_row_with_its_error(photographs, tmp_path):
    """The others are measured all the same. A PNG that is called JPEG is Pillow's business."""
    (tmp_path / "fish").mkdir()
    Image.open(photographs / "cat" / "0.jpg").save(tmp_path / "fish" / "0.jpg", format="PNG")
    only = ("torch, Pillow", "torch, torchvision")
    options = BenchOptions(table="photographs", rounds=2, smoke=True, data=tmp_path, only=only)
    status, printed, progress = bench(options)
    assert status == 0
    (failed,) = [line for line in printed.splitlines() if "failed: " in line]
    assert failed.startswith("torch, torchvision")
    assert "RuntimeError" in failed
    assert any(line.startswith("torch, Pillow  ") for line in printed.splitlines())
    assert progress.count(": torch, torchvision\n") == 1, "it failed once and was tried no more"


def test_way_that_loses_a_batch_fails(monkeypatch):
    """Its figure would be of less work than the others'. Here its device is the host."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **others: zeros(*size, **others))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    batch = device_copies.make_batch(2, 8)
    assert device_copies.seconds_of(iter, batch, 4) > 0
    with pytest.raises(RuntimeError, match="arrived with other contents"):
        device_copies.seconds_of(lambda each: itertools.islice(each, 6), batch, 4)  # of 3 + 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a table"),
        (["photos"], "there is no table 'photos'; there are photographs, crop"),
        (["tiny", "--only", "theirs"], "--only 'theirs' is the beginning of none"),
        (["engine", "--workers", "2", "4"], "engine takes one number of workers, got 2 4"),
        (["clips", "--data", "nowhere"], "--data: nowhere must hold videos, found none."),
        (["transfer", "--smoke"], "transfer measures copies to a GPU, and torch finds no CUDA"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments, message, capsys, monkeypatch):
    """Exit status 2, before anything is measured: one line that names the command once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(arguments) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.startswith(f"bench: {message}")
    assert error.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals of a terminal")
def test_interrupt_ends_with_what_there_is(tmp_path):
    """Ctrl-C in the second measurement: the first is in the table and in the JSON, status 130."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "engine", "--smoke", "--rounds", "1000"]
    with subprocess.Popen(
        [*command, "--json", str(figures)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for line in process.stderr:
                if line.startswith("round 2/"):
                    break
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Interrupted" in printed
    assert len(json.loads(figures.read_text())["rows"]["ours"]["three_stages_us"]["values"]) == 1
