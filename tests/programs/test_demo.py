"""The main job: ``python -m spdl_torch demo``."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from math import comb
from pathlib import Path

import psutil
import pytest
from _folders import HELPERS
from _gates import until
from _pages import reports
from hypothesis import given, strategies as st
from PIL import Image

import spdl_torch
from spdl_torch.__main__ import main
from spdl_torch.command_options import CommandError
from spdl_torch.demo.command import check_folder
from spdl_torch.demo.jobs import (
    PHOTOGRAPHS,
    PICTURES,
    WORKLOADS,
    Comparison,
    Environment,
    Measure,
    Measurement,
    Prepare,
    Training,
    decode_answer,
    decode_job,
    encode,
    expected_seconds,
    make_plan,
    make_plans,
    spread,
)
from spdl_torch.demo.outcome import Outcome
from spdl_torch.demo.pictures import Pictures
from spdl_torch.demo.table import comparison_table, model_speeds, waiting_table
from spdl_torch.demo.text import ending_text, workload_text
from spdl_torch.demo.training import _Pace
from spdl_torch.demo.verdict import (
    bottleneck,
    compare,
    gain_of,
    noises,
    quiet_rounds,
    rate_of,
    seen_by_training,
    wait_at,
)
from spdl_torch.machine.cpu_time import OtherPrograms
from spdl_torch.measuring import memory
from spdl_torch.measuring.child_process import answers_of
from spdl_torch.measuring.photographs import SIZES, write_photographs
from spdl_torch.observe.verdict.report import stage_lines
from spdl_torch.progress_bar import ProgressBar, duration, render, time_left

DEMO = [sys.executable, "-m", "spdl_torch", "demo", "--smoke"]

LIGHT = Training(
    images_per_second=580.0, epochs=(560.0, 600.0), wait_ratio=0.9, cpu_seconds=0.003, loss=2.3
)
MEASUREMENT = Measurement(
    loading_images_per_second=600.0,
    first_batch_seconds=0.1,
    loading_cpu_seconds=0.003,
    light=LIGHT,
    resnet=replace(LIGHT, images_per_second=50.0, epochs=(50.0,), wait_ratio=0.2),
    other_cores=0.0,
    peak_bytes=700 * 2.0**20,
)
REPORT = reports(1)[0]
ENVIRONMENT = Environment(
    python="3.11",
    torch="2",
    torchvision="0",
    device="cpu",
    device_name="CPU",
    num_cores=2,
    num_images=1000,
    num_classes=10,
    mean_bytes=1e5,
    codec="libjpeg-turbo",
    image_seconds={PICTURES: 0.00012, PHOTOGRAPHS: 0.0026},
    resnet_seconds={PICTURES: 0.008, PHOTOGRAPHS: 0.02},
)


def faster(*factors: float) -> Training:
    """The light network's epochs, each by a factor."""
    pairs = zip(LIGHT.epochs, factors * 2, strict=False)
    return replace(LIGHT, epochs=tuple(rate * factor for rate, factor in pairs))


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
    write_photographs(tmp_path / "same", 6, seed=1)
    write_photographs(tmp_path / "other", 6, seed=2)
    same, other, all_of_them = map(files_of, (tmp_path / "same", tmp_path / "other", photographs))
    assert len(same) == 6
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


def test_epochs_mean_all_the_photographs():
    """--epochs trains on every photograph; without it the amount does not depend on the folder."""
    plans = make_plans(ENVIRONMENT, 2, epochs=3)
    assert plans[PHOTOGRAPHS].light_images == plans[PHOTOGRAPHS].resnet_images == 1000
    assert plans[PHOTOGRAPHS].epochs == 3
    few = replace(ENVIRONMENT, num_images=20)
    assert plans[PICTURES] == make_plans(few, 2)[PICTURES]
    assert make_plans(ENVIRONMENT, 2) == make_plans(few, 2)


