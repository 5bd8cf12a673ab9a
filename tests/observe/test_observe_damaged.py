"""Files that are damaged, somebody else's or of no use: refused in words, shown without harm."""

from __future__ import annotations

import copy
import functools
import json
import operator
import os
import random
import re
import sqlite3
from contextlib import closing

import pytest
from support.pages import REPORT
from support.readings import entries_of, queue_entry, task_entry, write

from spdl_torch.__main__ import main
from spdl_torch.observe import (
    EventLogEntry,
    log_stats_summary,
    merge_ranks,
    pipelines_of_file,
    query_event_stats,
    query_queue_stats,
    query_task_stats,
    recording,
    report_of_file,
    tracing,
)
from spdl_torch.observe.plot import drawn_part
from spdl_torch.observe.store.stored_run import StoredRun
from spdl_torch.observe.trace.profile import page_of
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.whole_files import whole_file


def read_by(reader, path):
    """What it makes of the run."""
    with StoredRun.opened(path) as run:
        return reader(run)


READERS = {
    "report": report_of_file,
    "pipelines": pipelines_of_file,
    "tasks": query_task_stats,
    "queues": query_queue_stats,
    "events": query_event_stats,
    "summary": log_stats_summary,
    "plot": functools.partial(read_by, drawn_part),
    "page": functools.partial(read_by, lambda run: page_of(run, run.reports())),
}
HOSTILE = "de\x1b]0;title\x07co\x9bde\u202e\nVERDICT all is well"
"""A name that sets a terminal's title, moves its cursor, turns the text and makes a line."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a file of statistics of one run, without a journal beside it."""
    path = tmp_path_factory.mktemp("whole") / "s.db"
    builder = PipelineBuilder().add_source(range(50)).pipe(str, name="decode", concurrency=2)
    pipeline = builder.add_sink().build()
    with recording(pipeline, path) as writer, pipeline.auto_stop():
        assert len(list(pipeline)) == 50
        for entry in (task_entry(), queue_entry(), EventLogEntry(1.0, "mine", {"loss": 0.5})):
            writer.log(entry)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path.read_bytes()


