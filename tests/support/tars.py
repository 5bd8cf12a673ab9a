"""Tar archives and shards, and files that come as over a connection."""

import io
import tarfile
from pathlib import Path

from spdl_torch.data.sources._index import index_path, scan_tar

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar_of(files, kind="pax"):
    """An archive of (name, content); a string is the type of a member that has no content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=FORMATS[kind]) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content.encode(), "elsewhere"
                tar.addfile(info)
    return buffer.getvalue()


def shard_of(first, size, fields=("jpg", "cls")):
    """A shard whose samples are numbered."""
    return tar_of(
        (f"{n:06d}.{field}", f"{field} {n}".encode() * 99)
        for n in range(first, first + size)
        for field in fields
    )


def write_shard(path, content):
    """A shard and its index, which is returned."""
    Path(path).write_bytes(content)
    index = scan_tar(str(path)).to_json()
    Path(index_path(str(path))).write_bytes(index)
    return index


SIZES = (7, 0, 3, 7, 1)
"""The numbers of samples in the shards of a folder; these are numbered through."""


def write_shards(root):
    """Write them, each with an index; return the folder."""
    for number, size in enumerate(SIZES):
        write_shard(root / f"{number}.tar", shard_of(sum(SIZES[:number]), size))
    return root


class Pipe(io.RawIOBase):
    """A file that cannot seek and gives a few bytes at a time, as sockets do."""

    def __init__(self, content):
        self._file = io.BytesIO(content)

    def readable(self):
        return True

    def readinto(self, buffer):
        return self._file.readinto(memoryview(buffer)[:700])


def keys(samples):
    return [sample["__key__"] for sample in samples]
