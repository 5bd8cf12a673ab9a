"""What spdl_torch.testing finds in loaders that are not what they should be, and in datasets that
threads cannot load."""

import itertools
import os
import random
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support import early_names
from support.datasets import Made
from support.idioms import Samples, made as idiom, setting
from torch.utils.data import IterableDataset, get_worker_info

from spdl_torch import DataLoader
from spdl_torch.testing import assert_reproducible, assert_thread_safe, thread_safety

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # the idioms leave files open


def check(make_dataset, **options):
    """assert_reproducible of loaders on threads, which begin sooner than processes."""
    options = {"isolation": "thread", **options}
    assert_reproducible(
        lambda n: DataLoader(make_dataset(), 4, num_workers=n, **options), num_workers=(0, 1, 3)
    )


def test_reproducible_loader_passes_and_all_generators_are_put_back():
    """Draws through the modules' functions; the caller's own numbers go on as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    data = Made(
        lambda i: {"x": (torch.rand(2), random.gauss(0, 1)), "y": np.random.rand(3), "z": i}
    )
    check(lambda: data, shuffle=True, isolation="auto")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


class Counts(Made):
    """Each sample changes what the next one is, from another beginning in each run."""

    def __init__(self):
        self.parts = {"counter": [random.SystemRandom().random()]}

    def __getitem__(self, index):
        self.parts["counter"][0] += 1
        return self.parts["counter"][0] + torch.zeros(1)


def with_closure(rng=np.random.default_rng(1)):  # noqa: B008 - the same for all loaders
    """A transform whose generator is a variable around it, which no loader finds."""
    return Made(lambda index: rng.random())


@pytest.mark.parametrize(
    ("make_dataset", "options"),
    [
        (lambda: Made(lambda _: early_names.random()), {}),
        (lambda: Made(lambda _: early_names.rand(2)), {"isolation": "auto"}),
        (lambda: Made(lambda _: np.random.default_rng().random()), {}),
        (lambda: Made(lambda _: torch.rand(1)), {"rng": "worker"}),
        (Counts, {}),
        (with_closure, {}),
    ],
)
def test_what_is_not_reproducible_is_found(make_dataset, options):
    """Every time, not only when threads change places; with the usual reasons."""
    match = (
        r"(?s)num_workers=1 must give .* as num_workers=0, but epoch 0, batch 0.*at \[0\]"
        r".*\. Usual reasons: .*np\.random\.default_rng\(\)"
    )
    with pytest.raises(AssertionError, match=match):
        check(make_dataset, **options)


class Divided(IterableDataset):
    """Its workers divide 24 numbers, and ``draw`` something for each."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, 24, step):
            yield torch.tensor([number, self.draw()])


def test_iterable_is_compared_with_another_run_of_as_many_workers():
    """Other numbers of workers give other batches."""
    check(lambda: Divided(random.random), seed=1)
    with pytest.raises(AssertionError, match=r"must again give .* as num_workers=0, but"):
        check(lambda: Divided(early_names.random))


def test_draws_on_the_trainers_thread_pass():
    """A sampler's, where numpy's generator is the trainer's."""

    class FromNumpy(list):
        def __iter__(self):
            return iter(np.random.permutation(len(self)).tolist())

    check(lambda: Made(int), sampler=FromNumpy(range(12)))


@dataclass
class Batch:
    """What some collate functions return."""

    values: torch.Tensor


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), r"at \[0\]"),
        (torch.zeros(2), torch.zeros(3), r"float32\[3\] in place of torch.float32\[2\]"),
        (np.zeros((2, 2)), np.eye(2), r"at \[0\]"),
        (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse(), "other entries of a torch.sparse"),
        (torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j]), None),
        (np.ma.masked_array([1, 2], [1, 0]), np.ma.masked_array([1, 2], [1, 0]), None),
        (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object), r"at \[1\]: 'b'"),
        ([1, (2, "x")], [1, (2, "y")], r"at \[1\]\[1\]: 'y' in place of 'x'"),
        ({"a": 1}, {"b": 1}, r"the keys are \['b'\]"),
        (Batch(torch.zeros(1)), Batch(torch.ones(1)), r"at \.values\[0\]"),
        (1, 1.0, "float in place of int"),
        (float("nan"), float("nan"), None),
    ],
)
def test_values_are_compared_bit_by_bit(first, second, what):
    """Whatever the batches are made of; the place of what differs is named."""
    with nullcontext() if what is None else differs(f"epoch 0, batch 1 differs.*{what}"):
        compare([0, first], [0, second])


