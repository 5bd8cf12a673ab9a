"""The Lightning callback: what it logs to the trainer's real loggers and reports to the user."""

from __future__ import annotations

import csv
import os
import re
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from functools import partial

import pytest
import torch
from support import warm
from support.datasets import MapData, Points
from support.later import LIGHTNINGS_WARNINGS, later
from support.readings import shown
from support.tuners import RandomTuner, auto
from torch.utils.data import DataLoader as TorchDataLoader

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.autotune import tuning
from spdl_torch.observe import (
    pipelines_of_file,
    query_event_stats,
    query_task_stats,
    recording,
    report_of_file,
)
from spdl_torch.observe.store.epoch_watchers import watchers_of
from spdl_torch.pipeline import PipelineBuilder

_, modules, callbacks, loggers_of, utilities, monitors = later(
    "lightning",
    "support.lightning_modules",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.utilities",
    "spdl_torch.lightning",
)

pytestmark = LIGHTNINGS_WARNINGS

STAGE_KEYS = {
    *("busy_ratio", "cpu_ratio", "wait_in_ratio", "wait_out_ratio", "items_per_second"),
    *("task_seconds_p50", "task_seconds_p99", "num_failures", "num_dropped", "concurrency"),
}


def ours(**options):
    """Four batches of three."""
    return DataLoader(Points(), batch_size=3, num_workers=2, **options)


def streamed(length=12):
    """The same out of a pipeline, whose stages have names that MLflow would refuse."""
    builder = PipelineBuilder().add_source(range(length)).pipe(float, name="<read>")
    builder.aggregate(3).pipe(lambda numbers: torch.tensor(numbers).unsqueeze(1), name="stack")
    return PipelineDataset(builder.add_sink())


def trainer(folder, monitor, **options):
    """Logs every second step to a CSV file."""
    added = monitor if isinstance(monitor, list) else [monitor]
    own = {"logger": loggers_of.CSVLogger(folder, name="", version=""), "log_every_n_steps": 2}
    return modules.trainer(**{**own, "callbacks": added, **options})


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


def logged_lengths(monitor, monkeypatch):
    """Batches in each window of training that the monitor logs, of a loader without workers."""
    lengths, of_window = [], monitor._metrics_of

    def noted(report, name):
        if not name.startswith("val"):
            lengths.append(report.stats.stages[-1].tasks.num_tasks)
        return of_window(report, name)

    monkeypatch.setattr(monitor, "_metrics_of", noted)
    return lengths


def test_figures_are_logged_where_lightning_logs(tmp_path):
    """Every second step of eight; shares are shares; all keys that the docstring lists."""
    trainer(tmp_path, monitors.PipelineStatsMonitor()).fit(modules.Diary(), ours())
    assert logged(tmp_path, "data/wait_ratio") == [1, 3, 5, 7]
    assert logged(tmp_path, "data/num_processes") == [1, 3, 5, 7]
    keys = {key for row in rows(tmp_path) for key in row}
    assert keys - {"step", "epoch", "data/wait_ratio", "data/num_processes"} == {
        f"data/{stage}/{key}" for stage in ("fetch", "collate") for key in STAGE_KEYS
    }
    for row in rows(tmp_path):
        for key, value in row.items():
            if key.endswith("_ratio"):
                assert 0 <= value <= 1, key
    documented = re.findall(r"``data/<stage>/([a-z_0-9]+)``", monitors.PipelineStatsMonitor.__doc__)
    assert sorted(documented) == sorted(STAGE_KEYS)


