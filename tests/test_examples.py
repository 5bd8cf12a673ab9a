"""The programs under ``examples/``: their short form runs and says what it should."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if not path.name.startswith("_"))
PLOTS = [path for path in PROGRAMS if path.stem.endswith("_plot")]
TRAINED_ELSEWHERE = ("train_language_model", "train_video_classifier")  # test_examples_training.py
BENCHMARKS = [p for p in PROGRAMS if p.name.startswith("benchmark_") and p not in PLOTS]


def run(program, *arguments):
    """What the program printed; it must end well."""
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_benchmarks():
    """The parametrised tests below have something to run."""
    assert {path.stem.removeprefix("benchmark_") for path in BENCHMARKS} >= {
        *("images", "memory", "start", "step")
    }


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.stem not in TRAINED_ELSEWHERE], ids=lambda path: path.stem
)
def test_smoke_run(program, tmp_path):
    """``--smoke`` measures every row and prints and writes what the long run does."""
    if program not in BENCHMARKS:
        run(program, "--smoke")
        return
    printed = run(program, "--smoke", "--json", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())
    keys = {"title", "settings", "metrics", "rows", "ratios", "failures", "remarks"}
    assert set(figures) == keys
    assert any("ours" in row for row in figures["rows"])
    assert figures["settings"]["rounds"] == 1
    for row, metrics in figures["rows"].items():
        assert any(line.startswith(row) for line in printed.splitlines()), printed
        for summary in metrics.values():
            assert summary["min"] <= summary["median"] <= summary["max"]
            assert len(summary["values"]) == 1
    for ratio in figures["ratios"]:
        assert any(line.startswith(ratio["name"]) for line in printed.splitlines()), printed


@pytest.mark.parametrize("program", BENCHMARKS, ids=lambda path: path.stem)
def test_docstring_says_how_to_run_it(program):
    """The first thing that a reader sees has the command."""
    assert f"python examples/{program.name}" in program.read_text().split('"""')[1]
