"""The programs under ``examples/``: their short form runs and says what it should."""

import importlib
import itertools
import json
import os
import runpy
import sys
import threading
import warnings
from pathlib import Path

import _warm
import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if not path.name.startswith("_"))
RUN_ELSEWHERE = (
    *("train_language_model", "train_video_classifier"),  # test_examples_training.py
    *("imagenet_lightning", "replace_dataloader"),  # test_examples_imagenet.py
)
REPORTING = ("benchmark_numpy", "transfer_benchmark")
"""They print a report, and write it with ``--json``."""
FRESH = ("image_dataloading", "performance_analysis")
"""Run as users run a program: what it imports is found, and it comes to its end. The one starts
processes, which import it. Nothing in the others' short form would show more in a process of its
own, which takes seconds to import torch."""


def run_fresh(program, *arguments):
    """Run the program in a process of its own; it must end well."""
    done = _warm.run([program, *arguments])
    assert done.returncode == 0, done.stderr


def run_here(program, *arguments):
    """Run the program in this process, which has imported torch already."""
    argv, path, environment = sys.argv, sys.path[:], dict(os.environ)
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(EXAMPLES))
    status = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other packages', which end no program of a user
            try:
                runpy.run_path(str(program), run_name="__main__")
            except SystemExit as end:
                status = end.code
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
        torch.set_rng_state(generator)
    assert not status, status


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.stem not in RUN_ELSEWHERE], ids=lambda path: path.stem
)
def test_smoke_run(program, tmp_path, capsys):
    """``--smoke`` does a little of everything that the long run does."""
    if program.stem in FRESH:
        run_fresh(program, "--smoke")
        return
    if program.stem not in REPORTING:
        run_here(program, "--smoke")
        assert capsys.readouterr().out
        return
    run_here(program, "--smoke", "--json", str(tmp_path / "figures.json"))
    printed = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    keys = {"title", "settings", "metrics", "rows", "ratios", "failures", "remarks"}
    assert set(figures) == keys
    assert figures["settings"]["rounds"] == 1
    for row, metrics in figures["rows"].items():
        assert any(line.startswith(row) for line in printed.splitlines()), printed
        for summary in metrics.values():
            assert summary["min"] <= summary["median"] <= summary["max"]
            assert len(summary["values"]) == 1


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_docstring_says_how_to_run_it(program):
    """The first thing that a reader sees has the command."""
    assert f"examples/{program.name}" in program.read_text(encoding="utf-8").split('"""')[1]


def test_transfer_benchmark_measures_no_batch_that_was_begun_before(monkeypatch):
    """What a thread is ahead by would count as done in no time."""
    monkeypatch.syspath_prepend(EXAMPLES)
    program, begun = importlib.import_module("transfer_benchmark"), []

    class Go(threading.Event):
        def wait(self, timeout=None):
            self.num_begun = len(begun)
            return super().wait(timeout)

    go = Go()
    batches = program.on_a_thread(
        lambda batch: begun.append(batch) or batch, program.held_back("batch", 5, go)
    )
    assert list(itertools.islice(batches, program.WARM_UP)) == ["batch"] * program.WARM_UP
    go.set()
    assert list(batches) == ["batch"] * 5
    assert go.num_begun == program.WARM_UP
