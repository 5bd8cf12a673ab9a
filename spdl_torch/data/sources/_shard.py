"""One shard: its file, whole and in part, its copy on a local disk, and the samples in it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

from spdl_torch.errors import DecodeError
from spdl_torch.io._cache.folders import (
    HAS_LOCKS,
    NO_ROOM,
    file_stamp,
    hash_of,
    is_at,
    locked,
    open_in,
    open_own_folder,
)
from spdl_torch.io._remote import is_url, read_url_range
from spdl_torch.io._resuming import open_resuming
from spdl_torch.io._retry import RETRIES, RetryPolicy
from spdl_torch.io._tar import DEFAULT_MAX_BYTES, MissingEndError, TarReader

from ._ahead import fetched_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_logger = logging.getLogger("spdl_torch.data")

_BUFFER_BYTES = 1 << 18  # a sample and the next header in one read of the disk
_RANGE_BYTES = 1 << 24  # read in one request; of more, a few megabytes at a time

# Folder and basename up to its first dot, then the field. No match: no dot, or one in front.
_KEY_AND_FIELD = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__(/|$)")  # WebDataset keeps metadata under such names

_HEADER_BYTES = 512


@dataclass(frozen=True)
class ShardFiles:
    """Opens shards: from where they are or, with ``cache``, from copies in that folder.

    A copy is downloaded under the name ``x.part``, which whoever needs it meanwhile waits for, and
    then gets its own name: what has that is whole. While copies are larger than ``max_bytes``, the
    one that was opened longest ago is removed.
    """

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    max_bytes: int | None = None
    ahead: int = 0

    @classmethod
    def of(
        cls,
        who: str,
        retries: int,
        storage_options: Mapping[str, Any],
        cache: str | os.PathLike[str] | None,
        max_bytes: int | None,
        ahead: int,
    ) -> ShardFiles:
        """Return what opens the shards of a source named ``who``. Raises: ValueError."""
        if max_bytes is not None and (cache is None or max_bytes < 1):
            raise ValueError(
                f"{who}: max_bytes must be >= 1 and needs cache=FOLDER, got {max_bytes!r}."
            )
        if ahead < 0:
            raise ValueError(f"{who}: ahead must be >= 0, got {ahead!r}.")
        kept = None if cache is None else os.path.abspath(os.fspath(cache))
        return cls(RetryPolicy(retries), storage_options, kept, max_bytes, ahead)

    def each(self, urls: Sequence[str]) -> Iterator[str]:
        """Yield the shards that are read one after the other, while the next ones are fetched."""
        if self.cache is None or not self.ahead:
            return iter(urls)
        return fetched_ahead(urls, self._fetch, self.ahead)

    def _fetch(self, url: str) -> None:
        if (copy := self._copy(url, self.policy)) is not None:
            copy.close()

    def open(self, url: str, *, seekable: bool = False) -> BinaryIO:
        """Open a shard to be read from front to back, or anywhere. Raises: OSError."""
        return self._copy(url, self.policy) or open_resuming(
            url, self.policy, self.storage_options, seekable=seekable
        )

    def open_part(self, url: str, first: int, end: int, num_bytes: int) -> BinaryIO:
        """Open a shard of a known size to be read from byte ``first`` to ``end``.

        Raises: OSError; DecodeError: a local file, or a copy, has another size.
        """
        file = self._copy(url, None)  # whoever reads parts repeats what fails
        if file is None and not is_url(url):
            file = open(url, "rb", min(_BUFFER_BYTES, end - first))  # noqa: SIM115 - the caller's
        if file is not None:
            size = file.seek(0, os.SEEK_END)
            if size != num_bytes:
                file.close()
                raise DecodeError(
                    f"{url}: the tar has {size} bytes, and its index is of one with {num_bytes}. "
                    "Delete the index, and write it anew: python -m spdl_torch prepare --index "
                    "FOLDER."
                )
        elif end - first <= _RANGE_BYTES:
            return io.BytesIO(read_url_range(url, first, end, self.storage_options))
        else:
            file = open_resuming(url, None, self.storage_options, seekable=True)
        file.seek(first)
        return file

    def _copy(self, url: str, policy: RetryPolicy | None) -> BinaryIO | None:
        """Open the copy of a shard; None: there are to be none, or its disk is full."""
        if self.cache is None or not HAS_LOCKS:
            return None
        options = sorted((name, repr(value)) for name, value in self.storage_options.items())
        key = hash_of("shard", url, repr(options)) if is_url(url) else file_stamp(url)
        name = f"{key:016x}.tar"
        try:
            folder = open_own_folder(os.path.join(self.cache, "shards"))
            while True:
                with contextlib.suppress(FileNotFoundError):
                    file = open_in(folder, name, 0)
                    os.utime(file)
                    return open(os.dup(file), "rb", _BUFFER_BYTES)
                self._download(url, folder, name, policy)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            _logger.warning("%s: not kept in %s: %s", url, self.cache, error.strerror)
            return None

    def _download(self, url: str, folder: int, name: str, policy: RetryPolicy | None) -> None:
        """Make a copy, or wait until another thread or process has made or left it."""
        unfinished = f"{name}.part"
        part = open_in(folder, unfinished)
        with locked(part):
            # Another may have given it the shard's name meanwhile, and it may be gone since.
            if not is_at(unfinished, part, folder) or os.access(name, os.F_OK, dir_fd=folder):
                return
            try:
                with (
                    open_resuming(url, policy, self.storage_options) as source,
                    open(part, "wb", closefd=False) as copy,
                ):
                    copy.truncate()  # what a killed process has left
                    shutil.copyfileobj(source, copy, 1 << 20)
                self._make_room(folder, os.fstat(part).st_size)
                os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.ftruncate(part, 0)  # nobody else has it: it has not got the name yet
                raise

    def _make_room(self, folder: int, size: int) -> None:
        if self.max_bytes is None:
            return
        copies: dict[str, os.stat_result] = {}
        for name in os.listdir(folder):
            if name.endswith(".tar"):
                with contextlib.suppress(FileNotFoundError):  # others make room, too
                    copies[name] = os.stat(name, dir_fd=folder)
        for name in sorted(copies, key=lambda name: copies[name].st_mtime_ns):
            if size + sum(there.st_size for there in copies.values()) <= self.max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            del copies[name]


def read_samples(
    url: str | os.PathLike[str],
    *,
    retries: int = RETRIES,
    max_sample_bytes: int = DEFAULT_MAX_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of one tar shard. ``pipe(read_samples, concurrency=n)`` after a source of
    URLs reads ``n`` shards at once.

    Each sample is ``{"__key__": str, "__url__": str, "jpg": bytes, "cls": bytes, ...}``. Arguments,
    layout and errors are those of :class:`TarShards`.
    """
    files = ShardFiles(RetryPolicy(retries), storage_options or {})
    for sample in numbered_samples(os.fspath(url), every_sample, files, max_sample_bytes):
        assert sample is not None, "every sample was wanted"
        yield sample


