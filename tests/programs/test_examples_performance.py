"""examples/performance_analysis.py: its file holds what was processed, to the item."""

import json
import os
import re
import signal
from typing import NamedTuple

import _warm
import pytest

pytest.importorskip("av")

from _folders import ROOT
from _videos import KINDS, REAL, write_video

from spdl_torch.observe import query_task_stats, summarize

SECONDS = 50
"""How long a test waits for the program to end; never how long it should take."""

CONCURRENCY = 3
SINK_SIZE = 3

# The program as it is, but for a decode() that is counted where nobody else counts, and a line for
# every video. The counts are written when main() has returned or raised.
COUNTING = """
import functools, json, sys, threading
import performance_analysis as program

lock, counts = threading.Lock(), {"decoded": 0, "failed": 0}
decode, program.PROGRESS_SECONDS = program.decode, 0.0

def count(what):
    with lock:
        counts[what] += 1

@functools.wraps(decode)
def counted(path):
    try:
        frames = decode(path)
    except Exception:
        count("failed")
        raise
    count("decoded")
    return frames

program.decode = counted
try:
    status = program.main()
finally:
    with open("counts.json", "w") as file:
        json.dump(counts, file)
sys.exit(status)
"""


class Totals(NamedTuple):
    """Of a statistics file."""

    tasks: int
    failures: int
    out_of_source: int
    out_of_stage: int
    out_of_sink: int


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Real videos where they are at hand."""
    real = [path for path in REAL if path.suffix == ".mp4"]
    if real:
        return real
    paths = [tmp_path_factory.mktemp("made") / f"{number}.mp4" for number in range(2)]
    for path, name in zip(paths, ("b-frames", "no b-frames"), strict=True):
        path.write_bytes(write_video(KINDS[name]))
    return paths


def fill(folder, originals, copies):
    """Put each video ``copies`` times below ``folder/videos``, and first of all one that is none;
    returns how many there are.
    """
    (folder / "videos").mkdir()
    (folder / "videos" / "0.mp4").write_bytes(b"this is no video")
    for number in range(copies):
        place = folder / "videos" / f"{number:04d}"
        place.mkdir()
        for original in originals:
            (place / original.name).symlink_to(original)
    return 1 + copies * len(originals)


def start(folder, log_interval):
    """The program on the folder's videos."""
    options = ["--dataset-dir", "videos", "--db-path", "stats.db", "--max-failures", "1.0"]
    options += ["--concurrency", str(CONCURRENCY), "--log-interval", str(log_interval)]
    path = os.pathsep.join([str(ROOT / "examples"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    return _warm.start(["-u", "-c", COUNTING, *options], cwd=folder, env=environment)


def totals(folder):
    """What the file says, and what was counted: (totals, decoded, failed)."""
    (task,), queues = summarize(folder / "stats.db")
    counts = json.loads((folder / "counts.json").read_text())
    found = Totals(task.num_tasks, task.num_failures, *(queue.num_items for queue in queues))
    return found, counts["decoded"], counts["failed"]


def last_number_of(printed):
    """Videos that the loop took, by the last line of progress."""
    return int(re.findall(r"^(\d+) of \d+ videos", printed, re.M)[-1])


@pytest.mark.parametrize("log_interval", [0.05, 1000])
def test_totals_are_what_was_decoded_when_the_run_ends(log_interval, originals, tmp_path):
    """For intervals shorter and longer than the run, videos that fail included."""
    num_videos = fill(tmp_path, originals, copies=3)
    process = start(tmp_path, log_interval)
    printed, complaints = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, complaints
    found, decoded, failed = totals(tmp_path)
    assert (decoded, failed) == (num_videos - 1, 1)
    assert found == Totals(num_videos, 1, num_videos, decoded, decoded)
    assert last_number_of(printed) == decoded
    assert f"Total tasks processed: {num_videos}\n    Total failures: 1\n" in printed, printed
    num_rows = len(query_task_stats(tmp_path / "stats.db"))
    assert num_rows > 1 if log_interval < 1 else num_rows == 1


@pytest.mark.parametrize("log_interval", [0.05, 1000])
def test_totals_are_what_was_decoded_when_ctrl_c_comes(log_interval, originals, tmp_path):
    """In the middle of a run: tasks to the item; every video failed, was delivered or waits."""
    num_videos = fill(tmp_path, originals, copies=1000)
    process = start(tmp_path, log_interval)
    before = ""
    while not before or last_number_of(before) < 5:  # far more are left
        line = process.stdout.readline()
        assert line, process.communicate(timeout=SECONDS)
        before += line
    process.send_signal(signal.SIGINT)
    printed, complaints = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGINT, complaints
    assert "interrupted; the figures so far:" in complaints
    found, decoded, failed = totals(tmp_path)
    assert 5 <= decoded < num_videos
    assert (found.tasks, found.failures) == (decoded + failed, failed)
    # A worker may be stopped with a path in its hand.
    assert found.tasks <= found.out_of_source <= found.tasks + CONCURRENCY
    # What is decoded and not delivered waits: behind the stage, with the thread between, or in the
    # sink; Ctrl-C may come between taking an item and telling of it.
    delivered = last_number_of(before + printed)
    assert delivered <= found.out_of_sink <= delivered + 1
    assert found.out_of_sink <= found.out_of_stage <= found.out_of_sink + SINK_SIZE + 1
    assert found.out_of_stage <= decoded
    assert decoded <= found.out_of_stage + 2 * CONCURRENCY + CONCURRENCY
