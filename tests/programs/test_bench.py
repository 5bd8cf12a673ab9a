"""``python examples/bench``: statistics, every table in its short form, failures, Ctrl-C."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from _datasets import Indices
from _folders import ROOT
from _measures_here import measure_here
from bench.arguments import main
from bench.command import choose, run_bench, write_files
from bench.loaders import (
    Work,
    bare_threads,
    grain_threads,
    nodes,
    ours,
    spdl_batches,
    spdl_items,
    torch_loader,
)
from bench.passes import measure_pass
from bench.peers import installed, left_out
from bench.report import Goal, Metric, Report
from bench.rounds import ratios, summarize
from bench.tables import TABLES, BenchOptions, load_table
from hypothesis import given, strategies as st
from PIL import Image

from spdl_torch.measuring.videos import write_video

BENCH = ROOT / "examples" / "bench"
POSITIVE = st.floats(1e-3, 1e6)
KEYS = {"title", "settings", "metrics", "rows", "ratios", "failures", "remarks"}
PNG = b"\x89PNG"


# -- statistics ------------------------------------------------------------------------------------


@given(st.lists(POSITIVE, min_size=1))
def test_median_is_within_the_spread(values):
    """And both ends of the spread are values."""
    summary = summarize(values)
    assert summary.smallest <= summary.median <= summary.largest
    assert {summary.smallest, summary.largest} <= set(values)


@given(st.dictionaries(st.integers(0, 9), POSITIVE), st.dictionaries(st.integers(0, 9), POSITIVE))
def test_ratio_is_taken_within_a_round(series, others):
    """Only rounds that both have count, and each is divided by the other's value of that round."""
    common = sorted(series.keys() & others.keys())
    assert ratios(series, others) == [series[n] / others[n] for n in common]


# -- the report ------------------------------------------------------------------------------------

METRICS = (
    Metric(key="speed", heading="images/s"),
    Metric(key="cost", heading="ms", higher_is_better=False),
)


def small_report():
    """Three rows, two rounds; the second round of one is missing."""
    report = Report(title="a title", metrics=METRICS, settings={"cores": 2}, peer="them, slow")
    for number, factor in enumerate((1.0, 2.0)):
        report.add("ours", {"speed": 100 * factor, "cost": 1.0}, number)
        report.add("them, slow", {"speed": 10 * factor, "cost": 4.0}, number)
    report.add("them, quick", {"speed": 50.0, "cost": 2.0}, 0)
    report.failures["broken"] = "Traceback:\n  somewhere\nValueError: no such thing"
    return report


def test_goal_takes_the_best_of_several_peers():
    """A name with a star is the row that is hardest to beat, and rounds stay together."""
    report = small_report()
    speed = Goal(metric="speed", row="ours", over="them*", at_least=2.5)
    cost = Goal(metric="cost", row="ours", over="them*", at_most=0.4)
    assert (report.best("them*", "speed"), report.best("them*", "cost")) == ("them, quick",) * 2
    assert report.values_of(speed) == [2.0]
    assert report.values_of(replace(speed, over="them, slow")) == [10.0, 10.0]
    report.goals = [speed, cost]
    assert [ratio["reached"] for ratio in report.as_json()["ratios"]] == [False, False]
    assert "goal >= 2.5: MISSED" in report.text()


def test_failed_row_stands_beside_the_others():
    """With the last line of its error; the whole of it is in the JSON."""
    report = small_report()
    text = report.text()
    assert "broken       failed: ValueError: no such thing" in text
    assert "x them, slow" in text
    assert "10.00 (10.00..10.00)" in text
    assert "somewhere" in report.as_json()["failures"]["broken"]


def test_json_has_every_value(tmp_path):
    """Strict JSON, read back: rows with median, spread and the values of each round."""
    path = tmp_path / "figures.json"
    write_files(small_report(), BenchOptions(table="tiny", json=path), io.StringIO())
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert set(found) == KEYS
    expected = {"median": 150.0, "min": 100.0, "max": 200.0, "values": [100.0, 200.0]}
    assert found["rows"]["ours"]["speed"] == expected
    assert found["metrics"]["speed"] == "images/s"


# -- what is measured ------------------------------------------------------------------------------


LOADERS = {
    "ours": (ours, None),
    "torch": (torch_loader, None),
    "bare threads": (bare_threads, None),
    "nodes": (nodes, "torchdata"),
    "SPDL, items": (spdl_items, "spdl"),
    "SPDL, batches": (spdl_batches, "spdl"),
    "Grain": (grain_threads, "grain"),
}


@pytest.mark.filterwarnings("ignore")  # of the peers, about themselves
@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_gives_each_sample_once(name):
    """So all of them are measured at the same work; the last batch is a part of one."""
    run, needs = LOADERS[name]
    if needs is not None and not installed(needs):
        pytest.skip(left_out(needs))
    workers = 0 if name == "torch" else 2
    work = Work(dataset=Indices(22), num_samples=22, batch_size=4, num_workers=workers)
    batches = [batch.tolist() for batch in run(work)()]
    assert sorted(itertools.chain(*batches)) == list(range(22))
    assert sorted(map(len, batches)) == [2, 4, 4, 4, 4, 4]


def test_bare_threads_pass_an_error_on():
    """A ceiling that lost samples would be too high."""
    work = Work(dataset=Indices(20, bad=(9,)), num_samples=20, batch_size=4, num_workers=2)
    with pytest.raises(ValueError, match="bad 9"):
        list(bare_threads(work)())