def assert_read_or_refused(content, path):
    """By every reader, with the one error that is documented, which names the file."""
    path.write_bytes(content)
    refusals = []
    for read in READERS.values():
        try:
            read(path)
        except ValueError as error:
            refusals.append(str(error))
    assert all(str(path) in refusal for refusal in refusals), refusals
    return len(refusals)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE interval SET totals = '{'",
        "DELETE FROM task_window; DELETE FROM queue_window; UPDATE interval SET details = '[1]'",
        "UPDATE event SET details = CAST(x'ff' AS TEXT)",
        "DROP VIEW task_stats",
    ],
)
def test_damaged_file_is_refused(change, whole, tmp_path):
    """Whatever SQLite, JSON or Python say of its content: a ValueError with the path. One that is
    cut off is refused by every reader."""
    path = tmp_path / "s.db"
    assert assert_read_or_refused(whole, path) == 0
    assert assert_read_or_refused(whole[: len(whole) // 2], path) == len(READERS)
    path.write_bytes(whole)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(change)
    assert assert_read_or_refused(path.read_bytes(), path) >= 1


def test_file_is_opened_once_for_whatever_is_read_of_it(whole, tmp_path, monkeypatch, capsys):
    """So that all of it is of one file, which others may be writing."""
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    path, opened, connect = tmp_path / "s.db", [], sqlite3.connect
    path.write_bytes(whole)
    commands = [
        ["report", str(path)],
        ["report", str(path), "--html", str(tmp_path / "p.html")],
        ["plot", str(path), "-o", str(tmp_path)],
    ]

    def counted(*args, **options):
        opened.append(args)
        return connect(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", counted)
    for read in READERS.values():
        read(path)
    assert [main(command) for command in commands] == [0, 0, 0]
    assert len(opened) == len(READERS) + len(commands)


def places_in(content, place=()):
    """Where each value of JSON stands."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in pairs:
        yield (*place, key)
        if isinstance(value, dict | list):
            yield from places_in(value, (*place, key))


JUNK = [None, -1, 1e308, "x", [], {}, True, 2**70, {"a": 1}]


def test_damaged_trace_is_merged_or_refused(tmp_path):
    """Values that are gone or of another kind: a ValueError with the path, and nothing else."""
    path, draws = tmp_path / "trace.json", random.Random(0)
    builder = PipelineBuilder().add_source(range(8)).pipe(str, name="decode").add_sink()
    with tracing(path), (pipeline := builder.build()).auto_stop():
        assert len(list(pipeline)) == 8
    trace, kinds, refusals = json.loads(path.read_text()), {}, []
    for place in places_in(trace):  # of as many events as there were
        kinds.setdefault(tuple("any" if isinstance(key, int) else key for key in place), place)
    for _ in range(24):
        changed = copy.deepcopy(trace)
        *way, last = draws.choice([*kinds.values()])
        around = functools.reduce(operator.getitem, way, changed)
        if draws.random() < 0.3:
            del around[last]
        else:
            around[last] = draws.choice(JUNK)
        path.write_text(json.dumps(changed))
        try:
            merge_ranks([path], tmp_path / "merged.json")
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 2
    assert all(str(path) in refusal for refusal in refusals), refusals


def assert_harmless(text):
    """Every character is shown as one, and no line is somebody else's."""
    assert all(letter.isprintable() or letter == "\n" for letter in text), ascii(text)
    assert "\nVERDICT all is well" not in text


def test_names_of_a_file_do_not_control_the_terminal(whole, tmp_path, capsys):
    """Of stages, loaders and hosts, in what commands print and in the summary; nor does the name of
    the file, which may be anything."""
    path, name = tmp_path / "s.db", HOSTILE.replace("\n", "")
    path.write_bytes(whole)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE task_window SET label = ?, name = ?", (name, name))
        connection.execute("UPDATE run SET host = ?", (name,))
        totals = connection.execute("SELECT totals FROM interval").fetchone()[0]
        totals = totals.replace('"decode"', json.dumps(name))
        connection.execute("UPDATE interval SET totals = ?, name = ?", (totals, name))
        own = "run_id, timestamp, name, begins, totals, details"  # with several, names are said
        connection.execute(f"INSERT INTO interval ({own}, pipeline) SELECT {own}, 1 FROM interval")
    for options in ([], ["--format", "json"]):
        assert main(["report", str(path), *options]) == 0
        printed = capsys.readouterr().out
        assert r"\x1b" in printed or r"\u001b" in printed
        assert_harmless(printed)
    log_stats_summary(path, write=(texts := []).append)
    assert_harmless(texts[0])
    assert main(["report", str(tmp_path / f"a{HOSTILE}")]) == 2
    printed = capsys.readouterr().err
    assert r"\x1b" in printed
    assert_harmless(printed.replace("\nVERDICT", ""))


def test_name_of_a_stage_is_one_printable_line(caplog):
    """In the pipeline's repr, its statistics and the log, wherever the name came from."""
    builder = PipelineBuilder().add_source([1, 0]).pipe(lambda n: 1 // n, name=HOSTILE)
    pipeline = builder.add_sink().build(max_failures=1)
    assert list(pipeline) == [1]
    assert_harmless(caplog.text)
    assert r"de\x1b]0;" in caplog.text
    assert_harmless(repr(pipeline))


def test_file_has_the_mode_of_the_umask_and_goes_to_a_pipe_as_it_is(tmp_path):
    """As any file that a program writes."""
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "new" / "page") as file:
            file.write(b"page")
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "page").stat().st_mode & 0o777 == 0o640
    reading, writing = os.pipe()
    with whole_file(f"/dev/fd/{writing}") as file:
        file.write(b"page")
    os.close(writing)
    assert os.read(reading, 10) == b"page"
    os.close(reading)


def test_file_is_not_written_through_a_link(tmp_path):
    """Nor does its unfinished part have a name that somebody could foresee."""
    target, page = tmp_path / "target", tmp_path / "page.html"
    target.write_text("mine")
    page.symlink_to(target)
    seen = []
    for _ in range(2):
        with whole_file(page) as file:
            file.write(b"page")
            seen += [each for each in os.listdir(tmp_path) if each.endswith(".tmp")]
    assert len(set(seen)) == 2
    assert (target.read_text(), page.read_text()) == ("mine", "page")
    with pytest.raises(TypeError, match="bytes-like"), whole_file(page) as file:
        file.write("half")
    assert page.read_text() == "page"
    assert sorted(os.listdir(tmp_path)) == ["page.html", "target"]


CONTENTS = {
    "notes.txt": b"hello " * 100,
    "empty.db": b"",
    "zip.json": b"\x1f\x8b123",
    "no-list.json": b'{"a": 1}',
    "later.json": b'{"traceEvents": [], "spdlTorch": {"formatVersion": 2, "profiles": []}}',
    "folder/other.json": b'{"traceEvents": []}',
}
WHAT_TO_GIVE = "Give a file that|Give the folder of|expected a folder of"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("report none", WHAT_TO_GIVE),
        ("report folder", "is a folder, and no"),
        ("report notes.txt", "notes.txt is not a statistics file.*ui.perfetto.dev opens a trace"),
        ("report empty.db", "empty.db is an empty SQLite file; nothing was logged to it"),
        ("report hooks.db", "hooks.db: run 1 has no intervals of a loader .* by recording()"),
        ("report run.db --html folder", "this is a folder"),
        ("report run.db --format json --html x.html", "exclude each other"),
        ("report run.db run.db", "there is a file of rank 0 before it"),
        ("plot run.db -o notes.txt", "File exists: 'notes.txt'"),
        ("plot run.db --stage x", "no stage 'x'"),
        ("trace none --torch none -o merged.json", WHAT_TO_GIVE),
        ("trace zip.json -o x.json", "zip.json: not a trace in JSON"),
        ("trace no-list.json -o x.json", "not a Chrome trace: it has no list of 'traceEvents'"),
        ("trace later.json -o x.json", "later.json: its format is 2"),
        ("trace a.json -o .", "this is a folder"),
        ("trace a.json -o x.json.bz2", "compressed by gzip alone: end the name in .gz"),
        ("trace run.db -o x.json", "run.db: a statistics file, not a trace. Read it with"),
        ("trace folder -o x.json", "folder is a folder, and no trace"),
        ("trace folder/other.json -o x.json", "a trace, but not one that spdl_torch wrote"),
        ("prepare none out", WHAT_TO_GIVE),
        ("watch run.db --once", "the command watch is gone. .*report FILE"),
    ],
)
def test_command_says_in_one_line_what_it_cannot_do(
    command, complaint, tmp_path, monkeypatch, capsys
):
    """Without a traceback; nothing is printed, written or changed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    write(tmp_path / "hooks.db", task_entry(), queue_entry())
    write(tmp_path / "run.db", *entries_of(REPORT))
    name, *arguments = command.split()
    before = {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}
    assert main([name, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    who = "spdl-torch: " if "is gone" in complaint else f"spdl-torch {name}: "
    line = printed.err.splitlines()[-1]
    assert line.startswith(who)
    assert re.search(complaint, line)
    assert {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_help_is_shown_without_a_command(capsys):
    """With the commands that there are."""
    assert main([]) == 0
    assert "report" in capsys.readouterr().out
