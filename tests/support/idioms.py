# ruff: noqa: SIM115  # handles that stay open are among what this file is about
"""Datasets as repositories write them for torch's worker processes.

An idiom is a function or a class that makes one in an empty folder, beside it the options that its
loader needs. The samples are known: mostly pairs of an index and a value that must be equal to it.
They keep handles and readers, objects that samples leave something in, and what belongs to a
process: globals, environment, settings, signals.
"""

import contextlib
import gc
import io
import mmap
import multiprocessing
import os
import random
import signal
import threading
import warnings
import zlib

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

N = 240  # samples

_PIXELS = bytes(100_000)


def decode(value):
    """Stand in for decoding a file: hold no GIL for some 30 µs."""
    zlib.crc32(_PIXELS)
    return value


def samples_of(batch):
    """Split a batch that torch collated into its samples, as plain numbers."""
    if isinstance(batch, torch.Tensor):
        rows = batch.tolist() if batch.ndim else [batch.item()]
        return [tuple(row) if isinstance(row, list) else row for row in rows]
    return list(zip(*map(samples_of, batch), strict=True))


class Samples(Dataset):
    """A map-style dataset of N samples; ``value(index)`` is to return ``index``. ``folder``: for a
    dataset that keeps files."""

    def __init__(self, folder=None):
        self.folder = folder

    def __len__(self):
        return N

    def __getitem__(self, index):
        return index, self.value(index)

    def value(self, index):
        return decode(index)


IDIOMS = {}


def idiom(make):
    """Register a function or a class, which is called with a folder of its own; it gives a dataset,
    or one and its loader's options."""
    IDIOMS[make.__name__] = make
    return make


def made(name, folder):
    """A dataset and options of its loader beside ``num_workers``."""
    found = IDIOMS[name](folder)
    return found if isinstance(found, tuple) else (found, {})


# -- handles and readers


def written(folder):
    """Write N records of 16 bytes and return the file's path."""
    path = folder / "records.bin"
    path.write_bytes(b"".join(b"%-16d" % number for number in range(N)))
    return path


def read(file, index):
    """Read one record in two steps, as ``seek`` makes everybody do."""
    file.seek(index * 16)
    return int(decode(file.read(16)))


@idiom
class LazilyOnSelf(Samples):
    """A file that is opened on the first sample, on self."""

    def __init__(self, folder):
        self.path, self.file = written(folder), None

    def value(self, index):
        self.file = self.file or open(self.path, "rb")
        return read(self.file, index)


@idiom
class OpenedInInit(Samples):
    """A small file that is opened in the beginning, for its header, and a memory map, which has a
    position of its own."""

    def __init__(self, folder):
        # It fits into the file's buffer, so that torch's workers do not read it again.
        self.file = open(written(folder), "rb")
        self.first = self.file.peek(16)
        self.map = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)

    def value(self, index):
        return index if read(self.file, index) == read(self.map, index) == index else -1


# -- objects in which one sample leaves what the next must not see


class ShiftOfBoth:
    """A step of a recipe, which draws for the image and repeats it for the mask."""

    def __call__(self, image, mask):
        self.by = random.randrange(1_000_000)
        return decode(image + self.by), mask + self.by


@idiom
class AugmentationInRecipe(Samples):
    """A list of steps, each with its state."""

    def __init__(self, folder):
        self.pipeline = [ShiftOfBoth(), ShiftOfBoth()]

    def value(self, index):
        image, mask = index, 0
        for step in self.pipeline:
            image, mask = step(image, mask)
        return image - mask


@idiom
class ClosureWithState(Samples):
    """A function that keeps something in the variables around it."""

    def __init__(self, folder):
        last = []

        def value(index):
            last.append(index)
            decode(index)
            return last.pop()

        self.value = value


class Padding:
    """Pads into a buffer that is kept, and returns a copy."""

    def __init__(self):
        self.buffer = np.zeros((16, 2), dtype=np.int64)

    def __call__(self, samples):
        self.buffer[:] = 0
        for row, sample in enumerate(samples):
            self.buffer[row] = decode(sample)
        return torch.tensor(self.buffer[: len(samples)])


@idiom
def collate_object_with_buffer(folder):
    """An object as ``collate_fn``."""
    return Samples(), {"collate_fn": Padding()}


@idiom
class ChangesItsTensor(Samples):
    """``x = self.data[i]; x += 1`` changes the dataset; of torch's workers only the worker's."""

    def __init__(self, folder):
        self.data = torch.arange(N).repeat(2, 1).T.contiguous()

    def __getitem__(self, index):
        row = decode(self.data[index])
        row += 1
        return row


