"""Recording by one call: every epoch of every kind of loader is in the file, once."""

from __future__ import annotations

import copy
import math
import pickle
import sqlite3
from contextlib import closing
from functools import partial

import pytest
from support.datasets import Divided, SafeIndices
from torch.utils.data import DataLoader as TorchLoader

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.__main__ import main
from spdl_torch.data import cached
from spdl_torch.observe import (
    EventLogEntry,
    Profile,
    pipelines_of_file,
    query_task_stats,
    recording,
    report_of_file,
)
from spdl_torch.observe.store.epoch_watchers import watchers_of
from spdl_torch.observe.store.stored_run import StoredRun
from spdl_torch.pipeline import PipelineBuilder

NEVER = 1e6  # seconds between two readings: only the ends of epochs are recorded
NUM_ITEMS = 24


def pipeline():
    """The same numbers."""
    builder = PipelineBuilder().add_source(range(NUM_ITEMS)).pipe(str, name="fetch")
    return PipelineDataset(builder.add_sink())


def loader(num_workers, **options):
    """Of six batches."""
    options = {"isolation": "thread", **options}
    return DataLoader(SafeIndices(NUM_ITEMS), batch_size=4, num_workers=num_workers, **options)


def accelerated(given):
    """What our Accelerator makes of it."""
    pytest.importorskip("accelerate")
    from spdl_torch.accelerate import Accelerator

    return Accelerator(cpu=True).prepare(given)


def fabrics(given):
    """What Fabric makes of it."""
    lightning = pytest.importorskip("lightning")
    return lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(given)


class Words(SafeIndices):
    """Its keys are the names of files."""

    def __getitem__(self, key):
        return super().__getitem__(int(key.removeprefix("img/").removesuffix(".jpg")))


def skipping_words(bad, **options):
    """A loader that leaves out the bad ones."""
    names = [f"img/{number}.jpg" for number in range(NUM_ITEMS)]
    options = {"isolation": "thread", "on_error": "skip", "error_budget": NUM_ITEMS, **options}
    return DataLoader(Words(NUM_ITEMS, bad=tuple(bad)), 4, sampler=names, **options)


LOADERS = {
    "threads": lambda: loader(2),
    "persistent threads": lambda: loader(2, persistent_workers=True),
    "processes": lambda: loader(2, isolation="process", persistent_workers=True),
    "pipeline": pipeline,
    "inside torch's": lambda: TorchLoader(pipeline(), batch_size=None),
    "prepared by Accelerate": lambda: accelerated(loader(2)),
    "inside torch's, prepared by Fabric": lambda: fabrics(TorchLoader(pipeline(), batch_size=None)),
}


def begins(path):
    """Whether each interval is the first of its pass."""
    with StoredRun.opened(path) as run:
        return [bool(each["begins"]) for each in run.intervals]


def num_fetched(path, **of):
    """The number of samples in the file."""
    return sum(row["num_tasks"] for row in query_task_stats(path, "fetch", **of))


@pytest.mark.parametrize("kind", LOADERS)
def test_every_epoch_is_recorded_once(tmp_path, kind):
    """Short ones too, between two readings; not those before and after the block."""
    source, path = LOADERS[kind](), tmp_path / "run.db"
    list(source)
    with recording(source, path, interval_seconds=NEVER):
        for _ in range(3):
            list(source)
    list(source)
    assert num_fetched(path) == 3 * NUM_ITEMS
    assert begins(path) == [True] * 3
    assert report_of_file(path).stats.stages[0].tasks.num_tasks == 3 * NUM_ITEMS
    assert Profile.load(path).statistics()["fetch"]["num_tasks"] == 3 * NUM_ITEMS


@pytest.mark.parametrize("kind", ["persistent threads", "pipeline"])
def test_readings_meanwhile_double_nothing(tmp_path, kind):
    """As often as possible, while epochs end and begin."""
    source, path = LOADERS[kind](), tmp_path / "run.db"
    with recording(source, path, interval_seconds=1e-6):
        for _ in range(40):
            list(source)
    assert num_fetched(path) == 40 * NUM_ITEMS
    assert sum(begins(path)) <= 40


def test_block_that_raises_keeps_what_there_was(tmp_path):
    """The exception is the user's own; the file has the epoch up to it, and the run's end."""
    source, path = loader(0), tmp_path / "run.db"

    def train():
        with recording(source, path):
            for number, _ in enumerate(source):
                if number == 2:
                    raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert num_fetched(path) == 12
    with closing(sqlite3.connect(path)) as connection:
        (run,) = connection.execute("SELECT ended IS NOT NULL FROM run")
    assert run == (1,)
    assert watchers_of(source) == ()


def said_of_skipped(report):
    """The remark on skipped samples."""
    return [each for each in report.verdict.remarks if "samples that were skipped" in each]


def test_several_loaders_have_numbers_and_names(tmp_path, capsys):
    """Each its own figures, and its own skipped samples over all epochs, also more of them than a
    loader remembers; an event of the program that is called so is none of them."""
    bad = SafeIndices(3_000, bad=range(1_500))
    many = DataLoader(bad, batch_size=100, on_error="skip", error_budget=2_000)
    sources, path = {"many": many, "few": skipping_words([7]), "none": loader(0)}, tmp_path / "r.db"
    with recording(sources, path, interval_seconds=NEVER, config={"lr": 1}) as writer:
        for _ in range(2):
            list(many)
            list(sources["few"])
        for details in ({}, {"pipeline": 0}, {"key": 1, "error": 2}, {"pipeline": [1], "key": []}):
            writer.log(EventLogEntry(1.0, "skipped", details))
    assert pipelines_of_file(path) == {0: "many", 1: "few"}  # the other one has loaded nothing
    assert num_fetched(path, pipeline=1) == 2 * NUM_ITEMS
    (said,) = said_of_skipped(report_of_file(path, pipeline=0))
    assert said.endswith("1499 (ValueError: bad 1499) and 2995 before.")
    (said,) = said_of_skipped(report_of_file(path, pipeline=1))
    once = "img/7.jpg (ValueError: bad 7)"
    assert said == f"fetch: samples that were skipped: {once}, {once}."
    assert main(["report", str(path)]) == 0
    headings = [each for each in capsys.readouterr().out.splitlines() if each[:4] == "PIPE"]
    assert headings == ["PIPELINE 0 many", "PIPELINE 1 few"]  # the numbers that --pipeline takes


