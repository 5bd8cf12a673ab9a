"""Check that the bits are the same for any number of workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..loader.backends.worker_thread import acting_as_worker
from ..loader.differences import first_difference, path_of_difference
from ..loader.rng.owned import (
    OwnedGenerators,
    ids_of_the_process,
    set_state,
    state_digest,
    state_of,
)
from ..objects.copies import deep_copy
from ..objects.generator_states import GeneratorStates
from ..objects.kinds import GENERATORS
from ..objects.members import text_of
from ..scopes import scope
from ._changes import checking, reached


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
    its batches are compared with those of another run with the same number of workers. And with two
    workers or more, no two of them may draw the same numbers for their items from a generator of
    the dataset's own, of which each has a copy.

    Args:
        make_loader: called once for each of ``num_workers``, twice for an iterable dataset, and
            once for the sampler alone. If a difference is found, once more, to find out which
            attribute of the dataset an epoch changes.
        num_workers: numbers of workers; each is compared with the first.
        num_epochs: how often each loader is iterated.
        num_batches: of each epoch; None = all. Those of one loader are kept in memory. A dataset
            without an end needs a number.
        seed: of the order, and of the streams unless the loader has a seed of its own.
    Raises: AssertionError: which batch and sample differs, and the likely reason: the generator of
            the process, or the attribute of the dataset, that samples have in common.
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
        drawn_by_sampler = set() if is_iterable else _drawn_by_sampler(first, num_batches)
        pairs = [(workers, num_workers[0]) for workers in num_workers[1:]]
        if is_iterable:
            pairs = [(workers, workers) for workers in num_workers]
        expected: list[list[Any]] = []
        for run, (workers, reference) in enumerate(pairs, 1):
            if run == 1 or is_iterable:
                seed_all(seed, 0)
                expected = batches(make_loader(reference))
            seed_all(seed, 0 if drawn_by_sampler else run)
            loader, before = make_loader(workers), GeneratorStates.now()
            difference = first_difference(expected, batches(loader))
            if difference is not None:
                drawn = changed_since(before) - drawn_by_sampler
                again = "again " if workers == reference else ""
                reason = _reason(loader, drawn)
                reason = reason or _what_changes(num_batches, drawn_by_sampler, make_loader)
                raise AssertionError(
                    f"assert_reproducible: num_workers={workers} must {again}give the same batches "
                    f"as num_workers={reference}, but {difference}. {reason}"
                )
        if is_iterable and max(num_workers) > 1:
            _check_workers_differ(first)


def _check_workers_differ(loader: Any) -> None:
    is_seeded = getattr(loader, "rng", None) == "sample"
    for path in alike_on_workers(loader.dataset, seeds_transforms=is_seeded):
        raise AssertionError(
            f"assert_reproducible: workers must not draw the same numbers for their items, but two "
            f"of them do, from {path}: each has a copy in the same state. Draw from torch, random "
            "or numpy.random, which the loader seeds for each item, or seed it in __iter__ by "
            "get_worker_info().seed. What all workers must do alike, such as shuffling a list that "
            "they divide, keeps a generator of its own."
        )


_IMPORTED_BY_NAME = {
    "random": "as `from random import random` or `getrandbits` does, when it runs before the "
    "loader starts. Call `random.random()`",
    "numpy.random": "as a name imported from numpy.random does, when that runs before the loader "
    "starts, and scipy's and scikit-learn's `random_state=None`. Call `np.random.<name>()`, or "
    "pass a generator that is seeded from torch.randint()",
}


def _reason(loader: Any, drawn: set[str]) -> str | None:
    if getattr(loader, "rng", "sample") == "worker":
        return 'rng="worker" deals streams out to workers. Leave it out.'
    if drawn:
        return " ".join(
            f"While loading, something drew from the process's generator of {name}, "
            f"{_IMPORTED_BY_NAME[name]}."
            for name in sorted(drawn)
        )
    return None


def _what_changes(
    num_batches: int | None, drawn_by_sampler: set[str], make_loader: Callable[[int], Iterable[Any]]
) -> str:
    """Name the generator or the dataset's attribute that an epoch on this thread leaves changed:
    what workers in processes of their own do cannot be seen here."""
    with suppress(Exception):  # of a dataset that cannot be copied or compared
        loader = make_loader(0)
        dataset = getattr(loader, "dataset", None)
        own = own_generators(dataset, getattr(loader, "collate_fn", None))
        digests = _digests(own)
        before, generators = deep_copy(dataset), GeneratorStates.now()
        for _ in islice(loader, num_batches):
            pass
        reason = _reason(None, changed_since(generators) - drawn_by_sampler)
        if reason is not None:
            return reason
        for path, digest in _digests(own).items():
            if digest != digests[path]:
                return (
                    f"An epoch without workers changes {path} (another state of a "
                    f"{type(own[path]).__name__}): samples leave it to one another. Keep it as an "
                    "attribute of a transform, where the loader seeds it for each sample, or draw "
                    "from torch, random or numpy.random."
                )
        difference = path_of_difference(before, dataset)
        if difference is not None:
            place, _, what = difference.removeprefix(" at ").partition(": ")
            change = f" ({what})" if what else ""
            return (
                f"An epoch without workers changes dataset{place}{change}: samples leave it to one "
                "another. Make it anew in each __getitem__, seeded by torch.randint() where it is "
                "a generator."
            )
    return (
        "Nothing was drawn from the process's generators of random and numpy.random, and no "
        "attribute of the dataset changes. Look for generators that each sample makes without a "
        "seed (np.random.default_rng()), draws on an accelerator or in threads of the dataset's "
        "own, and for state in modules."
    )


def _drawn_by_sampler(loader: Any, num_batches: int | None) -> set[str]:
    """Return the generators that the order comes from: drawing from those is allowed."""
    before = GeneratorStates.now()
    sampler = getattr(loader, "_index_sampler", ())  # torch's attribute for the one it pulls
    for _ in islice(sampler, num_batches):
        pass
    return changed_since(before)


def changed_since(before: GeneratorStates) -> set[str]:
    """Name the generators, of those that a dataset could draw from unseen, whose state differs."""
    now = GeneratorStates.now()
    pairs = {"random": (before.python, now.python), "numpy.random": (before.numpy, now.numpy)}
    return {name for name, (a, b) in pairs.items() if path_of_difference(a, b) is not None}


def seed_all(seed: int, run: int) -> None:
    """Seed torch's generator with ``seed``, the others with both numbers."""
    torch.manual_seed(seed)
    random.seed(f"{seed} {run}")
    np.random.seed((seed + run) & 0xFFFFFFFF)


