"""The bits of random streams stay what they are: a saved run has to go on with the same ones.

``rng_bits.json`` holds them, written by ``python tests/loader/test_rng_bits.py``. Write it again
only where other bits are meant, and say so in the changelog: every user's augmentations change.
"""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ways_of_draws
from support.datasets import Drawing
from torch.utils.data import IterableDataset

from spdl_torch import DataLoader
from spdl_torch.loader.rng.keys import Purpose, StreamKey, epoch_seed

KEPT = Path(__file__).with_name("rng_bits.json")
NOTE = (
    "Written with torch 2.14, numpy 2.4 and Python 3.11 on x86-64. Seeds are ours alone. Draws are "
    "what the libraries' generators give for those seeds, which their next release may change."
)

# Of torch's operators one is enough: that of each the bits are its generator's with the sample's
# seed is shown by test_rng_operators.py.
TORCH = {
    "randint": lambda: torch.randint(0, 1 << 40, (2,)),
    "Beta": lambda: torch.distributions.Beta(2.0, 2.0).sample((2,)),
    "manual_seed": lambda: (torch.manual_seed(3), torch.randint(0, 1 << 40, (2,)))[1],
    "initial_seed": lambda: torch.tensor([torch.initial_seed()]),
}
OTHERS = {
    "random": lambda: torch.tensor([random.getrandbits(40), random.randrange(1 << 40)]),
    "random.gauss": lambda: torch.tensor([random.gauss(0, 1), random.random()]),
    "numpy": lambda: torch.from_numpy(np.random.randint(0, 1 << 40, 2)),
    "numpy, floats": lambda: torch.tensor([np.random.rand(), np.random.normal()]),
}
OWN = {
    "own random": random.Random(3),
    "own pcg64": np.random.default_rng(3),
    "own philox": np.random.Generator(np.random.Philox(3)),
    "own random_state": np.random.RandomState(3),
    "own torch": torch.Generator().manual_seed(3),
}


class Iterable(IterableDataset):
    """Draws at the beginning of its iterator and for each item."""

    def __iter__(self):
        first = TORCH["randint"]()
        for _ in range(3):
            yield torch.cat([first, TORCH["randint"](), OTHERS["random"]()])


def draw_from(generator):
    """What a transform draws from a generator of its own."""
    if isinstance(generator, torch.Generator):
        return torch.randint(0, 1 << 40, (1,), generator=generator)
    if isinstance(generator, random.Random):
        return torch.tensor([generator.getrandbits(40)])
    draw = getattr(generator, "integers", None) or generator.randint
    return torch.tensor([int(draw(0, 1 << 40, dtype=np.int64))])


def collate_and_draw(samples):
    """The samples, and what the batch's own stream gives."""
    return torch.cat([*samples, TORCH["randint"](), OTHERS["random"](), OTHERS["numpy"]()])


class EveryThird(torch.utils.data.DistributedSampler):
    """Rank 1 of 3, at epoch 2."""

    def __init__(self, dataset):
        super().__init__(dataset, num_replicas=3, rank=1, shuffle=False)
        self.set_epoch(2)


def drawn(dataset, num_workers, **options):
    """Two epochs of batches of two, as numbers."""
    loader = DataLoader(dataset, 2, num_workers=num_workers, isolation="thread", **options)
    return [batch.flatten().tolist() for _ in range(2) for batch in loader]


def loads(num_workers):
    """Everything that a loader with this many workers draws, by name."""
    found = {
        name: drawn(Drawing(draw, 4), num_workers, seed=4)
        for name, draw in (TORCH | OTHERS).items()
    }
    for name, generator in OWN.items():
        dataset = Drawing(partial(draw_from, generator), 4)
        found[name] = drawn(dataset, num_workers)
        found[f"{name}, seed=4"] = drawn(dataset, num_workers, seed=4)
    sampled = Drawing(TORCH["randint"], 4)
    found["collate_fn"] = drawn(sampled, num_workers, seed=4, collate_fn=collate_and_draw)
    found["rank 1 of 3"] = drawn(sampled, num_workers, seed=4, sampler=EveryThird(sampled))
    torch.manual_seed(9)
    found["without seed"] = drawn(sampled, num_workers)
    if num_workers < 2:  # with more, an iterable dataset gives everything several times
        found["iterable"] = drawn(Iterable(), num_workers, seed=4)
    return found


def seeds():
    """The seeds themselves, which nothing of torch's or numpy's decides."""
    key = StreamKey(epoch_seed(4, 2), start=10, num_replicas=3, rank=1)
    return {
        f"{purpose.name} {generator}": [key.seed(at, purpose, generator) for at in (0, 1, 1 << 40)]
        for purpose in Purpose
        for generator in range(3)
    }


def test_seeds_of_the_streams_are_those_of_before():
    """Bit by bit, on every machine."""
    assert seeds() == json.loads(KEPT.read_text())["seeds"]


@pytest.mark.parametrize(
    ("num_workers", "way"),
    [*((0, way) for way in ways_of_draws.WAYS), (1, "key"), (3, "key"), (3, "unseen")],
)
def test_draws_are_those_of_before(num_workers, way, monkeypatch):
    """Whole numbers exactly; others to 5 digits, for vectorised kernels differ among processors."""
    ways_of_draws.take(way, monkeypatch)
    kept = json.loads(KEPT.read_text())["draws"]
    found = loads(num_workers)
    assert set(found) == set(kept) - ({"iterable"} if num_workers > 1 else set())
    for name, batches in found.items():
        assert len(batches) == len(kept[name]), name
        for batch, before in zip(batches, kept[name], strict=True):
            assert batch == pytest.approx(before, rel=1e-5, abs=1e-6), name


if __name__ == "__main__":
    KEPT.write_text(json.dumps({"note": NOTE, "seeds": seeds(), "draws": loads(0)}) + "\n")
