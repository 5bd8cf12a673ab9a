"""Samples of shards by their positions, found in the shards' indexes."""

from __future__ import annotations

import io
import time
import zlib
from array import array
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from spdl_torch.errors import DecodeError
from spdl_torch.io._read import Reader
from spdl_torch.io._remote import is_url
from spdl_torch.io._tar import TarReader

from ._samples import every_sample, grouped_samples
from ._shard_files import open_part
from ._tar_index import TarIndex, index_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spdl_torch.io._retry import RetryPolicy

_END = bytes(1024)
_NUM_THREADS = 16  # that read the indexes of remote shards


class IndexedSamples:
    """All samples of shards, numbered consecutively, in the order of the shards.

    It takes 24 bytes a sample and 4 a file.

    Raises: OSError: an index cannot be read; DecodeError: it is damaged.
    """

    def __init__(
        self,
        urls: Sequence[str],
        storage_options: Mapping[str, Any],
        policy: RetryPolicy,
        max_bytes: int,
    ) -> None:
        self._urls = urls
        self._options = storage_options
        self._policy = policy
        self._max_bytes = max_bytes
        self.first_samples = [0]
        """The number of each shard's first sample, and that of all samples."""
        self._num_bytes: list[int] = []
        self._offsets, self._sizes = array("q"), array("q")
        self._first_files, self._crc32s = array("q", [0]), array("I")
        for index in _load_all(urls, storage_options):
            self._add(index)

    def __len__(self) -> int:
        return self.first_samples[-1]

    def sample(self, number: int) -> dict[str, Any]:
        """Read one sample. Errors as those of :meth:`samples`."""
        (sample,) = self.samples(number, number + 1)
        return sample

    def samples(self, first: int, end: int) -> Iterator[dict[str, Any]]:
        """Yield the samples ``first`` to ``end``, all of one shard, and read nothing else.

        A connection that is lost is opened again at the next sample.
        Raises: DecodeError: a sample is not what the index says; OSError: it cannot be read.
        """
        shard = self._shard_of(first)
        url, number, num_failed = self._urls[shard], first, 0
        while number < end:
            try:
                with self._open(shard, number, end) as file:
                    while number < end:
                        self._check_limit(number, url)
                        sample = self._sample(number, url, file.read(self._sizes[number]))
                        number, num_failed = number + 1, 0
                        yield sample
                return
            except Exception as error:
                num_failed += 1
                wait = self._policy.wait_after(error, url, num_failed)
                if wait is None:
                    raise
            time.sleep(wait)

    def _add(self, index: TarIndex) -> None:
        self.first_samples.append(self.first_samples[-1] + index.num_samples)
        self._num_bytes.append(index.num_bytes)
        self._offsets.extend(index.samples.offset)
        self._sizes.extend(index.samples.size)
        for num_files in index.samples.num_files:
            self._first_files.append(self._first_files[-1] + num_files)
        self._crc32s.extend(index.files.crc32)

    def _shard_of(self, number: int) -> int:
        return bisect_right(self.first_samples, number) - 1

    def _open(self, shard: int, number: int, end: int) -> Any:
        last = end - 1
        bounds = self._offsets[number], self._offsets[last] + self._sizes[last]
        return open_part(self._urls[shard], *bounds, self._num_bytes[shard], self._options)

    def _check_limit(self, number: int, url: str) -> None:
        if self._sizes[number] > self._max_bytes:
            inside = number - self.first_samples[self._shard_of(number)]
            raise DecodeError(
                f"{url}: sample {inside} has more than max_sample_bytes={self._max_bytes}."
            )

    def _sample(self, number: int, url: str, content: bytes) -> dict[str, Any]:
        """Return the sample in its bytes of the tar, once they are as the index says."""
        reader = TarReader(
            io.BytesIO(content + _END)
            if len(content) == self._sizes[number]
            else io.BytesIO(content),
            url,
            max_member_bytes=self._max_bytes,
            start=self._offsets[number],
        )
        samples = [*grouped_samples(reader, url, every_sample, self._max_bytes)]
        if len(samples) != 1 or samples[0] is None:
            raise self._damage(number, url, f"{len(samples)} samples are where one should be")
        sample = samples[0]
        fields = [*sample][2:]  # after the key and the URL
        expected = self._crc32s[self._first_files[number] : self._first_files[number + 1]]
        if len(fields) != len(expected):
            raise self._damage(number, url, f"it has {len(fields)} files, not {len(expected)}")
        for field, crc32 in zip(fields, expected, strict=True):
            if zlib.crc32(sample[field]) != crc32:
                name = f"{sample['__key__']}.{field}"
                raise self._damage(number, url, f"{name!r} has another checksum")
        return sample

    def _damage(self, number: int, url: str, what: str) -> DecodeError:
        inside = number - self.first_samples[self._shard_of(number)]
        return DecodeError(
            f"{url}: sample {inside}, at byte {self._offsets[number]}, is not as the index says: "
            f"{what}. The shard is damaged, or the index is another's: python -m spdl_torch "
            "prepare --verify FOLDER."
        )


def part_of(first: int, end: int, index: int, count: int) -> tuple[int, int]:
    """Return part ``index`` of ``count`` of a range: lengths differ by one at most, longer first.

    0..7 in 3 parts -> 0..3, 3..5, 5..7
    """
    length, rest = divmod(end - first, count)
    begin = first + index * length + min(index, rest)
    return begin, begin + length + (index < rest)


def _load_all(urls: Sequence[str], storage_options: Mapping[str, Any]) -> Iterator[TarIndex]:
    read = Reader(storage_options=storage_options)
    paths = [*map(index_path, urls)]
    if not any(map(is_url, urls)):
        yield from (TarIndex.from_json(read(path), path) for path in paths)
        return
    with ThreadPoolExecutor(_NUM_THREADS) as executor:
        yield from executor.map(lambda path: TarIndex.from_json(read(path), path), paths)