def test_the_demo_takes_90_seconds_whatever_an_image_costs():
    """Some of which make the images. The amounts follow from what one image costs here, and from
    the cores that load."""

    def expected(environment, num_workers):
        prepare = Prepare(folder="", num_photographs=96)
        job = Comparison(prepare=prepare, num_workers=num_workers, num_rounds=5)
        return sum(
            expected_seconds(turn.workload, turn.plan, environment, num_workers)
            for turn in job.measures(environment)
        )

    assert 50 < expected(ENVIRONMENT, 2) < 80
    assert 50 < expected(replace(ENVIRONMENT, num_cores=16), 8) < 80
    slow = {PICTURES: 0.0002, PHOTOGRAPHS: 0.005}
    slow_steps = {PICTURES: 0.011, PHOTOGRAPHS: 0.025}
    slower = replace(ENVIRONMENT, image_seconds=slow, resnet_seconds=slow_steps)
    assert 50 < expected(slower, 2) < 90
    plans = make_plans(ENVIRONMENT, 1), make_plans(ENVIRONMENT, 2)
    halves = [plan[PICTURES].loading_images for plan in plans]
    assert abs(2 * halves[0] - halves[1]) <= 256


def test_the_loaders_take_turns_and_none_is_always_first():
    """Round after round, the other way round in every second one."""
    job = Comparison(
        prepare=Prepare(folder="f", num_photographs=3), num_workers=2, num_rounds=2, epochs=None
    )
    turns = [(turn.workload, turn.variant) for turn in job.measures(ENVIRONMENT)]
    assert turns == [
        *((PICTURES, "torch"), (PICTURES, "loader")),
        *((PHOTOGRAPHS, "torch"), (PHOTOGRAPHS, "loader"), (PHOTOGRAPHS, "both")),
        *((PICTURES, "loader"), (PICTURES, "torch")),
        *((PHOTOGRAPHS, "both"), (PHOTOGRAPHS, "loader"), (PHOTOGRAPHS, "torch")),
    ]
    assert [turn.reports for turn in job.measures(ENVIRONMENT)] == [
        *[False] * 7,
        True,
        False,
        False,
    ]


def test_clock_leaves_out_the_steps_that_wait_for_the_workers_start():
    """Images and waits after as many steps as there are workers, or from the beginning."""
    clock = _Pace(2)
    clock.count(8, 5.0)
    clock.count(8, 4.0)
    clock.count(8, 0.25)
    clock.count(4, 0.5)
    assert clock.read()[1:] == (0.75, 12)
    assert clock.total == 28
    clock = _Pace(0)
    clock.count(8, 5.0)
    assert clock.read()[1:] == (5.0, 8)


def test_workers_that_start_one_after_the_other_are_no_slower():
    """Two workers whose batches come together, and two whose batches alternate, make as many in a
    second; counted from the first batch on, the first two would seem to make a sixth more."""

    def rate(num_warm, *arrivals):
        moments = iter((0.0, *arrivals))
        clock = _Pace(num_warm, lambda: next(moments))
        for _ in arrivals:
            clock.count(1, 0.0)
        read = clock.read()
        return read.num_images / read.seconds

    together, alternating = (1, 1, 2, 2, 3, 3, 4, 4), (1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5)
    assert rate(2, *together) == rate(2, *alternating) == 2
    assert rate(1, *together) > 1.15 * rate(1, *alternating)


def test_pictures_are_an_ordinary_dataset():
    """As CIFAR comes: the transform's tensor and a label, the same ones in every process."""
    image, label = Pictures(12_000)[10_003]
    assert (image.shape, str(image.dtype), label) == ((3, 32, 32), "torch.float32", 3)
    assert (Pictures(20).data == Pictures(20).data).all()
    assert len(Pictures(12_000)) == 12_000


def test_a_job_survives_the_way_to_the_child():
    """JSON and back."""
    prepare = Prepare(folder="photos", num_photographs=3, workloads=(PHOTOGRAPHS,))
    job = Comparison(prepare=prepare, num_workers=2, num_rounds=5)
    assert decode_job(json.dumps(encode(job))) == job


def test_a_measurement_survives_the_way_back():
    """JSON and back, the report included."""
    measurement = replace(MEASUREMENT, report=REPORT.as_dict())
    for answer in (measurement, ENVIRONMENT):
        assert decode_answer(json.loads(json.dumps(encode(answer)))) == answer


