"""Datasets inside of others, ours around the user's, and functions inside of functions.

What is inside may be safe on threads, and say so: what is around it is somebody else's.
"""

import contextvars
import functools
import logging
import os
import random
import types
from collections import OrderedDict

import numpy as np
import torch
from _idioms import PAIRS, Idiom, N, Samples, decode, idiom, listed
from _idioms_files import Reader, written
from _idioms_objects import Padding, Resize, ShiftOfBoth
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

from spdl_torch import ImageFolder, PipelineDataset
from spdl_torch.data import bucket, cached, mix
from spdl_torch.pipeline import PipelineBuilder

NUMBERS = list(range(N))
STEP = contextvars.ContextVar("STEP", default=None)
CACHE = {}


def reset():
    """Forget what an earlier run kept."""
    CACHE.clear()
    Registry.last.clear()


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
def wrapper_of_a_safe_dataset(folder):
    """What is inside says that it is safe."""
    return Idiom(dataset=Wrapper(Safe()))


@idiom
def wrapper_of_a_wrapper_in_a_subset(folder):
    """The same further inside."""
    return Idiom(dataset=Subset(Wrapper(Subset(Safe(), NUMBERS)), NUMBERS[::-1]))


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


@idiom
def subclass_of_subset(folder):
    """As wrappers that apply a transform are often written."""

    class Transformed(Subset):
        keeps = Keeps()

        def __getitem__(self, index):
            return self.keeps(super().__getitem__(index))

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    return Idiom(dataset=Transformed(Safe(), NUMBERS))


@idiom
def dataset_as_a_property(folder):
    """``dataset`` is computed, and safe; the samples come from a file."""

    class Computed(Samples):
        def __init__(self, path):
            self.reader = Reader(path)

        @property
        def dataset(self):
            return Safe()

        def value(self, index):
            return self.reader.read(index)

    return Idiom(dataset=Computed(written(folder)))


@idiom
def concatenation_of_safe_and_other(folder):
    """One of two is safe."""
    return Idiom(dataset=ConcatDataset([Safe(), Wrapper(Safe())]), epochs=[PAIRS * 2])


@idiom
def stack_of_safe_and_other(folder):
    """Images and masks, from two datasets."""

    class Masks(Samples):
        keeps = Keeps()

        def __getitem__(self, index):
            return self.keeps(index)

    return Idiom(
        dataset=StackDataset(TensorDataset(torch.arange(N)), Masks()),
        epochs=[[((n,), n) for n in range(N)]],
    )


@idiom
def subset_of_lazy_indices(folder):
    """The indices are a user's sequence, which reads them from a file."""

    class FromFile:
        def __init__(self, path):
            self.reader = Reader(path)

        def __len__(self):
            return N

        def __getitem__(self, index):
            return self.reader.read(index)

    return Idiom(dataset=Subset(Safe(), FromFile(written(folder))))


@idiom
def one_dictionary_for_object_and_wrapper(folder):
    """A wrapper that takes the place of the dataset, attributes and all."""

    class Patched(Safe):
        def value(self, index):
            self.helper.last = index
            decode(index)
            return self.helper.last

    dataset = Safe()
    dataset.helper = types.SimpleNamespace()
    dataset.__class__ = Patched
    return Idiom(dataset=dataset)


# -- ours around the user's ------------------------------------------------------------------


@idiom
def cached_with_a_transform_that_keeps(folder):
    """The samples are safe, the transform is not."""
    return Idiom(dataset=cached(Safe(), transform=Keeps()))


@idiom
def cached_around_a_wrapper(folder):
    """Each worker has the user's dataset to itself; the cache is everybody's."""
    return Idiom(dataset=cached(Wrapper(Safe())), epochs=[PAIRS] * 2)


@idiom
def buckets_with_a_collate_object(folder):
    """The groups' batches go through one buffer."""
    grouped = bucket(Safe(), 8, size_of=[1] * N, collate_fn=Padding())
    options = {"sampler": grouped.sampler(1, 0), "batch_size": None}
    return Idiom(dataset=grouped, options=options)


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
def pipeline_and_a_collate_object(folder):
    """The pipeline's items are batched by the loader, through one buffer."""
    return Idiom(dataset=pipeline(NUMBERS, pair), options={"collate_fn": Padding()})


