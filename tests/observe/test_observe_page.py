"""The report as a page: it says what the report says, and needs no network."""

from __future__ import annotations

import sys

import pytest
from support.pages import FORMULAS, HOSTILE, REPORT, read, reports, timeline
from support.readings import entries_of

from spdl_torch.__main__ import main
from spdl_torch.observe import EventLogEntry, Profile, SQLiteStatsWriter, report_of_file
from spdl_torch.observe.trace.profile import panels_of

pytest.importorskip("matplotlib", reason="the extra plot is not installed")


def write_run(path, *runs, events=(), **config):
    """A run in a statistics file with a pipeline for each list of readings."""
    with SQLiteStatsWriter(path, config=config) as writer:
        for number, readings in enumerate(runs):
            for entry in entries_of(
                *readings, number=number, name=f"loader {number}", started=1_800_000_000
            ):
                writer.log(entry)
        for seconds, name, details in events:
            writer.log(EventLogEntry(1_800_000_000 + seconds, name, details))
    return path


def assert_says(page, report):
    """The verdict, the action, the checks and the table of the stages, cell by cell."""
    said = " ".join(page.texts)
    finding = report.verdict.finding.split(": ", 1)  # the reason is a sentence of its own
    for text in (*finding, report.verdict.action, *report.verdict.remarks):
        assert text.lower() in said.lower()
    for line in str(report).splitlines():
        if line.startswith("checks"):
            assert line.removeprefix("checks").strip() in said
    for stage in report.stats.stages:
        cells = page.texts[page.texts.index(stage.name) :]
        tasks = stage.tasks
        assert str(tasks.num_tasks) in cells
        for seconds in (tasks.ave_time, tasks.p50_time, tasks.p90_time, tasks.p99_time):
            assert f"{1e3 * seconds:.1f}" in cells


def test_time_line_shows_the_last_seconds_of_the_trace():
    """Each kind of slice, on the lanes of the trace, parts included, and the queues."""
    trace = Profile(reports(3)[-1], (timeline(40),))._as_trace(None, 200_000)
    (lanes, queues), ((began, ended),), (start, stop) = panels_of(trace)
    assert lanes.names == ["worker[0]", "worker[1]", "worker[2]", "training"]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {e["name"] for e in slices} == set(lanes.spans)
    for kind, spans in lanes.spans.items():
        those = [event for event in slices if event["name"] == kind]
        assert len(spans) == len(those)
        total = sum(event["dur"] for event in those) / 1e6
        assert sum(end - begin for _, begin, end in spans) == pytest.approx(total)
    assert list(lanes.inside) == ["collate"]
    readings = [e["args"]["items"] for e in trace["traceEvents"] if e["ph"] == "C"]
    (queue,) = queues.curves
    assert queue.name == "queue ready (cap 8)"
    assert list(queue.values) == [*readings, readings[-1]]  # to the end
    assert queue.times[-1] == pytest.approx(stop)
    assert ended - began == pytest.approx(0.002)
    longer = Profile(REPORT, (timeline(8_000),))._as_trace(None, 200_000)
    _, _, (start, stop) = panels_of(longer)
    assert stop - start == pytest.approx(5.0)


def test_live_page_has_the_time_line(tmp_path):
    """The document is sound and loads nothing: closed elements, images that are in it, no script,
    and a policy that forbids the rest."""
    page = read(Profile(REPORT, (timeline(40),)).write_html(tmp_path / "page.html"))
    assert len(page.images) == 1
    assert_says(page, REPORT)
    assert "script" not in page.tags
    assert not {name for name, _ in page.attributes} & {"href", "srcset", "action", "data"}
    policies = [value for name, value in page.attributes if name == "content"]
    assert any(policy.startswith("default-src 'none';") for policy in policies)
    assert "width=device-width, initial-scale=1" in policies


def test_texts_of_users_are_shown_as_they_are(tmp_path):
    """Names of stages and files, keys and errors make no elements, and control no terminal."""
    name = f"{HOSTILE} {FORMULAS}"
    skipped = {"pipeline": 0, "key": "a\x1b[2Jb", "error": HOSTILE}
    events = [(1.0, "skipped", skipped)]
    db = write_run(tmp_path / "a<b>&.db", reports(3, stages=(name, "b")), events=events, x=HOSTILE)
    page = read(Profile.load(db).write_html(tmp_path / "p.html"))
    assert "script" not in page.tags
    assert not any("\x1b" in each for each in page.texts)
    assert len(page.images) == page.tags.count("img") == 2
    assert not any(attribute.startswith("on") for attribute, _ in page.attributes)
    texts = "\n".join(page.texts)
    assert r"a\x1b[2Jb" in texts
    assert HOSTILE in texts
    assert name in page.texts
    assert "a<b>&.db" in texts


def test_report_alone_is_a_page_without_a_library(tmp_path, monkeypatch):
    """Sentences and the table of stages; charts need matplotlib, which the error names. It replaces
    a page and no folder: the file takes its name once it is whole, and nothing else is left."""
    profile = Profile(REPORT, (timeline(3),))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        profile.write_html(tmp_path / "p.html")
    with pytest.raises(ValueError, match="a page must be a file"):
        REPORT.write_html(tmp_path)
    path = tmp_path / "page.html"
    path.write_text("before")
    assert REPORT.write_html(path) == path
    assert_says(read(path), REPORT)
    assert [*tmp_path.iterdir()] == [path]


def test_command_writes_a_page_of_the_run(tmp_path, capsys):
    """One page with every pipeline of the run: it says what their reports say, with a picture of
    the stages, and one of the queues."""
    db = write_run(tmp_path / "run.db", reports(5), reports(5, stages=("decode",)))
    out = tmp_path / "new" / "out.html"
    assert main(["report", str(db), "--html", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    page = read(out)
    assert {"loader 0", "loader 1"} <= set(page.texts)
    assert ["<svg" in image for image in page.images] == [True] * 2
    facts = [text for text in page.texts if text.startswith("run.db | run 1 of 1 | rank 0 of 1")]
    assert [" | pipeline 0 loader 0 | " in text for text in facts] == [True, False]
    for number in (0, 1):
        assert_says(page, report_of_file(db, pipeline=number))
