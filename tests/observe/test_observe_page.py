"""The report as a page: its figures are the store's, and it needs no network."""

from __future__ import annotations

import base64
import gzip
import json
import sys

import pytest
from _browser import Browser, found_chromium
from _pages import FORMULAS, HOSTILE, MS, REPORT, Reader, read, reports, timeline
from _readings import html_in_notebook

from spdl_torch import DataLoader
from spdl_torch.__main__ import main
from spdl_torch.engine.moments import TwoClocks
from spdl_torch.engine.timeline import Part, Row, Timeline, Turn
from spdl_torch.observe import (
    EventLogEntry,
    Profile,
    Report,
    SQLiteStatsWriter,
    entries_of,
    make_report,
    pipelines_of_file,
    query_queue_stats,
    query_task_stats,
    recording,
    report_of_file,
)
from spdl_torch.observe.page.events import Event, event_tables
from spdl_torch.observe.trace.sections import OverTime


def write_run(path, *runs, events=(), **config):
    """A run in a statistics file with a pipeline for each list of readings."""
    with SQLiteStatsWriter(path, config=config) as writer:
        for number, readings in enumerate(runs):
            before = None
            for reading in readings:
                timestamp = 1_800_000_000 + reading.stats.elapsed
                name = f"loader {number}"
                for entry in entries_of(
                    reading, before, pipeline_id=number, name=name, timestamp=timestamp
                ):
                    writer.log(entry)
                before = reading
        for seconds, name, details in events:
            writer.log(EventLogEntry(1_800_000_000 + seconds, name, details))
    return path


def shown(table, column):
    """A column of a table of the page."""
    names = [each["name"] for each in table["columns"]]
    return [row[names.index(column)] for row in table["rows"]]


# -- figures ---------------------------------------------------------------------------------------


def test_figures_are_those_of_the_store(tmp_path):
    """Report, stages and every interval of every curve, where the stages' names come twice too."""
    db = write_run(tmp_path / "run.db", reports(6))
    page = read(Profile.load(db).write_html(tmp_path / "out" / "page.html"))
    report = report_of_file(db)
    assert [Report.from_dict(each) for each in page.figures["reports"]] == [report]
    (stages,) = (t for t in page.figures["tables"] if t["title"] == "Stages")
    for column, figures in {
        "stage": [s.name for s in report.stats.stages],
        "workers": [s.concurrency for s in report.stats.stages],
        "busy": [s.busy_ratio for s in report.stats.stages],
        "p99 ms": [s.tasks.p99_time for s in report.stats.stages],
        "tasks": [s.tasks.num_tasks for s in report.stats.stages],
        "at most/s": [s.capacity for s in report.stats.stages],
        "failed": [s.tasks.num_failures for s in report.stats.stages],
    }.items():
        assert shown(stages, column) == figures, column
    tasks = query_task_stats(db)[::-1]
    sink = [row for row in query_queue_stats(db) if row["label"] == "sink"][::-1]
    check_curve(page, "Waiting for data: sink", sink, lambda r: r["get_wait_time"] / r["elapsed"])
    check_curve(page, "Delivered: sink", sink, lambda r: r["num_items"] / r["elapsed"])
    assert delivered(page) == "batches/s"
    units = {chart["title"]: chart["unit"] for chart in page.figures["charts"]}
    assert units["Calls"] == units["Failed calls"] == "1/s"
    for name in ("fetch", "collate"):
        rows = [row for row in tasks if row["label"] == name]
        check_curve(page, f"Busy: {name}", rows, lambda r: r["busy_time"] / r["elapsed"] / 2)
        check_curve(page, f"Calls: {name}", rows, lambda r: r["num_tasks"] / r["elapsed"])
        failed = f"Failed calls: {name}"
        check_curve(page, failed, rows, lambda r: r["num_failures"] / r["elapsed"])
        for word, column in {"mean": "ave", "p50": "p50", "p90": "p90", "p99": "p99"}.items():
            key = f"{column}_time"
            check_curve(page, f"Time of a call: {name} {word}", rows, lambda r, k=key: 1e3 * r[k])


def delivered(page):
    """The unit of what the consumer took."""
    (chart,) = (chart for chart in page.figures["charts"] if chart["title"] == "Delivered")
    return chart["unit"]


