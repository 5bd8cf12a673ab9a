"""The statistics file: nothing lost at any end, readable by SQL, summed up truly."""

from __future__ import annotations

import gc
import json
import os
import queue
import re
import signal
import sqlite3
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from support import warm
from support.forks import fork
from support.gates import PATIENCE_SECONDS, in_thread, result_of, until
from support.readings import queue_entry, task_entry, write

from spdl_torch.observe import (
    EventLogEntry,
    SQLiteStatsWriter,
    TaskStatsLogEntry,
    log_stats_summary,
    query_event_stats,
    query_queue_stats,
    query_task_stats,
    recording_gc,
)
from spdl_torch.observe.store import writer as sqlite_module

HOUR = 3600.0
"""A flush interval that no test lives to see."""

# The columns of the tables of SPDL's example logger.
SPDL_COLUMNS = {
    "task_stats": "id, timestamp, name, num_tasks, num_failures, ave_time, p90_time, p99_time",
    "queue_stats": "id, timestamp, name, elapsed, num_items, ave_put_time, ave_get_time, "
    "p90_put_time, p99_put_time, p90_get_time, p99_get_time, occupancy_rate",
    "event_stats": "id, timestamp, event_name",
}


def rows(path, query, *arguments):
    """What a reader of the file sees."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query, arguments).fetchall()


def test_shutdown_writes_what_is_left(tmp_path):
    """However long the flush interval, from the buffer that was given, as SPDL's hooks use it, and
    what was logged before a start, or without one."""
    buffer, path = queue.Queue(), tmp_path / "s.db"
    writer = SQLiteStatsWriter(path, buffer, flush_interval=HOUR)
    writer.log(task_entry(0.0))
    with writer:
        buffer.put(task_entry(1.0))
        buffer.put("not an entry")
        buffer.put(queue_entry())
    writer.shutdown()  # twice does no harm
    assert [row["timestamp"] for row in query_task_stats(path)] == [1, 0]
    assert len(query_queue_stats(path)) == 1
    assert rows(path, "SELECT ended IS NOT NULL FROM run") == [(1,)]
    with pytest.raises(RuntimeError, match="started before"):
        writer.start()


@pytest.mark.parametrize(
    ("end", "code", "first"),
    [("", 0, "pipeline"), ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "writer")],
    ids=["exit", "Ctrl-C"],
)
def test_last_figures_are_in_the_file_when_the_process_just_ends(tmp_path, end, code, first):
    """Nobody called shutdown() or stop(): the pipelines end first, then the writer."""
    make = ["writer = SQLiteStatsWriter('s.db', flush_interval=3600); writer.start()", "start()"]
    program = f"""
        import os, itertools, signal
        from spdl_torch.observe import SQLiteStatsWriter, TaskStatsLogEntry
        from spdl_torch.pipeline import PipelineBuilder, TaskStatsHook

        class Hook(TaskStatsHook):
            def interval_stats_callback(self, stats):
                writer.log(TaskStatsLogEntry(1.0, str(self.info), stats))

        def start():
            global pipeline
            builder = PipelineBuilder().add_source(itertools.count()).pipe(str, name="decode")
            pipeline = builder.add_sink().build(task_hook_factory=lambda info: [Hook(info)])
            for _ in range(10):
                pipeline.get_item()

        {"; ".join(make if first == "writer" else make[::-1])}
        {end}
    """
    words = ["-c", textwrap.dedent(program)]
    done = warm.run(words, cwd=tmp_path, timeout=PATIENCE_SECONDS, ends_whole=True)
    assert done.returncode == code, done.stderr
    (row,) = query_task_stats(tmp_path / "s.db")
    assert row["num_tasks"] >= 10
    assert rows(tmp_path / "s.db", "SELECT ended IS NOT NULL FROM run") == [(1,)]


def test_file_opens_when_the_process_was_killed(tmp_path):
    """It lacks only what was not flushed, and says that the run did not end."""
    path, event = tmp_path / "s.db", EventLogEntry(1.0, "begun", {"by": "me"})

    def write_and_die():
        writer = SQLiteStatsWriter(path, flush_interval=0.01)
        writer.start()
        writer.log(event)
        until(lambda: query_event_stats(path))
        os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(fork(write_and_die), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert query_event_stats(path) == [event]
    assert rows(path, "SELECT ended FROM run") == [(None,)]
    write(path, task_entry())
    assert len(rows(path, "SELECT * FROM run")) == 2


@contextmanager
def locked(path):
    """Somebody else writes to the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def broken(path):
    """It fails in the middle of a transaction, as on a disk that is full."""
    trigger = "BEFORE INSERT ON task_window BEGIN SELECT json('{'); END"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"CREATE TRIGGER broken {trigger}")
        yield
        connection.execute("DROP TRIGGER broken")


