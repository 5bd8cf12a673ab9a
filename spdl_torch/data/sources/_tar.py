"""Tar shards in WebDataset's layout, shuffled and sharded; with indexes also read at random."""

from __future__ import annotations

import glob
import logging
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, starmap
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from spdl_torch.checks import check_whole
from spdl_torch.errors import DecodeError
from spdl_torch.io._remote import RETRIES, is_url
from spdl_torch.io._tar import DEFAULT_MAX_BYTES
from spdl_torch.shown_text import counted

from ._base import checked_start, random_of
from ._files import find_files
from ._index import IndexedSamples, index_path, pieces
from ._shard import ShardSource, numbered_samples

if TYPE_CHECKING:
    from ._stream import Mix

T = TypeVar("T")

_logger = logging.getLogger("spdl_torch.data")

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class TarShards(ShardSource):
    """The samples of tar files in WebDataset's layout, read from front to back; with an index, also
    at random.

    Consecutive files with the same key (the name up to the first dot of its last part) are one
    sample: ``{"__key__": "train/0001", "__url__": "...", "jpg": bytes, "cls": bytes}``; fields are
    in lower case. Names without a dot or that begin with one, names like ``__this__``, folders and
    links are left out. gzip, bzip2 and xz are recognised by content.

    urls: one or more paths, URLs, globs and brace patterns, such as
        ``"s3://bucket/train-{000..099}.tar"``. The matches of a glob are sorted; everything else
        keeps its order.
    on_error: ``"skip"`` logs a shard that is damaged or cut short and goes on with the next one;
        the samples before the damage are yielded in both modes. A missing shard is an error.
    retries: attempts to open a shard again, where reading had stopped, when its connection is lost.
    max_sample_bytes: a larger sample counts as damaged or hostile.
    storage_options: options of fsspec's file system.
    cache: a folder on a local disk where each shard is kept whole, downloaded once by one of the
        threads and processes of the machine while the others wait; None = nothing is kept. A shard
        of a URL is found by that name, ``storage_options`` and the version that the store says it
        has, a local one by its name, size and modification time.
    max_bytes: the most bytes of shards in ``cache``; those that were opened longest ago are removed
        when another one has come. None = no limit. Where a disk is full, shards are read from
        where they are.
    ahead: the number of shards that threads bring into ``cache`` while the one before is read.
    index: whether to use the index beside each shard, ``x.index.json`` of ``x.tar``, which
        ``python -m spdl_torch prepare`` writes; None = if all shards are local and have one.

    With an index ``len()`` is known, ``shards[position]`` reads one sample, so that any loader can
    take this as a map-style dataset, and each sample is compared with its checksum.

    ``shard``, with an index: each part has its own samples one after the other, in the order of the
    shards, and as many as the others or one less. Without: each part has its own shards if there
    are at least as many shards as parts. Otherwise the shards are dealt to groups of parts of equal
    size, as many groups as divide both numbers, and the parts of a group read the same shards and
    take turns at the samples. The lengths of these parts are unknown, and may differ.

    ``shuffle``: the order of the shards by ``(seed, epoch)``, then a buffer of samples.

    Raises, while iterating: DecodeError: a shard that is not a tar, damaged, cut short, with two
    fields of one name in a sample, beyond the limit, or other than its index says; the message has
    its name and the byte or the sample. OSError: a shard that cannot be read;
    SourceChangedError: one that was replaced meanwhile. At once:
    FileNotFoundError: a glob without a match, or with ``index=True`` a shard without an index;
    DecodeError: a damaged index; ValueError: no shards.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        on_error: Literal["raise", "skip"] = "raise",
        retries: int = RETRIES,
        max_sample_bytes: int = DEFAULT_MAX_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        index: bool | None = None,
        cache: str | os.PathLike[str] | None = None,
        max_bytes: float | None = None,
        ahead: int = 2,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"TarShards: on_error must be 'raise' or 'skip', got {on_error!r}.")
        check_whole("TarShards", max_sample_bytes=max_sample_bytes)
        super().__init__(urls, storage_options, retries, cache, max_bytes, ahead)
        self._on_error = on_error
        self._max_sample_bytes = max_sample_bytes
        self._indexed: IndexedSamples | None = None
        if index or (index is None and all(map(_has_index, self.urls))):
            self._indexed = IndexedSamples(self.urls, self._files, self._max_sample_bytes)
        self._has_all_it_counts = self._indexed is None or on_error == "raise"

    def __repr__(self) -> str:
        return f"<TarShards of {counted(len(self.urls), 'shard')}{self._shown_parts()}>"

    def __len__(self) -> int:
        """Return the number of samples in this part. Raises: TypeError: there is no index."""
        first, end = self._bounds(len(self._with_index("has no len()")))
        return end - first

    def __bool__(self) -> bool:
        return self._indexed is None or len(self) > 0

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Read the sample at a position of this part, in the order of the shards.

        Raises: TypeError: there is no index, or the source is shuffled; IndexError; DecodeError:
            the sample is damaged; OSError: it cannot be read.
        """
        indexed = self._with_index("cannot read at random")
        self._check_positions()
        first, end = self._bounds(len(indexed))
        place = position + (end if position < 0 else first)
        if not first <= place < end:
            raise IndexError(f"TarShards: position must be below {end - first}, got {position}.")
        return indexed.sample(place)

    def iterate(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Iterate from the ``start``-th sample on.

        Earlier ones are skipped: their contents are not even read, unless samples are shuffled
        without an index, or damaged ones, which do not count, may be among those of an index.
        """
        return self._with()._iterated(checked_start(self, start))

    def _iterated(self, start: int) -> Iterator[dict[str, Any]]:
        if self._has_all_it_counts and self._mix is None:
            return self._unmixed(start)
        if self._mix is None:
            return islice(self._unmixed(0), start, None)
        if self._has_all_it_counts and self._indexed is not None:
            return self._mixed_by_number(self._mix, self._indexed, start)
        return islice(self._drawn(self._mix, self._unmixed(0)), start, None)

    def _with_index(self, cannot: str) -> IndexedSamples:
        """Return the places of the samples. Raises: TypeError: they are not known."""
        if self._indexed is None:
            raise TypeError(
                f"TarShards {cannot} without an index. Write one for each shard: python -m "
                "spdl_torch prepare --index FOLDER; for URLs pass index=True."
            )
        return self._indexed

    def _drawn(self, mix: Mix, items: Iterator[T]) -> Iterator[T]:
        place = [number for part in self._parts for number in part]
        return mix.drawn(items, self.epoch, *place)

    def _mixed_by_number(
        self, mix: Mix, indexed: IndexedSamples, start: int
    ) -> Iterator[dict[str, Any]]:
        """Draw the numbers of samples up to ``start``, and samples from then on. A number that is
        in the buffer then is read where it is drawn."""
        passed = False

        def items() -> Iterator[int | dict[str, Any]]:
            numbers = chain.from_iterable(starmap(range, self._ranges(indexed, 0)[1]))
            read = 0
            while not passed and (number := next(numbers, None)) is not None:
                yield number
                read += 1
            yield from self._unmixed(read)

        mixed = self._drawn(mix, items())
        deque(islice(mixed, start), maxlen=0)
        passed = True
        for each in mixed:
            yield indexed.sample(each) if isinstance(each, int) else each

    def _unmixed(self, start: int) -> Iterator[dict[str, Any]]:
        """Iterate over the samples of this part, shard by shard."""
        if self._indexed is not None:
            return self._indexed_samples(self._indexed, start)
        urls = [self.urls[shard] for shard in self._order_of_shards()]
        return self._samples(*self._part([*enumerate(urls)]), start)

    def _order_of_shards(self) -> list[int]:
        shards = [*range(len(self.urls))]
        if self._mix is not None:
            random_of("shards", self._mix.seed, self.epoch).shuffle(shards)
        return shards

    def _ranges(
        self, indexed: IndexedSamples, start: int
    ) -> tuple[list[str], list[tuple[int, int]]]:
        """Return the shards of this part's samples from ``start`` on, and their numbers in each."""
        first, end = self._bounds(len(indexed))
        begins, order = indexed.first_samples, self._order_of_shards()
        found = [*pieces(begins, order, first + start, end)]
        ranges = [(begins[shard] + low, begins[shard] + high) for shard, low, high in found]
        return [self.urls[shard] for shard, _, _ in found], ranges

    def _indexed_samples(self, indexed: IndexedSamples, start: int) -> Iterator[dict[str, Any]]:
        urls, ranges = self._ranges(indexed, start)
        for bounds, _ in zip(ranges, self._files.each(urls), strict=True):
            yield from self._unless_damaged(indexed.samples(*bounds))

    def _part(self, shards: list[tuple[int, str]]) -> tuple[list[tuple[int, str]], int, int]:
        """Return the shards to read, of those with their places in the epoch, and this part's turn
        at their samples: its number in its group, and the group's size."""
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

        urls = self._files.each([url for _, url in shards])
        for (place, _), url in zip(shards, urls, strict=True):
            # Rotate the first turn from shard to shard, so that short shards serve all parts alike.
            first = (member - place) % members
            skipped = num_passed

            def wanted(number: int, first: int = first, skipped: int = skipped) -> bool:
                turn, rest = divmod(number - first, members)
                return rest == 0 and skipped + turn >= start

            samples = numbered_samples(url, wanted, self._files, self._max_sample_bytes)
            for number, sample in enumerate(self._unless_damaged(samples)):
                num_passed += number % members == first
                if sample is not None:
                    yield sample

    def _unless_damaged(self, samples: Iterator[T]) -> Iterator[T]:
        """Yield the samples of a shard, as far as it can be read; with ``on_error="raise"``, raise
        the error then."""
        try:
            yield from samples
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
                found += find_files("TarShards", name, False, self.storage_options)
            else:
                found.append(name)
        return found


def _has_index(url: str) -> bool:
    return url.endswith(".tar") and not is_url(url) and os.path.isfile(index_path(url))


def expand_braces(pattern: str) -> list[str]:
    """Expand ``"{08..10}{a,b}"`` to ``08a 08b 09a 09b 10a 10b``. Other braces stay as they are."""
    names, start = [""], 0
    for group in _BRACES.finditer(pattern):
        choices = _choices(group[1])
        literal = pattern[start : group.start()]
        start = group.end()
        names = [name + literal + choice for name in names for choice in choices]
    return [name + pattern[start:] for name in names]


def _choices(inside: str) -> list[str]:
    if bounds := _RANGE.fullmatch(inside):
        low, high = int(bounds[1]), int(bounds[2])
        padded = bounds[1].startswith("0") and len(bounds[1]) > 1
        width = max(len(bounds[1]), len(bounds[2])) if padded else 0
        return [str(number).zfill(width) for number in range(low, high + 1)]
    return inside.split(",") if "," in inside else [f"{{{inside}}}"]
