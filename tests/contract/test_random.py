"""Random streams: one for each sample, the same bits wherever the workers are, other ones in each
epoch; or, with ``rng="worker"``, torch's."""

import copy
import functools
import hashlib
import random

import numpy as np
import pytest
import torch
from support.covering import by_pairs
from support.datasets import Divided, Made, Sized
from support.forks import found_in_forks, found_in_new
from support.loaders import DataLoader
from support.seats import FORKED, NONE, THREADS, in_every_seat, in_seats
from torch.utils.data import DistributedSampler, IterableDataset, default_collate, get_worker_info

from spdl_torch.loader.rng.patches import can_see_draws, install

MANY = 120
"""Samples in batches of 3: for each of two workers more than are looked at for draws."""
near = in_seats(NONE, THREADS, FORKED)


@pytest.fixture(autouse=True)
def _loaders_have_run():
    """A function that was kept before the first loader draws from the process's generator. (Not at
    the import: other files need such functions.)"""
    install()


def drawn(loader):
    """What the loader's samples drew, of an epoch."""
    return [tuple(row.flatten().tolist()) for batch in loader for row in batch]


def three_draws(_=None):
    """A number from each library, as one tensor."""
    numbers = [torch.rand(()), random.random(), np.random.rand()]
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)


class Draws:
    """Each sample draws from all that samples draw from: functions of torch, ``random`` and
    ``numpy.random`` (called, ``kept``, and in C++), and generators of its own."""

    thread_safe = True

    def __init__(self, length=12, first=0, kept=()):
        self.length = length
        self.first = first  # samples before it draw nothing
        self.kept = kept
        self.own_python = random.Random(1)
        self.own_numpy = np.random.default_rng(2)
        self.transforms = {"old": np.random.RandomState(3), "torch": torch.Generator()}

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index < self.first:
            return [float(index)] * 16
        drawn = [float(index), torch.rand(()).item(), random.gauss(0, 1), np.random.normal()]
        drawn += [draw() for draw in self.kept]
        drawn += [self.own_python.random(), self.own_numpy.random()]
        drawn += [self.transforms["old"].rand()]
        drawn += torch.rand(2, generator=self.transforms["torch"]).tolist()
        drawn += torch.dropout(torch.ones(2), 0.5, True).tolist()
        return [*drawn, *torch.randperm(3).tolist(), random.random(), np.random.rand()]


class InBatches(Draws):
    """The same, made by the batch."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """Draws at the beginning and in each item; every worker makes a part of them."""

    thread_safe = True

    def __iter__(self):
        info, first = get_worker_info(), [torch.rand(()).item(), random.random(), np.random.rand()]
        for index in range(0 if info is None else info.id, 12, 1 if info is None else 2):
            yield [float(index), *first, torch.rand(()).item(), random.random(), np.random.rand()]


def collate(samples):
    """Draws too, as Mixup does."""
    return default_collate(samples), torch.rand(2), random.random(), np.random.rand()


def states():
    """torch's, Python's and numpy's, from which a loader's samples are not to draw."""
    numpys = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2:]


def loader_in(seat, kind):
    """Whose workers seed; of samples that draw from everything."""
    options = {"seed": 5, "generator": torch.Generator(), "worker_init_fn": seed_all}
    kept = {"kept": (random.random, np.random.random_sample, np.random.ranf)}
    dataset = kind() if kind is Stream else kind(**kept)
    return seat.loader(dataset, 3, collate_fn=collate, **options)


def seed_all(number):
    """What Lightning's does, in short."""
    seed = torch.initial_seed() + number
    for seeding in (torch.manual_seed, random.seed, lambda seed: np.random.seed(seed % 2**32)):
        seeding(seed)


@functools.cache
def bits_of(seat, kind):
    """Of two epochs; meanwhile the program's own generators stand still."""
    loader, before = loader_in(seat, kind), states()
    found = []
    for _ in range(2):
        for batch in loader:
            found.append(repr(batch))
            assert states() == before
    return found


@in_every_seat
@pytest.mark.parametrize("kind", [Draws, InBatches, Stream])
def test_samples_draw_the_same_bits_in_every_seat(seat, kind):
    """As without workers, in two epochs, and the trainer's generators stand still, whatever workers
    seed; the items of an iterable by their worker and their number in it."""
    if seat is NONE and kind is Stream:
        pytest.skip("it has no worker by whose number it could be divided")
    assert bits_of(seat, kind) == bits_of(THREADS if kind is Stream else NONE, kind)


@pytest.mark.parametrize("rng", ["sample", "worker"])
@pytest.mark.parametrize("persistent", [False, True])
def test_seed_makes_every_epoch_replayable(persistent, rng):
    """Epoch n has the same streams in a new loader, whatever torch's own seed is; no two samples of
    any epochs have the same, without a seed either. Streams of workers are dealt out anew for every
    epoch, also on threads that live on."""
    options = {"persistent_workers": persistent, "rng": rng}
    loader = THREADS.loader(Made(three_draws), 4, seed=5, **options)
    epochs = [drawn(loader) for _ in range(3)]
    torch.manual_seed(123)
    again = THREADS.loader(Made(three_draws), 4, seed=5, rng=rng)
    assert [drawn(again) for _ in range(3)] == epochs
    if rng == "sample":
        assert [drawn(DataLoader(Made(three_draws), 4, seed=5))] == epochs[:1]
    for seed in (6, None):
        other = THREADS.loader(Made(three_draws), 4, seed=seed, **options)
        epochs += [drawn(other), drawn(other)]
    assert len({sample for epoch in epochs for sample in epoch}) == 7 * 12, "no two are alike"


