"""Generators that a dataset, a transform, a library or a collate function keeps as its own."""

import copy
import random
import types
from contextlib import nullcontext
from functools import partial, reduce
from itertools import chain

import numpy as np
import pytest
import torch
from support.datasets import Drawing, Sized
from support.loaders import library
from torch.utils.data import IterableDataset, get_worker_info

from spdl_torch import DataLoader
from spdl_torch.loader.rng.keys import Purpose, StreamKey
from spdl_torch.loader.rng.owned import OwnedGenerators
from spdl_torch.objects.members import Unfinished, members, walk

NONE = {}
THREADS = {"num_workers": 3, "isolation": "thread"}
PROCESSES = {"num_workers": 2, "isolation": "process"}
MANY = {"num_workers": 8, "isolation": "thread"}


class Draws:
    """A transform that keeps a generator and draws one number from it."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self):
        generator = self.generator
        if isinstance(generator, torch.Generator):
            return torch.rand((), generator=generator, dtype=torch.float64).item()
        if isinstance(generator, np.random.BitGenerator):
            generator = np.random.Generator(generator)
        return generator.random()


KINDS = {
    "random": random.Random,
    "pcg64": np.random.default_rng,
    "random_state": np.random.RandomState,
    "random_state_of_pcg64": lambda seed: np.random.RandomState(np.random.PCG64(seed)),
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "bits": np.random.PCG64,
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "mt19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
}

PLACES = {
    "transform": lambda draws: {"transform": draws},
    "composed": lambda draws: {"transforms": [len, (draws, None)]},
    "partial": lambda draws: {"draw": partial(Draws.__call__, draws)},
    "method": lambda draws: {"draw": draws.__call__},
    "named": lambda draws: {"steps": {"first": draws}},
    "array": lambda draws: {"steps": np.array([draws, None])},
    "slots": lambda draws: {"draw": Slotted(draws)},
    "the dataset itself": lambda draws: {"draw": draws.generator.random},
}


class Slotted:
    """Keeps a transform, and has no dictionary."""

    __slots__ = ("__draws",)

    def __init__(self, draws):
        self.__draws = draws

    def __call__(self):
        return self.__draws()


class Owner(Sized):
    """Each sample is what the last of its parts draws."""

    def __init__(self, draws, place="transform"):
        super().__init__(64)
        self.parts = PLACES[place](draws)

    def __getitem__(self, index):
        (part,) = self.parts.values()
        while not callable(part):
            part = part["first"] if isinstance(part, dict) else part[1] or part[0]
        return part()


def epochs(dataset, workers=NONE, num_epochs=2, **options):
    """What the samples of some epochs drew, as lists."""
    loader = DataLoader(dataset, 8, **workers, **options)
    return [torch.cat(list(loader)).tolist() for _ in range(num_epochs)]


@pytest.mark.parametrize(
    ("kind", "place"),
    [*((kind, "transform") for kind in KINDS), *(("pcg64", place) for place in PLACES)],
)
def test_every_sample_draws_its_own_number_for_any_number_of_workers(kind, place):
    """64 numbers of 64, wherever the dataset keeps its generator, the same for any workers, others
    in the next epoch; the seed that the user gave decides them, and the generator itself stands
    where it stood."""
    dataset = Owner(Draws(KINDS[kind](3)), place)
    before = copy.deepcopy(dataset)
    expected = epochs(dataset)
    assert [len(set(epoch)) for epoch in expected] == [64, 64]
    assert expected[0] != expected[1]
    torch.manual_seed(1)  # not what they draw from
    if kind in ("random", "pcg64", "torch"):  # one of each library
        assert epochs(dataset, PROCESSES, persistent_workers=True) == expected
    for workers in (THREADS, MANY):
        assert epochs(dataset, workers) == expected
    for seed in (3, 4):
        assert (epochs(Owner(Draws(KINDS[kind](seed)), place)) == expected) is (seed == 3)
    assert before[0] == dataset[0]


def test_seed_of_the_loader_seeds_generators_without_one():
    """With ``seed=`` nothing depends on what the system gave them."""

    def run(workers, seed):
        return epochs(Owner(Draws(random.Random())), workers, seed=seed)

    expected = run(NONE, 5)
    for workers in (PROCESSES, MANY):
        assert run(workers, 5) == expected, workers
    assert run(NONE, 6) != expected
    assert run(NONE, None) != run(NONE, None)


def test_collate_function_with_a_generator_draws_for_its_batch():
    """One of its own for each batch, whichever worker makes it."""
    mixing = Draws(np.random.default_rng(2))
    dataset = Owner(Draws(random.Random(1)))
    collate = partial(lambda draw, _: torch.tensor([draw()]), mixing)
    expected = epochs(dataset, collate_fn=collate)
    assert len(set(expected[0])) == 8
    for workers in (PROCESSES, MANY):
        assert epochs(dataset, workers, collate_fn=collate) == expected, workers


class Shuffled(IterableDataset):
    """Deals out its files after shuffling them with generators of its own and of a helper, as many
    do: those have to be in one state on all workers. Its transform's generator is to differ for
    each item."""

    def __init__(self):
        self.rng = random.Random(4)
        self.order = types.SimpleNamespace(rng=np.random.default_rng(4))  # a helper, no transform
        self.transform = Draws(random.Random(5))

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        files = self.order.rng.permutation(24).tolist()
        self.rng.shuffle(files)
        for file in files[first::step]:
            yield torch.tensor([file, self.transform()], dtype=torch.float64)


@pytest.mark.parametrize("workers", [NONE, THREADS, PROCESSES], ids=["none", "threads", "forked"])
def test_iterable_datasets_own_generators_are_left_to_it(workers):
    """Every item once, in the order of torch's workers; each with a draw of its own."""
    items = torch.stack(list(DataLoader(Shuffled(), None, **workers)))
    number = {"num_workers": workers.get("num_workers", 0)}
    torchs = torch.stack(list(torch.utils.data.DataLoader(Shuffled(), None, **number)))
    assert items[:, 0].tolist() == torchs[:, 0].tolist()
    assert sorted(items[:, 0].tolist()) == list(range(24))
    assert len(set(items[:, 1].tolist())) == 24