@pytest.mark.parametrize("obstacle", [locked, broken])
def test_entries_wait_while_the_file_cannot_be_written(tmp_path, monkeypatch, caplog, obstacle):
    """In memory: told once, and written when it can be; the oldest are left out where there are too
    many. How many are not written at the end is told, too."""
    monkeypatch.setattr("spdl_torch.observe.store.file._BUSY_SECONDS", 0.0)
    monkeypatch.setattr(sqlite_module, "_MOST_PENDING", 2)
    entries = queue.SimpleQueue()
    with SQLiteStatsWriter(tmp_path / "s.db", entries, flush_interval=0.001) as writer:
        with obstacle(tmp_path / "s.db"):
            writer.log(task_entry(1.0))
            until(lambda: "cannot be written" in caplog.text)
            entries.put(task_entry(2.0))
            entries.put(task_entry(3.0))
            until(lambda: entries.empty() and len(writer._pending) == 2)
        until(lambda: len(query_task_stats(tmp_path / "s.db")) == 2)
    assert [row["timestamp"] for row in query_task_stats(tmp_path / "s.db")] == [3, 2]
    assert caplog.text.count("cannot be written") == 1
    writer = SQLiteStatsWriter(tmp_path / "s.db")
    for entry in (task_entry(4.0), queue_entry(4.0)):
        writer.log(entry)
    with obstacle(tmp_path / "s.db"):
        writer.shutdown()
    assert "2 entries were not written" in caplog.text


class Unprintable:
    """Fails where JSON asks for its text."""

    def __repr__(self):
        raise LookupError("no text")


def test_entries_that_cannot_be_written_take_no_other_with_them(tmp_path, caplog):
    """Wherever they stand among those that are written together; the order is that of the log, and
    the program's log says what was wrong with the first."""
    path, circle = tmp_path / "s.db", {}
    circle["self"] = circle
    unwritable = (
        EventLogEntry(1.0, "mine", {("a", 1): 2}),
        task_entry(ave_time=float("nan")),
        EventLogEntry(1.0, "mine", {"a": Unprintable()}),
        EventLogEntry(1.0, "mine", circle),
        EventLogEntry(1.0, "mine", 5),
        EventLogEntry(1.0, "\ud800"),  # half a surrogate pair
        EventLogEntry(None, "mine"),
        task_entry(num_tasks=2**64),
        TaskStatsLogEntry(1.0, "0:1:decode[2]", None),
        "hello",
    )
    with SQLiteStatsWriter(path, flush_interval=HOUR) as writer:
        for number, bad in enumerate(unwritable):
            writer.log(task_entry(float(number)))
            writer.log(bad)
            writer.log(queue_entry(float(number)))
            writer.log(EventLogEntry(float(number), "mine", {}))
    for kind in ("task", "queue", "event"):
        found = rows(path, f"SELECT timestamp FROM {kind}_stats ORDER BY id")
        assert [timestamp for (timestamp,) in found] == [*range(len(unwritable))]
    assert caplog.text.count("cannot be written") == 1
    assert "('a', 1)" in caplog.text
    assert "TypeError: keys must be str" in caplog.text


def test_collections_are_logged_while_the_block_runs(tmp_path):
    """Start and stop, with Python's details of them; nothing afterwards."""
    path, before = tmp_path / "s.db", list(gc.callbacks)
    with SQLiteStatsWriter(path, flush_interval=HOUR) as writer:
        with recording_gc(writer.log, generation=2):
            gc.collect(0)
            gc.collect()
        assert gc.callbacks == before
        gc.collect()
    events = query_event_stats(path)
    assert [event.event_name for event in events] == ["gc_start", "gc_stop"]
    assert events[1].details["generation"] == 2
    assert query_event_stats(path, "gc_stop", start_time=events[1].timestamp)


def test_error_of_log_is_logged_and_ends_the_thread(caplog):
    """Training goes on; what the block's end passes on raises there."""
    calls = []

    def log(entry):
        calls.append(entry)
        raise KeyError("full")

    def collect():
        with recording_gc(log, generation=2):
            for _ in range(2):
                gc.collect()
                until(lambda: "KeyError: 'full'" in caplog.text)

    with pytest.raises(KeyError, match="full"):
        collect()
    assert (len(calls), caplog.text.count("spdl-collections: the thread has ended")) == (2, 1)