@idiom
def sampler_that_sets_the_epoch(folder):
    """A sampler that tells the dataset of the epoch as it begins: workers have begun before."""

    class WithEpoch(Samples):
        epoch = 0

        def value(self, index):
            return self.epoch

    class Announcing:
        def __len__(self):
            return N

        def __iter__(self):
            dataset.epoch += 1
            yield from range(N)

    dataset = WithEpoch()
    return dataset, {"sampler": Announcing()}


# -- what belongs to a process


class Shards(IterableDataset):
    """Numbers of which a worker yields its share, found out in some way."""

    def __init__(self, find):
        self.find = find
        self.files = list(range(N // 4))

    def __iter__(self):
        number, num_workers = self.find(self)
        for file in decode(self.files[number::num_workers]):
            yield from (decode(4 * file + part) for part in range(4))


def share_of(worker):
    """The worker's number, and how many there are."""
    return worker, get_worker_info().num_workers


@idiom
def shuffled_then_divided(folder):
    """Every worker shuffles the list of files in the same way, and takes its share."""

    def shuffle(dataset):
        random.Random(0).shuffle(dataset.files)
        return share_of(get_worker_info().id)

    return Shards(shuffle)


LOCAL = threading.local()


@idiom
def shard_by_process_identity(folder):
    """The number that multiprocessing gives to its processes."""

    def find(_):
        identity = multiprocessing.current_process()._identity
        return (identity[-1] if identity else 0) % 4, 4

    return Shards(find), {"num_workers": 4}


@idiom
def shard_in_thread_local(folder):
    """``worker_init_fn`` sets a thread-local variable: right, if it runs on the same thread."""

    def begin(worker):
        LOCAL.shard = share_of(worker)

    return Shards(lambda _: LOCAL.shard), {"worker_init_fn": begin}


@idiom
class FolderOfSample(Samples):
    """Relative paths, in a folder that is changed to."""

    def __init__(self, folder):
        self.folders = [folder / str(number) for number in range(2)]
        for number, each in enumerate(self.folders):
            each.mkdir()
            (each / "x.txt").write_text(str(number))

    def value(self, index):
        os.chdir(self.folders[index % 2])
        with open("x.txt") as file:
            return index if decode(int(file.read())) == index % 2 else -1


@idiom
class OutputCaught(Samples):
    """A library that prints its result, or prints too much."""

    def value(self, index):
        caught = io.StringIO()
        with contextlib.redirect_stdout(caught):
            print(index)
            decode(index)
            print(index)
        lines = caught.getvalue().split()
        return index if lines == [str(index)] * 2 else -1


@idiom
class TimeLimit(Samples):
    """An alarm bounds the time of each sample."""

    def value(self, index):
        before = signal.signal(signal.SIGALRM, self.late)
        signal.setitimer(signal.ITIMER_REAL, 10)
        try:
            return decode(index)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def late(self, number, frame):
        raise TimeoutError


SETTINGS = {
    "default_dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.zeros(1).dtype is torch.float64,
    ),
    "deterministic_mode": (
        lambda: torch.set_deterministic_debug_mode("warn"),
        torch.are_deterministic_algorithms_enabled,
    ),
    "working_directory": (lambda: os.chdir("/"), lambda: os.getcwd() == "/"),
    "environment": (
        lambda: os.environ.__setitem__("OMP_NUM_THREADS", "1"),
        lambda: os.environ["OMP_NUM_THREADS"] == "1",
    ),
    "gc": (gc.disable, lambda: not gc.isenabled()),
    "warnings_filters": (
        lambda: warnings.simplefilter("ignore"),
        lambda: warnings.warn("ignored", stacklevel=1) is None,
    ),
    "signal_handlers": (
        lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        lambda: signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    ),
}
"""What a worker sets for its process, and whether that is so."""


def setting(*names):
    """A dataset and a ``worker_init_fn`` that makes these settings, which samples look for."""

    class Seen(Samples):
        def value(self, index):
            return index if all(SETTINGS[name][1]() for name in names) else -1

    def begin(worker):
        for name in names:
            SETTINGS[name][0]()

    return Seen(), {"worker_init_fn": begin}


@idiom
def worker_sets_its_process(folder):
    """torch's settings, its folder, environment, warnings, garbage collection and signals."""
    return setting(*SETTINGS)
