"""The index beside a tar: where each sample and each file begins, its size, and its checksum.

    shard-000000.tar         the samples
    shard-000000.index.json  {"format": ..., "version": 1, "tar": "shard-000000.tar", ...,
                              "samples": {"key": [...], "offset": [...], ...},
                              "files": {"name": [...], "offset": [...], ...}}

Each column has a value for each sample, or for each file, in the order of the tar. A sample's bytes
begin with the header of its first file and end where the next sample begins.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field, fields
from operator import add
from typing import TYPE_CHECKING, Any

from spdl_torch.errors import DecodeError
from spdl_torch.io._remote import is_url, read_url
from spdl_torch.io._tar import TarReader

from ._samples import key_and_field

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORMAT = "spdl_torch tar index"
_VERSION = 1
_BLOCK = 512


@dataclass(kw_only=True, slots=True)
class SampleColumns:
    """A value for each sample."""

    key: list[str] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    """The byte of the tar with which the header of its first file begins."""
    size: list[int] = field(default_factory=list)
    """Bytes up to the next sample, headers included."""
    num_files: list[int] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class FileColumns:
    """A value for each file of a sample."""

    name: list[str] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    """The byte of the tar with which its content begins."""
    size: list[int] = field(default_factory=list)
    """Bytes of its content."""
    crc32: list[int] = field(default_factory=list)
    """The checksum of its content, as ``zlib.crc32`` computes it."""


@dataclass(kw_only=True, slots=True)
class TarIndex:
    """The index of one tar, built file by file."""

    tar: str
    """The tar's name, without its folder."""
    num_bytes: int = 0
    """The size of the tar."""
    samples: SampleColumns = field(default_factory=SampleColumns)
    files: FileColumns = field(default_factory=FileColumns)
    left_out: list[list[str]] = field(default_factory=list)
    """The files that should have been in this tar, each with the reason why it is not."""

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.samples.key)

    def add(self, name: str, start: int, offset: int, size: int, crc32: int) -> None:
        """Add the next file: its header begins at ``start``, its content at ``offset``.

        Names that belong to no sample are left out.
        """
        split = key_and_field(name)
        if split is None:
            return
        if not self.samples.key or self.samples.key[-1] != split[0]:
            self._end_sample(start)
            self.samples.key.append(split[0])
            self.samples.offset.append(start)
            self.samples.num_files.append(0)
        self.samples.num_files[-1] += 1
        self.files.name.append(name)
        self.files.offset.append(offset)
        self.files.size.append(size)
        self.files.crc32.append(crc32)

    def finish(self, end: int, num_bytes: int) -> None:
        """Record where the last file ends, and how large the tar is."""
        self._end_sample(end)
        self.num_bytes = num_bytes

    def to_json(self) -> bytes:
        """Return the content of the index file."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "num_samples": self.num_samples,
            "tar": self.tar,
            "num_bytes": self.num_bytes,
            "samples": _columns_of(self.samples),
            "files": _columns_of(self.files),
            "left_out": self.left_out,
        }
        return json.dumps(content).encode("ascii") + b"\n"

    @classmethod
    def from_json(cls, content: bytes, name: str) -> TarIndex:
        """Parse the content of an index file. Raises: DecodeError: it is damaged, or no index."""
        try:
            found = json.loads(content)
            if found.pop("format") != _FORMAT or found.pop("version") != _VERSION:
                raise ValueError(f"expected format {_FORMAT!r}, version {_VERSION}")
            num_samples = found.pop("num_samples")
            samples = SampleColumns(**found.pop("samples"))
            index = cls(samples=samples, files=FileColumns(**found.pop("files")), **found)
            index._check(num_samples)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DecodeError(
                f"{name}: not an index of a tar, or damaged: {type(error).__name__}: {error}. "
                "Delete it, and write it anew: python -m spdl_torch prepare --index FOLDER."
            ) from error
        return index

    def _end_sample(self, end: int) -> None:
        if self.samples.key:
            self.samples.size.append(end - self.samples.offset[-1])

    def _check(self, num_samples: int) -> None:
        columns = [*_columns_of(self.samples).values()]
        file_columns = [*_columns_of(self.files).values()]
        if {len(column) for column in columns} != {num_samples}:
            raise ValueError(f"the columns of the samples must have {num_samples} values each")
        if {len(column) for column in file_columns} != {sum(self.samples.num_files)}:
            raise ValueError("the columns of the files must have as many values as num_files says")
        for column in (*columns[1:], *file_columns[1:], [self.num_bytes]):
            if not set(map(type, column)) <= {int} or not _is_within(column, 1 << 63):
                raise ValueError("offsets, sizes and checksums must be whole numbers >= 0")
        if not _is_within(self.files.crc32, 1 << 32):
            raise ValueError("a checksum must have 32 bits")
        ends = map(add, self.samples.offset, self.samples.size)
        if max(ends, default=0) > self.num_bytes:
            raise ValueError("a sample must end within the tar")


def _columns_of(columns: SampleColumns | FileColumns) -> dict[str, list[Any]]:
    return {each.name: getattr(columns, each.name) for each in fields(columns)}


def _is_within(column: list[int], end: int) -> bool:
    return min(column, default=0) >= 0 and max(column, default=0) < end


def index_path(tar: str) -> str:
    """Return the path or URL of a tar's index."""
    return tar.removesuffix(".tar") + ".index.json"


def load_index(tar: str, storage_options: Mapping[str, Any] | None = None) -> TarIndex:
    """Read the index beside a tar. Raises: OSError: there is none; DecodeError: it is damaged."""
    path = index_path(tar)
    if is_url(path):
        return TarIndex.from_json(read_url(path, storage_options), path)
    with open(path, "rb") as file:
        return TarIndex.from_json(file.read(), path)


def scan_tar(path: str) -> TarIndex:
    """Read a tar from front to back and return its index.

    Raises: DecodeError: it is damaged; ValueError: it is compressed, or its files share headers, so
        that none can be read by itself; OSError: it cannot be read.
    """
    index = TarIndex(tar=os.path.basename(path))
    end = 0
    with open(path, "rb", buffering=1 << 20) as file:
        reader = TarReader(file, path)
        if reader.is_compressed:
            raise ValueError(
                f"{path}: the tar is compressed, so no sample can be read by itself. Decompress it."
            )
        while (member := reader.advance()) is not None:
            name, size = member
            offset = reader.offset
            index.add(name, end, offset, size, zlib.crc32(reader.content()))
            end = offset + size + -size % _BLOCK
        if reader.has_shared_headers:
            raise ValueError(
                f"{path}: a header of all files gives a name or a size, so no sample can be read "
                "by itself. Write the tar anew."
            )
        index.finish(end, os.fstat(file.fileno()).st_size)
    return index
