"""Loggers beside or instead of the statistics file: what TensorBoard, W&B, MLflow and functions get
from a loop that no trainer runs."""

from __future__ import annotations

import json
import struct
import threading

import pytest
from support.datasets import SafeIndices

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.observe import query_task_stats, recording
from spdl_torch.observe.store.epoch_watchers import watchers_of
from spdl_torch.observe.verdict.report import metrics_of
from spdl_torch.pipeline import PipelineBuilder

NEVER = 1e6  # seconds between two readings: only the block's end logs
NUM_ITEMS = 24


def loader(**options):
    """Of six batches."""
    return DataLoader(SafeIndices(NUM_ITEMS), **{"batch_size": 4, "num_workers": 2, **options})


def halved():
    """A pipeline that drops every other item; a stage of it has a name that MLflow refuses."""
    builder = PipelineBuilder().add_source(range(NUM_ITEMS))
    builder.pipe(lambda number: None if number % 2 else number, name="drop(half)")
    return PipelineDataset(builder.add_sink())


class Calls:
    """A function that keeps what it is called with."""

    def __init__(self):
        self.seen = []

    def __call__(self, metrics, step):
        self.seen.append((dict(metrics), step))

    def total(self, key):
        return sum(metrics[key] for metrics, _ in self.seen)


def scalars(folder):
    """What TensorBoard reads: the points of every name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        key: [(event.step, event.value) for event in events.Scalars(key)]
        for key in events.Tags()["scalars"]
    }


def test_tensorboard_and_the_file_get_the_same(tmp_path):
    """In one call: all metrics of the Lightning callback."""
    from torch.utils.tensorboard import SummaryWriter

    source = loader()
    with (
        SummaryWriter(tmp_path / "board") as board,
        recording(source, tmp_path / "run.db", logger=board, interval_seconds=NEVER),
    ):
        list(source)
    found = scalars(tmp_path / "board")
    expected = metrics_of(source.report(), "data")
    assert {key: [(6, pytest.approx(value))] for key, value in expected.items()} == found
    assert found["data/num_processes"] == [(6, 0.0)]
    (row,) = query_task_stats(tmp_path / "run.db", "fetch")
    assert row["num_tasks"] == NUM_ITEMS


def test_step_is_the_number_of_batches_or_the_programs_own():
    """The batches of the first loader count, also for the others, epoch after epoch."""
    train, val, own, theirs = loader(), loader(num_workers=0), Calls(), Calls()
    named = {"": train, "val": val}
    with (
        recording(named, logger=own, interval_seconds=NEVER),
        recording(train, logger=theirs, interval_seconds=NEVER, step=lambda: 77, prefix="load"),
    ):
        for _ in range(2):
            list(train)
            list(val)
    (of_train, step), (of_val, val_step) = sorted(own.seen, key=lambda call: "val" in str(call))
    assert step == val_step == 12
    assert {key.split("/")[0] for key in of_train} == {"data"}
    assert {key.removeprefix("data/val/") for key in of_val} <= {
        key.removeprefix("data/") for key in of_train
    }
    assert [step for _, step in theirs.seen] == [77]
    assert "load/wait_ratio" in theirs.seen[0][0]


def test_slow_logger_does_not_hold_the_loop_up():
    """It blocks for as long as three epochs run; what it missed comes in one call. ``[]`` is for
    ranks that log nothing."""
    blocked, goes_on, calls = threading.Event(), threading.Event(), Calls()

    def slow(metrics, step):
        blocked.set()
        assert goes_on.wait(30)
        calls(metrics, step)

    source = halved()
    list(source)  # before the block
    with recording(source, logger=slow, interval_seconds=1e-6), recording(source, logger=[]):
        list(source)
        assert blocked.wait(30)
        for _ in range(3):
            list(source)
        goes_on.set()
        for _ in range(16):
            list(source)
    assert calls.total("data/drop_half_/num_dropped") == 20 * NUM_ITEMS / 2
    steps = [step for _, step in calls.seen]
    assert steps == sorted(steps)
    assert steps[-1] == 20 * NUM_ITEMS / 2
    assert watchers_of(source) == ()


def test_logger_that_fails_stops_nothing(caplog):
    """It is logged once; the other logger gets all."""

    def broken(metrics, step):
        raise KeyError("mine")

    source, calls = halved(), Calls()
    with recording(source, logger=[broken, calls], interval_seconds=1e-3):
        for _ in range(3):
            list(source)
    assert calls.total("data/drop_half_/num_dropped") == 3 * NUM_ITEMS / 2
    assert [record.exc_info[0] for record in caplog.records] == [KeyError]


def test_writer_of_scalars_alone_gets_no_text(caplog):
    """Where the workers run is a text, which it does not take."""

    class Scalars(dict):
        def add_scalar(self, name, value, step):
            self[name] = value

    source, seen = loader(), Scalars()
    with recording(source, logger=seen):
        list(source)
    assert "data/fetch/busy_ratio" in seen
    assert not caplog.records


def wandb_history(path):
    """Lines of a ``.wandb`` file: a 7-byte header, then records of protocol buffers in blocks of
    32 KiB, in the log format of LevelDB; a record may go over several blocks.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, parts, lines = path.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # complete, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts.clear()
            if record.WhichOneof("record_type") == "history":
                found = [(i.key or "/".join(i.nested_key), i) for i in record.history.item]
                lines.append({key: json.loads(item.value_json) for key, item in found})
    return lines


