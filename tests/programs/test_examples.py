"""The programs under ``examples/``: their short form runs and says what it should."""

import csv
import runpy
import sys
import warnings

import _warm
import pytest
import torch
from _folders import ROOT

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if not path.name.startswith("_"))
RUN_ELSEWHERE = (
    *("train_language_model", "train_video_classifier", "finetune_parquet"),  # _training.py
    *("imagenet_classification", "imagenet_lightning"),  # test_examples_imagenet.py
    "replace_dataloader",  # there, too
    *("benchmark_numpy", "benchmark_numpy_plot"),  # below
    "performance_analysis",  # by its plot, which draws what it measures
)
FRESH = ("image_dataloading",)
"""Run as users run a program: what it imports is found, and it comes to its end; it starts
processes, which import it. Nothing in the others' short form would show more in a process of its
own, which takes seconds to import torch."""


def run_fresh(program, *arguments):
    """Run the program in a process of its own; it must end well."""
    done = _warm.run([program, *arguments], forks=True)
    assert done.returncode == 0, done.stderr


def run_here(program, *arguments):
    """Run the program in this process, which has imported torch already."""
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other packages', which end no program of a user
        patch.setattr(sys, "argv", [str(program), *arguments])
        patch.setattr(sys, "path", [*sys.path])
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(end.code) from end
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(generator)


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.stem not in RUN_ELSEWHERE], ids=lambda path: path.stem
)
def test_smoke_run(program, capsys):
    """``--smoke`` does a little of everything that the long run does."""
    if program.stem in FRESH:
        run_fresh(program, "--smoke")
        return
    run_here(program, "--smoke")
    assert capsys.readouterr().out


def test_benchmark_numpy_writes_a_table_for_the_plot(tmp_path, capsys):
    """A line for each combination that it prints, and for each figure of it; it is drawn."""
    table = tmp_path / "numpy.csv"
    run_here(EXAMPLES / "benchmark_numpy.py", "--smoke", "--csv", str(table))
    printed = capsys.readouterr().out
    lines = list(csv.DictReader(table.read_text().splitlines()))
    rows = {(line["format"], line["loader"], line["num_workers"], line["pool"]) for line in lines}
    assert len(lines) == 2 * len(rows)
    for saved_as, library, count, pool in rows:
        assert f"\n{saved_as}, {library}, {count} {pool}  " in printed
    assert all(float(line["mean"]) > 0 and line["num_repeats"] == "1" for line in lines)
    run_here(EXAMPLES / "benchmark_numpy_plot.py", str(table))
    assert table.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
