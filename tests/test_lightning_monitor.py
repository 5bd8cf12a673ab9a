"""The Lightning callback: what the trainer's real loggers get, and what the user is told."""

from __future__ import annotations

import csv
import itertools
import re

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

lightning = pytest.importorskip("lightning")

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # noqa: E402

from spdl_torch import DataLoader, PipelineDataset  # noqa: E402
from spdl_torch.lightning import PipelineStatsMonitor  # noqa: E402
from spdl_torch.observe.laps import lap_between  # noqa: E402
from spdl_torch.pipeline import PipelineBuilder  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

STAGE_KEYS = {
    *("busy_ratio", "cpu_ratio", "wait_in_ratio", "wait_out_ratio", "items_per_second"),
    *("task_seconds_p50", "task_seconds_p99", "num_failures", "num_dropped", "concurrency"),
}


class Points(Dataset):
    """Sample i is the number i."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Module(lightning.LightningModule):
    """One weight; takes batches alone or in a dict or list."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        parts = batch.values() if isinstance(batch, dict) else [batch]
        return sum(self.layer(part).sum() for part in parts)

    def validation_step(self, batch, batch_idx):
        pass

    def test_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def ours():
    """Four batches of three."""
    return DataLoader(Points(), batch_size=3, num_workers=2)


def streamed():
    """The same out of a pipeline, whose stages have names that MLflow would refuse."""
    builder = PipelineBuilder().add_source(range(12)).pipe(float, name="<read>")
    return PipelineDataset(builder.aggregate(3).pipe(column, name="stack").add_sink())


def column(numbers):
    """A batch of numbers."""
    return torch.tensor(numbers).unsqueeze(1)


def trainer(folder, monitor, **options):
    """Logs every second step to a CSV file."""
    return lightning.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": CSVLogger(folder, name="", version=""),
            "log_every_n_steps": 2,
            "callbacks": [monitor],
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def rows(folder):
    """What the CSV file says: step and figures of each line."""
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        return [
            {key: float(value) for key, value in line.items() if value != ""}
            for line in csv.DictReader(file)
        ]


def logged(folder, key):
    """The steps at which a key was logged."""
    return [int(row["step"]) for row in rows(folder) if key in row]


def test_figures_are_logged_where_lightning_logs(tmp_path):
    """Every second step of eight; shares are shares; all keys that the docstring lists."""
    trainer(tmp_path, PipelineStatsMonitor()).fit(Module(), ours())
    assert logged(tmp_path, "data/wait_ratio") == [1, 3, 5, 7]
    keys = {key for row in rows(tmp_path) for key in row}
    assert keys - {"step", "epoch", "data/wait_ratio"} == {
        f"data/{stage}/{key}" for stage in ("fetch", "collate") for key in STAGE_KEYS
    }
    for row in rows(tmp_path):
        for key, value in row.items():
            if key.endswith("_ratio"):
                assert 0 <= value <= 1, key
    documented = re.findall(r"``([a-z_0-9]+)``", PipelineStatsMonitor.__doc__)
    assert STAGE_KEYS - {"busy_ratio", "cpu_ratio", "items_per_second", "task_seconds_p50"} <= {
        *documented,
        *("num_failures", "concurrency"),
    }


@pytest.mark.parametrize("wrap", [None, TorchDataLoader, DataLoader])
def test_pipeline_is_found_wherever_it_is(tmp_path, wrap):
    """By itself and in a loader without workers; its stages have names that every logger takes."""
    loader = streamed() if wrap is None else wrap(streamed(), batch_size=None)
    trainer(tmp_path, PipelineStatsMonitor()).fit(Module(), loader)
    assert logged(tmp_path, "data/wait_ratio") == [1, 3, 5, 7]
    stages = ("fetch", "collate") if wrap is DataLoader else ("_read_", "aggregate_3_", "stack")
    for stage in stages:
        assert logged(tmp_path, f"data/{stage}/items_per_second") == [1, 3, 5, 7]
    for row in rows(tmp_path):
        assert all(re.fullmatch(r"[A-Za-z0-9_. /-]+", key) for key in row)


def test_loaders_of_a_collection_have_their_names(tmp_path):
    """Among several; loaders of others are passed over."""
    loaders = {"a": ours(), "b": ours(), "c": TorchDataLoader(Points(), batch_size=3)}
    trainer(tmp_path, PipelineStatsMonitor(stages=False)).fit(Module(), loaders)
    keys = {key for row in rows(tmp_path) for key in row}
    assert keys == {"step", "data/a/wait_ratio", "data/b/wait_ratio"}