def test_logging_goes_on_when_a_collection_happens_inside_of_it(tmp_path):
    """A collection at every allocation: a lock held by the thread itself would be waited for."""
    path, before = tmp_path / "s.db", gc.get_threshold()

    def work():
        for n in range(300):
            writer.log(EventLogEntry(float(n), "mine", {"n": [n]}))

    with SQLiteStatsWriter(path, flush_interval=0.001) as writer, recording_gc(writer.log):
        gc.set_threshold(1)
        try:
            for thread in [in_thread(work) for _ in range(3)]:
                result_of(thread)
        finally:
            gc.set_threshold(*before)
    assert len(query_event_stats(path, "mine")) == 900


def test_run_says_who_wrote_it(tmp_path, monkeypatch):
    """Rank, versions and the user's configuration stand beside the figures."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    write(tmp_path / "s.db", task_entry(), config={"lr": 0.1, "data": tmp_path})
    (row,) = rows(tmp_path / "s.db", "SELECT rank, world_size, versions, config FROM run")
    assert row[:2] == (3, 8)
    assert "torch" in json.loads(row[2])
    assert json.loads(row[3]) == {"lr": 0.1, "data": str(tmp_path)}


def test_runs_share_a_file(tmp_path):
    """A stage of each run is its own; queries can tell them apart. Their bounds are inclusive, and
    a stage is known with and without its numbers."""
    path = tmp_path / "s.db"
    write(path, task_entry(1.0))
    write(path, *(task_entry(float(t)) for t in range(2, 5)), task_entry(9.0, "other"))
    assert [row["run_id"] for row in query_task_stats(path, run_id=2)] == [2] * 4
    parts = "SELECT DISTINCT run_id, label, stage_number, concurrency FROM task_stats"
    assert rows(path, f"{parts} ORDER BY timestamp") == [
        (1, "decode", 1, 2),
        (2, "decode", 1, 2),
        (2, "other", None, 1),
    ]
    for name in ("decode", "0:1:decode[2]"):
        found = query_task_stats(path, name, start_time=1, end_time=3)
        assert [row["timestamp"] for row in found] == [3, 2, 1]


def test_views_begin_with_spdls_columns(tmp_path):
    """Queries written for its files run on ours."""
    write(tmp_path / "s.db", task_entry(), queue_entry(), EventLogEntry(1.0, "gc_start"))
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection:
        for view, columns in SPDL_COLUMNS.items():
            cursor = connection.execute(f"SELECT * FROM {view}")
            assert ", ".join(name for name, *_ in cursor.description).startswith(columns)
            assert len(cursor.fetchall()) == 1


def test_two_writers_share_a_file(tmp_path):
    """Ranks on one machine may log to one file."""
    writers = [SQLiteStatsWriter(tmp_path / "s.db", flush_interval=0.001) for _ in range(2)]

    def log_many(writer):
        with writer:
            for number in range(100):
                writer.log(task_entry(float(number)))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(log_many, writers))
    assert len(query_task_stats(tmp_path / "s.db")) == 200


@pytest.mark.parametrize("network", [False, True])
def test_reader_sees_the_file_while_it_is_written(tmp_path, monkeypatch, network):
    """With write-ahead logging, and without it where the file system does not allow it."""
    monkeypatch.setattr("spdl_torch.observe.store.file._is_on_a_network", lambda _: network)
    with SQLiteStatsWriter(tmp_path / "s.db", flush_interval=0.001) as writer:
        ((mode,),) = rows(tmp_path / "s.db", "PRAGMA journal_mode")
        assert mode == ("delete" if network else "wal")
        writer.log(task_entry())
        until(lambda: query_task_stats(tmp_path / "s.db"))
    assert [path.name for path in tmp_path.iterdir()] == ["s.db"]


def test_file_that_is_locked_is_not_called_damaged(tmp_path, monkeypatch):
    """Where there is no write-ahead logging, whoever writes for long locks readers out; also those
    that have opened the file."""
    monkeypatch.setattr("spdl_torch.observe.store.file._is_on_a_network", lambda _: True)
    monkeypatch.setattr("spdl_torch.observe.store.file._BUSY_SECONDS", 0.0)
    path = write(tmp_path / "s.db", task_entry())
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            query_task_stats(path)
        monkeypatch.setattr("spdl_torch.observe.store.file._check_is_ours", lambda *_: True)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            query_task_stats(path)
    assert len(query_task_stats(path)) == 1


@pytest.mark.parametrize("version", [0, 99])
def test_file_is_refused_when_it_is_not_ours(tmp_path, version):
    """Another program's, before anything is changed, or a later release's; read or written."""
    path = tmp_path / "s.db"
    if version:
        write(path, task_entry())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}" if version else "CREATE TABLE t (x)")
    before = path.read_bytes()
    for use in (query_task_stats, SQLiteStatsWriter):
        with pytest.raises(ValueError, match=f"not a statistics file .* user_version {version}, e"):
            use(path)
    assert version or path.read_bytes() == before


def test_reading_fails_when_there_is_nothing(tmp_path):
    """A typing error leaves no empty file."""
    with pytest.raises(FileNotFoundError, match=r"statistics file .*s.db does not exist"):
        log_stats_summary(tmp_path / "s.db")
    with pytest.raises(ValueError, match=r"flush_interval must be > 0 seconds, got 0"):
        SQLiteStatsWriter(tmp_path / "t.db", flush_interval=0)
    assert not list(tmp_path.iterdir())


def test_queue_with_the_name_of_its_stage_is_distinguished_from_it(tmp_path):
    """As SPDL's example names it: by ``str(info)``, which names the tasks, too."""
    path = tmp_path / "s.db"
    write(path, task_entry(), queue_entry(name="0:1:decode[2]"), queue_entry(name="mine"))
    by_queue = query_queue_stats(path, "0:1:decode[2]_queue")
    assert by_queue == query_queue_stats(path, "0:1:decode[2]") == query_queue_stats(path, "decode")
    assert [row["name"] for row in by_queue] == ["0:1:decode[2]_queue"]
    assert [row["name"] for row in query_queue_stats(path, "mine")] == ["mine"]
    assert [row["name"] for row in query_task_stats(path)] == ["0:1:decode[2]"]
    log_stats_summary(path, write=(printed := []).append)
    assert re.findall("  Queue: (.*)", printed[0]) == ["mine", "0:1:decode[2]_queue"]


