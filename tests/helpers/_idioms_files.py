# ruff: noqa: SIM115  # handles that stay open are what this file is about
"""Files, archives and databases that a dataset keeps open."""

import mmap
import os

import numpy as np
from _idioms import Idiom, N, Samples, decode, idiom, simple

SIZE = 64  # bytes of a record


def written(folder, size=SIZE):
    """Write N records and return the file's path."""
    path = folder / "records.bin"
    if not path.exists():
        path.write_bytes(b"".join(b"%-*d" % (size, number) for number in range(N)))
    return path


def read(file, index, size=SIZE):
    """Read one record in two steps, as ``seek`` makes everybody do."""
    file.seek(index * size)
    return int(file.read(size))


class Reader:
    """Opens its file when it is first asked."""

    def __init__(self, path):
        self.path, self.file = path, None

    def read(self, index):
        if self.file is None:
            self.file = open(self.path, "rb")
        return read(self.file, index)


class Lazy(Samples, Reader):
    """Opens the file on the first sample, on self."""

    def __init__(self, folder):
        Reader.__init__(self, written(folder))

    def value(self, index):
        return decode(self.read(index))


@idiom
def lazily_on_self(folder):
    """A file that is opened on the first sample, on self."""
    return Idiom(dataset=Lazy(folder))


@simple
class FileInInit(Samples):
    """A small file that is opened in the beginning, for its header."""

    def __init__(self, folder):
        # It fits into the file's buffer, so that torch's workers do not read it again.
        self.file = open(written(folder, 16), "rb")
        self.first = self.file.peek(16)

    def value(self, index):
        return decode(read(self.file, index, 16))


@simple
class LazilyInHelper(Samples):
    """A helper object opens the file."""

    def __init__(self, folder):
        self.reader = Reader(written(folder))

    def value(self, index):
        return decode(self.reader.read(index))


@simple
class MemoryMapInInit(Samples):
    """A memory map that is opened in the beginning, and has a position of its own."""

    def __init__(self, folder):
        with open(written(folder), "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def value(self, index):
        return decode(read(self.map, index))


@simple
class NumpyMemoryMap(Samples):
    """numpy's memory map has no position."""

    def __init__(self, folder):
        self.map = np.memmap(written(folder), mode="r", dtype=np.uint8).reshape(N, SIZE)

    def value(self, index):
        return decode(int(self.map[index].tobytes()))


@simple
class TemporaryFileByPid(Samples):
    """A library that takes only paths: a temporary file for each process."""

    def value(self, index):
        path = self.folder / f"{os.getpid()}.tmp"
        path.write_text(str(index))
        return decode(int(path.read_text()))
