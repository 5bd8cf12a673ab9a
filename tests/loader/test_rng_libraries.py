"""Libraries of transforms that keep generators of their own: each sample draws its own numbers."""

import numpy as np
import pytest
import torch
from _datasets import Drawing
from _loader_helpers import library

from spdl_torch import DataLoader
from spdl_torch.loader.rng.owned import OwnedGenerators

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own, of many kinds


class Albumentations:
    """A crop, a flip and a change of brightness of one picture."""

    def __init__(self, seed):
        parts = library("albumentations")
        steps = parts.RandomResizedCrop(size=(8, 8)), parts.HorizontalFlip(p=0.5)
        steps += (parts.RandomBrightnessContrast(p=1.0),)
        self.compose = parts.Compose([*steps], seed=seed)
        shape = 32, 32, 3
        self.picture = np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)

    def __call__(self):
        picture = self.compose(image=self.picture)["image"]
        return torch.from_numpy(np.ascontiguousarray(picture)).double()


class Monai:
    """Noise, a flip and a turn of one volume."""

    def __init__(self, seed):
        parts = library("monai.transforms")
        steps = parts.RandGaussianNoise(prob=1.0), parts.RandFlip(0.5), parts.RandRotate90(0.5)
        self.compose = parts.Compose([*steps])
        self.compose.set_random_state(seed)
        self.volume = torch.arange(36.0).reshape(1, 6, 6)

    def __call__(self):
        return torch.as_tensor(self.compose(self.volume)).double().clone()


@pytest.mark.parametrize("isolation", ["thread", "auto"])
@pytest.mark.parametrize("transform", [Albumentations, Monai])
@pytest.mark.parametrize("own_seed", [3, None])
def test_every_sample_draws_its_own_numbers(transform, own_seed, isolation):
    """64 of 64, others in the next epoch, the same for 0 to 8 workers; by the library's own seed,
    or by the loader's where it has none.
    """
    expected = []
    for num_workers in (0, 1, 2, 8):
        dataset = Drawing(transform(own_seed), 64)
        assert OwnedGenerators(dataset)
        loader = DataLoader(
            *(dataset, 8),
            seed=5 if own_seed is None else None,
            num_workers=num_workers,
            isolation=isolation,
        )
        epochs = [torch.cat(list(loader)).reshape(64, -1) for _ in range(2)]
        expected = expected or epochs
        assert [len(torch.unique(epoch, dim=0)) for epoch in epochs] == [64, 64]
        assert not torch.equal(*epochs)
        assert all(map(torch.equal, epochs, expected))