@idiom
def pipelines_mixed_and_a_collate_object(folder):
    """Two pipelines in one."""
    both = mix({"a": pipeline(NUMBERS, pair), "b": pipeline(NUMBERS, pair)}, stop="first")
    return Idiom(dataset=both, options={"collate_fn": Padding()}, epochs=[PAIRS * 2])


@idiom
def pipeline_and_worker_init_fn(folder):
    """Each worker changes its process."""

    def begin(worker):
        os.environ["OMP_NUM_THREADS"] = "3"
        torch.set_default_dtype(torch.float64)

    return Idiom(dataset=pipeline(NUMBERS, pair), options={"worker_init_fn": begin})


@idiom
def pipeline_op_that_keeps(folder):
    """One thread calls the op, in each worker's pipeline."""
    return Idiom(dataset=pipeline(PAIRS, Keeps()))


@idiom
def pipeline_source_that_keeps(folder):
    """A source that notes where it is."""

    class Cursor:
        def __iter__(self):
            for self.position in range(N):
                yield decode(self.position), self.position

    return Idiom(dataset=pipeline(Cursor()))


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
def sequential_that_keeps(folder):
    """A subclass of ``nn.Sequential`` with a ``forward`` of its own."""

    class Noting(torch.nn.Sequential):
        def forward(self, image):
            self.last = number_in(image)
            decode(image)
            return self.last

    return Idiom(dataset=images(folder, Noting()), epochs=[IMAGES])


@idiom
def compose_with_a_buffer_inside(folder):
    """A recipe in which one step has a buffer."""

    class IntoBuffer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.buffer = np.zeros(1, np.int64)

        def forward(self, image):
            self.buffer[0] = number_in(image)
            decode(image)
            return int(self.buffer[0])

    recipe = torch.nn.Sequential(v2.Compose([v2.Identity(), IntoBuffer()]))
    return Idiom(dataset=images(folder, recipe), epochs=[IMAGES])


@idiom
def hook_of_a_transform(folder):
    """torchvision's transforms are modules, and modules have hooks."""
    keeps, transform = Keeps(), v2.Identity()
    transform.register_forward_hook(lambda module, images, image: keeps(number_in(image)))
    return Idiom(dataset=images(folder, transform), epochs=[IMAGES])


@idiom
def loader_under_lru_cache(folder):
    """torchvision's loader in a cache, and a step that paints into the image it gets."""

    def painted(image):
        number = number_in(image)
        image.putpixel((0, 0), (number + 1,) * 3)
        return number

    cache = functools.lru_cache(maxsize=None)(pil_loader)
    dataset = images(folder, painted, loader=cache)
    return Idiom(dataset=dataset, epochs=[IMAGES] * 2)


@idiom
def target_transform_that_counts(folder):
    """Labels are numbered in the order in which they come, in each worker from the beginning."""

    class Numbers(OrderedDict):
        def __call__(self, label):
            self["last"] = label
            decode(label)
            return self.pop("last")

    dataset = images(folder, number_in, target_transform=Numbers())
    return Idiom(dataset=dataset, epochs=[IMAGES])


# -- functions -------------------------------------------------------------------------------


def collated_into(buffer, samples):
    for row, sample in enumerate(samples):
        buffer[row] = torch.tensor(sample)
    decode(samples)
    return buffer[: len(samples)].clone()


@idiom
def partial_with_a_buffer(folder):
    """``functools.partial`` of a function and the buffer that it fills."""
    buffer = torch.zeros(16, 2, dtype=torch.int64)
    options = {"collate_fn": functools.partial(collated_into, buffer)}
    return Idiom(dataset=PAIRS, options=options)


@idiom
def bound_method_of_a_helper(folder):
    """A method whose object keeps the lengths of the last batch."""

    class Collator:
        def collate(self, samples):
            self.samples = samples
            decode(samples)
            return torch.tensor(self.samples)

    return Idiom(dataset=PAIRS, options={"collate_fn": Collator().collate})


@idiom
def collate_with_a_cache_in_a_global(folder):
    """The padded batch of each length is kept in a global."""

    def collate(samples):
        CACHE["batch"] = torch.tensor(samples)
        decode(samples)
        return CACHE["batch"]

    return Idiom(
        dataset=TensorDataset(torch.arange(N), torch.arange(N)), options={"collate_fn": collate}
    )


