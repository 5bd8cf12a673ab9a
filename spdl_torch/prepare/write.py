"""Write one shard to disk: whole, by renaming, its index last.

    shard-000000.tar.partial        -> shard-000000.tar         1.
    shard-000000.index.json.partial -> shard-000000.index.json  2.

A shard whose index is there is done. A process that is killed at any moment leaves a ``.partial``
file, or a tar without an index; the next run writes both anew.
"""

from __future__ import annotations

import os
import tarfile
from typing import TYPE_CHECKING, Any

from spdl_torch.data.sources._tar_index import TarIndex, index_path, load_index
from spdl_torch.errors import DecodeError
from spdl_torch.whole_files import new_file

if TYPE_CHECKING:
    from .encode import Sample

_BLOCK = 512
_PARTIAL = ".partial"


class ShardWriter:
    """Writes the samples of one shard; ``finish()`` makes it whole, ``drop()`` removes it."""

    def __init__(self, folder: str, name: str) -> None:
        self._path = os.path.join(folder, name)
        self._index = TarIndex(tar=name)
        self._offset = 0
        self._file = new_file(self._path + _PARTIAL, buffering=1 << 20)

    def add(self, sample: Sample) -> None:
        """Append the members of a sample. Its key is its number."""
        for member in sample.members:
            self._add_file(f"{sample.number:09d}.{member.field}", member.content, member.crc32)

    def leave_out(self, path: str, reason: str) -> None:
        """Note in the index why a file is not in the shard."""
        self._index.left_out.append([path, reason])

    def finish(self) -> int:
        """Write the end and the index, and give both their names; return the tar's size."""
        end = self._offset
        # Two empty blocks, then as many more as tar and tarfile write.
        self._file.write(bytes(2 * _BLOCK + -(end + 2 * _BLOCK) % tarfile.RECORDSIZE))
        num_bytes = self._file.tell()
        _sync(self._file)
        self._file.close()
        os.replace(self._path + _PARTIAL, self._path)
        self._index.finish(end, num_bytes)
        write_whole(index_path(self._path), self._index.to_json())
        return num_bytes

    def drop(self) -> None:
        """Remove what was written."""
        try:
            self._file.close()
        except OSError:  # the disk is full: what is still in the buffer has no room either
            pass
        remove_partial(self._path)

    def _add_file(self, name: str, content: bytes, crc32: int) -> None:
        info = tarfile.TarInfo(name)  # time, owner and group are 0: the same bytes every time
        info.size = len(content)
        header = info.tobuf(tarfile.GNU_FORMAT)
        start, offset = self._offset, self._offset + len(header)
        self._file.write(header)
        self._file.write(content)
        self._file.write(bytes(-len(content) % _BLOCK))
        self._index.add(name, start, offset, len(content), crc32)
        self._offset = offset + len(content) + -len(content) % _BLOCK


def write_whole(path: str, content: bytes) -> None:
    """Write a file so that it is never seen incomplete."""
    with new_file(path + _PARTIAL) as file:
        file.write(content)
        _sync(file)
    os.replace(path + _PARTIAL, path)


def done_index(folder: str, name: str) -> TarIndex | None:
    """Return the index of a shard that is already there, whole; None = it is to be written."""
    path = os.path.join(folder, name)
    try:
        index = load_index(path)
        return index if index.num_bytes == os.path.getsize(path) else None
    except (FileNotFoundError, DecodeError):
        return None


def remove_partial(path: str) -> None:
    """Remove what an interrupted run has left of a file, if anything."""
    try:
        os.remove(path + _PARTIAL)
    except FileNotFoundError:
        pass


def _sync(file: Any) -> None:
    # The system may crash after the rename: the name must not outlive the content.
    file.flush()
    os.fsync(file.fileno())
