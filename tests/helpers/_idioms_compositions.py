"""Datasets inside of others, ours around the user's, and functions inside of functions.

What is inside may be safe on threads, and say so: what is around it is somebody else's.
"""

import os

import numpy as np
import torch
from _idioms import PAIRS, Idiom, N, Samples, decode, idiom
from PIL import Image
from torch.utils.data import (
    Dataset,
)
from torchvision.transforms import v2

from spdl_torch import ImageFolder, PipelineDataset
from spdl_torch.data import cached, mix
from spdl_torch.pipeline import PipelineBuilder

NUMBERS = list(range(N))


class Safe(Samples):
    """Keeps nothing, and says so."""

    thread_safe = True

    def value(self, index):
        return index


class Keeps:
    """A transform that leaves its sample in an attribute, and reads it later."""

    def __call__(self, sample):
        self.last = sample
        decode(sample)
        return self.last


class Wrapper(Dataset):
    """A user's own, around any dataset."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.keeps = Keeps()

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.keeps(self.dataset[index])


# -- wrappers of what is safe ----------------------------------------------------------------


@idiom
def wrapper_that_delegates(folder):
    """``__getattr__`` hands through what the wrapper has not, ``thread_safe`` included."""

    class Delegating(Wrapper):
        def __getattr__(self, name):
            return getattr(self.__dict__["dataset"], name)

    return Idiom(dataset=Delegating(Safe()))


@idiom
def subclass_of_a_safe_dataset(folder):
    """The base class is a library's."""

    class Augmented(Safe):
        keeps = None

        def value(self, index):
            return self.keeps(index)

    dataset = Augmented()
    dataset.keeps = Keeps()
    return Idiom(dataset=dataset)


# -- ours around the user's ------------------------------------------------------------------


@idiom
def cached_with_a_transform_that_keeps(folder):
    """The samples are safe, the transform is not."""
    return Idiom(dataset=cached(Safe(), transform=Keeps()))


@idiom
def mixture_of_safe_and_other(folder):
    """Two map-style sources, of which one keeps state."""
    dataset = mix({"a": Safe(), "b": Wrapper(Safe())}, shuffle=False)
    return Idiom(dataset=dataset, options={"sampler": dataset.sampler(1, 0)}, epochs=[PAIRS * 2])


def pipeline(source, *ops):
    """Return a PipelineDataset that keeps the source's order in each part."""
    builder = PipelineBuilder().add_source(source)
    for op in ops:
        builder = builder.pipe(op)
    return PipelineDataset(builder.add_sink(4), num_replicas=1, rank=0, tail="uneven")


def pair(index):
    return index, decode(index)


@idiom
def pipeline_and_worker_init_fn(folder):
    """Each worker changes its process."""

    def begin(worker):
        os.environ["OMP_NUM_THREADS"] = "3"
        torch.set_default_dtype(torch.float64)

    return Idiom(dataset=pipeline(NUMBERS, pair), options={"worker_init_fn": begin})


@idiom
def pipeline_items_that_the_loop_changes(folder):
    """Without batches, the loop gets the source's own tensors."""
    rows = [torch.tensor([number, number]) for number in range(N)]
    return Idiom(
        dataset=pipeline(rows),
        options={"batch_size": None},
        epochs=[[number for pair in PAIRS for number in pair]] * 2,
        use=lambda sample: sample.zero_(),
    )


# -- images and their transforms -------------------------------------------------------------


def images(folder, transform, **options):
    """Return our ImageFolder of images that say which they are."""
    (folder / "a").mkdir(exist_ok=True)
    for number in range(0, N, 8):
        path = folder / "a" / f"{number:03}.bmp"
        Image.new("RGB", (2, 2), (number, number, number)).save(path)
    return ImageFolder(folder, transform, **options)


def number_in(image):
    """Return the number that an image shows."""
    return int(np.asarray(image).flat[0])


IMAGES = [(number, 0) for number in range(0, N, 8)]


@idiom
def hook_of_a_transform(folder):
    """torchvision's transforms are modules, and modules have hooks."""
    keeps, transform = Keeps(), v2.Identity()
    transform.register_forward_hook(lambda module, images, image: keeps(number_in(image)))
    return Idiom(dataset=images(folder, transform), epochs=[IMAGES])


# -- functions -------------------------------------------------------------------------------


# -- samplers --------------------------------------------------------------------------------


@idiom
def sampler_that_sets_the_epoch(folder):
    """A sampler that tells the dataset of the epoch as it begins: workers have begun before."""
    dataset = Samples()
    dataset.epoch = 0
    Dated = type("Dated", (Samples,), {"value": lambda self, index: decode(self.epoch)})
    dataset.__class__ = Dated

    class Announcing:
        epoch = 0

        def __len__(self):
            return N

        def __iter__(self):
            self.epoch += 1
            dataset.epoch = self.epoch
            yield from range(N)

    epochs = [[(number, epoch) for number in range(N)] for epoch in range(2)]
    return Idiom(dataset=dataset, options={"sampler": Announcing()}, epochs=epochs)
