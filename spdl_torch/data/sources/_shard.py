"""One shard: its file, whole and in part, and the samples in it."""

from __future__ import annotations

import io
import logging
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Self, cast

from spdl_torch.checks import check_bytes, whole
from spdl_torch.errors import DecodeError, SourceChangedError
from spdl_torch.io._cache.folders import HAS_LOCKS, file_stamp, hash_of
from spdl_torch.io._remote import RetryPolicy, is_url, read_url_range
from spdl_torch.io._resuming import Version, open_resuming, version_of
from spdl_torch.io._tar import MissingEndError, TarReader

from ...engine.channel import Channel, ChannelClosed, EndOfChannel
from ...engine.threads import ThreadGroup
from ._base import names_in
from ._copies import BUFFER_BYTES, ShardCopies
from ._stream import StreamSource

_logger = logging.getLogger("spdl_torch.data")

_RANGE_BYTES = 1 << 24  # read in one request; of more, a few megabytes at a time

# Folder and basename up to its first dot, then the field. No match: no dot, or one in front.
_KEY_AND_FIELD = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__(/|$)")  # WebDataset keeps metadata under such names

_HEADER_BYTES = 512


@dataclass(frozen=True)
class ShardFiles:
    """Opens shards: from where they are or from their copies, if ``copies`` are kept."""

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    copies: ShardCopies | None = None
    ahead: int = 0
    versions: dict[str, Version] = field(default_factory=dict)
    """Those that the shards of URLs had at first: these are read."""

    def each(self, urls: Sequence[str]) -> Iterator[str]:
        """Yield the shards that are read one after the other; from each one on, threads fetch the
        ``ahead`` that come next, if copies are kept. What fails is left to whoever reads the shard.
        """
        if self.copies is None or not self.ahead:
            yield from urls
            return
        todo = Channel[str](max(1, len(urls)))
        threads = ThreadGroup(todo.close)
        try:
            # With one for the shard that the reader waits for.
            if (num_threads := min(self.ahead + 1, len(urls) - 1)) > 0:
                threads.spawn_all([("shards", partial(self._fetch_all, todo))] * num_threads)
            for each in urls[1 : self.ahead]:
                todo.put(each)
            for place, url in enumerate(urls, self.ahead):
                for each in urls[place : place + 1]:
                    todo.put(each)
                yield url
        except BaseException:
            todo.close()
            raise
        todo.finish()  # those with the last names may read them yet

    def _fetch_all(self, todo: Channel[str]) -> None:
        with suppress(ChannelClosed, EndOfChannel):
            while True:
                url = str(todo.get())
                with suppress(Exception):
                    # It may stop as soon as the iteration has ended.
                    if (copy := self._copy(url, lambda: todo.closed)) is not None:
                        copy.close()

    def named(self, url: str) -> str:
        """Return the name of a shard in errors of its content: that of its copy, if it has one."""
        return url if self.copies is None else f"{url} (copied to {self.copies.folder})"

    def open(self, url: str, *, seekable: bool = False) -> BinaryIO:
        """Open a shard to be read from front to back, or anywhere. Raises: OSError."""
        return self._copy(url) or open_resuming(
            url, self.policy, self.storage_options, seekable=seekable
        )

    def open_part(self, url: str, first: int, end: int, num_bytes: int) -> BinaryIO:
        """Open a shard of a known size to be read from byte ``first`` to ``end``.

        Raises: OSError; DecodeError: a local file, or a copy, has another size.
        """
        file: Any = self._copy(url)
        if file is None and is_url(url) and end - first <= _RANGE_BYTES:
            part = partial(read_url_range, url, first, end, self.storage_options)
            return io.BytesIO(self.policy.repeat(part, url))
        if file is None and not is_url(url) and end - first <= BUFFER_BYTES:
            file = self.policy.repeat(partial(open, url, "rb", 0), url)
        file = file or open_resuming(url, self.policy, self.storage_options, seekable=True)
        size = file.seek(0, os.SEEK_END)
        if size < num_bytes or (size > num_bytes and (self.copies is not None or not is_url(url))):
            file.close()
            raise DecodeError(
                f"{self.named(url)}: the tar has {size} bytes, and its index is of one with "
                f"{num_bytes}. Delete the index, and write it anew: python -m spdl_torch "
                "prepare --index FOLDER."
            )
        file.seek(first)
        return cast("BinaryIO", file)

    def _copy(self, url: str, may_stop: Callable[[], bool] | None = None) -> BinaryIO | None:
        """Open the copy of a shard; None: there are to be none, or its disk is full. ``may_stop``:
        of a shard that is fetched ahead, says whether nobody wants it any more."""
        if self.copies is None:
            return None
        options = repr(sorted(self.storage_options.items()))
        key = hash_of("shard", url, options) if is_url(url) else file_stamp(url)
        if is_url(url) and url not in self.versions:
            self.versions[url] = version_of(url, self.policy, self.storage_options)
        version = self.versions[url] if is_url(url) else {"size": f"{os.path.getsize(url)}"}
        name = f"{key:016x}-{hash_of(repr(sorted(version.items()))):016x}.tar"
        download = partial(open_resuming, url, self.policy, self.storage_options, version=version)
        return self.copies.open(url, name, int(version.get("size", 0)), download, may_stop)