def test_bar_shows_amount_rate_and_rest():
    """The bar at a third of the way."""
    assert render("training", 160, 480, 4.0) == ("training [####........] 160/480  40/s  8 s left")
    assert render("importing torch", 0, 0, 1.0) == "importing torch ..."


def test_time_left_follows_from_the_parts_that_are_done():
    """Before the first is done, by what was expected."""
    assert time_left(0, 6, 1.0, expected=170.0) == ", about 3 min left"
    assert time_left(2, 6, 30.0, expected=170.0) == ", about 60 s left"
    assert time_left(7.5, 30.0, 20.0) == ", about 60 s left"  # of parts of unequal length
    assert time_left(0, 6, 1.0) == ""
    assert [duration(s) for s in (0.1, 43, 89, 91, 148, 569, 4000, 40000)] == [
        *("5 s", "45 s", "90 s", "1.5 min", "2.5 min", "9.5 min", "67 min", "11 h"),
    ]
    shown = [float(duration(s).removesuffix(" min")) for s in range(90, 570)]
    assert all(abs(60 * n / s - 1) < 0.17 for n, s in zip(shown, range(90, 570), strict=True))


def test_expected_time_follows_from_the_amount():
    """More epochs and fewer cores take longer."""
    plan = make_plan(PHOTOGRAPHS, ENVIRONMENT, 2)
    many = replace(ENVIRONMENT, num_images=100_000)
    long = make_plan(PHOTOGRAPHS, many, 2, epochs=2)
    assert expected_seconds(PHOTOGRAPHS, plan, ENVIRONMENT, 2) < 15
    assert expected_seconds(PHOTOGRAPHS, long, many, 2) > 2000
    single = replace(ENVIRONMENT, num_cores=1)
    assert expected_seconds(PHOTOGRAPHS, plan, single, 1) > 3.5


def test_meter_writes_lines_into_a_file():
    """No control characters where nobody watches."""
    stream = io.StringIO()
    meter = ProgressBar(stream)
    meter.begin("loading", 100)
    meter.advance(50)
    meter.end()
    assert stream.getvalue() == "loading, 100 images\n"


def test_comparison_table():
    """Medians, spread, ratios of the other columns over the first, 100 columns at most."""
    results = {
        "torch": [MEASUREMENT, replace(MEASUREMENT, loading_images_per_second=640.0)],
        "loader": [MEASUREMENT],
        "both": [replace(MEASUREMENT, loading_images_per_second=1240.0, peak_bytes=None)],
    }
    lines = comparison_table(results).splitlines()
    first = " ".join(lines[3].split())
    assert first == "loading alone images/s 620 ±20 600 1240 1.00x 2.07x higher"
    names = [line[:24].rstrip() for line in lines[3:8]]
    assert names[1:] == [
        *("training light network", "  waiting for data", "training resnet18", "  waiting for data")
    ]
    (peak,) = [" ".join(line.split()) for line in lines if line.startswith("memory")]
    assert peak == "memory, all processes MiB, peak 700 ±0 700 n/a 1.00x lower"
    assert max(map(len, lines)) < 100
    assert {len(line) for line in lines} == {len(lines[0])}


def test_comparison_table_says_of_what_its_ratios_are():
    """Each further column over the first, whichever were measured; a short run has none."""
    two = {"torch": [MEASUREMENT], "loader": [MEASUREMENT]}
    three = {**two, "both": [MEASUREMENT]}
    for results, over in ((two, ["2nd/1st"]), (three, ["2nd/1st", "3rd/1st"])):
        first, second, *_ = comparison_table(results).splitlines()
        assert first.split()[-len(over) - 1 :] == [*["ratio"] * len(over), "better"]
        assert second.split()[-len(over) - 1 :] == [*over, "is"]
    assert "ratio" not in comparison_table(three, with_ratio=False)


def test_comparison_table_of_an_interrupted_run():
    """The measurements so far, and no ratio."""
    text = comparison_table({"torch": [MEASUREMENT]})
    assert "spdl_torch" not in text
    assert "ratio" not in text
    assert "600" in text


