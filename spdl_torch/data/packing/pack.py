"""The functions that group the samples of a dataset by a budget, and the groups of a stream, from a
bounded look-ahead."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from ...checks import check_whole, whole
from ...loader.checkpoint.source_behind import source_behind
from ...loader.checkpoint.user_state import ended_early
from ...loader.sampling.parts import OwnRank, Shard, worker_shard
from ...loader.state_fields import check_fields, check_version
from ..dataset import PipelineDataset
from ..sources._stream import as_source, is_map_style
from .collate import Document, PackCollate, pad_collate
from .dataset import GroupedDataset, GroupPlan, Groups
from .rule import Oversize, Rule, as_sizes

if TYPE_CHECKING:
    from .rule import Size, SizeOf

_LOOK_AHEAD = 4096
_VERSION = 1  # of a stream's state


def pack(
    dataset: Any,
    budget: int,
    *,
    size_of: SizeOf | Callable[[Any], int],
    pad: float | Mapping[str, float] | None = None,
    oversize: Oversize = "error",
    seed: int = 0,
    shuffle: bool = True,
    look_ahead: int | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> GroupedDataset | GroupedStream:
    """Return a dataset whose samples are packs: documents end to end, up to ``budget`` tokens.

    A document is a sequence of tokens, or a dict of sequences of equal length: tensors, arrays or
    lists, (T,) or (T, ...). A sequence alone is named ``input_ids``. A pack is a dict of these,
    and of:

    * ``position_ids``: int64 (T,), from 0 in each document;
    * without ``pad``: ``cu_seqlens``, int32 (documents + 1,), where documents begin and the last
      one ends, and ``max_seqlen``, an int, as attention kernels for sequences of varying length
      take them. Load it with ``batch_size=None``;
    * with ``pad``: ``document_ids``, int32 (budget,), the number of each token's document, where
      padding counts as one more document. Every tensor has ``budget`` tokens, so packs can be
      batched.

    Args:
        dataset: map-style, a list of ``spdl_torch.data.sources`` among them; or a stream, which is
            any iterable that can be read again: another source, a function that returns an
            iterator, an iterable dataset that gives all ranks the same items.
        budget: the most tokens of a pack.
        size_of: for a map-style dataset, the sizes of its samples: a list, array or tensor of ints,
            or a function of the index, which is called once for each. Of a mixture, a function of
            the position, which is called for each of every epoch; a list has the first epoch alone.
            For a stream, a function of the item.
        pad: the value after the last document, or one for each field, 0 for those not named; None =
            no padding.
        oversize: ``"error"``: a document of more than ``budget`` tokens is refused. ``"split"``: it
            is divided into pieces of ``budget`` tokens, the last one with the rest.
        seed, shuffle: the order of documents and packs; False = nothing is shuffled.
        look_ahead: for a stream, the number of items that are packed together; None = 4096.
        num_replicas, rank: for a stream, in place of torch.distributed's. For a map-style dataset,
            pass them to ``sampler()``.

    Raises: TypeError, ValueError: see the message.
    """
    budget, seed = whole("pack", "budget", budget), whole("pack", "seed", seed, -math.inf)
    rule = Rule("pack", budget, PackCollate(budget, pad), oversize, seed, shuffle)
    return _grouped(rule, dataset, size_of, look_ahead, num_replicas, rank)


def bucket(
    dataset: Any,
    budget: int,
    *,
    size_of: SizeOf | Callable[[Any], Size],
    collate_fn: Callable[[list[Any]], Any] = pad_collate,
    seed: int = 0,
    shuffle: bool = True,
    look_ahead: int | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> GroupedDataset | GroupedStream:
    """Return a dataset of batches of similar samples. Padded, each batch has at most ``budget``
    elements: the number of samples, times the largest size.

    A size is what padding makes equal: an int for tokens or frames; a tuple of one int for each
    dimension that is padded, such as (height, width) for images, where the largest of each
    dimension counts.

    ``collate_fn`` makes the batch; the default pads tensors with zeros to the largest of the batch.
    Load it with ``batch_size=None``. Other arguments are those of :func:`pack`.

    Raises: TypeError, ValueError: see the message.
    """
    budget, seed = whole("bucket", "budget", budget), whole("bucket", "seed", seed, -math.inf)
    rule = Rule("bucket", budget, collate_fn, "error", seed, shuffle)
    return _grouped(rule, dataset, size_of, look_ahead, num_replicas, rank)


def _grouped(
    rule: Rule,
    dataset: Any,
    size_of: Any,
    look_ahead: int | None,
    num_replicas: int | None,
    rank: int | None,
) -> GroupedDataset | GroupedStream:
    if is_map_style(dataset):
        _refuse(rule.who, dataset, look_ahead=look_ahead, num_replicas=num_replicas, rank=rank)
        return GroupedDataset(dataset, GroupPlan(rule, dataset, size_of))
    if not callable(size_of):
        raise TypeError(f"{rule.who}: for a stream, size_of must be a function of the item.")
    check_whole(rule.who, look_ahead=look_ahead, optional=True)
    own_rank = OwnRank("GroupedStream", num_replicas, rank)
    return GroupedStream(dataset, rule, size_of, int(look_ahead or _LOOK_AHEAD), own_rank)


def _refuse(who: str, dataset: Any, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{who}: {name} is for streams; a {type(dataset).__name__} is map-style: all of it "
                f"is planned from its sizes, and sampler() takes the ranks. Leave {name} out, got "
                f"{value!r}."
            )


class _Restart(NamedTuple):
    """Where to read a stream again, and the groups to leave out then."""

    num_items: int = 0
    """The items before the window that is read first."""
    first_group: int = 0
    """The number of that window's first group."""
    next_group: int = 0
    """The number of the first group that has not been handed out."""


