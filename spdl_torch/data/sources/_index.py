"""The index beside a tar: where each sample and each file begins, its size, and its checksum; and
the samples of shards by their positions, which the indexes give.

    shard-000000.tar         the samples
    shard-000000.index.json  {"format": ..., "version": 1, "tar": "shard-000000.tar", ...,
                              "samples": {"key": [...], "offset": [...], ...},
                              "files": {"name": [...], "offset": [...], ...}}

Each column has a value for each sample, or for each file, in the order of the tar. A sample's bytes
begin with the header of its first file and end where the next sample begins.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, BinaryIO, TypeAlias, TypeVar

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler
from spdl_torch.io._remote import Reader, is_url
from spdl_torch.io._tar import TarReader

from ._shard import ShardFiles, grouped_samples, key_and_field

T = TypeVar("T")

_FORMAT = "spdl_torch tar index"
_VERSION = 1
_BLOCK = 512
_END = bytes(1024)
_NUM_THREADS = 16  # that read the indexes or footers of remote files


_SAMPLE_COLUMNS = ("key", "offset", "size", "num_files")
"""The columns of samples: ``offset`` is the byte of the tar with which the header of its first file
begins, ``size`` the number of bytes up to the next sample, headers included."""

FILE_COLUMNS = ("name", "offset", "size", "crc32")
"""The columns of files: ``offset`` is the byte of the tar with which its content begins, ``size``
and ``crc32`` those of its content."""

Columns: TypeAlias = dict[str, list[Any]]


@dataclass(kw_only=True, slots=True)
class TarIndex:
    """The index of one tar, built file by file."""

    tar: str
    """The tar's name, without its folder."""
    num_bytes: int = 0
    """The size of the tar."""
    samples: Columns = field(default_factory=lambda: {name: [] for name in _SAMPLE_COLUMNS})
    files: Columns = field(default_factory=lambda: {name: [] for name in FILE_COLUMNS})
    left_out: list[list[str]] = field(default_factory=list)
    """The files that should have been in this tar, each with the reason why it is not."""

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.samples["key"])

    def add(self, name: str, start: int, offset: int, size: int, crc32: int) -> None:
        """Add the next file: its header begins at ``start``, its content at ``offset``.

        Names that belong to no sample are left out.
        """
        split = key_and_field(name)
        if split is None:
            return
        if self.samples["key"][-1:] != [split[0]]:
            self._end_sample(start)
            _append(self.samples, split[0], start, None, 0)
        self.samples["num_files"][-1] += 1
        _append(self.files, name, offset, size, crc32)

    def finish(self, end: int, num_bytes: int) -> None:
        """Record where the last file ends, and how large the tar is."""
        self._end_sample(end)
        self.num_bytes = num_bytes

    def to_json(self) -> bytes:
        """Return the content of the index file."""
        head = {"format": _FORMAT, "version": _VERSION, "num_samples": self.num_samples}
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(head | fields).encode("ascii") + b"\n"

    @classmethod
    def from_json(cls, content: bytes, name: str) -> TarIndex:
        """Parse the content of an index file. Raises: DecodeError: it is damaged, or no index."""
        try:
            found = json.loads(content)
            if found.pop("format") != _FORMAT or found.pop("version") != _VERSION:
                raise ValueError(f"expected format {_FORMAT!r}, version {_VERSION}")
            num_samples = found.pop("num_samples")
            index = cls(**found)
            index._check(num_samples)
        except unless_of_handler(Exception) as error:
            raise DecodeError(
                f"{name}: not an index of a tar, or damaged: {type(error).__name__}: {error}. "
                "Delete it, and write it anew: python -m spdl_torch prepare --index FOLDER."
            ) from error
        return index

    def _end_sample(self, end: int) -> None:
        if self.samples["key"]:
            self.samples["size"][-1] = end - self.samples["offset"][-1]

    def _check(self, num_samples: int) -> None:
        if _lengths(self.samples) != dict.fromkeys(_SAMPLE_COLUMNS, num_samples):
            raise ValueError(f"the columns of the samples must have {num_samples} values each")
        if _lengths(self.files) != dict.fromkeys(FILE_COLUMNS, sum(self.samples["num_files"])):
            raise ValueError("the columns of the files must have as many values as num_files says")


def _append(columns: Columns, *values: Any) -> None:
    for column, value in zip(columns.values(), values, strict=True):
        column.append(value)


def _lengths(columns: Columns) -> dict[str, int]:
    return {name: len(column) for name, column in columns.items()}


def index_path(tar: str) -> str:
    """Return the path or URL of a tar's index."""
    return tar.removesuffix(".tar") + ".index.json"


def load_index(tar: str, read: Reader | None = None) -> TarIndex:
    """Read the index beside a tar. Raises: OSError: there is none; DecodeError: it is damaged."""
    path = index_path(tar)
    return TarIndex.from_json((read or Reader(retries=0))(path), path)


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


