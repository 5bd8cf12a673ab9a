"""Write one shard to disk: whole, by renaming, its index last; read shards back.

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

from ..named_tuples import NamedTuple
from .plan import planned_shards

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class Checked(NamedTuple):
    """One tar, read from front to back."""

    path: str
    num_samples: int
    problem: str | None
    """The fault that was found; None = none."""


def tars_in(path: str | os.PathLike[str]) -> list[str]:
    """Return a tar, or the tars in a folder, sorted, including those that its plan names and that
    are missing. Raises: ValueError: there is none.
    """
    name = os.fspath(path)
    if not os.path.isdir(name):
        if name.endswith(".tar") and os.path.isfile(name):
            return [name]
        raise ValueError(f"{name}: expected a folder of tars, or a file named *.tar.")
    found = {entry.name for entry in os.scandir(name) if entry.name.endswith(".tar")}
    found.update(planned_shards(name))
    if not found:
        raise ValueError(f"{name}: the folder has no file named *.tar.")
    return [os.path.join(name, tar) for tar in sorted(found)]


def check_tars(tars: list[str]) -> Iterator[Checked]:
    """Read each tar, and compare names, places, sizes and checksums with its index."""
    for tar in tars:
        try:
            index = load_index(tar)
            yield Checked(tar, index.num_samples, _difference(index, scan_tar(tar)))
        except FileNotFoundError as error:
            yield Checked(tar, 0, f"{error.filename} is missing")
        except (DecodeError, ValueError) as error:
            yield Checked(tar, 0, str(error))


def index_tars(tars: list[str]) -> Iterator[Checked]:
    """Write an index beside each tar that has none."""
    for tar in tars:
        if os.path.exists(index_path(tar)):
            yield Checked(tar, load_index(tar).num_samples, None)
            continue
        index = scan_tar(tar)
        write_whole(index_path(tar), index.to_json())
        yield Checked(tar, index.num_samples, None)


def _difference(index: TarIndex, found: TarIndex) -> str | None:
    """Return the first way in which a tar differs from what its index says."""
    there, expected = found.files, index.files
    for number, name in enumerate(expected.name):
        if there.name[number : number + 1] != [name]:
            return f"{name!r} is not where the index says"
        for column in ("offset", "size", "crc32"):
            value, other = getattr(expected, column)[number], getattr(there, column)[number]
            if value != other:
                return f"{name!r} is damaged: its {column} is {other}, the index says {value}"
    if len(there.name) > len(expected.name):
        return f"{there.name[len(expected.name)]!r} is not in the index"
    if (found.samples, found.num_bytes) != (index.samples, index.num_bytes):
        return "the samples are not where the index says"
    return None
