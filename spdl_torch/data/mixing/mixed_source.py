"""A mixture of which some sources are streams, for a pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard, TypeVar

from torch.utils.data import IterableDataset

from ...errors import UnsupportedOptionError
from ...loader.checkpoint import user_state
from ...loader.error_notes import add_thread_note
from ...loader.state_fields import check_fields, check_version
from ..sources._base import DataSource, checked_start
from ..sources._stream import Stream
from .plan import MixturePlan, Shares, Stop

T_co = TypeVar("T_co", covariant=True)

_VERSION = 1
_FOR_LOADERS = "A loader takes PipelineDataset(PipelineBuilder().add_source(mixture).add_sink())."
_END: Any = object()  # in place of an item, after the last one


class IterableSource(Stream[T_co]):
    """An iterable dataset in a mixture, which may divide itself among ranks and workers."""

    def __init__(self, dataset: Any, name: str) -> None:
        super().__init__(dataset)
        self._name = name

    def shard(self, index: int, count: int) -> IterableSource[T_co]:
        """Refuse. Raises: UnsupportedOptionError: there are several parts."""
        index, count = self._checked_shard(index, count)
        if count > 1:
            raise UnsupportedOptionError(
                f"mix: {self._name!r} is an iterable dataset, and {count} ranks or workers read "
                "it. If it gives each the same items, pass as_source(dataset), of which each takes "
                "its part. If it divides itself, those parts would be divided once more: pass "
                "num_replicas=1, rank=0 to the PipelineDataset, and num_workers=0 to a loader."
            )
        return self


class MixedSource(DataSource[T_co]):
    """Several sources as one, made by :func:`spdl_torch.data.mix`, for a pipeline.

    ``shard`` mixes the same part of every source. ``iterate(start)`` begins each source at the item
    whose turn it then is: at once if the source can, and knows its length.

    If a source is an iterable dataset, or is not shuffled and keeps a state of its own, the mixture
    has a state, too: the position of each source, and their own states.
    """

    def __init__(
        self,
        sources: Mapping[str, DataSource[Any]],
        phases: Sequence[Shares],
        *,
        seed: int,
        stop: Stop,
    ) -> None:
        self.sources = dict(sources)
        """The sources by name."""
        self._has_all_it_counts = all(each._has_all_it_counts for each in sources.values())
        self._copies = frozenset().union(*(each._copies for each in sources.values()))
        self._phases = tuple(phases)
        self._seed = seed
        self._stop: Stop = stop
        self._pending: dict[str, Any] | None = None  # the state at which the next iteration begins
        self._running: weakref.ref[_MixedItems] | None = None  # what the state is asked of

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which nobody has iterated."""
        return {**self.__dict__, "_running": None}

    def __repr__(self) -> str:
        return f"<MixedSource of {self.sources!r}>"

    def __len__(self) -> int:
        """Return the number of items of the epoch that is set. Raises: TypeError: a source does not
        know its length, or the mixture has no end.
        """
        sources: list[Any] = [*self.sources.values()]
        try:
            lengths = [len(source) for source in sources]
        except TypeError as error:
            raise TypeError(f"MixedSource has no len(): {error}. {_FOR_LOADERS}") from None
        end = None if self._stop == "never" else self._plan().end_of_epoch(lengths, self._stop)
        if end is None:
            raise TypeError(f"MixedSource has no len(): the mixture has no end. {_FOR_LOADERS}")
        return end

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, from its beginning."""
        super().set_epoch(epoch)
        self._pending = self._running = None

    def shard(self, index: int, count: int) -> MixedSource[T_co]:
        """Return the mixture of part ``index`` of ``count`` of every source.

        Raises: ValueError: not ``0 <= index < count``; UnsupportedOptionError: an iterable dataset.
        """
        index, count = self._checked_shard(index, count)
        parts = {name: source.shard(index, count) for name, source in self.sources.items()}
        return self._with(sources=parts)

    def shuffle(self, seed: int = 0, buffer_size: int | None = None) -> MixedSource[T_co]:
        """Refuse: the mixture has shuffled each source. Raises: UnsupportedOptionError."""
        raise UnsupportedOptionError(
            "MixedSource.shuffle: a mixture is shuffled by mix(seed=..., shuffle=True). Shuffle "
            "the sources themselves and pass shuffle=False for another buffer size."
        )

    def iterate(self, start: int = 0) -> Iterator[T_co]:
        """Iterate from the ``start``-th item on.

        Raises (while iterating): ValueError: a source is empty when its turn comes.
        """
        start = checked_start(self, start)
        items = self._new_items()
        pending, self._pending = self._pending, None
        if pending is not None:
            items.load_state(pending)
        elif start:
            items.go_to(start)
        self._running = weakref.ref(items)
        return items

    @property
    def state_dict(self) -> Callable[[], dict[str, Any]] | None:
        """The function that returns the position in the last iteration and, for each source, its
        passes, its items in this pass and its own state; None = a number of items says it all.
        """
        return self._state if any(map(_may_keep_state, self.sources.values())) else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next iteration at a state, if the epoch stays. Raises: ValueError: it is not a
        state of this mixture.
        """
        check_version(state_dict, _VERSION, "the mixture")
        check_fields(state_dict, ("version", "position", "sources"), "mixture")
        sources = state_dict["sources"]
        if set(sources) != set(self.sources):
            raise ValueError(
                f"load_state_dict: the state is of a mixture of {sorted(sources)}, this mixture "
                f"has {sorted(self.sources)}. Pass the sources that the state was saved with."
            )
        self._pending = state_dict

    def _state(self) -> dict[str, Any]:
        running = None if self._running is None else self._running()
        return (running or self._new_items()).state()

    def _new_items(self) -> _MixedItems:
        readers = [_Reader(*named, self.epoch) for named in self.sources.items()]
        return _MixedItems(readers, self._plan(), self._stop)

    def _plan(self) -> MixturePlan:
        return MixturePlan(tuple(self.sources), self._phases, self._seed, "epoch", self.epoch)


