"""``python examples/bench``: every table in its short form, failures, Ctrl-C; datasets as people
write them, and programs that train on them."""

import functools
import io
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import traceback
from dataclasses import replace

import pytest
import torch
from _moving_noise import write_video
from bench import loaders, table_ordinary, table_transfer
from bench.child_process import ChildFailure
from bench.command import main, run_bench
from bench.ordinary import rows
from bench.ordinary.catalogue import ORDINARY
from bench.peers import installed, left_out
from bench.program import DATASETS, ProgramPlan, train
from bench.tables import TABLES, BenchOptions, load_table
from PIL import Image
from support.datasets import Indices
from support.folders import ROOT
from support.loaders import library

from spdl_torch import DataLoader

# Datasets as people write them leave the end of a connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")

LOADERS = {
    "ours": (loaders.ours, None),
    "torch": (loaders.torch_loader, None),
    "bare threads": (loaders.bare_threads, None),
    "SPDL, items": (loaders.spdl_items, "spdl"),
    "SPDL, batches": (loaders.spdl_batches, "spdl"),
    "Grain": (loaders.grain_threads, "grain"),
}


@pytest.mark.filterwarnings("ignore")  # of the peers, about themselves
@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_gives_each_sample_once(name):
    """So all of them are measured at the same work; the last batch is a part of one."""
    run, needs = LOADERS[name]
    if needs is not None and not installed(needs):
        pytest.skip(left_out(needs))
    workers = 0 if name == "torch" else 2
    work = loaders.Work(dataset=Indices(22), num_samples=22, batch_size=4, num_workers=workers)
    batches = [batch.tolist() for batch in run(work)()]
    assert sorted(itertools.chain(*batches)) == list(range(22))
    assert sorted(map(len, batches)) == [2, 4, 4, 4, 4, 4]


def measure_here(program, argument, limit_seconds):
    """The answer of ``python examples/bench/child.py JOB``, and no memory: a fresh process would
    prove nothing more."""
    job = json.loads(argument)
    table = load_table(job["table"])
    threads = torch.get_num_threads()
    try:
        answer = dict(table.measure(table.contender(job["contender"]), job["settings"]))
    except Exception:
        raise ChildFailure(traceback.format_exc()) from None
    finally:
        torch.set_num_threads(threads)  # tables change it for their process
    return json.loads(json.dumps(answer)), 0.0


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


@pytest.mark.filterwarnings("ignore")  # of the peers, about themselves
@pytest.mark.parametrize(
    "table",
    [
        pytest.param(name, marks=[pytest.mark.long] if name == "program" else [])
        for name in TABLES
        if name not in ("transfer", "ordinary")  # that needs a GPU, this is below
    ],
)
def test_smoke_run_of_a_table(table, photographs, tmp_path):
    """Every table runs to its end: ours is measured, JSON is written."""
    data, figures = photographs, tmp_path / "figures.json"
    if table == "clips":
        write_video(tmp_path / "moving.mp4", seconds=3)
        data = tmp_path
    options = BenchOptions(table=table, rounds=1, smoke=True, data=data, json=figures)
    status, printed, progress = bench(options)
    figures = json.loads(options.json.read_text())
    assert (status, figures["failures"]) == (0, {}), progress
    keys = {"title", "settings", "metrics", "rows", "ratios", "failures", "remarks"}
    assert set(figures) == keys
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
    batch = table_transfer.make_batch(2, 8)
    on_a_thread = functools.partial(table_transfer.on_a_thread, dict)
    assert table_transfer.seconds_of(batch, 4, way=on_a_thread) > 0
    with pytest.raises(RuntimeError, match="arrived with other contents"):
        table_transfer.seconds_of(batch, 4, way=lambda each: itertools.islice(each, 6))  # of 3 + 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a table"),
        (["photos"], "there is no table 'photos'; there are photographs, crop"),
        (["engine", "--only", "theirs"], "--only 'theirs' is the beginning of none"),
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the datasets' data are written, once."""
    return tmp_path_factory.mktemp("ordinary")


