"""What the commands say of files and options that they cannot use: one line, and status 2."""

from __future__ import annotations

import re
import sqlite3

import pytest
from support.pages import REPORT
from support.readings import entries_of, queue_entry, task_entry, write

from spdl_torch.__main__ import main

CONTENTS = {
    "notes.txt": b"hello " * 100,
    "empty.db": b"",
    "zip.json": b"\x1f\x8b123",
    "no-list.json": b'{"a": 1}',
    "later.json": b'{"traceEvents": [], "spdlTorch": {"formatVersion": 2, "profiles": []}}',
    "folder/other.json": b'{"traceEvents": []}',
}
WHAT_TO_GIVE = "Give a file that|Give the folder of|expected a folder of"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with what is asked for below."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    write(tmp_path / "hooks.db", task_entry(), queue_entry())
    write(tmp_path / "run.db", *entries_of(REPORT))
    return tmp_path


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
def test_command_says_in_one_line_what_it_cannot_do(command, complaint, here, capsys):
    """Without a traceback; nothing is printed, written or changed."""
    name, *arguments = command.split()
    before = {path: path.is_dir() or path.read_bytes() for path in here.rglob("*")}
    assert main([name, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    who = "spdl-torch: " if "is gone" in complaint else f"spdl-torch {name}: "
    line = printed.err.splitlines()[-1]
    assert line.startswith(who)
    assert re.search(complaint, line)
    assert {path: path.is_dir() or path.read_bytes() for path in here.rglob("*")} == before


def test_report_opens_the_file_once(monkeypatch):
    """So that all of it is of one moment of a run that goes on."""
    opened, connect = [], sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: opened.append(a) or connect(*a, **k))
    assert main(["report", "run.db"]) == 0
    assert len(opened) == 1


def test_help_is_shown_without_a_command(capsys):
    """With the commands that there are."""
    assert main([]) == 0
    assert "report" in capsys.readouterr().out
