"""Check that a loader goes on with the exact next batch from each of its states."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import torch

from ..loader.differences import first_difference
from ..objects.generator_states import GeneratorStates
from ._changes import checking
from .reproducible import seed_all

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