def test_what_is_delivered_has_its_name(tmp_path):
    """A loader's consumer takes batches, a pipeline's takes items."""
    for unit, readings in {
        "batches": reports(2),
        "items": [make_report(reading.stats) for reading in reports(2)],
    }.items():
        db = write_run(tmp_path / f"{unit}.db", readings)
        page = read(Profile.load(db).write_html(tmp_path / "page.html"))
        assert delivered(page) == f"{unit}/s"


def check_curve(page, name, rows, figure):
    """A drawn curve has, for each interval, its figure at its end; the file says the same."""
    (columns,) = page.drawn[name]
    started = rows[0]["timestamp"] - rows[0]["elapsed"]
    ends = [row["timestamp"] - started for row in rows]
    values = [figure(row) for row in rows]
    assert columns["y"][-len(rows) :] == pytest.approx(values), name
    times = columns["x"][-len(rows) :]
    assert [time - times[0] for time in times] == pytest.approx([e - ends[0] for e in ends])
    # Where the first interval begins.
    assert times[0] - columns["x"][-len(rows) - 1] == pytest.approx(rows[0]["elapsed"])
    title, _, line = name.partition(": ")
    (chart,) = (c for c in page.figures["charts"] if c["title"] == title)
    (drawn,) = (each for each in chart["lines"] if each["name"] == line)
    assert drawn["values"][-len(rows) :] == pytest.approx(values)


def test_time_line_shows_every_slice_of_the_trace(tmp_path):
    """Each kind with its number and its total time, on the lanes of the trace, parts included."""
    profile = Profile(reports(3)[-1], (timeline(40),))
    trace = json.loads(profile.write_trace(tmp_path / "t.json").read_text())
    page = read(profile.write_html(tmp_path / "live.html"))
    loaded = read(Profile.load(tmp_path / "t.json").write_html(tmp_path / "loaded.html"))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {e["name"] for e in slices} >= {"Process", "Training Step", "collate"}
    for each in (page, loaded):
        for kind in {event["name"] for event in slices}:
            those = [event for event in slices if event["name"] == kind]
            (columns,) = each.drawn[kind]
            seconds = [b - a for a, b in zip(columns["left"], columns["right"], strict=True)]
            assert len(seconds) == len(those), kind
            total = sum(event["dur"] for event in those) / 1e6
            assert sum(seconds) == pytest.approx(total)
            assert columns["left"] == sorted(columns["left"])
            (lanes,) = each.figures["timelines"]
            (sums,) = (s for s in lanes["spans"] if s["kind"] == kind)
            assert (sums["num_spans"], sums["seconds"]) == (len(those), pytest.approx(total))
        names = ["worker[0]", "worker[1]", "worker[2]", "training"]
        assert each.figures["timelines"][0]["names"] == names
        readings = [e for e in trace["traceEvents"] if e["ph"] == "C"]
        (queue,) = each.drawn["Queues: queue worker→training (cap 8)"]
        noted = [event["args"]["items"] for event in readings]
        assert queue["y"] == [*noted, noted[-1]]  # to the end of the workers' rows
        (work,) = each.drawn["Process"]
        assert queue["x"][-1] == pytest.approx(max(work["right"]))
        bands = {band["name"]: band for band in each.figures["bands"]}
        collection = bands["garbage collection, generation 2"]
        assert collection["stop"] - collection["start"] == pytest.approx(0.002)
        (moved,) = (t for t in each.figures["tables"] if t["title"] == "Moved to mars")
        assert (shown(moved, "From"), shown(moved, "Why")) == (["threads"], ["rain"])


def test_events_of_any_name_have_a_table_with_their_details(tmp_path):
    """Also those that nobody knows yet; an event of another pipeline is on that one's part."""
    events = [
        (0.5, "skipped", {"pipeline": 0, "key": "img/7.jpg", "error": "ValueError: bad"}),
        (0.6, "placed", {"pipeline": 1, "where": "children"}),
        (0.7, "weather", {"sun": True, "degrees": 21.5}),
        (0.8, "gc_start", {"generation": 1}),
        (0.9, "gc_stop", {"generation": 1}),
    ]
    db = write_run(tmp_path / "run.db", reports(2), reports(2), events=events)
    first = read(Profile.load(db, pipeline=0).write_html(tmp_path / "0.html")).figures
    other = read(Profile.load(db, pipeline=1).write_html(tmp_path / "1.html")).figures
    tables = {table["title"]: table for table in first["tables"]}
    assert shown(tables["Skipped samples"], "Key") == ["img/7.jpg"]
    assert shown(tables["Weather"], "Sun") == [True]
    assert shown(tables["Weather"], "Degrees") == ["21.5"]
    assert "Placed" not in tables
    assert {"Placed", "Weather"} <= {table["title"] for table in other["tables"]}
    (collection,) = (b for b in first["bands"] if b["name"] == "garbage collection, generation 1")
    assert collection["stop"] - collection["start"] == pytest.approx(0.1, rel=1e-5)