@pytest.mark.parametrize(
    ("accumulate", "every", "windows", "validates", "num_optimizers"),
    [
        (1, 5, [5, 5], False, None),
        (4, 1, [4, 4, 2], True, None),
        (4, 2, [8, 2], False, None),
        (1, 2, [2] * 5, False, 2),
    ],
)
def test_figures_are_logged_where_lightning_logs_the_loss(
    tmp_path, monkeypatch, accumulate, every, windows, validates, num_optimizers
):
    """With gradient accumulation at the last batch of a step, and over all of its batches; the last
    step of an epoch may be shorter. With manual optimization every batch is a step, however many
    optimizers move. Without workers there is nothing that could be in threads or processes."""
    monitor = monitors.PipelineStatsMonitor(db_path=tmp_path / "s.db")
    options = {"log_every_n_steps": every, "val_check_interval": 3}
    if num_optimizers is None:
        options["accumulate_grad_batches"] = accumulate
    runs = trainer(tmp_path, monitor, max_epochs=1, **options)
    loaders = [DataLoader(Points(10)), *([DataLoader(Points(2))] if validates else [])]
    lengths = logged_lengths(monitor, monkeypatch)
    runs.fit(modules.Losses(num_optimizers), *loaders)
    steps = list(range(every - 1, -(-10 // accumulate), every))
    assert logged(tmp_path, "data/wait_ratio") == logged(tmp_path, "loss") == steps
    assert lengths == windows[: len(steps)]
    assert logged(tmp_path, "data/num_processes") == []


def test_loggers_and_file_get_where_the_workers_live(tmp_path):
    """A number for every logger, and the place in the file."""
    monitor, dataset = monitors.PipelineStatsMonitor(db_path=tmp_path / "s.db"), Points()
    dataset.thread_safe = True
    runs = trainer(tmp_path, monitor, max_epochs=1)
    runs.fit(modules.Diary(), DataLoader(dataset, batch_size=3, num_workers=2))
    numbers = {row["data/num_processes"] for row in rows(tmp_path) if "data/num_processes" in row}
    assert numbers == {0}
    text = "on 2 threads of the training process: Points says thread_safe = True."
    report = report_of_file(tmp_path / "s.db")
    assert str(report.placement) == text
    assert text in shown(report)


def test_lightnings_loggers_record_without_a_trainer(tmp_path):
    """By the same names as from the callback."""
    source, logger = ours(), loggers_of.CSVLogger(tmp_path, name="", version="")
    with recording(source, logger=logger):
        assert len(list(source)) == 4
    logger.save()
    keys = {key for row in rows(tmp_path) for key in row}
    assert keys >= {f"data/{stage}/{key}" for stage in ("fetch", "collate") for key in STAGE_KEYS}
    assert logged(tmp_path, "data/wait_ratio") == [4]


class Told(Points):
    """Has something to say in a report."""

    def loading_remarks(self):
        return ("few points",)


def test_finding_is_logged_every_epoch_and_the_action_when_it_changes(tmp_path, monkeypatch):
    """A line each, the action with what the loader has to say; nothing without being asked."""
    messages = []
    monkeypatch.setattr("spdl_torch.lightning.rank_zero_info", messages.append)

    def fit(monitor, **options):
        runs = trainer(tmp_path, monitor, logger=False, **options)
        runs.fit(modules.Diary(), DataLoader(Told(), batch_size=3))

    fit(monitors.PipelineStatsMonitor(verdict=False, db_path=tmp_path / "s.db"))
    assert messages == []
    fit(monitors.PipelineStatsMonitor(db_path=tmp_path / "s.db"), max_epochs=5)
    parts = [text.removeprefix("data: Training ").split(". ", 1) for text in messages]
    kinds = [re.sub(r".*\d %.*?(\): |$)", "", finding).rstrip(".") for finding, *_ in parts]
    assert len(parts) == 5
    for before, kind, part in zip([None, *kinds], kinds, parts, strict=False):
        assert (len(part) == 2) == (before != kind) == part[-1].endswith("few points"), messages


def test_monitor_warns_when_there_is_nothing_to_log(tmp_path):
    """Once, and it says why. Where there is nobody to log to, and no file, it refuses."""
    for loader, message in (
        (TorchDataLoader(Points(), batch_size=3), "found no loader of spdl_torch in training"),
        (DataLoader(Points(), stats=False), "the loaders of training have stats=False"),
    ):
        runs = trainer(tmp_path, monitors.PipelineStatsMonitor(), max_epochs=1)
        with pytest.warns(UserWarning, match=message):
            runs.fit(modules.Diary(), loader)
    message = re.escape("`PipelineStatsMonitor` callback with `Trainer(logger=False)`")
    runs = trainer(tmp_path, monitors.PipelineStatsMonitor(), logger=False)
    with pytest.raises(utilities.exceptions.MisconfigurationException, match=message):
        runs.fit(modules.Diary(), ours())


def test_decisions_and_samples_left_out_are_in_the_file(tmp_path, monkeypatch):
    """Each of every epoch, once; Lightning's loader, which is built anew, is tuned as well."""
    monkeypatch.setattr(tuning, "Tuner", RandomTuner)
    workers = auto(2, window_seconds=1e-6, max_threads=4)
    options = {"isolation": "thread", "on_error": "skip", "error_budget": 0.5}
    train = DataLoader(MapData(12, {3: ValueError, 7: ValueError}), num_workers=workers, **options)
    path = tmp_path / "s.db"
    runs = trainer(tmp_path, monitors.PipelineStatsMonitor(db_path=path), logger=False)
    runs.fit(modules.Diary(), train)
    assert train.decisions
    wanted = [{"pipeline": 0, **decision.as_details()} for decision in train.decisions]
    assert [row.details for row in query_event_stats(path, "decision")] == wanted
    keys = [event.details["key"] for event in query_event_stats(path, "skipped")]
    assert sorted(keys) == ["3", "3", "7", "7"]
    (said,) = [r for r in report_of_file(path).verdict.remarks if "were skipped" in r]
    assert "3 (ValueError: bad 3), 7 (Val" in said


@pytest.mark.parametrize(
    ("split", "make", "names"),
    [
        ("validate", lambda: [ours(), ours()], ["val/0", "val/1"]),
        (
            "fit",
            lambda: {"a": [ours(), ours()], "b": ours()},
            ["train/a/0", "train/a/1", "train/b"],
        ),
        (
            "predict",
            lambda: [streamed(), TorchDataLoader(streamed(), batch_size=None)],
            ["predict/0", "predict/1"],
        ),
        ("fit", lambda: [ours()], ["train"]),
    ],
)
def test_every_loader_is_found_wherever_it_is(tmp_path, split, make, names):
    """In the loggers under its name, in the file under its number, with all of its items."""
    monitor = monitors.PipelineStatsMonitor(stages=False, db_path=tmp_path / "s.db")
    getattr(trainer(tmp_path, monitor, max_epochs=1), split)(modules.Diary(), make())
    keys = {key for row in rows(tmp_path) for key in row}
    starts = [name.removeprefix("train").removeprefix("/") for name in names]
    assert keys == {"step", *(f"data/{start}/wait_ratio".replace("//", "/") for start in starts)}
    assert pipelines_of_file(tmp_path / "s.db") == dict(enumerate(names))
    for number in range(len(names)):
        first = report_of_file(tmp_path / "s.db", pipeline=number).stats.stages[0]
        assert first.tasks.num_tasks == 12


def num_loaded(path, run_id=None):
    """Tasks of every stage, by its name in the file."""
    found = Counter()
    for row in query_task_stats(path, run_id=run_id):
        found[row["name"]] += row["num_tasks"]
    return dict(sorted(found.items()))


def runs_in(path):
    """What the table of runs says."""
    query = "SELECT rank, world_size, ended IS NOT NULL, json_extract(config, '$.trainer') FROM run"
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


COUNTED = {
    # The loader of training, and of validation, and how often that comes.
    "none": (lambda: DataLoader(Points(), batch_size=3), 2),
    "workers": (ours, 2),
    "persistent": (partial(ours, persistent_workers=True), 1.0),
    "pipeline": (streamed, 1.0),
}


@pytest.mark.parametrize(
    ("kind", "every"), [("workers", 1), ("workers", 0), *((kind, 3) for kind in COUNTED)], ids=str
)
def test_file_and_windows_have_what_was_loaded(tmp_path, monkeypatch, kind, every):
    """To the item, however often figures are logged; the sanity check is left out."""
    make, interval = COUNTED[kind]
    monitor = monitors.PipelineStatsMonitor(db_path=tmp_path / "s.db")
    runs = trainer(tmp_path, monitor, log_every_n_steps=every, val_check_interval=interval)
    lengths = logged_lengths(monitor, monkeypatch)
    runs.fit(modules.Diary(), make(), make())
    assert pipelines_of_file(tmp_path / "s.db") == {0: "train", 1: "val"}
    loaded = list(num_loaded(tmp_path / "s.db").values())
    training, validation = loaded[: len(loaded) // 2], loaded[len(loaded) // 2 :]
    assert training == [24, 8, 8][: len(training)]
    validations = 2 if interval == 2 else 1
    assert validation == [validations * count for count in training]
    assert sum(lengths) <= 8
    for row in query_task_stats(tmp_path / "s.db"):
        assert min(row["elapsed"], row["num_tasks"], row["busy_time"], row["ave_time"]) >= 0
    assert runs_in(tmp_path / "s.db") == [(0, 1, 1, "fit")]


@pytest.mark.parametrize(("is_pipeline", "every"), [(False, 1), (True, 100)])
def test_every_pass_of_a_loader_that_starts_again_is_in_the_file(tmp_path, is_pipeline, every):
    """To the item, wherever in a pass figures are logged: three passes in each of two epochs."""
    monitor = monitors.PipelineStatsMonitor(db_path=tmp_path / "s.db")
    short = streamed(9) if is_pipeline else DataLoader(Points(9), batch_size=3, num_workers=2)
    pair = {"long": DataLoader(Points(27), batch_size=3), "short": short}
    runs = trainer(tmp_path, monitor, log_every_n_steps=every, val_check_interval=4)
    runs.fit(modules.Diary(), utilities.CombinedLoader(pair, "max_size_cycle"), ours())
    loaded = num_loaded(tmp_path / "s.db")
    of_short = [count for name, count in loaded.items() if name.startswith("1:")]
    assert (of_short[0], of_short[-1]) == (54, 18)
    assert watchers_of(short) == ()


def test_every_call_of_the_trainer_is_a_run(tmp_path):
    """Closed after each. Figures of validation and tests are logged once an epoch, over the whole
    of it; the sanity check's are not."""
    path, module = tmp_path / "s.db", modules.Diary()
    monitor = monitors.PipelineStatsMonitor("load", stages=False, db_path=path)
    runs = trainer(tmp_path, monitor, log_every_n_steps=0)
    runs.fit(module, ours(), ours())
    runs.test(module, ours(), verbose=False)
    runs.predict(module, ours())
    assert logged(tmp_path, "load/val/wait_ratio") == [3, 7]
    assert logged(tmp_path, "load/test/wait_ratio") == [8]
    assert logged(tmp_path, "load/wait_ratio") == []
    assert [run[2:] for run in runs_in(path)] == [(1, "fit"), (1, "test"), (1, "predict")]
    assert pipelines_of_file(path, run_id=1) == {0: "train", 1: "val"}
    assert pipelines_of_file(path) == {0: "predict"}


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_file_is_complete_when_training_fails(tmp_path, error):
    """It holds the run up to the failure, and the run has an end."""
    monitor = monitors.PipelineStatsMonitor(db_path=tmp_path / "s.db")
    runs = trainer(tmp_path, [monitor, modules.EndsByAnError(3, error)], log_every_n_steps=0)
    with pytest.raises((ValueError, SystemExit), match=r"no|1"):
        runs.fit(modules.Diary(), DataLoader(Points(), batch_size=3))
    assert num_loaded(tmp_path / "s.db") == {"0:1:fetch": 9, "0:2:collate": 3}
    assert runs_in(tmp_path / "s.db") == [(0, 1, 1, "fit")]


@pytest.mark.parametrize("at", [3, 4])
def test_steps_go_on_when_training_is_resumed(tmp_path, at):
    """From the middle and from the end of an epoch: none twice, none left out, a second run in the
    file, and a checkpoint of tensors alone."""
    path, checkpoint = tmp_path / "s.db", None
    for part, options in (("a", {"max_steps": at}), ("b", {})):
        saving = callbacks.ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=at, save_top_k=-1)
        monitor = monitors.PipelineStatsMonitor(stages=False, db_path=path)
        options |= {"enable_checkpointing": True, "log_every_n_steps": 1}
        runs = trainer(tmp_path / part, [monitor, saving], **options)
        runs.fit(modules.Diary(), ours(), ckpt_path=checkpoint, **modules.SAFELY)
        checkpoint = tmp_path / "ckpt" / f"epoch=0-step={at}.ckpt"
    state = torch.load(checkpoint, weights_only=True)
    assert not any("PipelineStatsMonitor" in key for key in state["callbacks"])
    seen = [logged(tmp_path / part, "data/wait_ratio") for part in ("a", "b")]
    assert seen == [list(range(at)), list(range(at, 8))]
    assert runs_in(path) == [(0, 1, 1, "fit")] * 2
    assert num_loaded(path, run_id=2)["0:2:collate[2]"] >= 8 - at
    assert all(min(row["elapsed"], row["num_tasks"]) >= 0 for row in query_task_stats(path))


ONE_RANK_MEASURES = """
import sys
from pathlib import Path
from test_lightning_monitor import DataLoader, Points, modules, monitors, ours, trainer

class Unlike(modules.Diary):
    def train_dataloader(self):
        stats = self.trainer.global_rank == 1
        return {"a": ours(), "b": DataLoader(Points(), batch_size=3, stats=stats)}

folder = Path(sys.argv[1])
monitor = monitors.PipelineStatsMonitor(stages=False, across_ranks=True, db_path=folder / "s.db")
options = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 1, "log_every_n_steps": 1}
trainer(folder, monitor, **options).fit(Unlike())
"""


def test_ranks_are_compared_when_asked(tmp_path):
    """Two real processes, of which one measures a loader alone: each gathers one figure a loader,
    those that were measured are compared, and each rank has a file."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["-c", ONE_RANK_MEASURES, str(tmp_path)]
    done = warm.run(command, env=environment)
    assert done.returncode == 0, done.stderr
    seen = [row for row in rows(tmp_path) if "data/b/wait_ratio_mean" in row]
    assert [int(row["step"]) for row in seen] == [0, 1]
    for row in seen:
        assert row["data/b/slowest_rank"] == 1
        assert row["data/b/wait_ratio_min"] == row["data/b/wait_ratio_max"]
        assert "data/b/wait_ratio" not in row
        least, mean, most = (row[f"data/a/wait_ratio_{what}"] for what in ("min", "mean", "max"))
        assert least <= mean <= most
        assert row["data/a/wait_ratio"] in (pytest.approx(least), pytest.approx(most))
        assert row["data/a/slowest_rank"] in (0, 1)
    for rank in (0, 1):
        path = tmp_path / f"s.rank{rank}.db"
        assert runs_in(path) == [(rank, 2, 1, "fit")]
        assert num_loaded(path).items() >= {"0:1:fetch[2]": 6, "0:2:collate[2]": 2}.items()