class Epochs:
    """A loader of these."""

    def __init__(self, *epochs):
        self.rest = iter(epochs)

    def __iter__(self):
        return iter(next(self.rest))


def test_number_of_batches_and_later_epochs_are_compared_too():
    """A loader that loses a batch is not reproducible; one number of workers has no other."""
    with differs("epoch 0 has 1 batches in place of 2"):
        compare([1, 2], [1])
    with differs("epoch 1, batch 0 differs.*: 3 in place of 2"):
        compare(Epochs([1], [2]), Epochs([1], [3]), num_epochs=2)
    with pytest.raises(ValueError, match="num_workers must be two numbers or more"):
        assert_reproducible(lambda _: [], num_workers=(2,))


def compare(first, second, num_epochs=1):
    """Two loaders."""
    loaders = iter([[], first, second])  # the first is asked for its sampler
    assert_reproducible(lambda _: next(loaders), num_workers=(0, 1), num_epochs=num_epochs)


def differs(what):
    return pytest.raises(AssertionError, match=what)


def check_threads(dataset, own, **options):
    """assert_thread_safe of an idiom, with its loader's own options."""
    assert_thread_safe(dataset, **{"batch_size": 5, "num_rounds": 2, **own, **options})


@pytest.mark.filterwarnings("ignore::UserWarning")  # of files that are read from a wrong place
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("AugmentationInRecipe", r"The threads share dataset\.pipeline\[0\]\.by \(int in place of"),
        ("ClosureWithState", r"No attribute .* Look for .*variables around functions"),
        ("OpenedInInit", r"No attribute .* Look for .*open files"),
        ("ChangesItsTensor", r"The threads share dataset\.data\[0\], which"),
        ("collate_object_with_buffer", r"The threads share collate_fn\.buffer\[\d\], which"),
        ("shuffled_then_divided", r"The threads share dataset\.files\[\d\] \(\d+ in place of \d"),
    ],
)
def test_what_threads_share_is_named(name, shared, tmp_path):
    """The attribute, if a copy of it can be compared, the batch that differs, and what to do."""
    match = (
        r"(?s)4 threads must give the samples that processes give, but in round \d batch \d+ "
        rf"(differs|raised).*{shared}.*; or leave isolation out"
    )
    with pytest.raises(AssertionError, match=match):
        check_threads(*idiom(name, tmp_path))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ("default_dtype", "deterministic_mode", "working_directory", "environment", "gc"),
            r"os\.getcwd\(\) \('/' in place of .*\); os\.environ \(OMP_NUM_THREADS\); "
            r"torch\.get_default_dtype\(\) \(torch.float64 in place of torch.float32\); "
            r"torch\.get_deterministic_debug_mode\(\) \(1 in place of 0\); 1 more\.",
        ),
        (
            ("warnings_filters", "gc"),
            r"warnings\.filters \(\d+ entries in place of \d+\); "
            r"gc\.isenabled\(\) \(False in place of True\)\.",
        ),
    ],
)
def test_setting_that_reaches_the_trainer_is_a_failure(names, told):
    """Though every sample is right. Of several the first four are named."""
    match = f"must leave the process as it is, but it changed {told} .*the training loop's too"
    with pytest.raises(AssertionError, match=match):
        check_threads(*setting(*names))


class SetsThreads(Samples):
    """Sets the number of intra-op threads, which a thread that was there before keeps."""

    def value(self, index):
        torch.set_num_threads(3)
        return index


def test_number_of_intra_op_threads_is_such_a_setting():
    """Though the thread that checks does not see it; and it is put back."""
    with ThreadPoolExecutor(1) as thread:
        before = thread.submit(torch.get_num_threads).result()
    with pytest.raises(AssertionError, match=r"torch\.get_num_threads\(\) \(3 in place of"):
        assert_thread_safe(SetsThreads(), num_rounds=1)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(torch.get_num_threads).result() == before


class Broken(Samples):
    """Fails with and without threads."""

    def value(self, index):
        raise LookupError(f"no sample {index}")