def test_bottleneck_is_what_the_report_says():
    """The loader's own verdict, which knows the GIL, with the training's own wait, and the cores
    in use, which its advice is about."""
    loader = spdl_torch.DataLoader(range(64), batch_size=4, num_workers=2)
    for _ in loader:
        pass
    report = loader.report()
    found = bottleneck(seen_by_training(report, report.stats.consumer_wait_ratio))
    used, there = report.probes.cores_used, report.probes.num_cores
    cores = f" Training and its workers used {used:.1f} of {there:g} cores."
    assert found == f"{report.verdict.finding}{cores} {report.verdict.action}"
    longer = replace(report, stats=replace(report.stats, elapsed=10.0))
    assert "not input-bound: it waits for data 1.0 %" in bottleneck(seen_by_training(longer, 0.01))


@pytest.mark.parametrize(
    ("ours", "finding", "advice"),
    [
        (
            {"light": faster(2.5)},
            "Faster: with our DataLoader a light network trains at 2.50x",
            "It",
        ),
        (
            {"light": faster(0.5)},
            "Slower: with our DataLoader a light network trains at 0.50x",
            "K",
        ),
        (
            {"light": faster(2.5), "resnet": replace(MEASUREMENT.resnet, epochs=(25.0,))},
            "Faster with one network, slower with the other: with our",
            "chance",
        ),
        ({"light": faster(1.02)}, "About level", "--rounds 20"),
        ({"light": faster(2.5, 0.9)}, "About level", "--rounds 20"),
        ({"loading_images_per_second": 1500.0}, "About level", "--rounds 20"),
        (
            {"other_cores": 1.0},
            "No verdict: other programs used up to 1.0 of 2 cores",
            "Repeat",
        ),
    ],
)
def test_compare(ours, finding, advice):
    """A difference counts when training's is above 5 %, its pairs say the same, and the machine was
    quiet; the other network must not say the contrary."""
    verdict = compare([MEASUREMENT], [replace(MEASUREMENT, **ours)], num_cores=2)
    assert finding in verdict.finding
    assert advice in verdict.advice


@given(
    st.lists(st.floats(1, 1000), min_size=1, max_size=6),
    st.lists(st.floats(1, 1000), min_size=1, max_size=6),
)
def test_gain_lies_between_the_least_and_the_most_of_its_epochs(theirs, ours):
    """Whatever was measured, and however many epochs are left of each loader."""
    gain = gain_of(theirs, ours)
    pairs = [after / before for before, after in zip(theirs, ours, strict=False)]
    assert min(pairs) <= gain.low <= gain.median <= gain.high <= max(pairs)
    assert gain.num_pairs == len(pairs)
    assert gain.noise >= 0
    assert gain_of(theirs, theirs).median == 1


@pytest.mark.parametrize("count", range(5, 40))
def test_a_gains_ends_hold_the_true_ratio_9_times_of_10(count):
    """The chance that so few of the pairs lie on one side of the true ratio is added up from all
    ways in which they may; one pair more left out would be too many."""

    def chance_outside(left_out):
        return 2 * sum(comb(count, number) for number in range(left_out + 1)) / 2**count

    gain = gain_of([1.0] * count, [float(n) for n in range(1, count + 1)])
    left_out = round(gain.low) - 1
    assert gain.high == count - left_out
    assert chance_outside(left_out) <= 0.1 < chance_outside(left_out + 1)


def test_what_disturbs_both_of_a_pair_disturbs_no_ratio():
    """Rates that halve for a while, for both loaders, as on a busy machine."""
    theirs, ours = [100.0, 50.0, 20.0, 100.0, 40.0], [110.0, 54.0, 22.0, 111.0, 43.0]
    gain = gain_of(theirs, ours)
    assert str(gain) == "1.10x (1.07 to 1.11)"
    assert gain.noise < 0.03


def test_each_row_of_speeds_has_its_own_noise():
    """By how the pairs' ratios differ; a row that was measured once has none."""
    slow = replace(MEASUREMENT, loading_images_per_second=600.0)
    fast = replace(MEASUREMENT, loading_images_per_second=1200.0)
    found = noises({"torch": [slow, slow, slow], "loader": [slow, fast, fast]})
    assert found == {
        "in training the light network": 0,
        "in training resnet18": 0,
        "in loading alone": pytest.approx(1.0),
    }
    assert noises({"torch": [slow, fast]}) == {}
    assert "in loading alone" not in noises({"torch": [slow], "loader": [fast]})