def test_streams_for_each_worker_leave_owned_generators_alone():
    """rng="worker" is torch's rule: what a generator draws follows from its own state."""
    dataset = Owner(Draws(random.Random(3)))
    generator = random.Random(3)
    assert epochs(dataset, NONE, 1, rng="worker") == [[generator.random() for _ in range(64)]]


def test_what_is_no_owned_generator_or_cannot_be_found_is_left():
    """Functions of modules are bound to those of the process, whose draws the thread leads; a
    structure without end, and one too long to look through."""
    for value in (random.random, random.Random.random, np.random.rand, torch.default_generator):
        assert not OwnedGenerators({"draw": value})
    endless = {"random": random.SystemRandom()}
    endless["self"] = [endless]
    assert not OwnedGenerators([endless, {n: [random.Random()] for n in range(10_000)}])


def albumentations(seed):
    """A crop, a flip and a change of brightness of one picture."""
    parts = library("albumentations")
    steps = parts.RandomResizedCrop(size=(8, 8)), parts.HorizontalFlip(p=0.5)
    compose = parts.Compose([*steps, parts.RandomBrightnessContrast(p=1.0)], seed=seed)
    picture = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)

    def draw(compose):
        return torch.from_numpy(compose(image=picture)["image"].copy()).double()

    return partial(draw, compose)


def monai(seed):
    """Noise, a flip and a turn of one volume."""
    parts = library("monai.transforms")
    steps = parts.RandGaussianNoise(prob=1.0), parts.RandFlip(0.5), parts.RandRotate90(0.5)
    compose, volume = parts.Compose([*steps]), torch.arange(36.0).reshape(1, 6, 6)
    compose.set_random_state(seed)
    return partial(lambda compose: torch.as_tensor(compose(volume)).double().clone(), compose)


