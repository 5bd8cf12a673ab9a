"""The main job: ``python -m spdl_torch demo``."""

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from _gates import until
from PIL import Image

import spdl_torch
from spdl_torch.__main__ import main
from spdl_torch.demo.command import UsageError, check_folder
from spdl_torch.demo.jobs import (
    VARIANTS,
    Measure,
    Measurement,
    Prepare,
    Smoke,
    StageRow,
    decode_answer,
    decode_job,
    encode,
    expected_seconds,
    make_plan,
    spread,
)
from spdl_torch.demo.table import comparison_table, stage_table
from spdl_torch.demo.verdict import LOADER, TRAINER, bottleneck, compare, quiet_rounds
from spdl_torch.measuring import memory
from spdl_torch.measuring.child_process import answers_of
from spdl_torch.measuring.machine import OtherPrograms
from spdl_torch.measuring.photographs import SIZES, write_photographs
from spdl_torch.measuring.progress_bar import ProgressBar, duration, render, time_left

DEMO = [sys.executable, "-m", "spdl_torch", "demo", "--smoke"]

MEASUREMENT = Measurement(
    loading_images_per_second=600.0,
    first_batch_seconds=0.1,
    loading_cpu_seconds=0.003,
    training_images_per_second=50.0,
    wait_ratio=0.2,
    training_cpu_seconds=0.04,
    loss=2.3,
    other_cores=0.0,
    peak_bytes=700 * 2.0**20,
)
STAGE = StageRow(
    name="decode",
    concurrency=2,
    num_calls=480,
    busy_ratio=0.9,
    cpu_ratio=0.95,
    wait_in_ratio=0.06,
    wait_out_ratio=0.04,
    mean_seconds=0.003,
    p99_seconds=0.01,
    calls_per_second=600.0,
    capacity_per_second=666.7,
)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jpg"))
    }


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder, 40, seed=1)
    return folder


def test_photographs_are_the_same_for_the_same_seed(photographs, tmp_path):
    """A seed fixes every byte, and the number of photographs does not change the first ones."""
    write_photographs(tmp_path / "same", 12, seed=1)
    write_photographs(tmp_path / "other", 12, seed=2)
    same, other, all_of_them = map(files_of, (tmp_path / "same", tmp_path / "other", photographs))
    assert len(same) == 12
    assert same.items() <= all_of_them.items()
    assert not set(same.values()) & set(other.values())


def test_photographs_resemble_imagenet(photographs):
    """They decode to the sizes announced, and take ImageNet's bytes per pixel, about 0.57."""
    sizes, modes, num_bytes, num_pixels = set(), set(), 0, 0
    for path in photographs.rglob("*.jpg"):
        with Image.open(path) as image:
            image.load()
            assert image.format == "JPEG"
            modes.add(image.mode)
            sizes.add(image.size)
            num_pixels += image.width * image.height
        num_bytes += path.stat().st_size
    assert modes == {"RGB", "L"}
    assert sizes <= {(width, height) for width, height, _ in SIZES}
    assert sum(share for _, _, share in SIZES) == 100
    assert 0.45 < num_bytes / num_pixels < 0.7


def test_photographs_report_their_progress(tmp_path):
    """One call for every photograph written."""
    done = []
    write_photographs(tmp_path, 3, progress=done.append)
    assert done == [1, 2, 3]


@pytest.mark.parametrize(
    ("total", "count", "expected"), [(10, 3, [0, 3, 6]), (2, 5, [0, 1, 0, 1, 0]), (3, 3, [0, 1, 2])]
)
def test_spread(total, count, expected):
    """Evenly over the folder, or round and round."""
    assert spread(total, count) == expected


def test_epochs_mean_all_the_images():
    """--epochs trains on every image; without it the amount does not depend on the folder."""
    assert make_plan("cpu", 1000, epochs=3).epoch_images == 1000
    assert make_plan("cpu", 1000, epochs=3).epochs == 3
    assert make_plan("cpu", 1000) == make_plan("cpu", 20)


