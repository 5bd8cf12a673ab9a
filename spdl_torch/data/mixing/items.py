"""Iterate over a mixture of sources that are read from the front, and keep the position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from ..checkpoint.inner_passes import give_dataset_state, has_passes, state_at_beginning
from ..checkpoint.user_state import ended_early, give_state, keeps_state, state_of
from ..error_notes import add_thread_note
from ..state_fields import Field, check_fields, check_version, is_whole_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .mixture import Stop
    from .plan import MixturePlan

_VERSION = 1
_END: Any = object()  # in place of an item, after the last one


class Reader(ABC):
    """One source of a mixture, read again and again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_passes = 0
        """The number of passes that have ended."""
        self.num_items = 0
        """The number of items taken in this pass."""
        self._items: Iterator[Any] | None = None

    def next(self) -> Any:
        """Return the next item of the pass, or ``_END`` after its last one."""
        if self._items is None:
            self._begin(self.num_items)
        assert self._items is not None, "guaranteed by _begin"
        item = next(self._items, _END)
        self.num_items += item is not _END
        return item

    def again(self) -> None:
        """Begin the next pass."""
        self.num_passes, self.num_items = self.num_passes + 1, 0
        self._begin(0)

    @abstractmethod
    def skip(self, num_items: int) -> None:
        """Skip items from the beginning of the first pass, through as many passes as that takes.
        Only ``next`` notices the end of a pass.
        """

    def state(self) -> dict[str, Any]:
        """Return the position."""
        own = self._own_state()
        return {"num_passes": self.num_passes, "num_items": self.num_items, "state": own}

    def load_state(self, state: Mapping[str, Any], where: str) -> None:
        """Go to a position, before anything is read."""
        self.num_passes, self.num_items = state["num_passes"], state["num_items"]

    @abstractmethod
    def _begin(self, num_items: int) -> None:
        """Begin the pass, after so many of its items."""

    def _own_state(self) -> Any:
        """Return the state that the source itself keeps; None = none."""
        return None


class SourceReader(Reader):
    """Reads a ``DataSource``: every pass is another of its epochs."""

    def __init__(self, name: str, source: Any, epoch: int) -> None:
        super().__init__(name)
        self._source = source._with()  # a copy, which has an epoch of its own
        self._epoch = epoch

    def skip(self, num_items: int) -> None:
        try:
            length = len(self._source) if self._source._has_all_it_counts else None
        except TypeError:
            length = None
        if length is None:
            self._read_past(num_items)
            return
        if length and num_items:
            # Exactly at the end of a pass, nobody has noticed the end yet: it is still that pass.
            self.num_passes = (num_items - 1) // length
            num_items -= self.num_passes * length
        self._begin(num_items)

    def _read_past(self, num_items: int) -> None:
        """Skip in a source that does not know how many items it gives."""
        self._begin(num_items)
        assert self._items is not None, "guaranteed by _begin"
        first = next(self._items, _END)
        if first is not _END:
            self._items = chain((first,), self._items)
            return
        self._begin(0)  # perhaps this pass is shorter: count
        while num_items:
            if self.next() is not _END:
                num_items -= 1
                continue
            if not self.num_items:
                return  # empty: iteration reports that
            self.again()

    def _begin(self, num_items: int) -> None:
        # No pass of one epoch may have the order of a pass of another.
        self._source.set_epoch((self._epoch << 20) + self.num_passes)
        self._items, self.num_items = self._source.iterate(num_items), num_items


class DatasetReader(Reader):
    """Reads an ``IterableDataset``: every pass is an ``iter()`` of it."""

    def __init__(self, name: str, dataset: Any) -> None:
        super().__init__(name)
        self._dataset = dataset

    def skip(self, num_items: int) -> None:
        self._begin(num_items)

    def _begin(self, num_items: int) -> None:
        self._items = iter(self._dataset)
        self.num_items = sum(1 for _ in islice(self._items, num_items))

    def _own_state(self) -> Any:
        own: Any = None
        if self._items is None:
            # Not where a PipelineDataset stands: that is somewhere in a pass of the epoch before,
            # which nobody goes on with.
            own = state_at_beginning(self._dataset)
        keeper = next(filter(keeps_state, (self._items, self._dataset)), None)
        if own is None and keeper is not None:
            own = state_of(keeper)
        return own

    def load_state(self, state: Mapping[str, Any], where: str) -> None:
        own = state["state"]
        if own is not None and keeps_state(self._dataset):
            give_state(self._dataset, own, f"{where}.state")
            if not has_passes(self._dataset):
                self._items = iter(self._dataset)
            elif state["num_items"]:
                # Now: if this epoch draws nothing more from it, the next one must not go on with
                # this pass.
                self._items = self._dataset._begun_pass()
        elif own is not None and not (state["num_passes"] or state["num_items"]):
            give_dataset_state(self._dataset, own, f"{where}.state")
        elif own is not None:
            self._items = iter(self._dataset)
            give_state(self._items, own, f"{where}.state")
        else:
            self.skip(state["num_items"])
            if self.num_items < state["num_items"]:
                given = f"{where}.num_items", self._dataset
                raise ended_early(*given, self.num_items, state["num_items"])
        super().load_state(state, where)