class IndexedSamples:
    """All samples of shards, numbered consecutively, in the order of the shards.

    It takes 24 bytes a sample and 4 a file.

    Raises: OSError: an index cannot be read; DecodeError: it is damaged.
    """

    def __init__(self, urls: Sequence[str], files: ShardFiles, max_bytes: int) -> None:
        self._urls = urls
        self._files = files
        self._max_bytes = max_bytes
        self.first_samples = [0]
        """The number of each shard's first sample, and that of all samples."""
        self._num_bytes: list[int] = []
        self._offsets, self._sizes = array("q"), array("q")
        self._first_files, self._crc32s = array("q", [0]), array("I")
        load = partial(load_index, read=Reader(storage_options=files.storage_options))
        for index in read_each(load, urls):
            self.first_samples.append(self.first_samples[-1] + index.num_samples)
            self._num_bytes.append(index.num_bytes)
            self._offsets.extend(index.samples["offset"])
            self._sizes.extend(index.samples["size"])
            nums_files = accumulate(index.samples["num_files"], initial=self._first_files.pop())
            self._first_files.extend(nums_files)
            self._crc32s.extend(index.files["crc32"])

    def __len__(self) -> int:
        return self.first_samples[-1]

    def sample(self, number: int) -> dict[str, Any]:
        """Read one sample. Errors as those of :meth:`samples`."""
        (sample,) = self.samples(number, number + 1)
        return sample

    def samples(self, first: int, end: int) -> Iterator[dict[str, Any]]:
        """Yield the samples ``first`` to ``end``, all of one shard, and read nothing else.

        Raises: DecodeError: a sample is not what the index says; OSError: it cannot be read.
        """
        shard, last = self._shard_of(first), end - 1
        url, num_bytes = self._urls[shard], self._num_bytes[shard]
        bounds = self._offsets[first], self._offsets[last] + self._sizes[last]
        with self._files.open_part(url, *bounds, num_bytes) as file:
            for number in range(first, end):
                yield self._sample(number, url, file)

    def _shard_of(self, number: int) -> int:
        return bisect_right(self.first_samples, number) - 1

    def _sample(self, number: int, url: str, shard: BinaryIO) -> dict[str, Any]:
        """Return the sample in the next bytes of the tar, once they are as the index says."""
        if self._sizes[number] > self._max_bytes:
            inside = number - self.first_samples[self._shard_of(number)]
            raise DecodeError(
                f"{url}: sample {inside} has more than max_sample_bytes={self._max_bytes}."
            )
        content = shard.read(self._sizes[number])
        file = io.BytesIO(content + (_END if len(content) == self._sizes[number] else b""))
        start = self._offsets[number]
        name = self._files.named(url)
        reader = TarReader(file, name, max_member_bytes=self._max_bytes, start=start)
        samples = [*grouped_samples(reader, url, self._max_bytes)]
        if len(samples) != 1 or samples[0] is None:
            raise self._damage(number, url, f"{len(samples)} samples are where one should be")
        sample = samples[0]
        names = [*sample][2:]  # after the key and the URL
        expected = self._crc32s[self._first_files[number] : self._first_files[number + 1]]
        if len(names) != len(expected):
            raise self._damage(number, url, f"it has {len(names)} files, not {len(expected)}")
        for each, crc32 in zip(names, expected, strict=True):
            if zlib.crc32(sample[each]) != crc32:
                name = f"{sample['__key__']}.{each}"
                raise self._damage(number, url, f"{name!r} has another checksum")
        return sample

    def _damage(self, number: int, url: str, what: str) -> DecodeError:
        inside = number - self.first_samples[self._shard_of(number)]
        return DecodeError(
            f"{self._files.named(url)}: sample {inside}, at byte {self._offsets[number]}, is not "
            f"as the index says: {what}. The shard is damaged, or the index is another's: python "
            "-m spdl_torch prepare --verify FOLDER."
        )


def pieces(
    first_items: Sequence[int], order: Iterable[int], first: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """Yield what of each group lies between places ``first`` and ``end``, with the groups in this
    order: the group's number, and the bounds in it.

    first_items: the number of each group's first item, and that of all items.
    """
    place = 0  # of the group's first item, in that order
    for number in order:
        length = first_items[number + 1] - first_items[number]
        low, high = max(first - place, 0), min(end - place, length)
        place += length
        if low < high:
            yield number, low, high


def read_each(read: Callable[[str], T], urls: Sequence[str]) -> list[T]:
    """Return what ``read`` returns for each file, on several threads if one is behind a URL."""
    if not any(map(is_url, urls)):
        return [*map(read, urls)]
    with ThreadPoolExecutor(_NUM_THREADS) as executor:
        return [*executor.map(read, urls)]
