"""Plots of a statistics file: what is in it is drawn, with units, and the bottleneck is named. The
report as a page: it says what the report says, and needs no network."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import datetime
from functools import partial

import pytest
from support import readings
from support.pages import FORMULAS, HOSTILE, REPORT, read, reports, timeline
from support.readings import entries_of, pipeline_stats, stage_stats, write

from spdl_torch.__main__ import main
from spdl_torch.observe import EventLogEntry, Profile, make_report, plot_stats, report_of_file
from spdl_torch.observe.plot import drawn_part
from spdl_torch.observe.store.stored_run import StoredRun
from spdl_torch.observe.trace.profile import panels_of
from spdl_torch.pipeline import QueuePerfStats, TaskPerfStats

matplotlib = pytest.importorskip("matplotlib", reason="the extra plot is not installed")

task_entry = partial(readings.task_entry, elapsed=10.0)
queue_entry = partial(readings.queue_entry, elapsed=10.0, num_items=100)


def of_pipeline(occupancies, num_intervals=3, start=1000.0, wait=0.9):
    """Entries of a pipeline, 10 s each. A stage works all the time that its queue is empty; the
    loop waits for that share of the time."""

    def report(number):
        end, stages = 10.0 * number, []
        for label, share in occupancies.items():
            times = 0.1, 0.2, 0.3, end, 0.05
            waits = {"put_wait_time": number, "get_wait_time": number}
            queue = QueuePerfStats(end, 100 * number, 0, 0, share, *[0.01] * 4, **waits)
            tasks = TaskPerfStats(10 * number, 0, *times, 0.1)
            stages.append(stage_stats(label, 1, tasks, queue, busy_ratio=1 - share))
        return make_report(pipeline_stats(end, wait, stages))

    return entries_of(*map(report, range(1, num_intervals + 1)), started=start)


SLOW_DECODE = {"read": 0.95, "decode": 0.1}


@pytest.fixture
def db_path(tmp_path):
    """A run of three intervals with a slow stage whose consumer waits all the time."""
    return write(tmp_path / "s.db", *of_pipeline(SLOW_DECODE))


def picture(db_path, kind="tasks", run_id=None, **options):
    """The figure that is saved: of tasks, or of queues."""
    with StoredRun.opened(db_path, run_id) as run:
        return drawn_part(run, **options)[kind]


def panel(figure, quantity):
    """The axes whose y label begins with the quantity."""
    (axes,) = [axes for axes in figure.axes if axes.get_ylabel().startswith(quantity)]
    return axes


def lines(figure, quantity):
    """The y values of the lines of a panel, by label."""
    return {line.get_label(): list(line.get_ydata()) for line in panel(figure, quantity).lines}


def legend_texts(figure):
    """What the legend says."""
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def sentence(figure):
    """What is said above the panels, as one line."""
    return figure.axes[0].get_title(loc="left").replace("\n", " ")


def test_every_stage_has_its_lines_with_units(db_path):
    """One a panel, three where there are percentiles; the title has start, run and machine."""
    tasks, queues = picture(db_path), picture(db_path, "queues")
    assert {axes.get_ylabel(): len(axes.lines) for axes in (*tasks.axes, *queues.axes)} == {
        "tasks\n(1/s)": 2,
        "failures\n(1/s)": 2,
        "task time\n(ms)": 6,
        "throughput (QPS)\n(items/s)": 3,
        "occupancy\n(% of the time)": 3,
        "put: wait for room\n(ms)": 9,
        "get: wait for an item\n(ms)": 9,
    }
    assert panel(queues, "occupancy").get_ylim() == (-4, 104)
    started = datetime.fromtimestamp(1000).astimezone().isoformat(sep=" ")
    for figure in (tasks, queues):
        assert figure.axes[-1].get_xlabel().startswith("time since the run's start (s)")
        assert "s.db | run 1 of 1 | rank 0 of 1" in figure.get_suptitle()
        assert figure.get_suptitle().endswith(f"started {started}")
    assert lines(tasks, "task time") == {
        f"0:{position}:{label} {kind}": pytest.approx([value] * 3, rel=0.07)
        for position, label in ((1, "read"), (2, "decode"))
        for kind, value in (("mean", 100), ("p90", 200), ("p99", 300))
    }
    assert lines(queues, "throughput")["0:1:read_queue mean"] == [10, 10, 10]
    assert lines(queues, "occupancy")["0:2:decode_queue mean"] == pytest.approx([10] * 3)
    assert list(panel(queues, "throughput").lines[0].get_xdata()) == [10, 20, 30]


def test_failed_interval_has_no_time(tmp_path):
    """If all tasks failed there is no time to draw, rather than 0 ms."""
    entries = [
        task_entry(10.0 * end, "0:1:decode", num_failures=failures, ave_time=0.1 * (failures < 10))
        for end, failures in enumerate((0, 3, 10, 0), start=1)
    ]
    figure = picture(write(tmp_path / "s.db", *entries))
    assert lines(figure, "failures") == {"0:1:decode mean": [0, 0.3, 1, 0]}
    times = lines(figure, "task time")["0:1:decode mean"]
    assert [math.isnan(value) for value in times] == [False, False, True, False]


def collection(start, stop, generation):
    """The events of one collection."""
    details = {"generation": generation}
    return [EventLogEntry(start, "gc_start", details), EventLogEntry(stop, "gc_stop", details)]


def test_full_collections_are_spans_from_start_to_stop(tmp_path, db_path):
    """On every panel; young ones are not shown. Without any, the legend has none."""
    events = [
        *collection(1005.0, 1007.0, 2),
        *collection(1006.0, 1006.5, 0),
        *collection(1029.0, 1033.0, 2),
        *collection(2000.0, 2001.0, 2),  # long after the last interval
    ]
    path = write(tmp_path / "gc.db", *of_pipeline(SLOW_DECODE), *events)
    for figure in (picture(path), picture(path, "queues")):
        for axes in figure.axes:
            (marks,) = [each for each in axes.collections if each.get_zorder() == 0.5]
            spans = [tuple(path.get_extents().intervalx) for path in marks.get_paths()]
            assert spans == [(5, 7), (29, 33)]
            assert axes.get_xlim()[1] < 31, "the axis ends with the run"
        assert "full garbage\ncollection" in legend_texts(figure)
    none = picture(db_path)
    assert legend_texts(none) == ["0:1:read", "0:2:decode\n(bottleneck)", "mean", "p90", "p99"]


def test_stage_is_chosen_by_any_of_its_names(db_path, tmp_path):
    """With its queue; the bottleneck is looked for among all. The sink has no picture of tasks."""
    for name in ("decode", "0:2:decode_queue"):
        tasks = picture(db_path, stages=[name])
        queues = picture(db_path, "queues", stages=[name])
        assert list(lines(tasks, "tasks")) == ["0:2:decode mean"]
        assert list(lines(queues, "throughput")) == ["0:2:decode_queue mean"]
        assert sentence(tasks) == sentence(queues) == report_of_file(db_path).verdict.finding
    (path,) = plot_stats(db_path, tmp_path, stages=["sink"])
    assert path.name == "queue_stats_combined.png"


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [("+15", "+27", [20]), (1020.0, None, [20, 30]), (None, "+1e1", [10])],
)
def test_time_span_is_in_seconds_since_1970_or_the_start(db_path, start, end, expected):
    """Both bounds are inclusive, and the axis still counts from the run's start."""
    figure = picture(db_path, start_time=start, end_time=end)
    times = list(figure.axes[0].lines[0].get_xdata())
    assert times[-len(expected) :] == expected
    assert len(times) == max(2, len(expected))