class Faulty:
    """Samples of which some fail."""

    thread_safe = True

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index % 10 == 7:
            raise ValueError(f"bad {index}")
        return index


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "isolation": "process"}],
    ids=["the loop's thread", "threads", "processes"],
)
def test_live_page_lists_skipped_samples_with_their_keys(tmp_path, options):
    """Wherever they were loaded; beside a file, which has them too, they are listed once."""
    loader = DataLoader(Faulty(), 4, on_error="skip", error_budget=0.5, **options)
    with recording(loader, tmp_path / "run.db"):
        for _ in loader:
            pass
    profile = loader.profile()
    page = read(profile.write_html(tmp_path / "live.html"))
    (table,) = (t for t in page.figures["tables"] if t["title"] == "Skipped samples")
    assert sorted(shown(table, "Key")) == ["17", "27", "37", "7"]
    assert len(loader.skipped) == 4
    for key, error in zip(shown(table, "Key"), shown(table, "Error"), strict=True):
        assert f"bad {key}" in error
    trace, out = profile.write_trace(tmp_path / "t.json"), tmp_path / "both.html"
    command = ["report", str(tmp_path / "run.db"), "--trace", str(trace), "--html", str(out)]
    assert main(command) == 0
    (table,) = (t for t in read(out).figures["tables"] if t["title"] == "Skipped samples")
    assert sorted(shown(table, "Key")) == ["17", "27", "37", "7"]


# -- the document ----------------------------------------------------------------------------------


def test_document_is_sound_and_loads_nothing(tmp_path):
    """Closed elements, no address that a browser would open, and a policy that forbids it."""
    profile = Profile(reports(3)[-1], (timeline(5),))
    page = read(profile.write_html(tmp_path / "p.html"))
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "action", "data"}
    policies = [value for name, value in page.attributes if name == "content"]
    assert any(policy.startswith("default-src 'none';") for policy in policies)


def test_texts_of_users_are_shown_as_they_are(tmp_path):
    """Names of stages and files, keys, errors and details make neither elements nor formulas."""
    name = f"{HOSTILE} {FORMULAS}"
    events = [(0.5, HOSTILE, {HOSTILE: HOSTILE, "formula": FORMULAS})]
    db = write_run(tmp_path / "a<b>&.db", reports(3, stages=(name, "b")), events=events, x=HOSTILE)
    page = read(Profile.load(db).write_html(tmp_path / "p.html"))
    assert set(page.scripts) == {"spdl-script", "spdl-charts", "spdl-figures", ""}
    assert not any(attribute.startswith("on") for attribute, _ in page.attributes)
    texts = "\n".join(page.texts)
    assert texts.count(HOSTILE) >= 3
    assert name in page.texts
    assert "a<b>&.db" in texts
    packed = gzip.decompress(base64.b64decode(page.scripts["spdl-charts"])).decode()
    assert not any(mark in packed for mark in ("$$", r"\\(", r"\\["))


def test_report_alone_is_a_page_without_a_library(tmp_path, monkeypatch):
    """Sentences and the table of stages need no Bokeh; charts do, and the error names the extra."""
    monkeypatch.setitem(sys.modules, "bokeh", None)
    report = reports(3)[-1]
    page = read(report.write_html(tmp_path / "r.html"))
    assert report.verdict.finding in page.texts
    assert [Report.from_dict(each) for each in page.figures["reports"]] == [report]
    profile = Profile(report, (timeline(3),))
    with pytest.raises(ModuleNotFoundError, match=r"pip install bokeh \(the extra report\)"):
        profile.write_html(tmp_path / "p.html")
    assert not (tmp_path / "p.html").exists()
    assert report.verdict.finding in Reader(html_in_notebook(profile)).texts