@pytest.mark.parametrize(
    "job",
    [
        Prepare(folder="photos", num_photographs=3),
        Smoke(prepare=Prepare(folder="photos", num_photographs=3), num_workers=2),
        Measure(
            variant="torch", folder="f", num_workers=2, device="cpu", plan=make_plan("cpu", 10)
        ),
    ],
)
def test_a_job_survives_the_way_to_the_child(job):
    """JSON and back."""
    import json

    assert decode_job(json.dumps(encode(job))) == job


def test_a_measurement_survives_the_way_back():
    """JSON and back, stages included."""
    measurement = replace(MEASUREMENT, stages=(STAGE, STAGE))
    assert decode_answer(encode(measurement)) == measurement


def test_bar_shows_amount_rate_and_rest():
    """The bar at a third of the way."""
    assert render("training", 160, 480, 4.0) == ("training [####........] 160/480  40/s  8 s left")
    assert render("importing torch", 0, 0, 1.0) == "importing torch ..."


def test_time_left_is_told_from_the_parts_that_are_done():
    """Before the first is done, by what was expected."""
    assert time_left(0, 6, 1.0, expected=170.0) == ", about 3 min left"
    assert time_left(2, 6, 30.0, expected=170.0) == ", about 60 s left"
    assert time_left(0, 6, 1.0) == ""
    assert [duration(s) for s in (0.1, 43, 89, 91, 4000, 40000)] == [
        *("5 s", "45 s", "90 s", "2 min", "67 min", "11 h"),
    ]


def test_expected_time_follows_from_the_amount():
    """More epochs and fewer cores take longer."""
    short, long = make_plan("cpu", 1000), make_plan("cpu", 100_000, epochs=2)
    assert 10 < expected_seconds(short, "cpu", 2) < 30
    assert expected_seconds(long, "cpu", 2) > 3000
    assert expected_seconds(short, "cpu", 1) > expected_seconds(short, "cpu", 2)


def test_meter_writes_lines_into_a_file():
    """No control characters where nobody watches."""
    stream = io.StringIO()
    meter = ProgressBar(stream)
    meter.begin("loading", 100)
    meter.advance(50)
    meter.end()
    assert stream.getvalue() == "loading, 100 images\n"


def test_comparison_table():
    """Medians, spread, ratio of the last column over the first, 100 columns at most."""
    results = {
        "torch": [MEASUREMENT, replace(MEASUREMENT, loading_images_per_second=640.0)],
        "loader": [MEASUREMENT],
        "both": [replace(MEASUREMENT, loading_images_per_second=1240.0, peak_bytes=None)],
    }
    lines = comparison_table(results).splitlines()
    assert " ".join(lines[3].split()) == "loading alone images/s 620 ±20 600 1240 2.00x higher"
    (peak,) = [" ".join(line.split()) for line in lines if line.startswith("memory")]
    assert peak == "memory, all processes MiB, peak 700 ±0 700 n/a lower"
    assert max(map(len, lines)) < 100
    assert {len(line) for line in lines} == {len(lines[0])}


def test_comparison_table_says_of_what_its_ratios_are():
    """The last column over the first, whichever was measured; a short run has none."""
    two = {"torch": [MEASUREMENT], "loader": [MEASUREMENT]}
    three = {**two, "both": [MEASUREMENT]}
    for results, over in ((two, "2nd/1st"), (three, "3rd/1st")):
        first, second, *_ = comparison_table(results).splitlines()
        assert first.split()[-2:] == ["ratio", "better"]
        assert second.split()[-2:] == [over, "is"]
    assert "ratio" not in comparison_table(three, with_ratio=False)


def test_comparison_table_of_an_interrupted_run():
    """What was measured, and no ratio."""
    text = comparison_table({"torch": [MEASUREMENT], "loader": [], "both": []})
    assert "spdl_torch" not in text
    assert "ratio" not in text
    assert "600" in text


def test_stage_table():
    """A line per stage, aligned, 100 columns at most."""
    lines = stage_table([STAGE, replace(STAGE, name="a stage with a very long name")]).splitlines()
    assert " ".join(lines[3].split()) == "decode 2 480 90 95 6 4 3.00 10.00 600.0 666.7"
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= 100


IDLE = replace(STAGE, name="collate", busy_ratio=0.1)


