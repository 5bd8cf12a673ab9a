"""examples/image_dataloading.py: every image once, true figures, and a clean end in every case."""

import os
import re
import signal

import _warm
import psutil
import pytest
from _folders import ROOT
from PIL import Image

EXAMPLES = ROOT / "examples"
PROGRAM = EXAMPLES / "image_dataloading.py"
NUM_IMAGES = 23
SECONDS = 45
"""Within which a program that was asked to stop must have ended."""


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


@pytest.fixture(scope="module")
def endless(images, tmp_path_factory):
    """A list that takes a quarter of a minute and more, of paths relative to the folder."""
    flist = tmp_path_factory.mktemp("list") / "endless.txt"
    paths = [str(path.relative_to(images)) for path in sorted(images.rglob("*.jpg"))]
    flist.write_text("".join(f"{path}\n" for path in paths) * 60_000)
    return flist


def start(*arguments):
    """The running program, alone in its process group. Its smoke run has workers that Python
    starts; here they are forked.
    """
    options = ["--device", "cpu", "--num-threads", 1, "--width", 16, "--height", 16]
    return _warm.start([PROGRAM, *options, *arguments], start_new_session=True, forks=True)


def frames_and_batches(printed, who="all, whole run"):
    """The two numbers of a line."""
    found = re.search(rf"^{re.escape(who)}: ([\d,]+) frames, ([\d,]+) batches", printed, re.M)
    assert found, printed
    return tuple(int(number.replace(",", "")) for number in found.groups())


def wait_until_it_loads(process):
    """Read lines until one tells of images."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(r"so far: [1-9]", line):
            return "".join(lines)
    raise AssertionError("".join(lines) + process.stderr.read())


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_image_is_loaded_once_when_workers_share_the_list(images, num_workers, tmp_path):
    """Together the workers take each line of the list exactly once, in batches of their own."""
    flist = tmp_path / "list.txt"
    flist.write_text("\n".join(str(path) for path in images.rglob("*.jpg")))
    options = ["--input-flist", flist, "--batch-size", 4, "--num-workers", num_workers]
    printed, complaints = start(*options).communicate(timeout=SECONDS)
    shares = [len(range(number, NUM_IMAGES, num_workers)) for number in range(num_workers)]
    assert complaints == ""
    num_batches = sum(-(-share // 4) for share in shares)
    assert frames_and_batches(printed) == (NUM_IMAGES, num_batches)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_program(endless, images, signum):
    """Ctrl-C reaches the whole process group; the workers do not die of it, they finish. Where the
    program can, it prints the figures so far, of less than everything."""
    process = start("--input-flist", endless, "--prefix", images, "--interval", "0.2")
    before = wait_until_it_loads(process)
    workers = psutil.Process(process.pid).children(recursive=True)
    (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
    printed, complaints = process.communicate(timeout=SECONDS)
    assert workers
    assert psutil.wait_procs(workers, timeout=SECONDS)[1] == []
    if signum != signal.SIGKILL:
        assert (process.returncode, complaints) == (128 + signum, "")
        assert f"stopped by {signum.name}" in printed
        loaded = frames_and_batches(printed)[0]
        so_far = frames_and_batches(before.splitlines()[-1], "so far")[0]
        assert 0 < so_far <= loaded < NUM_IMAGES * 5_000


def test_program_fails_when_a_worker_dies(endless, images):
    """The other worker is stopped, the message says which and how, the figures are printed."""
    options = ["--input-flist", endless, "--prefix", images, "--interval", "0.2"]
    process = start(*options, "--num-workers", 2)
    printed = wait_until_it_loads(process)
    os.kill(int(re.search(r"worker 1 \(cpu\): process (\d+)", printed)[1]), signal.SIGKILL)
    printed, complaints = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert complaints.startswith("worker 1 (cpu): the process was killed by SIGKILL.")
    assert frames_and_batches(printed)[0] > 0