SKIPPING = partial(skipping_words, range(1, NUM_ITEMS, 3))
REPORTING = {
    "the loop's thread": SKIPPING,
    "threads": partial(SKIPPING, num_workers=2, persistent_workers=True),
    "processes": partial(SKIPPING, num_workers=2, isolation="process"),
    "a cache": lambda: DataLoader(cached(SafeIndices(NUM_ITEMS)), batch_size=4, num_workers=2),
    "a stream": lambda: DataLoader(Divided(NUM_ITEMS), batch_size=4),
}


@pytest.mark.parametrize("kind", REPORTING)
def test_report_of_the_file_is_the_loaders(tmp_path, capsys, kind):
    """Also on the page; what was skipped before the block is not of the run."""
    source, path = REPORTING[kind](), tmp_path / "run.db"
    list(source)
    with recording(source, path, interval_seconds=NEVER):
        list(source)
    live = source.report()
    assert str(report_of_file(path)) == str(live)
    assert report_of_file(path) == live
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == f"{live}\n"
    for said in said_of_skipped(live):
        assert "img/22.jpg (ValueError: bad 22) and 3 before." in said
        assert main(["report", str(path), "--html", str(tmp_path / "run.html")]) == 0
        assert said in (tmp_path / "run.html").read_text()


def test_each_rank_has_a_file_of_its_own(tmp_path, monkeypatch):
    """Named by torchrun's variables, or as the name says."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    source, given = loader(0), {"rank": 0, "world_size": 1}
    for name, expected, options in (
        ("a.db", "a.rank1.db", {}),
        ("b{rank}.db", "b1.db", {}),
        ("c.db", "c.db", given),
    ):
        with recording(source, tmp_path / name, **options):
            list(source)
        assert num_fetched(tmp_path / expected) == NUM_ITEMS


@pytest.mark.parametrize("kind", ["threads", "pipeline"])
def test_copies_are_not_recorded(tmp_path, kind):
    """A copy or a pickle has nobody who watches it; nor has a worker that was forked."""
    source, path = LOADERS[kind](), tmp_path / "run.db"
    with recording(source, path, interval_seconds=NEVER):
        for other in (copy.copy(source), pickle.loads(pickle.dumps(source))):
            assert watchers_of(other) == ()
            assert len(list(other)) == len(list(loader(0) if kind == "threads" else pipeline()))
        list(source)
    assert num_fetched(path) == NUM_ITEMS


def test_loader_of_which_only_a_copy_loads_is_told_of(tmp_path, caplog):
    """As where a trainer makes another one of it: the file would have nothing of it, silently. A
    block that fails has another reason."""
    with recording({"val": loader(0)}, tmp_path / "run.db") as writer:
        assert len(list(copy.copy(loader(0)))) == 6
        writer.log(EventLogEntry(1.0, "mine"))
    assert caplog.text.count("the loader 'val' delivered nothing in the block") == 1
    with pytest.raises(KeyError, match="mine"), recording(loader(0), tmp_path / "run.db"):
        raise KeyError("mine")
    assert len(caplog.messages) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_workers_go_on_without_the_parents_lock(tmp_path):
    """torch's workers iterate over a copy that a fork made at any moment, the lock taken or not."""
    source, path = pipeline(), tmp_path / "run.db"
    theirs = TorchLoader(source, batch_size=None, num_workers=1, multiprocessing_context="fork")
    with recording(source, path, interval_seconds=NEVER):
        (watcher,) = watchers_of(source)
        with watcher():
            assert len(list(theirs)) == NUM_ITEMS
        list(source)
    assert num_fetched(path) == NUM_ITEMS


class Decisions(SafeIndices):
    """A dataset with a name that our loaders have."""

    decisions = ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loaders": [1, 2]}, r"a spdl_torch.DataLoader, .* got list"),
        ({"loaders": TorchLoader(Decisions(4))}, "got DataLoader"),
        ({"loaders": loader(0, stats=False)}, "with stats=False there is nothing to record"),
        ({"interval_seconds": 0}, "interval_seconds must be > 0 seconds, got 0"),
        ({"interval_seconds": True}, "interval_seconds must be a number of seconds, got T"),
        ({"interval_seconds": math.inf}, "interval_seconds must be <= .* seconds, got inf"),
        ({"rank": "0"}, "rank must be an int or None, got '0'"),
        ({"world_size": 0}, "world_size must be >= 1 or None, got 0"),
        ({"path": "."}, r"\. is a folder. Add a file's"),
        ({"logger": dict}, "logger must be a SummaryWriter, .* got type"),
        ({"path": None}, "expected a path, a logger, or both, got neither"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_bad_argument_is_named_before_anything_is_written(tmp_path, options, message):
    """With what it must be and what was given, in place of an error somewhere inside."""
    never = recording(**{"loaders": loader(0), "path": tmp_path / "run.db", **options})
    with pytest.raises((TypeError, ValueError, OSError), match=message), never:
        pass
    assert list(tmp_path.iterdir()) == []