def test_validation_and_test_are_logged_once_an_epoch(tmp_path):
    """Over the whole of it; the sanity check is not."""
    monitor = PipelineStatsMonitor("load", stages=False)
    runs = trainer(tmp_path, monitor, log_every_n_steps=0)
    module = Module()
    runs.fit(module, ours(), ours())
    runs.test(module, ours(), verbose=False)
    assert logged(tmp_path, "load/val/wait_ratio") == [3, 7]
    assert logged(tmp_path, "load/test/wait_ratio") == [8]
    assert logged(tmp_path, "load/wait_ratio") == []


def test_every_logger_gets_them(tmp_path):
    """TensorBoard's file has what the CSV file has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardLogger(tmp_path, name="", version="board")
    loggers = [CSVLogger(tmp_path, name="", version=""), board]
    trainer(tmp_path, PipelineStatsMonitor(), logger=loggers).fit(Module(), ours())
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for key in ("data/wait_ratio", "data/fetch/busy_ratio"):
        seen = [(event.step, event.value) for event in events.Scalars(key)]
        expected = [(int(row["step"]), row[key]) for row in rows(tmp_path) if key in row]
        assert seen == [(step, pytest.approx(value)) for step, value in expected]


def test_verdict_is_told_once_as_long_as_it_is_the_same(tmp_path, monkeypatch):
    """At the end of the first epoch; nothing without being asked."""
    told = []
    monkeypatch.setattr("spdl_torch.lightning.rank_zero_info", told.append)
    monitor = PipelineStatsMonitor()
    trainer(tmp_path, monitor, max_epochs=5).fit(Module(), ours())
    assert told[0].startswith("data: Training ")
    causes = [line.split(":")[1] for line in told]
    assert all(a != b for a, b in itertools.pairwise(causes))
    told.clear()
    trainer(tmp_path / "b", PipelineStatsMonitor(verdict=False)).fit(Module(), ours())
    assert told == []


def test_monitor_warns_when_it_finds_nothing(tmp_path):
    """torch's own loader has no figures."""
    monitor = PipelineStatsMonitor()
    with pytest.warns(UserWarning, match="found no loader of spdl_torch in training"):
        trainer(tmp_path, monitor).fit(Module(), TorchDataLoader(Points(), batch_size=3))


def test_trainer_without_a_logger_is_refused(tmp_path):
    """In Lightning's words."""
    message = re.escape("`PipelineStatsMonitor` callback with `Trainer(logger=False)`")
    with pytest.raises(MisconfigurationException, match=message):
        trainer(tmp_path, PipelineStatsMonitor(), logger=False).fit(Module(), ours())


@pytest.mark.slow
def test_ranks_are_compared_when_asked(tmp_path):
    """Two real processes; the file of rank 0 has the least, mean and largest wait."""
    monitor = PipelineStatsMonitor(stages=False, across_ranks=True)
    options = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 1, "log_every_n_steps": 1}
    trainer(tmp_path, monitor, **options).fit(Module(), ours())
    seen = [row for row in rows(tmp_path) if "data/wait_ratio" in row]
    assert [int(row["step"]) for row in seen] == [0, 1]
    for row in seen:
        least, mean, most = (row[f"data/wait_ratio_{what}"] for what in ("min", "mean", "max"))
        assert least <= mean <= most
        assert row["data/wait_ratio"] in (pytest.approx(least), pytest.approx(most))
        assert row["data/slowest_rank"] in (0, 1)


def test_laps_of_a_run_add_up_to_it():
    """Counts and seconds of the parts are those of the whole."""
    dataset = streamed()
    readings = [None, *(dataset.stats() for _ in dataset)]
    laps = [lap_between(before, after) for before, after in itertools.pairwise(readings)]
    whole = readings[-1]
    assert sum(lap.elapsed for lap in laps) == pytest.approx(whole.elapsed)
    waited = sum(lap.consumer_wait_ratio * lap.elapsed for lap in laps)
    assert waited == pytest.approx(whole.consumer_wait_ratio * whole.elapsed)
    for number, stage in enumerate(whole.stages):
        parts = [lap.stages[number] for lap in laps]
        assert sum(part.tasks.num_tasks for part in parts) == stage.tasks.num_tasks
        busy = sum(part.tasks.busy_time for part in parts)
        assert busy == pytest.approx(stage.tasks.busy_time)
        assert all(0 <= part.busy_ratio <= 1 for part in parts)
    assert lap_between(whole, laps[0]) is laps[0], "of another run"