@pytest.mark.filterwarnings("ignore")  # the libraries' own, of many kinds
@pytest.mark.parametrize("transform", [albumentations, monai])
@pytest.mark.parametrize("own_seed", [3, None])
def test_every_sample_of_a_library_draws_its_own_numbers(transform, own_seed):
    """64 of 64, others in the next epoch, the same wherever the workers are; by the library's own
    seed, or by the loader's where it has none."""
    expected = []
    for workers in (NONE, MANY, PROCESSES):
        dataset = Drawing(transform(own_seed), 64)
        seed = 5 if own_seed is None else None
        loader = DataLoader(dataset, 8, seed=seed, **workers)
        epochs = [torch.cat(list(loader)).reshape(64, -1) for _ in range(2)]
        expected = expected or epochs
        assert [len(torch.unique(epoch, dim=0)) for epoch in epochs] == [64, 64]
        assert not torch.equal(*epochs)
        assert all(map(torch.equal, epochs, expected))


def fail(*_):
    raise AssertionError("user code ran")


ASKED = ("len", "iter", "getitem", "contains", "eq", "repr", "getattr")
METHODS = {**{f"__{name}__": fail for name in ASKED}, "__hash__": None}
ALSO_ASKED = {**METHODS, **dict.fromkeys(("items", "keys", "values"), fail)}


@pytest.mark.parametrize("kind", [type("L", (list,), METHODS), type("D", (dict,), ALSO_ASKED)])
def test_no_method_of_an_object_is_called(kind):
    """Not even to ask for its length. Keys are found, and attributes, also of what is too long to
    be entered."""
    key, inside, *beside = map(random.Random, range(4))
    short, long = kind([(key, inside)]), kind([(n, random.Random()) for n in range(10_000)])
    vars(short)["kept"], vars(long)["kept"] = beside
    assert {*OwnedGenerators((short, long)).found} == {key, inside, *beside}


@pytest.mark.parametrize("depth", [10, 3_000])
def test_search_that_ends_early_says_so_once(depth, caplog, monkeypatch):
    """With what to do; not where it has seen everything."""
    monkeypatch.setattr("spdl_torch.loader.rng.owned._has_warned", False)
    chain = reduce(lambda inner, _: [inner], range(depth), random.Random(1))
    for _ in range(2):
        OwnedGenerators(chain)
    assert len(caplog.messages) == (depth > 2_000)
    assert all("stopped after 2000 objects" in each and "Keep" in each for each in caplog.messages)


def test_walk_gives_each_object_once_and_whole_levels():
    """Nearest first, where there are cycles, too; one that ends early leaves out the deepest."""
    deep = [[]]
    root = [[deep, deep], [deep]]
    root.append(root)
    levels = [root], root[:2], [deep], deep
    for most, num_levels in ((1, 1), (2, 2), (3, 2), (4, 3), (9, 4)):
        found = []
        with pytest.raises(Unfinished) if num_levels < 4 else nullcontext():
            found.extend(walk([root], members, most))
        assert [*map(id, found)] == [*map(id, chain(*levels[:num_levels]))]


def test_seeds_of_two_generators_and_two_purposes_differ():
    """What a sample draws from one says nothing of what it draws from another."""
    generators = random.Random(1), random.Random(2), np.random.default_rng(1)
    owned = OwnedGenerators(generators)
    assert owned.found == generators
    drawn = set()
    for epoch in range(2):
        key = StreamKey(7, epoch=epoch)
        for position in range(20):
            for purpose in (Purpose.SAMPLE, Purpose.COLLATE):
                owned.seed(key, position, purpose)
                drawn |= {generator.random() for generator in generators}
    assert len(drawn) == 2 * 20 * 2 * 3