def test_pass_has_all_figures():
    """Rates, CPU and the first batch, from one pass."""
    work = Work(dataset=Indices(40), num_samples=40, batch_size=4, num_workers=0)
    figures = measure_pass(torch_loader(work), 40, len)
    keys = {"per_second", "end_to_end", "cpu_ms", "cpu_us", "first_batch_ms", "at_end_mib"}
    assert set(figures) == keys
    assert all(value >= 0 for value in figures.values())


@pytest.mark.parametrize("expected", [36, 44])
def test_pass_refuses_a_loader_that_loses_or_adds_samples(expected):
    """Its figures would be of other work."""
    work = Work(dataset=Indices(40), num_samples=40, batch_size=4, num_workers=0)
    with pytest.raises(RuntimeError, match=f"gave 40 samples, expected {expected}"):
        measure_pass(torch_loader(work), expected, len)


# -- the command -----------------------------------------------------------------------------------


def bench(options, **more):
    """Exit status and what was printed."""
    out, progress = io.StringIO(), io.StringIO()
    status = run_bench(options, out, progress, **more)
    return status, out.getvalue(), progress.getvalue()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Two classes of three small JPEGs."""
    folder = tmp_path_factory.mktemp("photographs")
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(3):
            image = Image.radial_gradient("L").resize((300, 260 + number)).convert("RGB")
            image.save(folder / name / f"{number}.jpg")
    return folder


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """One of three seconds."""
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "moving.mp4", seconds=3)
    return folder


@pytest.mark.filterwarnings("ignore")  # of the peers, about themselves
@pytest.mark.parametrize("table", [name for name in TABLES if name != "transfer"])
def test_smoke_run_of_a_table(table, photographs, videos, tmp_path):
    """Every table runs to its end: ours is measured, JSON and picture are written."""
    data = videos if table in ("clips", "video-decoders") else photographs
    options = BenchOptions(
        table=table,
        rounds=1,
        smoke=True,
        data=data,
        json=tmp_path / "figures.json",
        picture=tmp_path / "picture.png",
    )
    status, printed, progress = bench(options, run=measure_here)
    figures = json.loads(options.json.read_text())
    assert (status, figures["failures"]) == (0, {}), progress
    assert set(figures) == KEYS
    assert figures["rows"]
    for row, metrics in figures["rows"].items():
        assert any(line.startswith(row) for line in printed.splitlines()), printed
        assert set(metrics) <= set(figures["metrics"])
        for summary in metrics.values():
            assert len(summary["values"]) == 1
    if table not in ("ordinary", "what-if", "program"):
        assert any("ours" in row for row in figures["rows"])
    assert options.picture.read_bytes().startswith(PNG)


def test_contender_that_fails_is_a_row_with_its_error(photographs, tmp_path):
    """The others are measured all the same. A PNG that is called JPEG is Pillow's business."""
    (tmp_path / "fish").mkdir()
    Image.open(photographs / "cat" / "0.jpg").save(tmp_path / "fish" / "0.jpg", format="PNG")
    status, printed, progress = bench(
        BenchOptions(
            table="photographs",
            rounds=2,
            smoke=True,
            data=tmp_path,
            only=("torch, Pillow", "torch, torchvision"),
        ),
        run=measure_here,
    )
    assert status == 0
    (failed,) = [line for line in printed.splitlines() if "failed: " in line]
    assert failed.startswith("torch, torchvision")
    assert "RuntimeError" in failed
    assert any(line.startswith("torch, Pillow  ") for line in printed.splitlines())
    assert progress.count(": torch, torchvision\n") == 1, "it failed once and was tried no more"


def test_missing_peer_is_a_line():
    """It says how to install it, and its contenders are not measured."""
    table = load_table("tiny")
    contenders = [replace(one, needs=("no_such_peer",)) for one in table.contenders[1:]]
    table = replace(table, contenders=(table.contenders[0], *contenders))
    chosen, remarks = choose(table, BenchOptions(table="tiny"))
    assert [one.name for one in chosen] == [table.contenders[0].name]
    assert remarks == [left_out("no_such_peer")]
    assert "pip install" in remarks[0]


def test_goal_names_rows_that_there_are():
    """A goal over a name that no contender has would never be seen."""
    for name in TABLES:
        table = load_table(name)
        for goal in table.goals:
            names = [one.name for one in table.contenders]
            assert goal.row in names, goal
            assert goal.over is None or any(
                replace(goal, row="").compares(other) for other in names
            ), goal
            assert goal.metric in {metric.key for metric in table.metrics}, goal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a table"),
        (["photos"], "there is no table 'photos'; there are photographs, crop"),
        (["tiny", "--only", "theirs"], "--only 'theirs' is the beginning of none"),
        (["engine", "--json", "no/x.json"], "no/x.json: there is no folder no."),
        (["engine", "--picture", "x.txt"], "--picture must end with .png, .svg or .pdf"),
        (["engine", "--workers", "2", "4"], "engine takes one number of workers, got 2 4"),
        (["ordinary", "--workers", "2", "2"], "--workers must be different numbers"),
        (["clips", "--data", "nowhere"], "--data: nowhere must hold videos, found none."),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments, message, capsys):
    """Exit status 2, before anything is measured: one line that names the command once."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bench: {message}")
    assert error.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="signals of a terminal")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_with_what_there_is(tmp_path, signum):
    """Ctrl-C in the second measurement: the first is in the table and in the JSON, status 130."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "engine", "--smoke", "--rounds", "1000"]
    with subprocess.Popen(
        [*command, "--json", str(figures)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            for line in process.stderr:
                if line.startswith("round 2/"):
                    break
            process.send_signal(signum)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Interrupted" in printed
    assert len(json.loads(figures.read_text())["rows"]["ours"]["three_stages_us"]["values"]) == 1
