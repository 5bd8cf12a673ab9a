"""Random numbers on worker threads: a stream for each sample, and the trainer's left alone."""

import random

import numpy as np
import pytest
import torch
from _loader_helpers import assert_threads_end
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info
from torchvision.transforms import v2

from spdl_torch import DataLoader
from spdl_torch.data.random import sample_seed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

AUGMENT = v2.Compose(
    [
        v2.RandomResizedCrop(16, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.3, 0.3, 0.3),
        v2.RandomErasing(p=0.5),
    ]
)


class Augmented(Dataset):
    """Random crops, flips, colours and boxes of a ramp."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        image = torch.arange(3 * 32 * 32, dtype=torch.int64).reshape(3, 32, 32) + index
        return AUGMENT((image % 256).to(torch.uint8))


class InOneCall(Augmented):
    """The same through ``__getitems__``."""

    sample_context = None

    def __getitems__(self, indices):
        samples = []
        for position, index in enumerate(indices):
            with self.sample_context(position):
                samples.append(self[index])
        return samples


class Drawing(Dataset):
    """Samples are what a function draws."""

    def __init__(self, draw, length=12):
        self.draw = draw
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.draw(index)


def two_epochs(dataset, num_workers, **options):
    """Every batch of two shuffled epochs, and what the trainer draws afterwards."""
    torch.manual_seed(7)
    loader = DataLoader(dataset, 5, shuffle=True, num_workers=num_workers, **options)
    batches = [batch for _ in range(2) for batch in loader]
    return batches, torch.rand(3)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Augmented, InOneCall])
def test_augmentations_are_equal_for_any_number_of_threads(kind, persistent):
    """torchvision's transforms give the same bits from 1, 2, 3 and 7 threads."""
    expected, trainer = two_epochs(Augmented(), 1, persistent_workers=persistent)
    for num_workers in (1, 2, 3, 7):
        got, after = two_epochs(kind(), num_workers, persistent_workers=persistent)
        assert all(map(torch.equal, got, expected))
        assert torch.equal(after, trainer)


def test_augmentations_differ_between_epochs_and_samples():
    """No two samples of two epochs have the same stream."""
    loader = DataLoader(Drawing(lambda _: torch.rand(4)), 3, num_workers=2, persistent_workers=True)
    rows = torch.cat([*loader, *loader])
    assert len(torch.unique(rows, dim=0)) == 24


def test_subset_passes_the_streams_on():
    """torch's Subset hands whole lists to the dataset inside it."""
    expected, _ = two_epochs(Subset(Augmented(), range(20)), 2)
    got, _ = two_epochs(Subset(InOneCall(), range(20)), 2)
    assert all(map(torch.equal, got, expected))


