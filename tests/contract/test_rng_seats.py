"""Random streams and torch's modes as promises: the same in every seat, of whatever draws; modes
reach user code as they reach a worker that torch forks."""

from __future__ import annotations

import decimal
import functools
import json
import random
import threading
from typing import Any

import _warm
import numpy as np
import pytest
import torch
from _datasets import Made
from _first_draws import Draws, InBatches, Stream, collate, digest_of, states_of_program as states
from _folders import HELPERS
from _loader_helpers import assert_threads_end
from _seats import FORKED, NONE, THREADS, in_every_seat, in_seats
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import Dataset, IterableDataset

from spdl_torch import DataLoader
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


class OnesForZeros(TorchFunctionMode):
    """Changes what a function of torch returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.ones if func is torch.zeros else func)(*args, **(kwargs or {}))


def look(index: int) -> Any:
    """A sample that shows the modes under which it is made."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ weight
    is_half = product.dtype is torch.bfloat16
    precision = decimal.getcontext().prec
    return index, torch.zeros(1).item(), is_half, product.requires_grad, precision, product.detach()


MODES = {
    "none": lambda: torch.enable_grad(),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "function mode": OnesForZeros,
    "context variable": lambda: decimal.localcontext(prec=40),
}


@functools.cache
def of_torch(mode: str) -> str:
    """What torch's workers make under a mode."""
    with MODES[mode]():
        return repr(list(FORKED.peer(Made(look, 8), batch_size=2)))


@in_seats(NONE, THREADS, FORKED)
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_those_of_the_thread_that_begins_the_epoch(seat: Any, mode: Any) -> None:
    """As in torch's forked workers, and so are context variables, which new threads do not have by
    themselves; what is made under inference mode can be used outside it."""
    loader = seat.loader(Made(look, 8), batch_size=2)
    with MODES[mode]():
        batches = list(loader)
    again = [batch for batch in loader if seat.num_workers]
    assert repr(batches) == of_torch(mode)
    assert again == [] or again[0][1].sum() == 0, "each epoch has its own"
    if not seat.are_processes and seat.num_workers:
        torch.ones(2, 2, requires_grad=True).mul(batches[0][5]).sum().backward()


class LastWord:
    """Is told of the modes of the thread that it belongs to when that ends."""

    def __init__(self, found: list[int]) -> None:
        self.found = found

    def __del__(self) -> None:
        self.found.append(len(_get_current_function_mode_stack()))


def test_threads_end_without_function_modes() -> None:
    """torch would let go of what a thread leaves after Python's end of it, and ask for the GIL: as
    the interpreter exits, that aborts the process."""
    of_thread, found = threading.local(), list[int]()

    def look_last(index: int) -> int:
        of_thread.word = getattr(of_thread, "word", None) or LastWord(found)
        return len(_get_current_function_mode_stack())

    with OnesForZeros():
        batches = list(DataLoader(Made(look_last, 8), num_workers=2, isolation="thread"))
    assert_threads_end()
    assert sum(batches).item() == 8, "each sample was made in the mode"
    assert found
    assert not any(found)