_MOST_ITEMS = 16


def own_generators(*roots: Any, without: frozenset[int] = frozenset()) -> dict[str, Any]:
    """Return the generators that a dataset and a collate_fn lead to, by the expression for each:
    attributes, variables around functions, and default arguments.

    ``without``: the ids of those to leave out, besides the process's own.
    """
    excepted = ids_of_the_process() | without
    return {
        text_of(path): value
        for path, value in reached(zip(("dataset", "collate_fn"), roots, strict=False))
        if isinstance(value, GENERATORS) and id(value) not in excepted
    }


def _digests(generators: dict[str, Any]) -> dict[str, int]:
    """Return a number for the state of each."""
    return {path: state_digest(generator) for path, generator in generators.items()}


@scope
def _kept(generators: dict[str, Any]) -> Iterator[None]:
    """Restore all of them after the block."""
    states = {path: state_of(generator) for path, generator in generators.items()}
    try:
        yield
    finally:
        for path, state in states.items():
            set_state(generators[path], state)


def alike_on_workers(dataset: Any, *, seeds_transforms: bool) -> list[str]:
    """Name the generators from which two workers of an iterable dataset draw the same numbers for
    their items: each worker has a copy in the same state.

    Draws for the first item do not count, nor those for less than half of the items: workers that
    shuffle a list in the same way, before each takes its share, must draw alike.

    seeds_transforms: whether the loader seeds the generators of transforms for every item.
    """
    moved: list[dict[str, set[int]]] = []
    for number in range(2):
        try:
            own = deep_copy(dataset)
        except Exception:  # what cannot be copied cannot be looked at twice
            return []
        seeded = OwnedGenerators(own).found if seeds_transforms else ()
        generators = own_generators(own, without=frozenset(id(each) for _, each in seeded))
        # A generator outside the copy is the same object for both: each begins with it as it is.
        with _kept(generators), acting_as_worker(number, 2, 0, own):
            states = [_digests(generators) for _ in islice(iter(own), _MOST_ITEMS)]
        moved.append(_drawn_for_most(states))
    first, second = moved
    return [path for path in first if first[path] & second.get(path, set())]


def _drawn_for_most(states: list[dict[str, int]]) -> dict[str, set[int]]:
    """Return the states after the later items, of the generators that most of them draw from."""
    steps = list(pairwise(states))
    drawn = {
        path: [after[path] for before, after in steps if before[path] != after[path]]
        for path in (states[0] if states else ())
    }
    return {path: set(each) for path, each in drawn.items() if 2 * len(each) > len(steps)}
