"""``python examples/bench ordinary``: the datasets, what is compared, what is a loss."""

import importlib
import io
import itertools
import pickle
from dataclasses import replace
from functools import partial

import pytest
from _loader_helpers import library
from _measures_here import measure_here
from bench import table_ordinary
from bench.command import run_bench
from bench.ordinary.catalogue import ORDINARY
from bench.ordinary.passes import DifferentBatches, check_batches
from bench.report import Report
from bench.tables import BenchOptions, load_table

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


class Counter:
    """A sample that is another one with every look at it."""

    def __init__(self):
        self.looks = itertools.count()

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return index, next(self.looks) * (index == COUNT - 1)


class Shorter(Counter):
    """Ends early in ours, which is the second to be asked for a dataset."""

    made = itertools.count()

    def __init__(self):
        self.length = COUNT if next(self.made) % 2 == 0 else BATCH

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def test_other_batch_than_torchs_is_an_error():
    """The comparison sees one number of one sample, and batches that are missing."""
    counter = Counter()
    make = partial(dict, dataset=counter, batch_size=BATCH)
    with pytest.raises(DifferentBatches, match=r"batch 1 is not torch's; it differs at \[1\]"):
        check_batches(make, 0)
    with pytest.raises(DifferentBatches, match="batch 1 is not torch's"):
        check_batches(lambda: {"dataset": Shorter(), "batch_size": BATCH}, 0)


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
    status, printed = smoke("rows, arithmetic", "fixed")
    (failed,) = [line for line in printed.splitlines() if "failed: " in line]
    assert failed.startswith("rows, arithmetic")
    assert "batch 0 is not torch's" in failed
    assert status == 1
    assert table_ordinary.FIXED in printed


def smoke(*only, **more):
    """Exit status, and what a short run printed."""
    out = io.StringIO()
    options = BenchOptions(table="ordinary", rounds=1, smoke=True, only=only, **more)
    status = run_bench(options, out, io.StringIO(), run=measure_here)
    return status, out.getvalue()


def test_both_loaders_are_measured_with_and_without_workers():
    """A row, the mean below it, the costs in a table of their own, and where they arise."""
    status, printed = smoke("rows, arithmetic", "fixed", "profile", more_workers=(1,))
    lines = printed.splitlines()
    names = [line.split("  ")[0] for line in lines]
    assert status == 0
    assert "LOSS" not in printed, "a short run judges nothing"
    order = [
        names.index(n) for n in ("rows, arithmetic", table_ordinary.MEAN, table_ordinary.FIXED)
    ]
    assert order == sorted(order)
    for count in ("0 workers", "2 workers", "1 worker"):
        assert f"  {count}: torch, 1/s" in printed
    for loader in ("torch: ", "ours: "):
        assert sum(name.startswith(loader) for name in names) > 3
    assert "ours, µs/batch" in lines[order[2] - 2]
    assert "1/s" not in lines[order[2] - 2]


def report_of(ratios):
    """Two rounds of each dataset, the second one better by a tenth."""
    report = Report(title="", metrics=load_table("ordinary").metrics, settings={})
    for name, ratio in ratios.items():
        for number, factor in enumerate((1.0, 1.1)):
            values = {"ratio_0": ratio * factor, "ratio_2": 0.95 * ratio * factor}
            values |= {"ratio_4": 2.0, "torch_0": 1000.0 + number}
            report.add(name, values, number)
    return report


def test_losses_are_marked_and_the_geometric_mean_ends_the_table():
    """Each round has its mean. A median below 0.97, with workers below 1, is a loss, in its row and
    in a line; more so if every round is below."""
    report = report_of({"slow": 0.5, "quick": 2.0, "even": 1.0})
    report.add("quick", {"ratio_0": 100.0, "ratio_2": 2.0, "ratio_4": 2.0}, 2)  # then interrupted
    remarks = table_ordinary.conclude(report)
    assert set(report.rows[table_ordinary.MEAN]["ratio_0"]) == {0, 1}
    assert report.median(table_ordinary.MEAN, "ratio_0") == pytest.approx(1.05)
    assert report.median(table_ordinary.MEAN, "ratio_4") == pytest.approx(2.0)
    assert remarks == [
        "LOSSES with 0 workers: 1 of 3 medians are below 0.97, 1 in every round: slow 0.53 in "
        "every round.",
        "LOSSES with 2 workers: 2 of 3 medians are below 1.00, 1 in every round: slow 0.50 in "
        "every round; even 1.00.",
        "LOSSES with 4 workers: 0 of 3 medians are below 1.00, 0 in every round.",
    ]
    rows = {line.split("  ")[0]: line for line in report.text().splitlines()}
    assert list(rows)[-1] == table_ordinary.MEAN
    assert "LOSS 0.53 (0.50..0.55)" in rows["slow"]
    assert "LOSS 0.50 (0.47..0.52)" in rows["slow"]
    assert "loss 1.00 (0.95..1.04)" in rows["even"]
    assert "LOSS" not in rows["quick"] + rows["even"]
    assert "loss" not in rows["quick"]
    assert "1,000" in rows["even"]
    assert "(1,000..1,001)" not in rows["even"], "a speed is there to be read beside its ratio"