def test_summary_weighs_each_figure_by_what_it_is_of(tmp_path):
    """Times by the tasks that succeeded, waits by items, occupancy and QPS by time."""
    path, good, bad = tmp_path / "s.db", (1, 0, 20), (3, 5, 0)
    seconds, elapsed, shares = (9.0, 0.5, 0.01), (0.5, 60.0, 4.0), (1.0, 0.25, 0.0)
    for parts in zip(good, bad, seconds, elapsed, shares, strict=True):
        num_good, num_bad, each, time, share = parts
        counts = {"num_tasks": num_good + num_bad, "num_failures": num_bad}
        figures = {"num_items": num_good, "ave_put_time": each, "occupancy_rate": share}
        write(path, task_entry(ave_time=each, **counts), queue_entry(elapsed=time, **figures))
    log_stats_summary(path, write=(printed := []).append)
    mean = f"{(9.0 + 20 * 0.01) / 21:.4f}s"
    expected = {
        "Total tasks processed": "29",
        "Total failures": "8",
        "Average task time": mean,
        "Average put time": mean,
        "Average QPS": f"{21 / 64.5:.2f}",
        "Average occupancy rate": f"{(0.5 + 0.25 * 60) / 64.5:.1%}",
    }
    assert expected.items() <= dict(re.findall("^    (.+): (.+)$", printed[0], re.M)).items()


def test_summary_has_spdls_figures(tmp_path, caplog):
    """Its labels, in its order."""
    write(tmp_path / "s.db", task_entry(num_failures=1), queue_entry())
    with caplog.at_level("INFO", logger="spdl_torch.observe"):
        log_stats_summary(tmp_path / "s.db")
    (text,) = caplog.messages
    assert re.findall(r"^  (.+): (.+)$", text, re.M) == [
        *[("Stage", "0:1:decode[2]"), ("  Total tasks processed", "10"), ("  Total failures", "1")],
        *[("  Average task time", "0.1000s"), ("  Success rate", "90.0%")],
        *[("  Number of log entries", "1"), ("Queue", "0:1:decode[2]_queue")],
        *[("  Total items processed", "10"), ("  Average QPS", "2.00")],
        *[("  Average put time", "0.0100s"), ("  Average get time", "0.0100s")],
        *[("  Average occupancy rate", "50.0%"), ("  Number of log entries", "1")],
    ]
    log_stats_summary(tmp_path / "s.db", write=(printed := []).append)
    assert printed == [text]
