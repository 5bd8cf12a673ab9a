"""``python examples/bench program``: the programs, what they see, what counts as a loss."""

import subprocess

import _warm
import pytest
from _loader_helpers import library
from bench.program.plans import DATASETS, ProgramPlan
from bench.program.train import train
from bench.table_program import run_program


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the datasets' data are written, once."""
    return tmp_path_factory.mktemp("programs")


def plan_of(dataset="rows", **more):
    """One epoch with the light network, without workers."""
    return ProgramPlan(
        dataset=dataset, **{"network": "light", "num_workers": 0, "num_epochs": 1, **more}
    )


@pytest.mark.parametrize("dataset", DATASETS)
def test_program_trains_on_every_dataset(dataset, folder):
    """Whatever its batches look like."""
    plan = plan_of(dataset, num_epochs=2)
    for needed in plan.ordinary.needs:
        library(needed)
    said = train("spdl_torch", plan, folder, 2 * plan.ordinary.batch_size)
    assert set(said) == {"import_ms", "first_batch_ms"}
    assert said["first_batch_ms"] > 0


def test_missing_samples_are_an_error(tmp_path):
    """A loader that leaves some out would seem to be faster."""
    plan = plan_of("iterable")
    train("spdl_torch", plan, tmp_path, 64)
    with pytest.raises(RuntimeError, match="the loader gave 64 samples, not 128"):
        train("spdl_torch", plan, tmp_path, 128)


def test_program_that_fails_says_why(tmp_path, monkeypatch):
    """With its own last words."""
    monkeypatch.setattr(subprocess, "run", lambda command, **_: _warm.run(command[1:]))
    missing = tmp_path / "no folder"
    with pytest.raises(RuntimeError, match=r"ours: status 1\n(.|\n)*No such file or directory"):
        run_program("ours", plan_of("iterable"), missing, 64)