@pytest.mark.parametrize("ordinary", ORDINARY, ids=lambda one: one.name)
def test_dataset_gives_torchs_batches(ordinary, folder):
    """Where nothing is random; the others give whole batches. All can be sent to a worker."""
    for module in ordinary.needs:
        library(module)
    make = functools.partial(replace(ordinary, batch_size=4).arguments, folder, 8)
    dataset = pickle.loads(pickle.dumps(make()["dataset"]))
    assert getattr(type(dataset), "__getitems__", None) is None or "TensorDataset" in ordinary.name
    if ordinary.is_random:
        assert len(list(DataLoader(**make()))) == 2
    else:
        table_ordinary.check_batches(make, 0)


def test_wrong_batches_fail_the_table(monkeypatch):
    """The row says so, and the exit status is 1; the other rows are measured."""
    torchs, calls = rows.ScaledRows.__getitem__, itertools.count()

    def changing(self, index):
        return torchs(self, index)[0] + next(calls), index

    monkeypatch.setattr(rows.ScaledRows, "__getitem__", changing)
    status, printed, _ = smoke_of_ordinary("rows, arithmetic", "rows, (x[i]")
    (failed,) = [line for line in printed.splitlines() if "failed: " in line]
    assert failed.startswith("rows, arithmetic")
    assert "batch 0 is not torch's" in failed
    assert status == 1
    assert any(line.startswith("rows, (x[i]") for line in printed.splitlines())


def smoke_of_ordinary(*only, workers=(2,)):
    """What a short run says of some of the datasets as people write them."""
    names = {"table": "ordinary", "only": only, "workers": workers}
    return bench(BenchOptions(rounds=1, smoke=True, **names))


def test_both_loaders_are_measured_with_and_without_workers():
    """A row, and the mean below it."""
    status, printed, _ = smoke_of_ordinary("rows, arithmetic", workers=(2, 1))
    names = [line.split("  ")[0] for line in printed.splitlines()]
    assert status == 0
    assert "LOSS" not in printed, "a short run judges nothing"
    assert names.index("rows, arithmetic") < names.index(table_ordinary.MEAN)
    for count in ("0 workers", "2 workers", "1 worker"):
        assert f"  {count}: torch, 1/s" in printed


def plan_of(dataset, num_epochs):
    """With the light network, without workers."""
    return ProgramPlan(dataset=dataset, network="light", num_workers=0, num_epochs=num_epochs)


@pytest.mark.parametrize("dataset", DATASETS)
def test_program_trains_on_every_dataset(dataset, folder):
    """Whatever its batches look like."""
    plan = plan_of(dataset, 2)
    for module in plan.ordinary.needs:
        library(module)
    (own := folder / "programs").mkdir(exist_ok=True)  # of another number of samples
    said = train("spdl_torch", plan, own, 2 * plan.ordinary.batch_size)
    assert set(said) == {"first_batch_ms"}
    assert said["first_batch_ms"] > 0


def test_missing_samples_are_an_error(tmp_path):
    """A loader that leaves some out would seem to be faster."""
    plan = plan_of("iterable", 1)
    train("spdl_torch", plan, tmp_path, 64)
    with pytest.raises(RuntimeError, match="the loader gave 64 samples, not 128"):
        train("spdl_torch", plan, tmp_path, 128)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals of a terminal")
def test_interrupt_ends_with_what_there_is(tmp_path):
    """Ctrl-C in the second measurement: the first is in the table and in the JSON, status 130."""
    figures, pipes = tmp_path / "figures.json", dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    options = ["engine", "--smoke", "--rounds", "1000", "--json", figures]
    command = [sys.executable, ROOT / "examples" / "bench", *options]
    with subprocess.Popen(command, text=True, **pipes) as process:
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
