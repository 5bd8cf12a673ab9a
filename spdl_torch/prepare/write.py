"""Write one shard to disk: whole, by renaming, its index last.

    shard-000000.tar.partial        -> shard-000000.tar         1.
    shard-000000.index.json.partial -> shard-000000.index.json  2.

A shard whose index is there is done. A process that is killed at any moment leaves a ``.partial``
file, or a tar without an index; the next run writes both anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from typing import TYPE_CHECKING, Any

from spdl_torch.data.sources._tar_index import TarIndex, index_path, load_index, scan_tar
from spdl_torch.errors import DecodeError
from spdl_torch.whole_files import new_file

if TYPE_CHECKING:
    from .encode import Sample

_PARTIAL = ".partial"


class ShardWriter:
    """Writes the samples of one shard; ``finish()`` makes it whole, ``drop()`` removes it."""

    def __init__(self, folder: str, name: str) -> None:
        self._path = os.path.join(folder, name)
        self._left_out: list[list[str]] = []
        self._file = new_file(self._path + _PARTIAL, buffering=1 << 20)
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.GNU_FORMAT)

    def add(self, sample: Sample) -> None:
        """Append the members of a sample. Its key is its number."""
        for field, content in sample.members.items():
            info = tarfile.TarInfo(f"{sample.number:09d}.{field}")
            info.size = len(content)  # time, owner and group are 0: the same bytes every time
            self._tar.addfile(info, io.BytesIO(content))

    def leave_out(self, path: str, reason: str) -> None:
        """Note in the index why a file is not in the shard."""
        self._left_out.append([path, reason])

    def finish(self) -> int:
        """Write the end and the index, and give both their names; return the tar's size."""
        self._tar.close()
        _sync(self._file)
        self._file.close()
        os.replace(self._path + _PARTIAL, self._path)
        index = scan_tar(self._path)
        index.left_out.extend(self._left_out)
        write_whole(index_path(self._path), index.to_json())
        return index.num_bytes

    def drop(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):  # the disk is full: what is still in the buffer, too
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path + _PARTIAL)


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


def _sync(file: Any) -> None:
    # The system may crash after the rename: the name must not outlive the content.
    file.flush()
    os.fsync(file.fileno())
