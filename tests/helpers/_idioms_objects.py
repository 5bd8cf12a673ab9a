"""Objects of a dataset in which one sample leaves what the next must not see."""

import random

import numpy as np
import torch
from _idioms import NUMBERS, Idiom, N, Samples, decode, idiom, simple
from _idioms_files import written
from torch.utils.data import IterableDataset, get_worker_info


class Files(IterableDataset):
    """A list of files that workers divide among themselves."""

    def __init__(self):
        self.files = list(range(N // 4))

    def __iter__(self):
        info = get_worker_info()
        for file in self.mine(info.id, info.num_workers):
            for part in range(4):
                yield decode(4 * file + part)


@idiom
def shuffled_then_divided(folder):
    """Every worker shuffles the list in the same way, and takes its share."""

    class Shuffled(Files):
        def mine(self, number, num_workers):
            random.Random(0).shuffle(self.files)
            return decode(self.files)[number::num_workers]

    return Idiom(dataset=Shuffled())


class Shift:
    """Draws once, and is applied to image and mask."""

    def draw(self):
        self.by = torch.randint(1_000_000, ()).item()

    def __call__(self, value):
        return decode(value) + self.by


@simple
class AugmentationDrawnOnce(Samples):
    """Image and mask get the same draw."""

    def __init__(self, folder):
        self.aug = Shift()

    def value(self, index):
        self.aug.draw()
        image, mask = self.aug(index), self.aug(0)
        return image - mask


class ShiftOfBoth:
    """A step of a recipe, which draws for the image and repeats it for the mask."""

    def __call__(self, results):
        self.by = random.randrange(1_000_000)
        results["image"] = decode(results["image"] + self.by)
        results["mask"] += self.by
        return results


@simple
class AugmentationInRecipe(Samples):
    """A list of steps, each with its state."""

    def __init__(self, folder):
        self.pipeline = [ShiftOfBoth(), ShiftOfBoth()]

    def value(self, index):
        results = {"image": index, "mask": 0}
        for step in self.pipeline:
            results = step(results)
        return results["image"] - results["mask"]


def reading_through(last):
    def load(index):
        last.append(index)
        decode(index)
        return last.pop()

    return load


@simple
class ClosureWithState(Samples):
    """A function that keeps something in the variables around it."""

    def __init__(self, folder):
        self.load = reading_through([])

    def value(self, index):
        return self.load(index)


@simple
class ScratchBuffer(Samples):
    """One numpy buffer into which every record is read."""

    def __init__(self, folder):
        self.path, self.buffer = written(folder), np.zeros(64, dtype=np.uint8)

    def value(self, index):
        with open(self.path, "rb") as file:
            file.seek(64 * index)
            file.readinto(self.buffer)
        return int(decode(self.buffer).tobytes())


@simple
class BufferOfClass(Samples):
    """A buffer that is an attribute of the class."""

    buffer = bytearray(8)

    def value(self, index):
        self.buffer[:] = b"%8d" % index
        return int(decode(self.buffer))


@simple
class DictAsCache(Samples):
    """A dict in which every sample stays."""

    def __init__(self, folder):
        self.cache = {}

    def value(self, index):
        if index not in self.cache:
            self.cache[index] = decode(index)
        return self.cache[index]


def _coroutine():
    answer = None
    while True:
        index = yield answer
        answer = decode(index)


@simple
class GeneratorKept(Samples):
    """A generator that is sent each index."""

    def __init__(self, folder):
        self.generator = _coroutine()
        next(self.generator)

    def value(self, index):
        return self.generator.send(index)


class Padding:
    """Pads into a buffer that is kept, and returns a copy."""

    def __init__(self):
        self.buffer = torch.zeros(16, 2, dtype=torch.int64)

    def __call__(self, samples):
        self.buffer.zero_()
        for row, sample in enumerate(samples):
            self.buffer[row] = torch.tensor(sample)
        return self.buffer[: len(samples)].clone()


class Safe(Samples):
    """Nothing is kept, and it says so."""

    thread_safe = True

    def value(self, index):
        return decode(index)


class Plain(Safe):
    """It does not say so."""

    thread_safe = None


@idiom
def collate_object_with_buffer(folder):
    """An object as ``collate_fn``."""
    return Idiom(dataset=Plain(), options={"collate_fn": Padding()})


class Tensors(Samples):
    """Rows of a tensor, as they are."""

    def __init__(self):
        self.data = torch.arange(N).repeat(2, 1).T.contiguous()

    def __getitem__(self, index):
        return decode(self.data[index])


@idiom
def sample_changes_its_tensor(folder):
    """``x = self.data[i]; x += 1`` changes the dataset; of torch's workers only the worker's."""

    class Changing(Tensors):
        def __getitem__(self, index):
            row = self.data[index]
            row += 1
            return row

    return Idiom(dataset=Changing())


class WithEpoch(Samples):
    """Samples of an epoch that is set."""

    epoch = 0

    def value(self, index):
        return decode(int(self.epoch))


@idiom
def sampler_that_sets_the_epoch(folder):
    """A sampler that tells the dataset of the epoch as it begins: workers have begun before."""
    dataset = WithEpoch()

    class Announcing:
        def __len__(self):
            return N

        def __iter__(self):
            dataset.epoch += 1
            yield from NUMBERS

    return Idiom(dataset=dataset, options={"sampler": Announcing()})


@simple
class SeededByIndex(Samples):
    """Each sample seeds the generators it draws from."""

    def value(self, index):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(index)
        decode(index)
        got = random.random(), np.random.rand(), torch.rand(()).item()
        generators = random.Random(index), np.random.RandomState(index)
        torchs = torch.rand((), generator=torch.Generator().manual_seed(index)).item()
        right = (*(g.random() for g in generators), torchs)
        return index if got == right else -1