@pytest.mark.parametrize(
    ("rows", "wait_ratio", "name", "finding", "advice"),
    [
        ([STAGE], 0.01, TRAINER, "not input-bound", "Nothing to tune"),
        ([], 0.30, LOADER, "waits 30 %", "Raise num_workers"),
        ([IDLE, STAGE], 0.30, "decode", "busy 90 %, all of it computing", "more cores"),
        ([replace(STAGE, cpu_ratio=0.2), IDLE], 0.3, "decode", "computing 20 %", "wait for files"),
        ([IDLE], 0.30, "collate", "no stage is short of threads", "persistent_workers"),
    ],
)
def test_bottleneck(rows, wait_ratio, name, finding, advice):
    """The stage that is busy most, unless training hardly waits."""
    found, verdict = bottleneck(rows, wait_ratio)
    assert found == name
    assert finding in verdict.finding
    assert advice in verdict.advice


@pytest.mark.parametrize(
    ("ours", "finding", "advice"),
    [
        ({"training_images_per_second": 100.0, "wait_ratio": 0.01}, "2.00x as fast", "two imports"),
        ({"training_images_per_second": 51.0}, "not clearly faster with ours (1.02x)", "longer"),
        ({"other_cores": 1.0}, "None: other programs used up to 1.0 of the 2 cores", "Repeat"),
    ],
)
def test_compare(ours, finding, advice):
    """A difference counts when it is above 5 %, no rounds overlap, and the machine was quiet."""
    verdict = compare([MEASUREMENT], [replace(MEASUREMENT, **ours)], num_cores=2)
    assert finding in verdict.finding
    assert advice in verdict.advice


def test_quiet_rounds():
    """Disturbed runs are left out if every variant keeps one, and all are kept otherwise."""
    busy = replace(MEASUREMENT, other_cores=0.5)
    results = {"torch": [MEASUREMENT, busy], "both": [MEASUREMENT]}
    assert quiet_rounds(results, 2) == {"torch": [MEASUREMENT], "both": [MEASUREMENT]}
    results["both"] = [busy]
    assert quiet_rounds(results, 2) == results


def test_compare_when_the_model_is_the_limit():
    """Nobody waits: nothing to do, and the rate from which it would matter."""
    rounds = [replace(MEASUREMENT, wait_ratio=0.01)]
    verdict = compare(rounds, rounds, num_cores=2)
    assert "The model is the limit" in verdict.finding
    assert "Nothing to gain" in verdict.advice


def test_memory_counts_descendants():
    """Children of children belong to the tree, others do not."""
    assert memory._descendants(5, {5: 1, 6: 5, 7: 6, 8: 1}) == [5, 6, 7]


def test_memory_of_this_process():
    """Some bytes for a living process, None for one that has ended."""
    assert memory.tree_bytes(os.getpid()) > 2**20
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert memory.tree_bytes(ended.pid) is None


def test_other_programs_are_not_negative():
    """Our own work is not counted as somebody else's."""
    cores = OtherPrograms().cores()
    assert cores is None or cores >= 0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "does not exist"),
        ([], "holds no folders"),
        (["a/readme.txt"], "hold no images"),
        (["a/x.JPEG", "b/readme.txt"], "1 of 2 folders in .* hold no images, 'b' first"),
    ],
)
def test_check_folder_refuses(tmp_path, names, message):
    """What was expected, what was given, what to do."""
    folder = tmp_path / "data"
    for name in names or []:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    if names == []:
        folder.mkdir()
    with pytest.raises(UsageError, match=message):
        check_folder(folder)


def test_check_folder_accepts_photographs(photographs):
    """A class-per-folder tree passes."""
    check_folder(photographs)


def test_bad_data_is_one_line_and_status_2(tmp_path, capsys):
    """No traceback for the caller's mistake."""
    file = tmp_path / "photo.jpg"
    file.touch()
    assert main(["demo", "--data", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{file} is a file. Give the folder above the classes" in error


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "many"])
def test_counts_are_whole_and_positive(value, capsys):
    """Anything else is refused in words."""
    for option in ("--epochs", "--workers", "--rounds"):
        with pytest.raises(SystemExit, match="2"):
            main(["demo", f"{option}={value}"])
        refused = f"argument {option}: must be a whole number of 1 or more, got {value}"
        assert refused in capsys.readouterr().err


def test_version_is_printed(capsys):
    """As other programs do."""
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"spdl-torch {spdl_torch.__version__}\n"


