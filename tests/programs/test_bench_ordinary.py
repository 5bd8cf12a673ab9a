"""``python examples/bench ordinary`` and ``program``: the datasets, what is compared, a loss."""

import importlib
import io
import itertools
import pickle
from dataclasses import replace
from functools import partial

import pytest
from bench import table_ordinary
from bench.command import run_bench
from bench.ordinary.catalogue import ORDINARY
from bench.ordinary.passes import check_batches
from bench.program.plans import DATASETS, ProgramPlan
from bench.program.train import train
from bench.tables import BenchOptions
from support.loaders import library
from support.measures_here import measure_here

import spdl_torch

COUNT, BATCH = 8, 4

# Datasets as people write them leave the end of a connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the datasets' data are written, once."""
    return tmp_path_factory.mktemp("ordinary")


@pytest.mark.parametrize("ordinary", ORDINARY, ids=lambda one: one.name)
def test_dataset_gives_torchs_batches(ordinary, folder):
    """Where nothing is random; the others give whole batches. All can be sent to a worker."""
    for module in ordinary.needs:
        library(module)
    make = partial(replace(ordinary, batch_size=BATCH).arguments, folder, COUNT)
    dataset = pickle.loads(pickle.dumps(make()["dataset"]))
    assert getattr(type(dataset), "__getitems__", None) is None or "TensorDataset" in ordinary.name
    if ordinary.is_random:
        assert len(list(spdl_torch.DataLoader(**make()))) == COUNT // BATCH
    else:
        check_batches(make, 0)


def test_wrong_batches_fail_the_table(monkeypatch):
    """The row says so, and the exit status is 1; the other rows are measured."""
    rows = importlib.import_module("bench.ordinary.rows")
    torchs = rows.ScaledRows.__getitem__
    calls = itertools.count()
    monkeypatch.setattr(
        rows.ScaledRows,
        "__getitem__",
        lambda self, index: (torchs(self, index)[0] + next(calls), index),
    )
    status, printed = smoke("rows, arithmetic", "rows, (x[i]")
    (failed,) = [line for line in printed.splitlines() if "failed: " in line]
    assert failed.startswith("rows, arithmetic")
    assert "batch 0 is not torch's" in failed
    assert status == 1
    assert any(line.startswith("rows, (x[i]") for line in printed.splitlines())


def smoke(*only, workers=(2,)):
    """Exit status, and what a short run printed."""
    out = io.StringIO()
    options = BenchOptions(table="ordinary", rounds=1, smoke=True, only=only, workers=workers)
    status = run_bench(options, out, io.StringIO(), run=measure_here)
    return status, out.getvalue()


def test_both_loaders_are_measured_with_and_without_workers():
    """A row, and the mean below it."""
    status, printed = smoke("rows, arithmetic", workers=(2, 1))
    names = [line.split("  ")[0] for line in printed.splitlines()]
    assert status == 0
    assert "LOSS" not in printed, "a short run judges nothing"
    assert names.index("rows, arithmetic") < names.index(table_ordinary.MEAN)
    for count in ("0 workers", "2 workers", "1 worker"):
        assert f"  {count}: torch, 1/s" in printed


def plan_of(dataset="rows", **more):
    """One epoch with the light network, without workers."""
    return ProgramPlan(
        dataset=dataset, **{"network": "light", "num_workers": 0, "num_epochs": 1, **more}
    )


@pytest.mark.parametrize("dataset", DATASETS)
def test_program_trains_on_every_dataset(dataset, folder):
    """Whatever its batches look like."""
    plan = plan_of(dataset, num_epochs=2)
    for needed in plan.ordinary.needs:
        library(needed)
    (own := folder / "programs").mkdir(exist_ok=True)  # of another number of samples
    said = train("spdl_torch", plan, own, 2 * plan.ordinary.batch_size)
    assert set(said) == {"import_ms", "first_batch_ms"}
    assert said["first_batch_ms"] > 0


def test_missing_samples_are_an_error(tmp_path):
    """A loader that leaves some out would seem to be faster."""
    plan = plan_of("iterable")
    train("spdl_torch", plan, tmp_path, 64)
    with pytest.raises(RuntimeError, match="the loader gave 64 samples, not 128"):
        train("spdl_torch", plan, tmp_path, 128)
