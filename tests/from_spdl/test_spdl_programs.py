"""SPDL's published programs with their imports changed and nothing more."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from support import warm
from support.folders import ROOT
from support.videos import KINDS, write_video

from spdl_torch.observe import plot_stats, query_event_stats

SEEDS = ROOT.parent / "shared/seeds"
SECONDS = 50
"""How long a test waits for a program to end; never how long it should take."""

pytestmark = pytest.mark.skipif(not SEEDS.is_dir(), reason="the programs are not there")

IMPORTS = {
    "import spdl.io\n": "from spdl_torch import spdl\n",
    "import spdl.io.utils\n": "from spdl_torch import spdl\n",
    "from spdl.": "from spdl_torch.spdl.",
    "from examples.": "from spdl_torch.spdl.examples.",
}
"""The one rule: spdl becomes spdl_torch.spdl, where it is imported."""

WITHOUT_CUDA = {
    "device_config=device_config,\n        strict": "device_config=None,\n        strict",
    'torch.device(f"cuda:{args.worker_id}")': 'torch.device("cpu")',
}
"""What a machine without CUDA forces."""


def program(number, folder, changes=IMPORTS):
    """A program with the changes, as a file, and how many lines they are: imports alone, if not
    said otherwise, and nothing of SPDL's is imported any more."""
    path = folder / f"program_{number}.py"
    subprocess.run([sys.executable, str(SEEDS / "program.py"), number, str(path)], check=True)
    before = after = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        after = after.replace(old, new)
    path.write_text(after, encoding="utf-8")
    pairs = list(zip(before.splitlines(), after.splitlines(), strict=True))
    changed = [(old, new) for old, new in pairs if old != new]
    if changes is IMPORTS:
        assert all(re.match(r"\s*(import|from) ", old) for old, _ in changed)
        assert not re.search(r"^\s*(import|from) (spdl|examples)\b(?!_torch)", after, re.M)
    return path, len(changed)


# 003's workers keep SIGTERM, by which its Pool ends those that are idle, for themselves: it hangs
# every third time or so at its end, with SPDL as with us. This end waits for them.
GENTLE_POOL = """
import multiprocessing.pool, runpy, sys
multiprocessing.pool.Pool.__exit__ = lambda pool, *_: (pool.close(), pool.join())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments, cwd):
    """What a program printed; both streams."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = warm.run(["-c", GENTLE_POOL, *arguments], cwd=cwd, env=environment, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def shape_of(line):
    """A line with its figures left out."""
    return re.sub(r"\d[\d.]*", "#", line.rstrip())


def test_performance_analysis_prints_what_the_page_shows(tmp_path):
    """000: labels, order and rules, line by line; its file can be drawn."""
    path, _ = program("000", tmp_path)
    for number, name in enumerate(("b-frames", "no b-frames", "hevc")):
        place = tmp_path / "videos" / str(number)
        place.mkdir(parents=True)
        (place / "video.mp4").write_bytes(write_video(KINDS[name]))
    options = ["--dataset-dir", "videos", "--db-path", "stats.db", "--log-interval", "0.2"]
    out, log = run(path, *options, cwd=tmp_path)
    assert "Videos found: 3" in out
    assert "Pipeline completed in" in out
    (page,) = SEEDS.glob("000_*.txt")
    shown = page.read_text(encoding="utf-8").splitlines()
    expected = shown[shown.index("=" * 80) : shown.index("Visualization¶")]
    lines = log.splitlines()
    start = lines.index("=" * 80)
    printed = lines[start : start + len(expected)]
    assert list(map(shape_of, printed)) == list(map(shape_of, expected))
    assert "    Total tasks processed: 3" in printed
    assert printed.count("    Total items processed: 3") == 3
    names = [line.split(": ")[1] for line in printed if line.startswith(("  Stage: ", "  Queue: "))]
    assert names == ["0:1:decode[10]", "0:0:src_queue", "0:1:decode[10]_queue", "0:2:sink_queue"]
    assert {event.event_name for event in query_event_stats(tmp_path / "stats.db")} <= {
        *("gc_start", "gc_stop")
    }
    pytest.importorskip("matplotlib")
    pictures = plot_stats(tmp_path / "stats.db", tmp_path / "plots")
    assert [p.name for p in pictures] == ["task_stats_combined.png", "queue_stats_combined.png"]


def test_image_dataloading_loads_every_image(tmp_path):
    """003: two processes share the list; what cannot be decoded is left out; the trace is there."""
    changes = {**IMPORTS, **({} if torch.cuda.is_available() else WITHOUT_CUDA)}
    path, num_changed = program("003", tmp_path, changes)
    assert num_changed == 4 + (0 if torch.cuda.is_available() else 2)
    names = []
    for number in range(40):
        names.append(f"{number}.jpg")
        Image.new("RGB", (64, 48), (number, 90, 200)).save(tmp_path / names[-1])
    (tmp_path / "3.jpg").write_bytes(b"no image")
    (tmp_path / "list.txt").write_text("\n".join(names))
    options = ["--input-flist", "list.txt", "--prefix", f"{tmp_path}/", "--num-workers", "2"]
    options += ["--batch-size", "4", "--num-threads", "2", "--trace", "run.pftrace"]
    _, log = run(path, *options, cwd=tmp_path)
    assert "total_frames=39, total_batches=10" in log
    assert re.search(r"Aggregated FPS=\d+\.\d\d, BPS=\d+\.\d\d", log)
    for worker in range(2):
        text = (tmp_path / f"run.pftrace.{worker}").read_text()
        assert text.count('"name":"Training Step"') == 5


def test_data_formats_loads_what_was_saved(tmp_path, monkeypatch):
    """004: every format and way to load it, on threads and in a process pool; the arrays are
    numpy's."""
    path, _ = program("004", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    formats = __import__(path.stem)
    loader_of = formats._get_load_fn
    for data_format, compressed, impl, pool in (
        *((kind, False, impl, "mt") for kind in ("npy", "npz") for impl in ("np", "spdl")),
        *(("npz", True, "np", "mt"), ("npz", True, "spdl", "mt")),
        *(("torch", False, "torch", "mt"), ("npz", False, "spdl", "mp")),
    ):
        data = formats.get_mock_data(data_format, compressed)
        load = loader_of(data_format, impl)
        pipeline = formats.get_pipeline(formats.DataSource(data, repeat=3), load, 2, pool)
        num_items, elapsed = formats.run_pipeline(pipeline)
        assert num_items == 3
        assert elapsed > 0
        peer = loader_of(data_format, "torch" if impl == "torch" else "np")
        for ours, theirs in itertools.zip_longest(load(data), peer(data)):
            assert np.array_equal(ours, theirs)
