"""Random streams as a promise: the same bits in every seat, of whatever draws."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import _warm
import numpy as np
import pytest
import torch
from _first_draws import Draws, InBatches, Stream, collate, digest_of
from _folders import HELPERS
from _loader_helpers import assert_threads_end
from _seats import FORKED, NONE, THREADS, in_every_seat, in_seats
from torch.utils.data import Dataset, IterableDataset

from spdl_torch.loader.rng.patches import install

LENGTH, BATCH_SIZE = 12, 3
HANG_SECONDS = 120


@pytest.fixture(autouse=True)
def _loaders_have_run() -> None:
    """A function that was kept before the first loader draws from the process's generator. (Not at
    the import: other files need such functions.)"""
    install()


def drawn(loader: Any) -> str:
    """The bits of two epochs."""
    return repr([batch for _ in range(2) for batch in loader])


@functools.cache
def reference(kind: type) -> str:
    """The bits that are drawn in one seat, against which the others are held."""
    return drawn(loader_in(THREADS if kind is Stream else NONE, kind))


def seed_all(seed: int) -> None:
    for seeding in (torch.manual_seed, random.seed, np.random.seed):
        seeding(seed)


def loader_in(seat: Any, kind: type) -> Any:
    options = {"seed": 5, "generator": torch.Generator(), "worker_init_fn": seed_all}
    kept = {"kept": (random.random, np.random.random_sample, np.random.ranf)}
    dataset = kind() if kind is Stream else kind(**kept)
    return seat.loader(dataset, batch_size=BATCH_SIZE, collate_fn=collate, **options)


def states() -> Any:
    numpys = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2:]


@in_every_seat
@pytest.mark.parametrize("kind", [Draws, InBatches, Stream])
def test_samples_draw_the_same_bits_in_every_seat(seat: Any, kind: Any) -> None:
    """As without workers, in two epochs, and the trainer's generators stand still, whatever workers
    seed; the items of an iterable by their worker and their number in it."""
    if seat is NONE and kind is Stream:
        pytest.skip("it has no worker by whose number it could be divided")
    want, before = reference(kind), states()
    assert drawn(loader_in(seat, kind)) == want
    assert states() == before
    for _ in loader_in(seat, kind):
        assert states() == before


class Reseeded(Dataset):
    """Keeps a generator, which its user seeds again before each pass, as with MONAI."""

    def set_random_state(self, seed: int) -> None:
        self.R = np.random.RandomState(seed)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:
        return self.R.rand()


@in_seats(NONE, THREADS, FORKED)
def test_a_generator_that_is_seeded_again_repeats_its_numbers_in_a_new_loader(seat: Any) -> None:
    """In the next epoch of one loader they differ, as those of a generator that was left alone."""

    dataset = Reseeded()

    def passes(*, reseed: bool = True, **options: Any) -> list[list[float]]:
        loader, found = seat.loader(dataset, BATCH_SIZE, **options), []
        for _ in range(2):
            if reseed:
                dataset.set_random_state(1)
            found.append([value for batch in loader for value in batch.tolist()])
        return found

    first, second = passes()
    assert first != second
    assert passes() == passes(reseed=False) == [first, second]
    by_worker = passes(rng="worker")
    assert by_worker[0] == by_worker[1]


def test_the_first_loader_of_a_program_draws_what_later_ones_draw() -> None:
    """Forked workers and the main thread begin before anybody sees what torch's operators draw;
    threads see it from the beginning."""
    done = _warm.run(["-W", "ignore", HELPERS / "_first_draws.py"], timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr[-5000:]
    for kind, by_seat in json.loads(done.stdout).items():
        if kind in ("stream", "by worker", "worker_init_fn", "persistent"):
            # Of two workers the numbers count, and those that persist are seeded once.
            assert by_seat.pop("none") != by_seat["threads"], kind
        assert len(set(by_seat.values())) == 1, (kind, by_seat)
        assert digest_of(kind, "threads") == by_seat["threads"], kind


class CleansUp(IterableDataset):
    """Its generator draws, seeds and restores as it ends."""

    def __iter__(self) -> Any:
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            for index in range(LENGTH):
                yield index, torch.rand(())
        finally:
            torch.rand(()), random.random(), np.random.rand()
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])


@in_seats(NONE, THREADS, FORKED)
@pytest.mark.parametrize("num_batches", [0, 2, LENGTH])
def test_a_generator_that_ends_leaves_the_trainers_generators_alone(
    seat: Any, num_batches: int
) -> None:
    """Wherever the loop is left, what an iterable draws as it ends belongs to its own streams."""
    loader = seat.loader(CleansUp(), BATCH_SIZE, seed=5, generator=torch.Generator())
    before = states()
    for number, _ in enumerate(loader, 1):
        if number >= num_batches:
            break
    del loader
    assert_threads_end()
    assert states() == before
