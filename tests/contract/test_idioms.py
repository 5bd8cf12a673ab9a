"""Datasets written for torch's worker processes, each beside torch's own loader.

Nothing may be wrong, lost or doubled, and nothing that a worker does to its process may reach the
trainer's. Each is loaded once with two workers.
"""

import multiprocessing
from collections import Counter

import _idioms_files  # noqa: F401  # registers its idioms
import _idioms_objects  # noqa: F401
import _idioms_process
import pytest
import torch
from _idioms import IDIOMS

import spdl_torch
from spdl_torch.objects.generator_states import generators_kept
from spdl_torch.testing._process_state import changed_settings, settings_kept
from spdl_torch.testing.thread_safety import threads_interleaved

pytestmark = [
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="idioms of forked workers"
    ),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ALIKE = {
    *("lazily_on_self", "LazilyInHelper", "MemoryMapInInit"),
    *("NumpyMemoryMap", "AugmentationDrawnOnce", "AugmentationInRecipe", "ClosureWithState"),
    *("GeneratorKept", "ScratchBuffer", "BufferOfClass", "DictAsCache"),
    *("shard_in_thread_local", "shard_in_the_environment", "TimeLimit"),
    *("FolderOfSample", "TemporaryFileByPid", "OutputCaught"),
    "PrecisionOfSample",
}
"""Idioms of which another one needs the same of a worker: long forms here. What threads share of
them is found in ``test_testing_threads.py``."""


def load(loader_type, name, folder, **options):
    """Load an idiom, and return the batches of its epochs, and what is wrong: samples that are not
    as they should be, and what reached this process, which is put back."""
    folder.mkdir(parents=True)
    _idioms_process.reset()
    with generators_kept(), settings_kept() as settings:
        try:
            epochs, faults = _run(loader_type, IDIOMS[name](folder), options)
        finally:
            leaks = [f"{leak} reached the trainer" for leak in changed_settings(settings).values()]
            _idioms_process.reset()
    return epochs, faults + leaks


def _run(loader_type, idiom, options):
    options = {"batch_size": 8, "num_workers": 2, **options, **idiom.options}
    loader = loader_type(idiom.dataset, **options)
    epochs, faults = [], []
    for number, expected in enumerate(map(Counter, idiom.epochs)):
        idiom.before_epoch(number)
        epochs.append([])
        for batch in loader:
            epochs[-1].append(idiom.samples(batch))
            idiom.use(batch)
        got = Counter(sample for batch in epochs[-1] for sample in batch)
        if got != expected:
            missing, others = expected - got, got - expected
            few = list(others)[:3] or list(missing)[:3]
            faults.append(f"{missing.total()} samples missing, {others.total()} others: {few}")
    return epochs, faults


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in ALIKE else [])
        for name in sorted(IDIOMS)
    ],
)
def test_idiom_is_right_where_torchs_is(name, tmp_path):
    """With one import changed, and nothing else."""
    theirs, faults = load(torch.utils.data.DataLoader, name, tmp_path / "torch")
    assert not faults, f"torch's DataLoader: {faults}"
    with threads_interleaved():  # what threads would get wrong shows
        ours, faults = load(spdl_torch.DataLoader, name, tmp_path / "ours")
    assert not faults
    assert ours == theirs


def test_threads_take_over_what_the_program_set_for_its_own(tmp_path):
    """Context variables, which new threads do not have by themselves."""
    _, faults = load(
        spdl_torch.DataLoader, "precision_of_decimals", tmp_path / "x", isolation="thread"
    )
    assert not faults


@pytest.mark.parametrize("name", ["TimeLimit", "worker_sets_signal_handlers"])
def test_signals_need_a_process_of_their_own(name, tmp_path):
    """Its handlers are set by its main thread alone."""
    with pytest.raises(ValueError, match="signal only works in main thread"):
        load(spdl_torch.DataLoader, name, tmp_path / "x", isolation="thread")