def test_photographs_for_trying_out_are_a_tree_for_image_folder(tmp_path, capsys):
    """Two classes in each of two folders; what is there already is left alone."""
    assert main(["photographs", str(tmp_path), "--count", "4"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'train'}\n{tmp_path / 'val'}\n"
    for split in ("train", "val"):
        check_folder(tmp_path / split)
        assert len(files_of(tmp_path / split)) == 4
    before = files_of(tmp_path)
    assert len(set(before.values())) == 8
    assert main(["photographs", str(tmp_path)]) == 2
    assert "train is there already. Remove it, or give another" in capsys.readouterr().err
    assert files_of(tmp_path) == before


def test_the_command_does_not_import_torch():
    """Of itself, whatever the package's ``__init__`` does: help and errors come at once."""
    code = (
        "import sys, types\n"
        "package = types.ModuleType('spdl_torch')\n"
        f"package.__path__ = [{str(Path(memory.__file__).parent.parent)!r}]\n"
        "package.__version__ = '0'\n"
        "sys.modules['spdl_torch'] = package\n"
        "import spdl_torch.__main__, spdl_torch.demo.command\n"
        "print({'torch', 'torchvision', 'numpy'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "set()", answer.stderr


@pytest.fixture
def environment(tmp_path):
    """The demo's temporary folder goes into ``tmp_path``."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


@pytest.mark.timeout(180)
def test_smoke_run(tmp_path, environment):
    """The main job in its short form: every row, every column, nothing left behind."""
    done = subprocess.run(DEMO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "32 images" in done.stdout
    assert "n/a" not in done.stdout
    for row in ("loading alone", "training resnet18", "time to first batch", "memory"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(row)]
        assert len(line.split()) >= 3 + 2
    assert "ratio" not in done.stdout
    assert "3/3" in done.stderr
    assert done.stderr.startswith("A short run")
    assert not list(tmp_path.glob("spdl-torch-demo-*"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("moment", "table"), [("writing photographs", 0), ("2/3", 1)])
def test_interrupt(tmp_path, environment, moment, table):
    """Ctrl-C: what was measured so far, status 130, no traceback, no folder left."""
    with subprocess.Popen(
        DEMO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert any(moment in line for line in demo.stderr)
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate()
    assert demo.returncode == 130
    assert "Traceback" not in err
    assert "Interrupted." in out
    assert out.count("higher") == 0
    assert out.count("training resnet18") == table
    assert not list(tmp_path.glob("spdl-torch-demo-*"))


def test_reader_that_has_seen_enough_gets_no_traceback():
    """As behind ``| head``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "spdl_torch", "bench", "--list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.timeout(120)
def test_a_failing_run_shows_the_cause(tmp_path):
    """Status 1, which run it was, and the loader's own error."""
    (tmp_path / "class_0").mkdir()
    (tmp_path / "class_0" / "broken.jpg").write_bytes(b"not a photograph")
    done = subprocess.run([*DEMO, "--data", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"spdl-torch demo: 1/3 {' '.join(VARIANTS['torch'].heading)}" in done.stderr
    assert "broken.jpg" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_every_answer_has_a_peak_however_soon_it_comes(tmp_path, monkeypatch):
    """Memory is looked at as soon as an answer is there: the next one has a figure, too."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    monkeypatch.setenv("PYTHONPATH", path)
    go_on = tmp_path / "go on"
    os.mkfifo(go_on)

    def on_line(line):
        if line["done"]:
            go_on.write_bytes(b"")

    answers = answers_of("_answers_twice", str(go_on), on_line)
    found = [(answer["number"], peak) for answer, peak in answers]
    assert [number for number, _ in found] == [1, 2]
    assert found[1][1] > 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_measuring_process_ends_with_the_program(signum):
    """Killed without a chance to clean up, it leaves neither the child nor the child's child."""
    module = "_measures_forever"
    imports = "from spdl_torch.measuring.child_process import run_child"
    code = f"{imports}; run_child({module!r}, '', print)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as program:
        until(lambda: len(memory.tree_pids(program.pid)) == 3)
        family = memory.tree_pids(program.pid)
        program.send_signal(signum)
    until(lambda: not any(psutil.pid_exists(pid) for pid in family))
