"""Check that the bits are the same for any number of workers, and that a loader goes on with the
exact next batch from each of its states.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..loader.differences import first_difference, path_of_difference
from ..objects.generator_states import GeneratorStates
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


_Snapshot = tuple[int, int, Any, GeneratorStates]
"""Taken in this epoch after so many batches: a loader's state, and the generators'."""


def assert_resume_exact(
    make_loader: Callable[[], Any],
    *,
    num_epochs: int = 2,
    make_resumed: Callable[[], Any] | None = None,
    seed: int = 0,
) -> None:
    """Check that a loader continues with the exact next batch from each of its states.

    A loader runs undisturbed for ``num_epochs``; its state is taken before the first batch, after
    every batch and after every epoch, and goes through JSON and ``torch.load(weights_only=True)``.
    From every state another loader continues: the rest of its epoch and the epochs after it must
    equal those of the undisturbed run.

    torch's, Python's and numpy's global generators are seeded with ``seed`` at the beginning, set
    to what they were when a state was taken, as a trainer does, and restored at the end.

    Args:
        make_loader: returns a new loader, a ``spdl_torch.DataLoader`` or anything that has
            ``state_dict()`` and ``load_state_dict()``. Give each its own ``generator``, if any.
        num_epochs: of the undisturbed run. Its batches are kept in memory.
        make_resumed: returns the loaders that continue; None = ``make_loader``. Another number of
            workers must make no difference.
        seed: see above.
    Raises: AssertionError: from which state, and which batch and sample differs.
    """
    make_resumed = make_resumed or make_loader
    with checking():
        seed_all(seed, 0)
        epochs, snapshots = _undisturbed(make_loader(), num_epochs)
        for epoch, position, state, generators in snapshots:
            generators.restore()
            loader = make_resumed()
            loader.load_state_dict(state)
            got = [list(loader) for _ in range(epoch, num_epochs)]
            if got:
                expected = [epochs[epoch][position:], *epochs[epoch + 1 :]]
                _compare(expected, got, f"resumed in epoch {epoch} after batch {position}")


def _undisturbed(loader: Any, num_epochs: int) -> tuple[list[list[Any]], list[_Snapshot]]:
    epochs: list[list[Any]] = []
    snapshots = [_snapshot(loader, 0, 0)]
    for epoch in range(num_epochs):
        batches: list[Any] = []
        for batch in loader:
            batches.append(batch)
            snapshots.append(_snapshot(loader, epoch, len(batches)))
        epochs.append(batches)
        snapshots.append(_snapshot(loader, epoch + 1, 0))
    return epochs, snapshots


def _snapshot(loader: Any, epoch: int, position: int) -> _Snapshot:
    return epoch, position, _stored(loader.state_dict()), GeneratorStates.now()


def _stored(state: Any) -> Any:
    """Return a state as it comes back from a checkpoint."""
    try:
        state = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(
            f"assert_resume_exact: a state must be made of what JSON can hold: {error}. A "
            "dataset's or sampler's own state_dict() is part of it."
        ) from error
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _compare(expected: list[list[Any]], got: list[list[Any]], how: str) -> None:
    difference = first_difference(expected, got)
    if difference is not None:
        raise AssertionError(
            f"assert_resume_exact: {how}, {difference}; epochs and batches are counted from there. "
            "Look for a sampler or an iterable that draws from what nobody restores, or that keeps "
            "a position and has no state_dict()."
        )