def test_notebook_shows_the_page(tmp_path):
    """A profile in a frame of its own, a report as a fragment, both with the newest figures."""
    report = reports(3)[-1]
    assert report.verdict.action in "".join(Reader(html_in_notebook(report)).texts)
    profile = Profile(report, (timeline(3),))
    frame = Reader(html_in_notebook(profile))
    document = dict(frame.attributes)["srcdoc"]
    assert Reader(document).figures == read(profile.write_html(tmp_path / "p.html")).figures


@pytest.mark.parametrize("name", ["", "page.html"])
def test_page_replaces_a_page_and_no_folder(tmp_path, name):
    """The file takes its name once it is whole; nothing else is left behind."""
    path = tmp_path / name
    if not name:
        with pytest.raises(ValueError, match="a page must be a file"):
            reports(1)[-1].write_html(path)
        return
    path.write_text('<!DOCTYPE html>before<body class="spdl">')
    assert reports(1)[-1].write_html(path) == path
    assert "before" not in path.read_text()[:100]
    assert [each.name for each in tmp_path.iterdir()] == [name]


# -- the commands ----------------------------------------------------------------------------------


def test_command_writes_the_page_and_prints_its_path(tmp_path, capsys):
    """One page with every pipeline of the run."""
    db = write_run(tmp_path / "run.db", reports(5), reports(5, stages=("decode",)))
    out = tmp_path / "out.html"
    assert main(["report", str(db), "--html", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    page = read(out)
    found = [Report.from_dict(each) for each in page.figures["reports"]]
    assert found == [report_of_file(db, pipeline=number) for number in pipelines_of_file(db)]
    assert {chart["run"] for chart in page.figures["charts"]} == {"loader 0", "loader 1"}


def test_events_that_trace_and_file_both_have_are_shown_once():
    """In the table that says more; details that no event has get no column."""
    event = {"reason": "it was tried", "remedy": ""}
    traced = OverTime(tables=event_tables([Event(1.001, "placement", event)]))
    stored = OverTime(tables=event_tables([Event(1.0, "placement", {"pipeline": 0, **event})]))
    (table,) = (traced + stored).tables
    assert [column.name for column in table.columns] == ["at s", "Pipeline", "Reason"]
    assert len((traced + traced.named("another")).tables) == 2
    other = OverTime(tables=event_tables([Event(1.0, "placement", {"reason": "it was not"})]))
    assert len((other + stored).tables) == 2


def test_page_of_a_file_and_a_trace_shows_both(tmp_path, capsys):
    """The trace adds its time line to the page; alone it has its report."""
    db = write_run(tmp_path / "run.db", reports(6))
    trace = Profile(REPORT, (timeline(4),)).write_trace(tmp_path / "t.json.gz")
    out = tmp_path / "o.html"
    assert main(["report", str(db), "--trace", str(trace), "--html", str(out)]) == 0
    page = read(out)
    assert "Process" in page.drawn
    assert "Busy: fetch" in page.drawn
    assert main(["report", str(trace)]) == 0
    assert str(REPORT) in capsys.readouterr().out


def test_page_holds_no_letters_that_control_a_terminal(tmp_path):
    """Shown as in the text: names of loaders, and what events say."""
    events = [(1.0, "skipped", {"key": f"a{HOSTILE}\x1b[2Jb"}), (1.0, "\x1b[31m", {"\x1b": 1})]
    db = write_run(tmp_path / "run.db", reports(2), events=events)
    page = Profile.load(db).write_html(tmp_path / "page.html").read_text()
    assert "\x1b" not in page
    assert r"\x1b[2Jb" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{db}", "--html", "{folder}"], "this is a folder"),
        (["{folder}/none.db"], "does not exist"),
        (["{folder}"], "is a folder, and neither"),
        (["{other}"], "not a trace in JSON, nor a statistics file"),
        (["{db}", "--trace", "{db}"], "a statistics file, not a trace"),
        (["{empty}"], "empty.db: the file is empty: nothing was logged"),
        (["{db}", "--format", "json", "--html", "x.html"], "exclude each other"),
        (["{trace}", "--run", "1"], "chosen from a statistics file"),
        (["{two}", "--trace", "{trace}", "--html", "x.html"], "choose with --pipeline"),
    ],
)
def test_command_refuses_what_it_cannot_show(tmp_path, capsys, arguments, message):
    """One line that says what is wrong, and exit status 2."""
    places = {
        "db": write_run(tmp_path / "run.db", reports(2)),
        "two": write_run(tmp_path / "two.db", reports(2), reports(2)),
        "trace": Profile(REPORT, (timeline(2),)).write_trace(tmp_path / "t.json"),
        "folder": tmp_path,
        "other": tmp_path / "other.txt",
        "empty": tmp_path / "empty.db",
    }
    places["other"].write_text("hello")
    places["empty"].touch()
    assert main(["report", *(each.format(**places) for each in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("spdl-torch report: ")
    assert message in captured.err


# -- in a browser ----------------------------------------------------------------------------------

MODELS = "[...Bokeh.documents[0]._all_models.values()]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium."""
    with Browser(found_chromium(), tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def test_browser_shows_a_page_without_a_complaint(tmp_path, browser):
    """Nothing on the console, nothing asked of the network, no user's text run."""
    events = [(0.5, HOSTILE, {"key": HOSTILE})]
    db = write_run(tmp_path / "run.db", reports(6, stages=(HOSTILE, FORMULAS)), events=events)
    trace = Profile(REPORT, (timeline(30),)).write_trace(tmp_path / "t.json")
    out = tmp_path / "p.html"
    assert main(["report", str(db), "--trace", str(trace), "--html", str(out)]) == 0
    browser.open(out)
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [out.as_uri()]
    assert browser.evaluate("window.pwned === undefined")
    rows = "[...document.querySelectorAll('table')[0].tBodies[0].rows]"
    cells = browser.evaluate(f"{rows}.map((row) => [...row.cells].map((c) => c.innerText))")
    stages = report_of_file(db).stats.stages
    assert [row[0] for row in cells] == [HOSTILE, FORMULAS]
    assert [row[11] for row in cells] == [f"{stage.tasks.num_tasks:,}" for stage in stages]
    for row, stage in zip(cells, stages, strict=True):
        tasks = stage.tasks
        times = tasks.ave_time, tasks.p50_time, tasks.p90_time, tasks.p99_time
        assert row[7:11] == [f"{1e3 * seconds:.2f}" for seconds in times]
    page = read(out)
    spans = browser.evaluate(
        f"{MODELS}.filter((m) => m.data?.left).map((m) => [m.name, m.data.left.length])"
    )
    expected = {s["kind"]: s["num_spans"] for s in page.figures["timelines"][0]["spans"]}
    assert dict(spans) == expected


def test_browser_shows_what_the_mouse_points_at(tmp_path, browser):
    """A user's name of a part is a text in the hint too."""
    row = Row("worker", 1, 0, "stage", 1, (Turn(0, 0, 1000 * MS, 1000 * MS, -1, 7, 7, -1, -1),),
              (Part(HOSTILE, 0, 1000 * MS, MS),))  # fmt: skip
    clock = TwoClocks(perf_ns=0, system_ns=1_800_000_000_000_000_000)
    profile = Profile(REPORT, (Timeline("DataLoader", 1, clock, (row,)),))
    browser.open(profile.write_html(tmp_path / "p.html"))
    deep = (
        "(() => { const found = []; const look = (root) => { for (const e of"
        " root.querySelectorAll('*')) { if (e.shadowRoot) look(e.shadowRoot);"
        " if (e.tagName === 'CANVAS' || e.classList.contains('bk-Tooltip')) found.push(e); } };"
        " look(document); return found; })()"
    )
    x, y = browser.evaluate(
        f"{deep}.filter((e) => e.tagName === 'CANVAS').map((e) => e.getBoundingClientRect())"
        ".map((r) => [r.left + r.width / 3, r.top + r.height / 2])[0]"
    )
    for step in range(20):
        browser.point_at(x + step, y + 5)
    shown = browser.evaluate(
        f"{deep}.filter((e) => e.tagName !== 'CANVAS').map((e) => e.shadowRoot.textContent).join()"
    )
    assert HOSTILE in shown
    assert browser.evaluate("window.pwned === undefined")
    assert browser.problems == []
