"""The programs under ``examples/``: their short form runs and says what it should; those that load
in child processes train on what they should; image_dataloading.py ends cleanly in every case."""

import csv
import os
import re
import runpy
import signal
import sys
import warnings

import psutil
import pytest
import torch
from PIL import Image
from support import warm
from support.folders import ROOT

EXAMPLES = ROOT / "examples"
SECONDS = 50
"""How long a test waits for a program to end; never how long it should take."""
RUN_ELSEWHERE = (
    *("train_language_model", "train_video_classifier", "finetune_parquet"),  # below
    *("benchmark_numpy", "benchmark_numpy_plot", "image_dataloading"),  # below
    *("imagenet_classification", "imagenet_lightning"),  # test_examples_imagenet.py
    "replace_dataloader",  # there, too
    "performance_analysis",  # by its plot, which draws what it measures
)
PROGRAMS = [p.stem for p in sorted(EXAMPLES.glob("[!_]*.py")) if p.stem not in RUN_ELSEWHERE]


def run_here(program, *arguments):
    """Run the program in this process, which has imported torch already."""
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other packages', which end no program of a user
        patch.setattr(sys, "argv", [str(EXAMPLES / program), *arguments])
        patch.setattr(sys, "path", [*sys.path])
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(end.code) from end
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(generator)


@pytest.mark.parametrize("program", PROGRAMS)
def test_smoke_run(program, capsys):
    """``--smoke`` does a little of everything that the long run does. In this process: one of its
    own, which takes seconds to import torch, would show nothing more."""
    run_here(f"{program}.py", "--smoke")
    assert capsys.readouterr().out


def test_images_are_loaded_in_processes():
    """As users run a program: what it imports is found, and it comes to its end; it starts
    processes, which import it."""
    smoke("image_dataloading.py")