DRAWS = {
    "rand": lambda: torch.rand(3),
    "randint": lambda: torch.randint(0, 99, (3,)),
    "randperm": lambda: torch.randperm(5),
    "normal": lambda: torch.normal(torch.zeros(3), 1.0),
    "multinomial": lambda: torch.multinomial(torch.ones(5), 3),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "bernoulli_": lambda: torch.empty(9).bernoulli_(0.5),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "rand_like": lambda: torch.rand_like(torch.ones(3)),
    "init": lambda: torch.nn.init.xavier_uniform_(torch.empty(2, 2)),
    "beta": lambda: torch.distributions.Beta(1.0, 1.0).sample((3,)),
    "poisson": lambda: torch.poisson(torch.full((3,), 50.0)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draw_comes_from_the_samples_stream(name):
    """The same numbers from 1 and from 3 threads, and none taken from the trainer."""
    dataset = Drawing(lambda _: DRAWS[name]())
    expected, trainer = two_epochs(dataset, 1)
    got, after = two_epochs(dataset, 3)
    assert all(map(torch.equal, got, expected))
    assert torch.equal(after, trainer)
    torch.manual_seed(7)
    for _ in range(2):
        list(DataLoader(Drawing(lambda _: 0), 5, shuffle=True, num_workers=1))
    assert torch.equal(torch.rand(3), trainer)


def test_manual_seed_on_a_worker_seeds_that_worker():
    """The usual way to treat image and mask alike holds, and the trainer is not reseeded."""

    def pair(index):
        torch.manual_seed(index)
        first = torch.rand(2)
        torch.manual_seed(index)
        return torch.stack([first, torch.rand(2)])

    before = torch.get_rng_state()
    rows = torch.cat(list(DataLoader(Drawing(pair), 4, num_workers=3, generator=torch.Generator())))
    assert torch.equal(rows[:, 0], rows[:, 1])
    assert torch.equal(torch.get_rng_state(), before)


def test_rng_state_on_a_worker_is_that_workers():
    """``get_rng_state``, ``set_rng_state``, ``fork_rng`` and ``initial_seed`` agree with draws."""

    def draws(index):
        state = torch.get_rng_state()
        first = torch.rand(1)
        torch.set_rng_state(state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            assert torch.initial_seed() == index
        return torch.cat([first, torch.rand(1)])

    for batch in DataLoader(Drawing(draws), 4, num_workers=2):
        assert torch.equal(batch[:, 0], batch[:, 1])


def test_seeding_functions_keep_their_meaning_on_the_trainers_thread():
    """After threads were used, the process's own generator is seeded and read as before."""
    list(DataLoader(Drawing(lambda _: 0), num_workers=1))
    generator = torch.manual_seed(5)
    assert generator is torch.default_generator
    assert torch.initial_seed() == 5
    state = torch.get_rng_state()
    first = torch.rand(2)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    assert isinstance(torch.seed(), int)


def test_collate_fn_has_a_stream_of_its_own():
    """What collate_fn draws does not depend on the thread that finishes the batch."""
    mix = v2.MixUp(num_classes=3)

    def collate(samples):
        images, labels = torch.utils.data.default_collate(samples)
        return mix(images.float(), labels)[0]

    def sample(index):
        return torch.full((3, 4, 4), float(index)), index % 3

    before = torch.get_rng_state()
    runs = [
        list(
            DataLoader(
                Drawing(sample),
                4,
                num_workers=workers,
                collate_fn=collate,
                generator=torch.Generator().manual_seed(3),
            )
        )
        for workers in (1, 2, 4)
    ]
    assert all(map(torch.equal, runs[0], runs[1]))
    assert all(map(torch.equal, runs[0], runs[2]))
    assert torch.equal(torch.get_rng_state(), before)


def test_iterable_draws_from_its_workers_stream():
    """As in torch, each worker of an iterable has one stream, seeded base_seed + id."""

    class Stream(IterableDataset):
        """Two draws from each worker."""

        def __iter__(self):
            seed = get_worker_info().seed
            for _ in range(2):
                yield torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(seed))

    loader = DataLoader(Stream(), batch_size=None, num_workers=2)
    batches = list(loader)
    assert [torch.equal(drawn, fresh) for drawn, fresh in batches] == [True, True, False, False]


def test_worker_init_fn_cannot_reseed_the_trainer():
    """Seeding all three global generators in it, as Lightning does, leaves the trainer's."""

    def seed_everything(worker_id):
        torch.manual_seed(worker_id)
        random.seed(worker_id)
        np.random.seed(worker_id)

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loader = DataLoader(
        Drawing(lambda _: 0),
        num_workers=2,
        worker_init_fn=seed_everything,
        generator=torch.Generator(),
    )
    iterator = iter(loader)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    del iterator
    assert_threads_end()


def test_sample_seeds_do_not_collide():
    """Neighbouring epochs, batches and positions have different seeds."""
    seeds = {
        sample_seed(epoch, batch, position)
        for epoch in range(8)
        for batch in range(40)
        for position in range(-1, 40)
    }
    assert len(seeds) == 8 * 40 * 41