def numbered_samples(
    url: str, wanted: Callable[[int], bool], files: ShardFiles, max_bytes: int
) -> Iterator[dict[str, Any] | None]:
    """Yield one entry for each sample, in order. If ``wanted(number)`` is false, the entry is None
    and the contents are not read.

    A lost connection is opened again, and reading goes on where it was.
    """
    with files.open(url) as file:
        reader = TarReader(file, url, max_member_bytes=max_bytes)
        yield from grouped_samples(reader, url, wanted, max_bytes)


def key_and_field(name: str) -> tuple[str, str] | None:
    """Return the key and the field of a file's name; None = it belongs to no sample."""
    match = _KEY_AND_FIELD.fullmatch(name)
    if match is None or _META.match(name):
        return None
    return match[1], match[2].lower()


def grouped_samples(
    reader: TarReader, url: str, wanted: Callable[[int], bool], max_bytes: int
) -> Iterator[dict[str, Any] | None]:
    """Yield the samples of a tar, or None in place of those that are not wanted.

    Raises: DecodeError: the tar is damaged, or a sample beyond the limit; where only the end is
        missing, after the last sample.
    """
    sample: dict[str, Any] = {}
    last_key, number, size, keep = None, -1, 0, False
    while True:
        try:
            member = reader.advance()
        except MissingEndError:
            if number >= 0:
                yield sample if keep else None
            raise
        if member is None:
            break
        split = key_and_field(member[0])
        if split is None:
            continue
        key, field = split
        if key != last_key:
            if number >= 0:
                yield sample if keep else None
            last_key, number, size = key, number + 1, 0
            sample, keep = {"__key__": key, "__url__": url}, wanted(number)
        # Check unwanted samples too: all parts that share a shard must see it end at one sample.
        size += _HEADER_BYTES + member[1]
        if size > max_bytes:
            raise DecodeError(f"{url}: sample {key!r} has more than max_sample_bytes={max_bytes}.")
        if field in sample:
            raise DecodeError(f"{url}: sample {key!r} has more than one {field!r}.")
        sample[field] = reader.content() if keep else None
    if number >= 0:
        yield sample if keep else None


def every_sample(number: int) -> bool:
    """Return True: every sample is wanted."""
    return True