def test_a_model_waits_for_a_loader_that_is_slower():
    """From the loader's own rate on, and the model then goes at that rate."""
    assert wait_at(2000, 500) == 0.75
    assert wait_at(499, 500) == wait_at(500, 500) == 0
    assert rate_of([MEASUREMENT]) == 600
    assert model_speeds([410.0, 960.0]) == [200, 500, 1000, 2000]
    assert model_speeds([100.0, 9000.0]) == [1000, 2000, 5000, 10000, 20000]
    for rate in (3.0, 47.0, 99_000.0):
        speeds = model_speeds([rate])
        assert speeds[0] < rate < speeds[-1]
        assert len(speeds) <= 4
    fast = replace(MEASUREMENT, loading_images_per_second=1250.0)
    lines = waiting_table({"torch": [MEASUREMENT], "both": [fast]}).splitlines()
    assert " ".join(lines[1].split()) == "N at 500/s at 1,000/s at 2,000/s at 5,000/s"
    last = [" ".join(line.split()[-9:]) for line in lines[3:]]
    assert last == ["600 0 % 40 % 70 % 88 %", "1,250 0 % 0 % 38 % 75 %"]
    assert max(map(len, lines)) < 100


@pytest.fixture
def outcome():
    """Two rounds of every variant, ours twice as fast."""
    outcome = Outcome(num_workers=2, num_cores=2, environment=ENVIRONMENT)
    outcome.plans.update(make_plans(ENVIRONMENT, 2))
    for rate in (600.0, 630.0):
        for workload, plan in outcome.plans.items():
            for variant in WORKLOADS[workload].variants:
                ours = {
                    "loading_images_per_second": 2 * rate,
                    "light": faster(2.0),
                    "report": REPORT.as_dict(),
                }
                theirs = {"loading_images_per_second": rate}
                job = Measure(
                    workload=workload,
                    variant=variant,
                    folder="",
                    num_workers=2,
                    device="cpu",
                    plan=plan,
                )
                outcome.add(job, replace(MEASUREMENT, **(theirs if variant == "torch" else ours)))
    return outcome


def test_text_says_what_was_measured_and_how_sure_it_is(outcome):
    """A table, the noise and the speeds for each workload; at the end a verdict for each, and why
    our DataLoader alone gains no more."""
    tables = (workload_text(outcome, each) for each in outcome.measured())
    text = "\n".join([*tables, ending_text(outcome)])
    noise = (
        "a ratio may be off by up to 0 % in training the light network, 0 % in training resnet18"
    )
    assert " ".join(text.split()).count(noise) == 2
    assert text.count("A model faster than N images/s waits for its loader") == 2
    words = " ".join(text.split())
    trains = "a light network trains at 2.00x (2.00 to 2.00) torch's images/s, resnet18 at 1.00x"
    assert f"Faster: with our DataLoader and our ImageFolder {trains}" in words
    assert f"Faster: with our DataLoader {trains}" in words
    assert f"with our DataLoader alone {trains}" in words
    for workload in WORKLOADS.values():
        assert workload.why_level in words
    assert bottleneck(REPORT) in words
    for line in stage_lines(REPORT, has_notes=False):
        assert line in text.splitlines()
    assert max(map(len, text.splitlines())) < 100


def test_text_of_an_interrupted_run(outcome):
    """The measurements so far, without a verdict on the rest."""
    del outcome.rounds[PHOTOGRAPHS], outcome.rounds[PICTURES]["loader"]
    text = workload_text(outcome, PICTURES) + ending_text(outcome)
    assert "615" in text
    assert "spdl_torch" not in text
    assert "Faster" not in text


