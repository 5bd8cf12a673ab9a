"""Check that the bits are the same for any number of workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..loader.differences import first_difference, path_of_difference
from ._changes import checking

_USUAL_REASONS = (
    "Usual reasons: a generator that nobody seeds, such as np.random.default_rng() in a sample, "
    "random_state=None, or a name imported from random or numpy.random before the loader starts "
    "(call random.random(), np.random.rand()); what samples have in common and change, such as a "
    'counter, a buffer or a generator of the dataset\'s own (draw from torch); rng="worker".'
)


def assert_reproducible(
    make_loader: Callable[[int], Iterable[Any]],
    *,
    num_workers: Sequence[int] = (0, 1, 2, 7),
    num_epochs: int = 2,
    num_batches: int | None = None,
    seed: int = 0,
) -> None:
    """Check that a loader yields the same bits for any number of workers, threads or processes.

    ``make_loader(n)`` returns a new loader with ``num_workers=n``. Before it is called, torch's
    global generator is seeded with ``seed``, and those of ``random`` and ``numpy.random`` with
    another seed each time, so that a draw from them is found even if the workers happen to keep the
    order. (Not if the sampler draws from them: then with the same.) All three are put back.

    An iterable dataset divides itself among the workers, or yields everything once per worker. So
    its batches are compared with those of another run with the same number of workers.

    Args:
        make_loader: called once for each of ``num_workers``, twice for an iterable dataset, and
            once for the sampler alone.
        num_workers: numbers of workers; each is compared with the first.
        num_epochs: how often each loader is iterated.
        num_batches: of each epoch; None = all. Those of one loader are kept in memory. A dataset
            without an end needs a number.
        seed: of the order, and of the streams unless the loader has a seed of its own.
    Raises: AssertionError: which batch and sample differs, and the usual reasons.
        ValueError: fewer than two numbers of workers.
    """
    if len(num_workers) < 2:
        raise ValueError(
            f"assert_reproducible: num_workers must be two numbers or more, got {num_workers!r}. "
            "There is nothing to compare."
        )

    def batches(loader: Iterable[Any]) -> list[list[Any]]:
        return [list(islice(loader, num_batches)) for _ in range(num_epochs)]

    with checking():
        seed_all(seed, 0)
        first = make_loader(num_workers[0])
        is_iterable = isinstance(getattr(first, "dataset", None), IterableDataset)
        is_drawn_from = not is_iterable and _sampler_draws(first, num_batches)
        pairs = [(workers, num_workers[0]) for workers in num_workers[1:]]
        if is_iterable:
            pairs = [(workers, workers) for workers in num_workers]
        expected: list[list[Any]] = []
        for run, (workers, reference) in enumerate(pairs, 1):
            if run == 1 or is_iterable:
                seed_all(seed, 0)
                expected = batches(make_loader(reference))
            seed_all(seed, 0 if is_drawn_from else run)
            difference = first_difference(expected, batches(make_loader(workers)))
            if difference is not None:
                again = "again " if workers == reference else ""
                raise AssertionError(
                    f"assert_reproducible: num_workers={workers} must {again}give the same batches "
                    f"as num_workers={reference}, but {difference}. {_USUAL_REASONS}"
                )


def _sampler_draws(loader: Any, num_batches: int | None) -> bool:
    """Return whether the order comes from ``random`` or ``numpy.random``, which it may."""
    before = random.getstate(), np.random.get_state()
    sampler = getattr(loader, "_index_sampler", ())  # torch's attribute for the one it pulls
    for _ in islice(sampler, num_batches):
        pass
    return path_of_difference(before, (random.getstate(), np.random.get_state())) is not None


def seed_all(seed: int, run: int) -> None:
    """Seed torch's generator with ``seed``, the others with both numbers."""
    torch.manual_seed(seed)
    random.seed(f"{seed} {run}")
    np.random.seed((seed + run) & 0xFFFFFFFF)
