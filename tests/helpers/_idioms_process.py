"""What belongs to a process: its globals, environment, settings and signals."""

import contextlib
import gc
import io
import multiprocessing
import os
import signal
import threading
import warnings

import torch
from _idioms import Idiom, N, Samples, decode, idiom, simple
from torch.utils.data import IterableDataset, get_worker_info

SHARD = (0, 1)
LOCAL = threading.local()


class Shards(IterableDataset):
    """Numbers of which a worker yields its share, found out in some way."""

    def __init__(self, find):
        self.find = find

    def __iter__(self):
        number, num_workers = self.find()
        for value in range(number, N, num_workers):
            yield decode(value)


def _set_global(worker):
    global SHARD
    SHARD = (worker, get_worker_info().num_workers)


@idiom
def shard_in_a_global(folder):
    """``worker_init_fn`` sets a global of the module."""
    dataset = Shards(lambda: SHARD)
    return Idiom(dataset=dataset, options={"worker_init_fn": _set_global})


def _set_environ(worker):
    os.environ["SPDL_TEST_SHARD"] = f"{worker} {get_worker_info().num_workers}"


@idiom
def shard_in_the_environment(folder):
    """``worker_init_fn`` sets a variable of the environment."""
    dataset = Shards(lambda: map(int, os.environ["SPDL_TEST_SHARD"].split()))
    return Idiom(dataset=dataset, options={"worker_init_fn": _set_environ})


def _identity():
    identity = multiprocessing.current_process()._identity
    return ((identity[-1] if identity else 0) % 4, 4)


@idiom
def shard_by_process_identity(folder):
    """The number that multiprocessing gives to its processes."""
    return Idiom(dataset=Shards(_identity), options={"num_workers": 4})


@idiom
def shard_in_thread_local(folder):
    """``worker_init_fn`` sets a thread-local variable: right, if it runs on the same thread."""

    def begin(worker):
        LOCAL.shard = (worker, get_worker_info().num_workers)

    dataset = Shards(lambda: LOCAL.shard)
    return Idiom(dataset=dataset, options={"worker_init_fn": begin})


@simple
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


@simple
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


@simple
class PrecisionOfSample(Samples):
    """The default type is changed for one step, and put back."""

    def value(self, index):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if index % 2 else torch.float32)
        decode(index)
        made = torch.zeros(1).dtype
        torch.set_default_dtype(before)
        return index if made is (torch.float64 if index % 2 else torch.float32) else -1


@simple
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


class Seen(Samples):
    """Returns whether settings have been made."""

    def __init__(self, names):
        self.names = names

    def value(self, index):
        return index if all(SETTINGS[name][1]() for name in self.names) else -1


def setting(*names):
    """Return an idiom whose ``worker_init_fn`` makes these settings."""

    def begin(worker):
        for name in names:
            SETTINGS[name][0]()

    return Idiom(dataset=Seen(names), options={"worker_init_fn": begin})


@idiom
def worker_sets_its_process(folder):
    """torch's settings, its folder, its environment, warnings and garbage collection."""
    return setting(*(name for name in SETTINGS if name != "signal_handlers"))


@idiom
def worker_sets_signal_handlers(folder):
    """Ctrl-C is the trainer's."""
    return setting("signal_handlers")