class GroupedStream(IterableDataset[Any]):
    """A stream whose items come in groups, made by :func:`spdl_torch.data.pack` or
    :func:`spdl_torch.data.bucket`.

    ``look_ahead`` items are read, grouped and handed out, then the next ones. Every rank and worker
    reads the whole stream, makes the same groups, and takes its turn at them: groups depend neither
    on ranks nor on workers, and all ranks get equally many.
    """

    def __init__(
        self,
        items: Any,
        rule: Rule,
        size_of: Callable[[Any], Size],
        look_ahead: int,
        own_rank: OwnRank,
    ) -> None:
        # Every rank's own part would be divided once more.
        if isinstance(items, PipelineDataset) and items._own_rank.num_replicas != 1:
            raise TypeError(
                "pack: every rank has to read the whole stream, but "
                f"{type(items).__name__} gives each its own part. Pass the source; or "
                "PipelineDataset(..., num_replicas=1, rank=0)."
            )
        self.dataset = items
        """The stream, which every rank reads whole."""
        self._source = as_source(items)
        self.collate_fn = rule.collate_fn
        """The function that makes a batch of a group's items."""
        self._rule = rule
        self._size_of = size_of
        self._look_ahead = look_ahead
        self._own_rank = own_rank
        self._epoch = 0
        # Size and room of the groups so far, by thread: none overwrites what another has counted.
        self._filled: dict[int, tuple[int, int]] = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the source, and of the groups' order, for later iterations."""
        self._source.set_epoch(epoch)
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's and worker's groups, from the beginning."""
        return _GroupedItems(self, self._own_rank.shard(), worker_shard(), self._epoch)

    def windows(self, num_items: int) -> Iterator[list[Any]]:
        """Yield the items from number ``num_items`` on, ``look_ahead`` at a time."""
        items = iter(source_behind(self._source, num_items))
        while window := list(islice(items, self._look_ahead)):
            yield window

    def groups_of(self, window: list[Any], first: int, epoch: int) -> list[list[Any]]:
        """Return the groups of a window that begins with item number ``first``."""
        rule = self._rule
        sizes = as_sizes([self._size_of(item) for item in window], rule.who)
        pieces = rule.pieces_of(sizes.astype(np.int64, copy=False), first)
        generator = rule.generator("stream", epoch, first)
        order = rule.order(len(pieces.sizes), generator)
        places, ends = rule.grouped(pieces.sizes[order])
        turns = rule.order(len(ends), generator)
        groups = Groups(rule, pieces, order[places], np.array(ends), turns)
        self._count(groups)
        members: list[Any] = window
        if isinstance(self.collate_fn, PackCollate):
            members = [
                Document(window[piece.sample - first], piece)
                for piece in map(pieces.piece, range(len(pieces.sizes)))
            ]
        return [[members[number] for number in groups[turn]] for turn in range(len(groups))]

    def loading_remarks(self) -> tuple[str, ...]:
        """Return the remark for a loader's report on the waste so far. Worker processes make groups
        of their own, which this process does not see.
        """
        size, room = self.loading_counts().values()
        if not room:
            return ()
        return (f"{1 - size / room:.2%} of the groups' room so far is {self._rule.waste}.",)

    def loading_counts(self) -> dict[str, int]:
        """Return size and room of the groups that this process has made."""
        filled = list(self._filled.values())
        size, room = sum(size for size, _ in filled), sum(room for _, room in filled)
        return {"packing/size": size, "packing/room": room}

    def _count(self, groups: Groups) -> None:
        thread = threading.get_ident()
        size, room = self._filled.get(thread, (0, 0))
        self._filled[thread] = size + groups.size, room + groups.room


class _GroupedItems(Iterator[Any]):
    """The iterator over one worker's groups, which keeps its position."""

    def __init__(self, stream: GroupedStream, ranks: Shard, workers: Shard, epoch: int) -> None:
        self._stream = stream
        self._ranks, self._workers = ranks, workers
        self._epoch = epoch
        self._restart = _Restart()
        self._groups: Iterator[list[Any]] | None = None

    def __next__(self) -> Any:
        if self._groups is None:
            self._groups = self._dealt(self._restart)
        return self._stream.collate_fn(next(self._groups))

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        state = {"version": _VERSION, "epoch": self._epoch, "num_ranks": self._ranks.count}
        return {**state, **self._restart._asdict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position of a state, before the first group. Raises: ValueError."""
        check_version(state_dict, _VERSION, "the stream's iterator")
        check_fields(state_dict, _FIELDS, "grouped stream")
        if state_dict["num_ranks"] != self._ranks.count and self._workers.count > 1:
            raise ValueError(
                f"load_state_dict: the state of the grouped stream is of {state_dict['num_ranks']} "
                f"ranks, this run has {self._ranks.count}, and each of a rank's workers is at a "
                "group of its own. Resume with as many ranks, or with at most one worker."
            )
        self._epoch = state_dict["epoch"]
        self._stream.set_epoch(self._epoch)
        self._restart = _Restart(*(state_dict[name] for name in _Restart._fields))

    def _dealt(self, begun: _Restart) -> Iterator[list[Any]]:
        """Yield this worker's group of each round, once the round is known to be whole: the ranks
        take turns at the groups, and a rank's workers at its groups.
        """
        num_items, number = begun.num_items, begun.first_group
        # Rounds continue where the last one ended, perhaps in a run with another number of ranks.
        before = begun.next_group % self._ranks.count
        own: list[Any] = []
        for window in self._stream.windows(num_items):
            first_group = number
            for group in self._stream.groups_of(window, num_items, self._epoch):
                turn, place = divmod(number - before, self._ranks.count)
                is_own = turn % self._workers.count == self._workers.index
                if is_own and place == self._ranks.index:
                    own = group
                number += 1
                if place + 1 < self._ranks.count or not is_own or number <= begun.next_group:
                    continue
                # The next group of this worker is in this window, or after it.
                self._restart = _Restart(num_items, first_group, number)
                yield own
            num_items += len(window)
        if number < begun.next_group:
            raise ended_early("next_group", self._stream, number, begun.next_group)


_FIELDS = ("version", "epoch", "num_ranks", *_Restart._fields)