def shard_files(
    who: str,
    storage_options: Mapping[str, Any],
    retries: int,
    cache: str | os.PathLike[str] | None,
    max_bytes: float | None,
    ahead: int,
) -> ShardFiles:
    """Return what opens the shards of a source. Raises: ValueError: options of its cache."""
    check_bytes(who, max_bytes)
    if max_bytes is not None and cache is None:
        raise ValueError(f"{who}: max_bytes={max_bytes!r} is for copies. Pass cache=FOLDER, too.")
    ahead = whole(who, "ahead", ahead, 0)
    if cache in ("memory", "") or (cache is not None and is_url(os.fspath(cache))):
        raise ValueError(
            f"{who}: cache must be a folder on a local disk for whole shards, in /dev/shm to have "
            f"them in memory, got {cache!r}."
        )
    copies = None
    if cache is not None and HAS_LOCKS:
        copies = ShardCopies(os.path.abspath(os.fspath(cache)), max_bytes)
    retries = whole(who, "retries", retries, 0)
    return ShardFiles(RetryPolicy(retries), storage_options, copies, ahead)


class KeptFile(str):
    """The URL of a file of which a copy is kept on a local disk. What of spdl_torch reads a URL
    reads the copy, downloaded if it is not there."""

    __slots__ = ("_files",)
    _files: ShardFiles

    def __new__(cls, url: str, files: ShardFiles) -> Self:
        """Return the URL, to be opened by these."""
        made = super().__new__(cls, url)
        made._files = files
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self._files)

    def open(self) -> BinaryIO:
        """Open the copy, which stays readable whatever else takes its room. Raises: OSError."""
        return self._files.open(str(self), seekable=True)


class ShardSource(StreamSource[dict[str, Any]]):
    """The base of the sources that read shards: their names, the options that all of them take, and
    what their copies count."""

    _files: ShardFiles
    _WHAT = "shard"
    """The word for one, in errors."""

    def __init__(
        self,
        names: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        storage_options: Mapping[str, Any] | None,
        *others: Any,
    ) -> None:
        who = type(self).__name__
        self.storage_options = dict(storage_options or {})
        """As given."""
        self.urls = tuple(url for name in names_in(names) for url in self._found(name))
        """The names of all in the order given, regardless of parts and shuffling."""
        if not self.urls:
            raise ValueError(f"{who}: expected at least one {self._WHAT}, got none.")
        self._files = shard_files(who, self.storage_options, *others)
        self._copies = frozenset(filter(None, [self._files.copies]))

    @abstractmethod
    def _found(self, pattern: str) -> list[str]:
        """Return the names that one that was given means."""


def numbered_samples(
    url: str, wanted: Callable[[int], bool] | None, files: ShardFiles, max_bytes: int
) -> Iterator[dict[str, Any] | None]:
    """Yield one entry for each sample, in order. If ``wanted(number)`` is false, the entry is None
    and the contents are not read.

    A lost connection is opened again, and reading goes on where it was.
    """
    stamp = 0 if is_url(url) else file_stamp(url)
    with files.open(url) as file:
        reader = TarReader(file, files.named(url), max_member_bytes=max_bytes)
        yield from grouped_samples(reader, url, max_bytes, wanted)
    check_unchanged(url, files, stamp)


def check_unchanged(name: str, files: ShardFiles, stamp: int) -> None:
    """Raises: SourceChangedError: a local file was written to since it had that stamp. (Of a URL,
    who reads it notices; a copy never changes; a file that is removed is read as it was.)"""
    if files.copies is None and not is_url(name):
        with suppress(FileNotFoundError):
            if file_stamp(name) != stamp:
                raise changed(name)


def changed(name: str) -> SourceChangedError:
    """Return the error of a file that is another."""
    return SourceChangedError(
        f"{name}: changed since it was opened or its footer was read. Make the source again, and "
        "write new content under a new name."
    )


def key_and_field(name: str) -> tuple[str, str] | None:
    """Return the key and the field of a file's name; None = it belongs to no sample."""
    match = _KEY_AND_FIELD.fullmatch(name)
    if match is None or _META.match(name):
        return None
    return match[1], match[2].lower()


def grouped_samples(
    reader: TarReader, url: str, max_bytes: int, wanted: Callable[[int], bool] | None = None
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
            sample, keep = {"__key__": key, "__url__": url}, wanted is None or wanted(number)
        # Check unwanted samples too: all parts that share a shard must see it end at one sample.
        size += _HEADER_BYTES + member[1]
        if size > max_bytes:
            raise DecodeError(f"{url}: sample {key!r} has more than max_sample_bytes={max_bytes}.")
        if field in sample:
            raise DecodeError(f"{url}: sample {key!r} has more than one {field!r}.")
        sample[field] = reader.content() if keep else None
    if number >= 0:
        yield sample if keep else None
