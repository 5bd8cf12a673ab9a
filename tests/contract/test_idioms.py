"""Datasets written for torch's worker processes, each beside torch's own loader.

Nothing may be wrong, lost or doubled, and nothing that a worker does to its process may reach the
trainer's. The suite loads each of them once with two workers, or as often as
``SPDL_TORCH_IDIOM_RUNS`` says; its long form does so three times with four.
"""

import multiprocessing
import os

import _idioms_objects  # noqa: F401  # registers its idioms
import pytest
import torch
from _idioms import CRASHING, IDIOMS
from _idioms_runs import NUM_WORKERS, load

import spdl_torch
from spdl_torch.testing._both_ways import threads_interleaved

NUM_RUNS = int(os.environ.get("SPDL_TORCH_IDIOM_RUNS", "1"))
NUM_RUNS_FOR_LONG = 3  # in processes, all of them: there is nothing to race for
NUM_WORKERS_FOR_LONG = 4

pytestmark = [
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="idioms of forked workers"
    ),
    pytest.mark.usefixtures("forks_by_default"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore::ResourceWarning"),
    pytest.mark.timeout(180 + 5 * NUM_RUNS),
]


def check(name, folder, num_runs, num_workers):
    """Ours against the truth, and against torch's batches one by one."""
    options = {"num_workers": num_workers}
    theirs, faults = load(torch.utils.data.DataLoader, name, folder / "torch", **options)
    assert not faults, f"torch's DataLoader: {faults}"
    for run in range(num_runs):
        with threads_interleaved():
            ours, faults = load(spdl_torch.DataLoader, name, folder / f"ours{run}", **options)
        assert not faults, f"run {run}: {faults}"
        assert ours == theirs, f"run {run}: other batches than torch's"


def check_apart(*arguments):
    """The same, in a process of its own if the idiom may end it."""
    if arguments[0] not in CRASHING:
        check(*arguments)
        return
    child = multiprocessing.get_context("fork").Process(target=check, args=arguments)
    child.start()
    child.join()
    assert child.exitcode == 0, f"exit code {child.exitcode}"


@pytest.mark.parametrize("name", sorted(IDIOMS))
def test_idiom_is_right_where_torchs_is(name, tmp_path):
    """With one import changed, and nothing else."""
    check_apart(name, tmp_path, NUM_RUNS, NUM_WORKERS)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(IDIOMS))
def test_idiom_is_right_in_every_run(name, tmp_path):
    """What goes wrong may do so rarely."""
    check_apart(name, tmp_path, NUM_RUNS_FOR_LONG, NUM_WORKERS_FOR_LONG)


WRONG_ON_THREADS = [
    "shard_in_a_global",
    "shard_in_the_environment",
    "shard_by_process_identity",
    "worker_sets_torchs_settings",
    "worker_sets_folders",
    "worker_sets_what_is_printed",
    "worker_sets_its_own_ways",
    "EnvironmentOfSample",
    "GlobalBetweenFunctions",
    "SingletonClient",
    "FolderOfSample",
]
"""What goes wrong on threads in every run."""


@pytest.mark.parametrize("name", WRONG_ON_THREADS)
def test_threads_get_wrong_what_belongs_to_the_process(name, tmp_path):
    """This file finds it when loading stays on threads: its own control."""
    with threads_interleaved():
        _, faults = load(spdl_torch.DataLoader, name, tmp_path / "x", isolation="thread")
    assert faults


@pytest.mark.parametrize(
    "name", ["precision_of_decimals", "errors_of_numpy", "grad_mode_of_program"]
)
def test_threads_take_over_what_the_program_set_for_its_own(name, tmp_path):
    """Context variables and the grad mode, which new threads do not have by themselves."""
    _, faults = load(spdl_torch.DataLoader, name, tmp_path / "x", isolation="thread")
    assert not faults


@pytest.mark.parametrize("name", ["ScratchTensor", "deque_emptied", "loop_changes_a_list"])
def test_threads_get_wrong_what_they_share_of_the_dataset(name, tmp_path):
    """``isolation="thread"`` is the user's promise that nothing of this is there."""
    with threads_interleaved():
        try:
            _, faults = load(spdl_torch.DataLoader, name, tmp_path / "x", isolation="thread")
        except IndexError as error:  # two threads took the last of a queue
            faults = [error]
    assert faults


@pytest.mark.parametrize("name", ["TimeLimit", "worker_sets_signal_handlers"])
def test_signals_need_a_process_of_their_own(name, tmp_path):
    """Its handlers are set by its main thread alone."""
    with pytest.raises(ValueError, match="signal only works in main thread"):
        load(spdl_torch.DataLoader, name, tmp_path / "x", isolation="thread")
