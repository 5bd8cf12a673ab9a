"""The samples of one tar shard in WebDataset's layout."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from spdl_torch.errors import DecodeError
from spdl_torch.io._remote import is_url, stream_url
from spdl_torch.io._retry import RetryPolicy
from spdl_torch.io._tar import DEFAULT_MAX_BYTES, TarReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["numbered_samples", "read_samples"]

# Folder and basename up to its first dot, then the field. No match: no dot, or one in front.
_KEY_AND_FIELD = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__(/|$)")  # WebDataset keeps metadata under such names

_BUFFER_BYTES = 1 << 18  # a sample and the next header in one read of the disk
_HEADER_BYTES = 512


def read_samples(
    url: str | os.PathLike[str],
    *,
    retries: int = 3,
    max_sample_bytes: int = DEFAULT_MAX_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the samples of one tar shard. ``pipe(read_samples, concurrency=n)`` after a source of
    URLs reads ``n`` shards at once.

    Each sample is ``{"__key__": str, "__url__": str, "jpg": bytes, "cls": bytes, ...}``. Arguments,
    layout and errors are those of :class:`TarShards`.
    """
    policy = RetryPolicy(retries, 0.1, 5.0)
    name = os.fspath(url)
    for sample in numbered_samples(name, _every, policy, max_sample_bytes, storage_options):
        assert sample is not None, "every sample was wanted"
        yield sample


def numbered_samples(
    url: str,
    wanted: Callable[[int], bool],
    policy: RetryPolicy,
    max_bytes: int,
    storage_options: Mapping[str, Any] | None,
) -> Iterator[dict[str, Any] | None]:
    """Yield one entry for each sample, in order. If ``wanted(number)`` is false, the entry is None
    and the contents are not read.

    A lost connection is opened again, and samples that were already yielded are skipped.
    """
    num_done = num_failed = 0
    while True:
        try:
            with _open(url, storage_options) as file:
                reader = TarReader(file, url, max_member_bytes=max_bytes)
                num_before = num_done
                samples = _grouped(reader, url, partial(_wanted, wanted, num_before), max_bytes)
                for number, sample in enumerate(samples):
                    if number >= num_before:
                        num_done, num_failed = number + 1, 0
                        yield sample
                return
        except Exception as error:
            num_failed += 1
            wait = policy.wait_after(error, url, num_failed)
            if wait is None:
                raise
        time.sleep(wait)


def _grouped(
    reader: TarReader, url: str, wanted: Callable[[int], bool], max_bytes: int
) -> Iterator[dict[str, Any] | None]:
    sample: dict[str, Any] = {}
    last_key, number, size, keep = None, -1, 0, False
    while (member := reader.advance()) is not None:
        match = _KEY_AND_FIELD.fullmatch(member[0])
        if match is None or _META.match(member[0]):
            continue
        key, field = match[1], match[2].lower()
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


def _open(url: str, storage_options: Mapping[str, Any] | None) -> BinaryIO:
    if is_url(url):
        return stream_url(url, storage_options)
    return open(url, "rb", buffering=_BUFFER_BYTES)


def _every(number: int) -> bool:
    return True


def _wanted(wanted: Callable[[int], bool], num_before: int, number: int) -> bool:
    return number >= num_before and wanted(number)
