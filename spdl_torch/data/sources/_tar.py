"""Tar shards in WebDataset's layout, shuffled and sharded."""

from __future__ import annotations

import glob
import logging
import math
import os
import re
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from spdl_torch.errors import DecodeError
from spdl_torch.io._remote import is_url
from spdl_torch.io._retry import RetryPolicy
from spdl_torch.io._tar import DEFAULT_MAX_BYTES

from ._base import check_start, random_of
from ._files import find_files, nothing_found
from ._samples import numbered_samples
from ._stream import StreamSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["TarShards", "expand_braces"]

_logger = logging.getLogger("spdl_torch.data")

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_SHARDS = 1_000_000


class TarShards(StreamSource[dict[str, Any]]):
    """The samples of tar files in WebDataset's layout, read from front to back.

    Consecutive files with the same key (the name up to the first dot of its last part) are one
    sample: ``{"__key__": "train/0001", "__url__": "...", "jpg": bytes, "cls": bytes}``; fields are
    in lower case. Names without a dot or that begin with one, names like ``__this__``, folders and
    links are left out. gzip, bzip2 and xz are recognised by content.

    urls: one or more paths, URLs, globs and brace patterns, such as
        ``"s3://bucket/train-{000..099}.tar"``. The matches of a glob are sorted; everything else
        keeps its order.
    on_error: ``"skip"`` logs a shard that is damaged or cut short and goes on with the next one;
        the samples before the damage are yielded in both modes. A missing shard is an error.
    retries: attempts to open a shard again, at the next sample, when its connection is lost.
    max_sample_bytes: a larger sample counts as damaged or hostile.
    storage_options: options of fsspec's file system.

    ``shard``: each part has its own shards if there are at least as many shards as parts.
    Otherwise the shards are dealt to groups of parts of equal size, as many groups as divide both
    numbers, and the parts of a group read the same shards and take turns at the samples. The
    lengths of the parts are unknown, and may differ.

    ``shuffle``: the order of the shards by ``(seed, epoch)``, then a buffer of samples.

    Raises, while iterating: DecodeError: a shard that is not a tar, damaged, cut short, with two
    fields of one name in a sample, or beyond the limit; the message has its name and the last good
    file. OSError: a shard that cannot be read. At once: FileNotFoundError: a glob without a match;
    ValueError: no shards.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        on_error: Literal["raise", "skip"] = "raise",
        retries: int = 3,
        max_sample_bytes: int = DEFAULT_MAX_BYTES,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"TarShards: on_error must be 'raise' or 'skip', got {on_error!r}.")
        self._options = dict(storage_options or {})
        given = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
        self._urls = tuple(url for pattern in given for url in self._found(os.fspath(pattern)))
        if not self._urls:
            raise ValueError("TarShards: expected at least one shard, got none.")
        self._on_error = on_error
        self._policy = RetryPolicy(retries, 0.1, 5.0)
        self._max_sample_bytes = max_sample_bytes
        self._parts: tuple[tuple[int, int], ...] = ()

    def __repr__(self) -> str:
        parts = "".join(f", shard({index}, {count})" for index, count in self._parts)
        return f"<TarShards of {len(self._urls)} shards{parts}>"

    @property
    def urls(self) -> tuple[str, ...]:
        """The names of all shards in the order given, regardless of parts and shuffling."""
        return self._urls

    @property
    def num_retries(self) -> int:
        """The number of times that this source, and those made from it, opened a shard again in
        this process."""
        return self._policy.num_retries

    def shard(self, index: int, count: int) -> TarShards:
        """Return part ``index`` of ``count``, by shards or by samples; see the class."""
        self._check_shard(index, count)
        return self._with(_parts=(*self._parts, (index, count)))

    def iterate(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Iterate from the ``start``-th sample on.

        Earlier ones are skipped: their contents are not even read, unless samples are shuffled.
        """
        check_start(self, start)
        shards, member, members = self._part()
        if self._mix is None:
            return self._samples(shards, member, members, start)
        samples = self._samples(shards, member, members, 0)
        place = [number for part in self._parts for number in part]
        return islice(self._mix.drawn(samples, self._epoch, *place), start, None)

    def _part(self) -> tuple[list[tuple[int, str]], int, int]:
        """Return the shards to read, each with its place in the epoch, and this part's turn at
        their samples: its number in its group, and the group's size."""
        shards = list(enumerate(self._urls))
        if self._mix is not None:
            random_of("shards", self._mix.seed, self._epoch).shuffle(shards)
            shards = [(place, url) for place, (_, url) in enumerate(shards)]
        member, members = 0, 1
        for index, count in self._parts:
            groups = count if len(shards) >= count else math.gcd(len(shards), count)
            shards = shards[index % groups :: groups]
            member += members * (index // groups)
            members *= count // groups
        return shards, member, members

    def _samples(
        self, shards: list[tuple[int, str]], member: int, members: int, start: int
    ) -> Iterator[dict[str, Any]]:
        num_passed = 0  # of our own samples

        for place, url in shards:
            # Rotate the first turn from shard to shard, so that short shards serve all parts alike.
            first = (member - place) % members
            skipped = num_passed

            def wanted(number: int, first: int = first, skipped: int = skipped) -> bool:
                turn, rest = divmod(number - first, members)
                return rest == 0 and skipped + turn >= start

            samples = numbered_samples(
                url, wanted, self._policy, self._max_sample_bytes, self._options
            )
            try:
                for number, sample in enumerate(samples):
                    num_passed += number % members == first
                    if sample is not None:
                        yield sample
            except DecodeError as error:
                if self._on_error == "raise":
                    raise
                _logger.warning("the rest of a shard was skipped: %s", error)

    def _found(self, pattern: str) -> list[str]:
        found = []
        for name in expand_braces(pattern):
            # "?" belongs to a glob, but in a web address it begins the query.
            magic = glob.has_magic(name.replace("?", "") if name.startswith("http") else name)
            if magic and (is_url(name) or not os.path.exists(name)):
                names = sorted(find_files(name, False, self._options))
                if not names:
                    raise nothing_found("TarShards", name)
                found += names
            else:
                found.append(name)
        return found


def expand_braces(pattern: str) -> list[str]:
    """Expand ``"{08..10}{a,b}"`` to ``08a 08b 09a 09b 10a 10b``. Other braces stay as they are."""
    names, start = [""], 0
    for group in _BRACES.finditer(pattern):
        choices = _choices(group[1], pattern)
        literal = pattern[start : group.start()]
        start = group.end()
        if len(names) * len(choices) > _MOST_SHARDS:
            raise ValueError(f"TarShards: {pattern!r} means more than {_MOST_SHARDS} shards.")
        names = [name + literal + choice for name in names for choice in choices]
    return [name + pattern[start:] for name in names]


def _choices(inside: str, pattern: str) -> list[str]:
    if bounds := _RANGE.fullmatch(inside):
        low, high = int(bounds[1]), int(bounds[2])
        if low > high:
            raise ValueError(f"TarShards: {pattern!r} has a range that runs backwards.")
        if high - low >= _MOST_SHARDS:
            raise ValueError(f"TarShards: {pattern!r} means more than {_MOST_SHARDS} shards.")
        padded = bounds[1].startswith("0") and len(bounds[1]) > 1
        width = max(len(bounds[1]), len(bounds[2])) if padded else 0
        return [str(number).zfill(width) for number in range(low, high + 1)]
    return inside.split(",") if "," in inside else [f"{{{inside}}}"]