def test_quiet_rounds():
    """A round with a disturbed turn is left out as a whole, so that pairs stay pairs; all are kept
    if most would be left out."""
    busy = replace(MEASUREMENT, other_cores=0.5)
    first, second, third = (replace(MEASUREMENT, peak_bytes=float(n)) for n in (1, 2, 3))
    results = {"torch": [first, busy, third], "both": [third, second, first]}
    assert quiet_rounds(results, 2) == {"torch": [first, third], "both": [third, first]}
    results = {"torch": [first, busy, busy], "both": [third, second, first]}
    assert quiet_rounds(results, 2) == results
    interrupted = {"torch": [first, busy], "both": [third]}
    assert quiet_rounds(interrupted, 2) == interrupted


def test_memory_counts_descendants():
    """Children of children belong to the tree, others do not."""
    assert memory.descendants(5, {5: 1, 6: 5, 7: 6, 8: 1}) == [5, 6, 7]


def test_memory_of_this_process():
    """Some bytes for a living process, None for one that has ended."""
    assert memory.tree_bytes(os.getpid()) > 2**20
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert memory.tree_bytes(ended.pid) is None


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="counts so on Linux alone")
def test_memory_that_waits_for_its_reader_counts():
    """As torch's batches in a queue do: written by one process, mapped by none. And only once,
    however many hold it."""
    num_bytes = 256 << 20
    file = os.memfd_create("a batch")
    before = memory.tree_bytes(os.getpid())
    os.posix_fallocate(file, 0, num_bytes)
    other = os.dup(file)
    try:
        gained = memory.tree_bytes(os.getpid()) - before
    finally:
        os.close(other)
        os.close(file)
    assert 0.9 * num_bytes < gained < 1.5 * num_bytes


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
    """The message says what was expected, what was given and what to do."""
    folder = tmp_path / "data"
    for name in names or []:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    if names == []:
        folder.mkdir()
    with pytest.raises(CommandError, match=message):
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


def test_smoke_run(tmp_path, environment):
    """The main job in its short form: every row, every column, and no file left."""
    done = subprocess.run(DEMO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "32 images" in done.stdout
    assert "n/a" not in done.stdout
    for row in ("loading alone", "training light", "training resnet18", "time to first", "memory"):
        first, second = [line for line in done.stdout.splitlines() if line.startswith(row)]
        assert len(first.split()) >= 3 + 2
        assert len(second.split()) == len(first.split()) + 1
    assert "ratio" not in done.stdout
    assert "5/5" in done.stderr
    assert done.stderr.startswith("A short run")
    assert not list(tmp_path.glob("spdl-torch-demo-*"))


@pytest.mark.parametrize(
    ("moment", "is_given", "table"), [("writing photographs", False, 0), ("2/3", True, 1)]
)
def test_interrupt(tmp_path, photographs, environment, moment, is_given, table):
    """Ctrl-C: the measurements so far, status 130, no traceback, no folder left."""
    command = [*DEMO, "--data", str(photographs)] if is_given else DEMO
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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


def test_reader_that_has_seen_enough_gets_no_traceback(tmp_path):
    """As with ``| head``."""
    reader, writer = os.pipe()
    os.close(reader)
    photographs = ["photographs", str(tmp_path), "--count", "1", "--classes", "1"]
    command = [sys.executable, "-m", "spdl_torch", *photographs]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_failing_run_shows_the_cause(tmp_path):
    """Status 1, the part of the demo that failed, and the loader's own error."""
    (tmp_path / "class_0").mkdir()
    (tmp_path / "class_0" / "broken.jpg").write_bytes(b"not a photograph")
    done = subprocess.run([*DEMO, "--data", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "spdl-torch demo: preparing: the process ended with status 1" in done.stderr
    assert "broken.jpg" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_every_answer_has_a_peak_however_soon_it_comes(tmp_path, monkeypatch):
    """Memory is looked at as soon as an answer is there: the next one has a figure, too."""
    path = os.pathsep.join([str(HELPERS), *sys.path])
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
    imports = "from spdl_torch.measuring.child_process import answers_of"
    code = f"{imports}; next(answers_of({module!r}, '', print))"
    environment = {**os.environ, "PYTHONPATH": str(HELPERS)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as program:
        until(lambda: len(memory.tree_pids(program.pid)) == 3)
        family = memory.tree_pids(program.pid)
        program.send_signal(signum)
    until(lambda: not any(psutil.pid_exists(pid) for pid in family))
