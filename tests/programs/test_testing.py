"""What spdl_torch.testing finds in loaders that are not what they should be."""

import random
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support import early_names
from support.datasets import Made
from torch.utils.data import IterableDataset, get_worker_info

from spdl_torch import DataLoader
from spdl_torch.testing import assert_reproducible


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