@pytest.fixture
def offline_run(tmp_path, monkeypatch):
    """A run of W&B whose file lies in a folder."""
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=tmp_path, project="loading")

    def rows():
        run.finish()
        wandb.teardown()  # the file is complete when its writer has ended
        (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        return wandb_history(path)

    yield run, rows
    run.finish()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("steps", ["its own", "given"])
def test_wandb_keeps_the_programs_rows(offline_run, steps):
    """Steps and values of the program's rows are its own, however often figures join them."""
    run, rows = offline_run
    source = halved()
    with recording(source, logger=run, interval_seconds=1e-6):
        for epoch in range(3):
            for batch in source:
                run.log({"loss": batch}, step=100 * epoch + batch if steps == "given" else None)
    found = rows()
    losses = [(row["_step"], row["loss"]) for row in found if "loss" in row]
    batches = [(epoch, batch) for epoch in range(3) for batch in range(0, NUM_ITEMS, 2)]
    if steps == "given":
        assert losses == [(100 * epoch + batch, batch) for epoch, batch in batches]
    else:
        assert losses == [(step, batch) for step, (_, batch) in enumerate(batches)]
    assert {row["_step"] for row in found if "data/wait_ratio" in row}
    # What the block's end adds is in a row of its own, as the program logs no more.
    assert {row["_step"] for row in found if "loss" not in row} <= {losses[-1][0] + 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_gets_a_row_where_the_program_logs_none(offline_run):
    """The module stands for its current run."""
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    _, rows = offline_run
    source = loader()
    with recording(source, logger=wandb, interval_seconds=NEVER):
        list(source)
    (row,) = rows()
    expected = metrics_of(source.report(), "data")
    assert {key: row[key] for key in expected} == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_mlflow_gets_them_in_the_run_of_the_loops_thread(tmp_path, monkeypatch):
    """Under names that it takes; the recording thread begins no run of its own."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    source = halved()
    without = recording(source, logger=mlflow)
    with pytest.raises(ValueError, match="mlflow has no active run on this thread"), without:
        pass
    with mlflow.start_run() as run, recording(source, logger=mlflow, interval_seconds=1e-2):
        for _ in range(3):
            list(source)
    history = mlflow.MlflowClient().get_metric_history(
        run.info.run_id, "data/drop_half_/num_dropped"
    )
    assert sum(entry.value for entry in history) == 3 * NUM_ITEMS / 2
    assert max(entry.step for entry in history) == 3 * NUM_ITEMS / 2
    assert len(mlflow.search_runs(output_format="list")) == 1