def _state_of_the_process():
    return {
        "interval": sys.getswitchinterval(),
        "tracer": threading.gettrace(),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "num_threads": torch.get_num_threads(),
        "filters": list(warnings.filters),
        "stdout": sys.stdout,
        "drawn": (torch.get_rng_state().tolist(), random.getstate()),
        "threads": set(threading.enumerate()),
    }


@pytest.mark.parametrize(
    "name", ["ClosureWithState", "FolderOfSample", "OutputCaught", "TimeLimit"]
)
def test_everything_is_put_back(name, tmp_path):
    """Whether the dataset fails the check, for what belongs to the process: then the batch that
    differs is named; passes it, with handles on self or what belongs to a thread; or raises itself,
    of which there is nothing to say."""
    before = _state_of_the_process()
    with pytest.raises(AssertionError, match=r"(?s)round \d batch \d+ (differs|raised)"):
        check_threads(*idiom(name, tmp_path))
    if name == "TimeLimit":
        for safe in ("LazilyOnSelf", "shard_in_thread_local"):
            check_threads(*idiom(safe, tmp_path), num_rounds=1)
        with pytest.raises(LookupError, match="no sample"):
            assert_thread_safe(Broken())
    assert _state_of_the_process() == before


class Noisy(Samples):
    """Draws from every generator, and from one of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(1)

    def value(self, index):
        drawn = self.rng.random(), random.gauss(0, 1), np.random.rand()
        return torch.tensor([*drawn, torch.rand(())], dtype=torch.float64)


class NoisyStream(IterableDataset):
    """The same without an end, divided by worker."""

    def __init__(self):
        self.samples = Noisy()

    def __iter__(self):
        info = get_worker_info()
        for index in itertools.count(info.id, info.num_workers):
            yield self.samples[index]


@pytest.mark.parametrize("kind", [lambda: list(range(50)), Noisy, NoisyStream])
def test_safe_dataset_passes(kind):
    """Random numbers are equal on threads and alone; a dataset needs no end, nor a batch."""
    for batch_size in (4, None):
        options = {"num_batches": 20, "num_workers": 3, "num_rounds": 2}
        assert_thread_safe(kind(), batch_size=batch_size, **options)


class Scratch(Samples):
    """Writes a shared tensor and reads it in one line, so that threads switch within one."""

    def __init__(self):
        self.rows, self.scratch = torch.arange(256.0).reshape(32, 8), torch.zeros(8)

    def __len__(self):
        return len(self.rows)

    def value(self, index):
        return torch.mul(self.rows[index], 2, out=self.scratch).clone()


def test_shared_scratch_tensor_is_found_in_each_round():
    """Although few samples use it: threads switch between the calls of one line."""
    for seed in range(4):
        with pytest.raises(AssertionError, match=r"The threads share dataset\.scratch\[\d"):
            assert_thread_safe(Scratch(), num_rounds=1, seed=seed)


class Filled(Scratch):
    """Each sample writes a place of its own, once for all."""

    def value(self, index):
        self.rows[index] = 2.0
        return self.rows[index].clone()


def test_tensor_that_threads_write_without_harm_is_warned_of():
    """No sample differs, and the check says how sure that is."""
    with pytest.warns(UserWarning, match=r"no sample differed, .* share dataset\.rows\[\d+\], "):
        assert_thread_safe(Filled())


def test_threads_that_wait_for_ever_are_found(monkeypatch):
    """No check hangs: a batch that does not come within ``timeout`` is a difference."""
    monkeypatch.setattr(thread_safety, "_JOIN_SECONDS", 0.0)
    come, here = threading.Event(), os.getpid()

    class Waiting(Samples):
        def value(self, index):
            return come.wait() if os.getpid() == here else True

    try:
        with pytest.raises(AssertionError, match=r"batch 0 raised RuntimeError: .*timed out after"):
            assert_thread_safe(Waiting(), timeout=2, num_rounds=1)
    finally:
        come.set()


@pytest.mark.parametrize("option", ["num_workers", "num_batches", "num_rounds"])
def test_numbers_that_check_nothing_are_refused(option):
    """One thread has nobody to share with; and what is no dataset is refused, as it was given."""
    with pytest.raises(ValueError, match=f"assert_thread_safe: {option} must be >= "):
        assert_thread_safe([1, 2], **{option: 1 if option == "num_workers" else 0})
    with pytest.raises(TypeError, match=r"must have __getitem__ and __len__, .*, got list_it"):
        assert_thread_safe(iter([1, 2]))