class _MixedItems(Iterator[Any]):
    """The iterator over a mixture: the plan names the source of each item."""

    def __init__(self, readers: list[_Reader], plan: MixturePlan, stop: Stop) -> None:
        self._readers = readers
        self._drawn = [readers[number] for number in plan.drawn]
        self._plan = plan
        self._stop = stop
        self._position = 0
        self._is_over = False
        self._first = 0
        self._sources: list[int] = []  # of the items from number _first on

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        place = self._position - self._first
        if place >= len(self._sources):
            self._first, place = self._position, 0
            self._sources = self._plan.samples(self._first)[0].tolist()
        reader = self._readers[self._sources[place]]
        item = self._taken(reader)
        if item is _END:
            self._is_over = self._ends(reader)
            if self._is_over:
                raise StopIteration
            reader.again()
            item = self._taken(reader)
            if item is _END:
                raise ValueError(f"mix: the source {reader.name!r} is empty.")
        self._position += 1
        return item

    def go_to(self, position: int) -> None:
        """Go to a position, from the beginning; past the end if the mixture is shorter."""
        for reader, count in zip(self._readers, self._plan.counts(position).tolist(), strict=True):
            if count:
                reader.skip(count)
        self._position = position
        self._is_over = self._ends()

    def state(self) -> dict[str, Any]:
        """Return the position, and that of each source."""
        sources = {reader.name: reader.state() for reader in self._readers}
        return {"version": _VERSION, "position": self._position, "sources": sources}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a state, before the first item."""
        self._position = state["position"]
        for reader in self._readers:
            reader.load_state(state["sources"][reader.name])

    def _taken(self, reader: _Reader) -> Any:
        try:
            return reader.next()
        except Exception as error:
            add_thread_note(error, f"in item {reader.num_items} of the source {reader.name!r}")
            raise

    def _ends(self, ended: _Reader | None = None) -> bool:
        """Return whether the epoch is over; ``ended``: the source that would begin again now."""
        if self._stop == "never":
            return False
        begin_again = (reader is ended or reader.num_passes > 0 for reader in self._drawn)
        return any(begin_again) if self._stop == "first" else all(begin_again)


class _Reader:
    """One source of a mixture, read again and again: every pass is another of its epochs."""

    def __init__(self, name: str, source: Any, epoch: int) -> None:
        self.name = name
        self.num_passes = 0
        """The number of passes that have ended."""
        self.num_items = 0
        """The number of items taken in this pass."""
        self._source = source._with()  # a copy, which has an epoch of its own
        self._epoch = epoch
        self._items: Iterator[Any] | None = None
        self._keeper: Any = None  # what has a state of its own; None = nothing has
        self._resumed: Mapping[str, Any] | None = None  # the state, until an item is taken

    def next(self) -> Any:
        """Return the next item of the pass, or ``_END`` after its last one."""
        items = self._items
        item = next(self._begin(self.num_items, self._resumed) if items is None else items, _END)
        self.num_items += item is not _END
        self._resumed = None  # only now: its own state may still be that before it was resumed
        return item

    def again(self) -> None:
        """Begin the next pass."""
        self.num_passes += 1
        self._begin()

    def skip(self, num_items: int) -> None:
        """Skip items from the beginning of the first pass, through as many passes as that takes: at
        once if their length is known. Only ``next`` notices the end of a pass.
        """
        length = _known_length(self._source)
        if length:
            # Exactly at the end of a pass, nobody has noticed the end yet: it is still that pass.
            self.num_passes = (num_items - 1) // length
            self._begin(num_items - self.num_passes * length)
            return
        for _ in range(num_items):
            if self.next() is _END:
                self.again()
                if self.next() is _END:
                    return  # it is empty: iteration reports it

    def state(self) -> dict[str, Any]:
        """Return the position. ``num_left``: how many items of the last round are other parts'."""
        if self._resumed is not None:
            return {**self._resumed}
        state = {"num_passes": self.num_passes, "num_items": self.num_items, "num_left": 0}
        if self._keeper is None or not self.num_items:
            return {**state, "state": None}
        index, count = self._source.stride()
        return {**state, "num_left": count - index - 1, "state": user_state.state_of(self._keeper)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a position, before anything is read. Raises: ValueError: there are fewer items."""
        self.num_passes, num_items = state["num_passes"], state["num_items"]
        self._resumed = state
        if state["state"] is not None:
            # It gets its own state when an item is wanted. One that gives none in what is left of
            # the epoch would otherwise begin the next epoch there.
            self.num_items = num_items
        elif num_items:
            self._begin(num_items, state)
        if self.num_items < num_items:
            where = f"sources[{self.name!r}].num_items"
            given: Any = where, self._source._items, self.num_items, num_items
            raise user_state.EndedEarly(str(user_state.ended_early(*given)))

    def _begin(self, num_items: int = 0, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Begin the pass after so many of its items, at once if the ``state`` has the source's own.
        Of a foreign stream fewer are taken if there are no more.
        """
        source = self._source
        # No pass of one epoch may have the order of a pass of another.
        source.set_epoch((self._epoch << 20) + self.num_passes)
        if _is_foreign(source):
            self._items, self.num_items = self._begin_foreign(source, num_items, state)
        else:
            self._items, self.num_items = source.iterate(num_items), num_items
        return self._items

    def _begin_foreign(
        self, source: Stream[Any], num_items: int, state: Mapping[str, Any] | None
    ) -> tuple[Iterator[Any], int]:
        own, num_left = (None, 0) if state is None else (state["state"], state["num_left"])
        where, dataset = f"sources[{self.name!r}].state", source.begun()
        is_datasets = user_state.keeps_state(dataset)
        if own is not None and is_datasets:
            user_state.give_state(dataset, own, where)
        items = iter(dataset)
        if own is not None and not is_datasets:
            user_state.give_state(items, own, where)
        self._keeper = next(filter(user_state.keeps_state, (dataset, items)), None)
        index, count = source.stride()
        part = islice(items, num_left + index, None, count)
        return part, num_items if own is not None else sum(1 for _ in islice(part, num_items))


def _known_length(source: Any) -> int | None:
    """Return how many items a pass of a source has; None = nobody knows."""
    try:
        return len(source) if source._has_all_it_counts else None
    except TypeError:
        return None


def _is_foreign(source: object) -> TypeGuard[Stream[Any]]:
    """Return whether a source reads another object as it is, from the front."""
    return isinstance(source, Stream) and source._mix is None


def _may_keep_state(source: object) -> bool:
    if not _is_foreign(source):
        return False
    return isinstance(source._items, IterableDataset) or user_state.keeps_state(source._items)