def test_last_run_with_stats_is_drawn_by_default(tmp_path):
    """Runs are not mixed."""
    path = tmp_path / "s.db"
    for number, label in enumerate(("first", "second")):
        write(path, task_entry(1000.0 + 100 * number, f"0:1:{label}"))
    write(path, EventLogEntry(1.0, "mine"))
    assert list(lines(picture(path), "tasks")) == ["0:1:second mean"]
    assert "run 2 of 3" in picture(path).get_suptitle()
    assert list(lines(picture(path, run_id=1), "tasks")) == ["0:1:first mean"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": ["decod"]}, "run 1: no stage 'decod'; it has read, decode, sink"),
        ({"run_id": 7}, r"run_id must be of a run with figures \(1\), got 7"),
        ({"start_time": "+99"}, r"no interval of .* intervals end from \+10.000 s to \+30.000 s"),
        ({"end_time": "noon"}, "end_time must be seconds since 1970, .* got 'noon'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_nothing_to_draw_is_an_error_that_says_what_there_is(db_path, tmp_path, options, message):
    """And no folder is made. Events alone make no picture."""
    with pytest.raises(ValueError, match=message):
        plot_stats(db_path, tmp_path / "out", **options)
    path = write(tmp_path / "events.db", EventLogEntry(1.0, "mine"))
    with pytest.raises(ValueError, match=r"events.db: no figures of a stage or a queue were logge"):
        plot_stats(path, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def pointed_at(figure):
    """The entries of the legend that are marked."""
    return [text for text in legend_texts(figure) if text.endswith("\n(bottleneck)")]


def test_bottleneck_is_of_the_time_that_is_shown(tmp_path, db_path):
    """The legend points at it, as the report does. An interval that is not drawn has no say, and
    nor have the windows of hooks."""
    entries = of_pipeline(SLOW_DECODE, num_intervals=1)
    entries += of_pipeline(SLOW_DECODE, num_intervals=1, start=2000.0, wait=0.01)
    path = write(tmp_path / "two.db", *entries)
    assert pointed_at(picture(path, "queues", end_time=1500)) == ["0:2:decode_queue\n(bottleneck)"]
    later = picture(path, "queues", start_time=1500)
    assert "not input-bound" in sentence(later)
    assert pointed_at(later) == []
    path = write(tmp_path / "hooks.db", task_entry(busy_time=9.0), queue_entry())
    assert pointed_at(picture(path, "queues")) == []


def test_name_is_shown_as_it_is(tmp_path):
    """No formula, and nothing left out."""
    labels = ["_private", "price $1 to $2", "<lambda>"]
    entries = [task_entry(10.0, f"0:{place}:{label}") for place, label in enumerate(labels)]
    figure = picture(write(tmp_path / "s.db", *entries))
    shown = figure.legends[0].get_texts()[:3]
    assert [text.get_text().partition(":")[2].partition(":")[2] for text in shown] == labels
    figure.draw_without_rendering()
    assert not any(text.get_parse_math() for text in shown)


def test_plotting_leaves_matplotlib_alone(db_path, tmp_path):
    """No display, no pyplot, no setting changed; and importing does not load it."""
    code = f"""
import sys
import spdl_torch.observe
assert "matplotlib" not in sys.modules
import matplotlib
before = matplotlib.rcParams.copy()
spdl_torch.observe.plot_stats({str(db_path)!r}, {str(tmp_path)!r})
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    environment = {"PATH": "", "MPLCONFIGDIR": matplotlib.get_cachedir()}  # with its list of fonts
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_command_prints_the_paths_it_wrote(db_path, tmp_path, capsys):
    """Nothing else, so that they can be piped: SPDL's names, in a folder that is made."""
    arguments = ["plot", str(db_path), "-o", str(tmp_path / "new" / "out")]
    options = ["--stage", "read", "decode", "--start", "+5", "--end", "+60", "--run", "1"]
    assert main([*arguments, *options]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    names = [f"{kind}_stats_combined.png" for kind in ("task", "queue")]
    paths = [tmp_path / "new" / "out" / name for name in names]
    assert written.out.splitlines() == [*map(str, paths)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_command_names_matplotlib_when_it_is_missing(db_path, monkeypatch, capsys):
    """Without a traceback."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(db_path)]) == 2
    assert "matplotlib" in capsys.readouterr().err


def write_run(path, *runs, events=(), **config):
    """A run in a statistics file with a pipeline for each list of readings."""
    entries = []
    for number, found in enumerate(runs):
        of_loader = {"number": number, "name": f"loader {number}", "started": 1_800_000_000}
        entries += entries_of(*found, **of_loader)
    return write(path, *entries, *events, config=config)


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
    events = [EventLogEntry(1_800_000_001, "skipped", skipped)]
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