def test_epoch_is_the_samplers_where_it_was_set():
    """``set_epoch`` names the streams as it names the order, in a resumed program too."""
    dataset = Made(three_draws)
    sampler = DistributedSampler(dataset, 1, 0, shuffle=False)
    loader = DataLoader(dataset, 4, sampler=sampler, seed=5)
    epochs = []
    for epoch in (0, 1, 2, 1):
        sampler.set_epoch(epoch)
        epochs.append(drawn(loader))
    assert epochs[3] == epochs[1]
    assert len(set(map(tuple, epochs))) == 3
    assert epochs[:3] == [drawn(plain) for plain in [DataLoader(dataset, 4, seed=5)] * 3]


class Reseeded(Sized):
    """Keeps a generator, which its user seeds again before each pass, as with MONAI."""

    def __getitem__(self, index):
        return self.R.rand()


@near
def test_a_generator_that_is_seeded_again_repeats_its_numbers_in_a_new_loader(seat):
    """In the next epoch of one loader they differ, as those of a generator that was left alone."""
    dataset = Reseeded()

    def passes(*, reseed=True, **options):
        loader, found = seat.loader(dataset, 3, **options), []
        for _ in range(2):
            if reseed:
                dataset.R = np.random.RandomState(1)
            found.append(drawn(loader))
        return found

    first, second = passes()
    assert first != second
    assert passes() == passes(reseed=False) == [first, second]
    by_worker = passes(rng="worker")
    assert by_worker[0] == by_worker[1]


def begin(number):
    """Draws from the worker's stream, and moves it."""
    torch.manual_seed(torch.initial_seed() + int(torch.randint(9, ())))
    get_worker_info().dataset.first = int(torch.randint(4, ()))


KINDS = {
    "samples": (Draws(), {}),
    "stream": (Stream(), {}),
    "collate": (Draws(), {"collate_fn": collate}),
    "worker_init_fn": (Draws(), {"worker_init_fn": begin, "persistent_workers": True}),
    "by worker": (Draws(), {"rng": "worker"}),
    "late": (Draws(MANY, MANY - 30), {}),
}
SEATS = {seat.name: seat for seat in (NONE, THREADS, FORKED)}


def digest_of(kind, seat):
    """What two epochs draw, and what the program draws afterwards."""
    dataset, options = KINDS[kind]
    options = {"batch_size": 3, "seed": 5, "shuffle": not isinstance(dataset, Stream), **options}
    torch.manual_seed(1)
    loader = SEATS[seat].loader(dataset, **options)
    found = [batch for _ in range(2) for batch in loader]
    return hashlib.sha256(repr((found, torch.rand(1))).encode()).hexdigest()[:16]


def digests_of_first_loaders():
    """Of each kind in each seat, each in a fork, in which nothing that redirects torch's draws is
    installed yet."""
    assert not can_see_draws()
    found = {}
    for kind in KINDS:
        digests = found_in_forks(*(functools.partial(digest_of, kind, seat) for seat in SEATS))
        found[kind] = dict(zip(SEATS, digests, strict=True))
    return found


def test_the_first_loader_of_a_program_draws_what_later_ones_draw():
    """Forked workers and the main thread begin before anybody sees what torch's operators draw;
    threads see it from the beginning."""
    for kind, by_seat in found_in_new(digests_of_first_loaders).items():
        if kind in ("stream", "by worker", "worker_init_fn"):
            # Of two workers the numbers count, and those that persist are seeded once.
            assert by_seat.pop("none") != by_seat["threads"], kind
        assert len(set(by_seat.values())) == 1, (kind, by_seat)
        assert digest_of(kind, "threads") == by_seat["threads"], kind


generator_of_threads = getattr(torch, "thread_safe_generator", lambda: None)
"""torch's function; 2.9 has none, and draws without a generator's name."""


class NamedNumbers(Divided):
    """Asks for its generator once, and draws from it and without it for each item."""

    def __iter__(self):
        generator = generator_of_threads()
        for _ in self.items():
            yield torch.cat([torch.rand(2, generator=generator), three_draws()])


@near
def test_thread_safe_generator_follows_the_samples_stream(seat):
    """The way that torch offers to code that may run on threads: the draws are those of code that
    names no generator, whoever makes a sample; of an iterable's item, too, by its position."""
    expected = drawn(DataLoader(Made(lambda _: torch.rand(2)), 5, seed=3))
    named = Made(lambda _: torch.rand(2, generator=generator_of_threads()))
    assert drawn(seat.loader(named, 5, seed=3)) == expected
    items = [tuple(item.tolist()) for item in seat.loader(NamedNumbers(12), None, seed=3)]
    numbers = Made(lambda _: torch.cat([torch.rand(2), three_draws()]), 12)
    assert sorted(items) == sorted(drawn(DataLoader(numbers, 5, seed=3)))


@pytest.mark.usefixtures("led_by")
@by_pairs(
    seat=[NONE, THREADS, FORKED],
    init_fn=[None, seed_all],
    dataset=[pytest.param(Draws(22), id="map"), pytest.param(Stream(), id="iterable")],
)
def test_worker_streams_are_torchs_own(seat, dataset, init_fn):
    """rng="worker": the bits that torch's worker processes draw, from all three libraries."""
    options = {"collate_fn": collate, "worker_init_fn": init_fn, "persistent_workers": True}

    def two_epochs(make, **more):
        torch.manual_seed(11)
        random.seed(12)
        np.random.seed(13)
        loader = make(copy.deepcopy(dataset), 4, **options, **more)
        return repr([[batch for _ in range(2) for batch in loader], three_draws()])

    assert two_epochs(seat.loader, rng="worker") == two_epochs(seat.peer)
