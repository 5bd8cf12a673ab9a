"""The samples of one tar shard in WebDataset's layout."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from spdl_torch.errors import DecodeError
from spdl_torch.io._resuming import open_resuming
from spdl_torch.io._retry import RETRIES, RetryPolicy
from spdl_torch.io._tar import DEFAULT_MAX_BYTES, MissingEndError, TarReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# Folder and basename up to its first dot, then the field. No match: no dot, or one in front.
_KEY_AND_FIELD = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__(/|$)")  # WebDataset keeps metadata under such names

_HEADER_BYTES = 512


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
    policy = RetryPolicy(retries)
    name = os.fspath(url)
    options = storage_options or {}
    for sample in numbered_samples(name, every_sample, policy, max_sample_bytes, options):
        assert sample is not None, "every sample was wanted"
        yield sample


def numbered_samples(
    url: str,
    wanted: Callable[[int], bool],
    policy: RetryPolicy,
    max_bytes: int,
    storage_options: Mapping[str, Any],
) -> Iterator[dict[str, Any] | None]:
    """Yield one entry for each sample, in order. If ``wanted(number)`` is false, the entry is None
    and the contents are not read.

    A lost connection is opened again, and reading goes on where it was.
    """
    with open_resuming(url, policy, storage_options) as file:
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