@idiom
def lists_that_load_when_asked(folder):
    """A subclass of list that reads its entries when they are looked up."""

    class Lazily(list):
        def __init__(self, path):
            super().__init__(range(N))
            self.reader = Reader(path)

        def __getitem__(self, index):
            return index, self.reader.read(index)

    return Idiom(dataset=Lazily(written(folder)))


# -- what else a sample may leave behind -----------------------------------------------------


class Registry:
    """A cache that belongs to the class."""

    last = {}  # noqa: RUF012

    @classmethod
    def through(cls, index):
        cls.last["index"] = index
        decode(index)
        return cls.last["index"]


@idiom
def cache_of_a_class_in_a_subset(folder):
    """What a class method keeps, inside of a Subset."""

    class ByRegistry(Samples):
        def value(self, index):
            return Registry.through(index)

    return Idiom(dataset=Subset(ByRegistry(), NUMBERS))


@idiom
def context_variable_of_a_sample(folder):
    """Set for the sample, and read by what is called."""

    class InContext(Samples):
        def value(self, index):
            token = STEP.set(index)
            decode(index)
            found = STEP.get()
            STEP.reset(token)
            return found

    return Idiom(dataset=InContext())


@idiom
def log_records_of_a_sample(folder):
    """A handler that is added for a sample collects what a library logs."""

    class Collects(logging.Handler):
        def __init__(self):
            super().__init__()
            self.found = []

        def emit(self, record):
            self.found.append(record.getMessage())

    logger = logging.getLogger("spdl_test.library")
    logger.propagate = False
    logger.setLevel(logging.INFO)

    class Logged(Samples):
        def value(self, index):
            handler = Collects()
            logger.addHandler(handler)
            decode(index)
            logger.info("%d", index)
            decode(index)
            logger.removeHandler(handler)
            return index if handler.found == [str(index)] else -1

    return Idiom(dataset=Logged())


@idiom
def numpy_seeded_by_a_sample(folder):
    """``np.random.seed`` once, then draws in steps."""

    class Seeded(Samples):
        def value(self, index):
            np.random.seed(index)
            random.seed(index)
            first = np.random.rand()
            decode(index)
            state = np.random.RandomState(index)
            found = first, np.random.rand()
            return index if found == (state.rand(), state.rand()) else -1

    return Idiom(dataset=Seeded())


@idiom
def state_under_slots(folder):
    """A helper without ``__dict__``, in a dict of recipes."""

    class Recipe:
        __slots__ = ("mask", "steps")

        def __init__(self):
            self.steps = [ShiftOfBoth()]

        def __call__(self, index):
            results = {"image": index, "mask": 0}
            for step in self.steps:
                results = step(results)
            self.mask = results["mask"]
            decode(index)
            return results["image"] - self.mask

    class BySlots(Samples):
        def __init__(self):
            self.recipes = {"train": Recipe()}

        def value(self, index):
            return self.recipes["train"](index)

    return Idiom(dataset=BySlots())


@idiom
def samples_in_turn_of_an_iterable(folder):
    """An iterable that wraps a safe one, and sizes its boxes with a transform that keeps."""

    class Boxes(IterableDataset):
        def __init__(self, dataset):
            self.dataset, self.resize = dataset, Resize()

        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            for index in range(info.id, len(self.dataset), info.num_workers):
                yield self.resize({"index": self.dataset[index][1]})["boxes"]

    return Idiom(dataset=Boxes(Safe()), epochs=[NUMBERS])


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


@idiom
def batch_sampler_with_state(folder):
    """Batches of like lengths, from buckets that are filled and emptied."""

    class Buckets(BatchSampler):
        def __init__(self):
            super().__init__(range(N), 8, False)
            self.buckets = {k: [] for k in range(3)}

        def __iter__(self):
            for index in self.sampler:
                bucket = self.buckets[index % 3]
                bucket.append(index)
                if len(bucket) == 8:
                    yield list(bucket)
                    bucket.clear()

    options = {"batch_sampler": Buckets(), "batch_size": 1}
    return Idiom(dataset=Wrapper(Safe()), options=options)


@idiom
def list_of_tensors_that_the_loop_collects(folder):
    """Tensors in a list, handed out as they are, and changed by the loop."""
    rows = [torch.tensor([number, number]) for number in range(N)]
    return Idiom(
        dataset=rows,
        options={"collate_fn": lambda samples: samples},
        epochs=[PAIRS] * 2,
        samples=listed,
        use=lambda batch: [row.zero_() for row in batch],
    )