@dataclass(slots=True)
class MixedItems:
    """The iterator over a mixture: the plan names the source of each item.

    ``state_dict()`` has the position and, for each source, its passes, its items in this pass and,
    if it keeps one, its own state; ``load_state_dict`` goes there before the first item.
    """

    readers: Sequence[Reader]
    plan: MixturePlan
    stop: Stop
    position: int = 0
    is_over: bool = False
    _first: int = 0
    _sources: Sequence[int] = ()
    """The sources of the current segment of the plan, which begins at ``_first``."""

    def __iter__(self) -> MixedItems:
        return self

    def __next__(self) -> Any:
        if self.is_over:
            raise StopIteration
        place = self.position - self._first
        if not 0 <= place < len(self._sources):
            segment = self.plan.segment(self.position)
            self._first, self._sources = segment.first, segment.sources.tolist()
            place = self.position - self._first
        reader = self.readers[self._sources[place]]
        item = self._taken(reader)
        if item is _END:
            if self._is_last(reader):
                self.is_over = True
                raise StopIteration
            reader.again()
            item = self._taken(reader)
            if item is _END:
                raise ValueError(f"mix: the source {reader.name!r} is empty.")
        self.position += 1
        return item

    def go_to(self, position: int) -> None:
        """Go to a position, from the beginning; past the end if the mixture is shorter."""
        for reader, count in zip(self.readers, self.plan.counts(position).tolist(), strict=True):
            if count:
                reader.skip(count)
        self.position = position
        begun_again = [reader.num_passes > 0 for reader in self._drawn()]
        self.is_over = (self.stop == "first" and any(begun_again)) or (
            self.stop == "all" and all(begun_again)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and that of each source."""
        return {
            "version": _VERSION,
            "position": self.position,
            "sources": {reader.name: reader.state() for reader in self.readers},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position of a state. Raises: ValueError: it is not a state of this mixture."""
        check_version(state_dict, _VERSION, "the mixture's iterator")
        check_fields(state_dict, _FIELDS, _FIELDS, "mixture")
        sources = state_dict["sources"]
        names = [reader.name for reader in self.readers]
        if set(sources) != set(names):
            raise ValueError(
                f"load_state_dict: the state is of a mixture of {sorted(sources)}, this mixture "
                f"has {sorted(names)}. Pass the sources that the state was saved with."
            )
        for reader in self.readers:
            where = f"sources[{reader.name!r}]"
            check_fields(
                sources[reader.name], _SOURCE_FIELDS, _SOURCE_FIELDS, "mixture", f"{where}."
            )
            reader.load_state(sources[reader.name], where)
        self.position = state_dict["position"]

    def _taken(self, reader: Reader) -> Any:
        try:
            return reader.next()
        except Exception as error:
            add_thread_note(error, f"in item {reader.num_items} of the source {reader.name!r}")
            raise

    def _is_last(self, ended: Reader) -> bool:
        """Return whether the epoch ends where a source has ended."""
        if self.stop == "never":
            return False
        others = (reader for reader in self._drawn() if reader is not ended)
        return self.stop == "first" or all(reader.num_passes > 0 for reader in others)

    def _drawn(self) -> list[Reader]:
        """Return the sources that the plan ever draws from."""
        return [self.readers[number] for number in self.plan.sources_drawn()]


_NUMBER = Field("a whole number >= 0 of 64 bits", is_whole_number)
_FIELDS = {
    "version": _NUMBER,
    "position": _NUMBER,
    "sources": Field(
        "a dict of dicts",
        lambda value: (
            isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())
        ),
    ),
}
_SOURCE_FIELDS = {
    "num_passes": _NUMBER,
    "num_items": _NUMBER,
    "state": Field("anything", lambda _: True),
}