def test_benchmark_numpy_writes_a_table_for_the_plot(tmp_path, capsys):
    """A line for each combination that it prints, and for each figure of it; it is drawn."""
    table = tmp_path / "numpy.csv"
    run_here("benchmark_numpy.py", "--smoke", "--csv", str(table))
    printed = capsys.readouterr().out
    lines = list(csv.DictReader(table.read_text().splitlines()))
    rows = {(line["format"], line["loader"], line["num_workers"], line["pool"]) for line in lines}
    assert len(lines) == 2 * len(rows)
    for saved_as, library, count, pool in rows:
        assert f"\n{saved_as}, {library}, {count} {pool}  " in printed
    assert all(float(line["median"]) > 0 for line in lines)
    run_here("benchmark_numpy_plot.py", str(table))
    assert table.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def smoke(program, *options, cwd=None):
    """The lines of a short run."""
    command = [EXAMPLES / program, "--smoke", *options]
    done = warm.run(command, cwd=cwd, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


EPOCH = r"epoch (\d)  (\d+) \w+  loss ([\d.]+)  .*waited for data \d+%"


def test_language_model_learns_from_a_child_process(tmp_path):
    """Every epoch has all passages, one after the other; the loss falls."""
    lines = smoke("train_language_model.py", cwd=tmp_path)
    assert lines[0] == "240 passages, a vocabulary of 279 tokens"
    epochs = [re.match(EPOCH, line).groups() for line in lines[1:]]
    assert [(number, passages) for number, passages, _ in epochs] == [(n, "240") for n in "123"]
    losses = [float(loss) for *_, loss in epochs]
    assert losses == sorted(losses, reverse=True)


def test_video_classifier_learns_from_a_child_process(tmp_path):
    """Every epoch has all clips that fill a batch; validation has every video that is held out."""
    pytest.importorskip("av")
    lines = smoke("train_video_classifier.py", cwd=tmp_path)
    assert lines[0] == "10 videos to train on and 2 to validate, 2 classes"
    epochs = [re.match(EPOCH, line).groups() for line in lines[1:]]
    assert [(number, clips) for number, clips, _ in epochs] == [(n, "10") for n in "123"]
    assert all(re.search(r"validation (0|50|100)%$", line) for line in lines[1:])


def test_fine_tuning_goes_on_where_it_was_saved(tmp_path):
    """After its one epoch nothing is left; the report says where the workers are."""
    pytest.importorskip("pyarrow")
    saving = "--checkpoint", "saved.pt"
    lines = smoke("finetune_parquet.py", *saving, cwd=tmp_path)
    assert lines[0].startswith("epoch 0: loss of the last batch")
    assert "thread_safe = True" in "".join(lines)
    assert smoke("finetune_parquet.py", *saving, cwd=tmp_path) == []
    saved = torch.load(tmp_path / "saved.pt")
    assert saved["epoch"] == 1
    assert saved["loader"]["finished"]


NUM_IMAGES = 23
LAPS = 60_000


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of small JPEGs, some of them deeper, and one file that is none."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "deep").mkdir()
    for number in range(NUM_IMAGES):
        place = folder / "deep" if number % 3 else folder
        image = Image.new("RGB", (40 + number, 30), (10 * number, 90, 90))
        image.save(place / f"{number:02d}.jpg")
    (folder / "notes.txt").write_text("no image")
    return folder


def start(*arguments):
    """The running program, alone in its process group; its workers are forked."""
    options = ["--device", "cpu", "--num-threads", 1, "--width", 16, "--height", 16]
    command = [EXAMPLES / "image_dataloading.py", *options, *arguments]
    return warm.start(command, start_new_session=True)


def frames_and_batches(printed, who="all, whole run"):
    """The two numbers of a line."""
    found = re.search(rf"^{re.escape(who)}: ([\d,]+) frames, ([\d,]+) batches", printed, re.M)
    assert found, printed
    return tuple(int(number.replace(",", "")) for number in found.groups())


def test_every_image_is_loaded_once_when_workers_share_the_list(images, tmp_path):
    """Together the workers take each line of the list exactly once, in batches of their own."""
    flist = tmp_path / "list.txt"
    flist.write_text("\n".join(str(path) for path in images.rglob("*.jpg")))
    options = ["--input-flist", flist, "--batch-size", 4, "--num-workers", 3]
    printed, complaints = start(*options).communicate(timeout=SECONDS)
    assert complaints == ""
    num_batches = sum(-(-len(range(n, NUM_IMAGES, 3)) // 4) for n in range(3))
    assert frames_and_batches(printed) == (NUM_IMAGES, num_batches)


@pytest.mark.long  # beside other tests its workers may have the cores until their list ends
def test_workers_end_with_the_program(images, tmp_path):
    """Where one of them dies: the other one is stopped, the message says which and how. By Ctrl-C,
    which reaches the whole process group: the workers do not die of it, they finish. The program
    prints the figures so far, of less than everything."""
    paths = [f"{path.relative_to(images)}\n" for path in images.rglob("*.jpg")]
    (tmp_path / "list.txt").write_text("".join(paths) * LAPS)  # takes a minute and more
    options = ["--input-flist", tmp_path / "list.txt", "--prefix", images, "--interval", "0.2"]
    for is_killed in (True, False):
        process, before = start(*options, "--num-workers", 2), ""
        while not re.search(r"^so far: [1-9].*\n", before, re.M):
            before += (line := process.stdout.readline())
            assert line, before + process.stderr.read()
        workers = psutil.Process(process.pid).children(recursive=True)
        if is_killed:
            victim = int(re.search(r"worker 1 \(cpu\): process (\d+)", before)[1])
            os.kill(victim, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGINT)
        printed, complaints = process.communicate(timeout=SECONDS)
        assert len(workers) >= 2
        assert psutil.wait_procs(workers, timeout=SECONDS)[1] == []
        loaded = frames_and_batches(printed)[0]
        so_far = frames_and_batches(before.splitlines()[-1], "so far")[0]
        assert 0 < so_far <= loaded < NUM_IMAGES * LAPS
        if is_killed:
            assert process.returncode == 1
            assert complaints.startswith("worker 1 (cpu): the process was killed by SIGKILL.")
        else:
            assert (process.returncode, complaints) == (128 + signal.SIGINT, "")
            assert "stopped by SIGINT" in printed
