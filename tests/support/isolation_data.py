"""Datasets and functions for the worker process, which imports this module and not the tests."""

import faulthandler
import itertools
import os
import random
import subprocess
import sys
import threading

import numpy as np
import torch
import torch.library
from torch.utils.data import Dataset

from support.forks import end_at_once


class Coded(Exception):
    """Has arguments that are not text, and survives pickling."""

    def __init__(self, code, where):
        super().__init__(code, where)
        self.code = code


def image_of(index):
    """What every dataset here has at ``index``: large enough for shared memory."""
    return index + torch.rand(3, 80, 80)


class Images(Dataset):
    """Draws from all three generators."""

    def __init__(self, length=24):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        draws = torch.tensor([random.random(), np.random.rand()], dtype=torch.float64)
        return {"image": image_of(index), "index": index, "name": f"#{index}", "draws": draws}


class Noting(Dataset):
    """Notes in an open file of its worker's which samples it made, and its own end."""

    def __init__(self, folder):
        self.folder, self.file = folder, None

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(self.folder / str(os.getpid()), "a", encoding="utf-8")  # noqa: SIM115
        self.file.write(f"{index}\n")
        return index

    def __del__(self):
        if self.file is not None:
            self.file.write("end\n")


class Spawning(Dataset):
    """A sample is the pid of a program that was started and that of a process that was forked."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index:
            return index
        code = "import threading; print(flush=True); threading.Event().wait()"
        program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        program.stdout.readline()
        pid = os.fork()
        if pid == 0:
            threading.Event().wait()
        return program.pid, pid


class Crashing(Dataset):
    """Ends its process at sample 5."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 5:
            if isinstance(self.how, int):
                faulthandler.disable()  # pytest's would print all threads amid the tests' dots
                os.kill(os.getpid(), self.how)
                threading.Event().wait()  # the signal may be another thread's
            end_at_once(3)
        return index


class Unreadable:
    """Is pickled, and cannot be unpickled."""

    def __len__(self):
        return 4

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ValueError("this file is not mounted here")


def settings(_index):
    """The environment, the rank and the default dtype of the process."""
    distributed = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else os.environ.get("RANK")
    return os.environ.get("SPDL_TORCH_TEST"), rank and int(rank), torch.get_default_dtype()


class Holder(Dataset):
    """Has an attribute."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


class Counting(Dataset):
    """Counts its samples in a value, and writes into a tensor."""

    def __init__(self, counter, shared):
        self.counter, self.shared = counter, shared

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with self.counter.get_lock():
            self.counter.value += 1
        self.shared.fill_(1)
        return index


class Contents(Dataset):
    """Its only sample says which of its arrays and tensors are one object or have one memory."""

    def __init__(self, *parts):
        self.parts = parts

    def __len__(self):
        return 1

    def __getitem__(self, index):
        pairs = itertools.combinations(enumerate(self.parts), 2)
        return [[n, m] for (n, a), (m, b) in pairs if a is b or _memory_of(a) == _memory_of(b)]


def _memory_of(part):
    return part.untyped_storage().data_ptr() if isinstance(part, torch.Tensor) else id(part)
