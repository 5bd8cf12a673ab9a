# ruff: noqa: SIM115  # handles that stay open are what this file is about
"""Files, archives and databases that a dataset keeps open."""

import linecache
import mmap
import os
import sqlite3
import tarfile

import numpy as np
import pytest
from _idioms import PAIRS, Idiom, N, Samples, decode, idiom, simple

HANDLE = None
HANDLES = {}


def reset():
    """Forget what an earlier run opened."""
    global HANDLE
    HANDLE = None
    HANDLES.clear()
    linecache.clearcache()


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


class Lazy(Samples):
    """Open the file on the first sample, on self."""

    def __init__(self, folder):
        self.path, self.file = written(folder), None

    def value(self, index):
        if self.file is None:
            self.file = open(self.path, "rb")
        return decode(read(self.file, index))


@idiom
def lazily_on_self(folder):
    """A file that is opened on the first sample, on self."""
    return Idiom(dataset=Lazy(folder))


@idiom
def lazily_by_worker_init_fn(folder):
    """torch's documentation sets attributes of ``worker_info.dataset``."""
    dataset = Lazy(folder)

    def open_file(worker):
        from torch.utils.data import get_worker_info

        get_worker_info().dataset.file = open(dataset.path, "rb")

    return Idiom(dataset=dataset, options={"worker_init_fn": open_file})


@simple
class FileInInit(Samples):
    """A small file that is opened in the beginning, for its header."""

    def __init__(self, folder):
        # It fits into the file's buffer, so that torch's workers do not read it again.
        self.file = open(written(folder, 16), "rb")
        self.first = self.file.peek(16)

    def value(self, index):
        return decode(read(self.file, index, 16))


class Reader:
    """Opens its file when it is first asked."""

    def __init__(self, path):
        self.path, self.file = path, None

    def read(self, index):
        if self.file is None:
            self.file = open(self.path, "rb")
        return read(self.file, index)


@simple
class LazilyInHelper(Samples):
    """A helper object opens the file."""

    def __init__(self, folder):
        self.reader = Reader(written(folder))

    def value(self, index):
        return decode(self.reader.read(index))


@simple
class ModuleGlobalFile(Samples):
    """The file is opened into a global of the module."""

    def __init__(self, folder):
        self.path = written(folder)

    def value(self, index):
        global HANDLE
        if HANDLE is None:
            HANDLE = open(self.path, "rb")
        return decode(read(HANDLE, index))


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


def tarred(folder):
    """Write N members of a tar file."""
    path = folder / "records.tar"
    written(folder)
    with tarfile.open(path, "w") as tar, open(folder / "records.bin", "rb") as records:
        for number in range(N):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = SIZE
            tar.addfile(member, records)
    return path


@idiom
def tar_in_init(folder):
    """A tar file that is open before the workers start: torch's share its position."""

    class TarInInit(Samples):
        def __init__(self):
            self.tar = tarfile.open(tarred(folder))
            self.members = self.tar.getmembers()

        def value(self, index):
            return sum(self.tar.extractfile(self.members[index]).read())

    values = [(number, sum(b"%-*d" % (SIZE, number))) for number in range(N)]
    return Idiom(dataset=TarInInit(), epochs=[values], shares_file=True)


@simple
class Hdf5Lazily(Samples):
    """h5py, opened on the first sample."""

    def __init__(self, folder):
        h5py = pytest.importorskip("h5py")
        self.path, self.file = folder / "records.h5", None
        with h5py.File(self.path, "w") as file:
            file["x"] = np.arange(N)

    def value(self, index):
        import h5py

        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return decode(int(self.file["x"][index]))


class Database:
    """A connection and one cursor, made when first needed."""

    def __init__(self, path):
        self.path, self.cursor = path, None

    def find(self, index):
        if self.cursor is None:
            self.cursor = sqlite3.connect(self.path, check_same_thread=False).cursor()
        self.cursor.execute("select value from samples where id = ?", (index,))
        return self.cursor.fetchone()[0]


def database(folder):
    path = folder / "records.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table samples (id integer primary key, value integer)")
        connection.executemany("insert into samples values (?, ?)", PAIRS)
    connection.close()
    return path


@idiom
def sqlite_cursor(folder):
    """A helper's cursor: one for all threads ends the process with a segmentation fault."""

    class OneCursor(Samples):
        def __init__(self):
            self.database = Database(database(folder))

        def value(self, index):
            return decode(self.database.find(index))

    return Idiom(dataset=OneCursor())


@simple
class TemporaryFileByPid(Samples):
    """A library that takes only paths: a temporary file for each process."""

    def __init__(self, folder):
        self.folder = folder

    def value(self, index):
        path = self.folder / f"{os.getpid()}.tmp"
        path.write_text(str(index))
        return decode(int(path.read_text()))
