"""Sources that go on behind a state: those without the items that were handed out before it, and
those that keep a state of their own, which is asked for as a pass goes on."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..sampling.parts import Stride, undivided
from ..sampling.sampler_chain import length_of
from .user_state import (
    EndedEarly,
    OwnState,
    WorkerState,
    ended_early,
    give_state,
    keeps_state,
    state_of,
)

if TYPE_CHECKING:
    from .pipeline_state import PassProgress, PassState


def source_behind(
    source: Any, start: int, most_missing: int = 0, misfits: list[str] | None = None
) -> Any:
    """Return the source without its first ``start`` items; at once, if it can begin anywhere.

    Raises (while iterating): ValueError: it has fewer, by more than ``most_missing``. ``misfits``
        then has what it says.
    """
    if not start:
        return source
    misfits = [] if misfits is None else misfits
    kind = _AsyncBehind if isinstance(source, AsyncIterable) else Behind
    return kind(source, start, most_missing, misfits)


@dataclass(frozen=True, slots=True)
class _Behind:
    """A source without its first items."""

    source: Any
    start: int
    most_missing: int
    """The most items by which the source may be shorter than ``start``: what an incomplete last
    group lacked."""
    misfits: list[str]
    field: str = "num_source"
    """The state's field from which ``start`` is."""

    def _check(self, num_items: int) -> None:
        if num_items < self.start - self.most_missing:
            error = ended_early(self.field, self.source, num_items, self.start)
            self.misfits.append(str(error))
            raise error


@dataclass(frozen=True, slots=True)
class Behind(_Behind):
    """The rest of an iterable."""

    may_jump: bool = True
    """Whether the source may begin at ``start`` by its ``iterate``."""

    def __iter__(self) -> Iterator[Any]:
        if not (self.may_jump and hasattr(self.source, "iterate")):
            return self._after_skipping()
        length = length_of(self.source)
        if length is None:
            return self._after_jump()
        self._check(length)
        return iter(self.source.iterate(self.start))

    def _after_jump(self) -> Iterator[Any]:
        """Iterate from ``start`` on in a source of unknown length, which gives nothing both at its
        end and past it."""
        is_empty = True
        for item in self.source.iterate(self.start):
            is_empty = False
            yield item
        least = self.start - self.most_missing
        if is_empty and least > 0 and not any(True for _ in self.source.iterate(least - 1)):
            self._check(sum(1 for _ in self.source.iterate(0)))

    def _after_skipping(self) -> Iterator[Any]:
        try:
            items = iter(self.source)
        except EndedEarly as error:
            self.misfits.append(str(error))
            raise
        self._check(sum(1 for _ in islice(items, self.start)))
        yield from items


@dataclass(frozen=True, slots=True)
class _AsyncBehind(_Behind):
    """The rest of an asynchronous one."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        num_passed = 0
        async for item in self.source:
            if num_passed < self.start:
                num_passed += 1
            else:
                yield item
        self._check(num_passed)


class Watched:
    """A source that keeps its own state and, while states are wanted, the state after each item in
    flight.

    Args:
        progress: that of the pass.
        start: the number of items before the first one.
        resume: the state to resume, if it is of as many ranks.
        rests: whether the source has just been given its state after the pass before.
    """

    def __init__(
        self,
        keeper: Any,
        progress: PassProgress,
        start: int,
        resume: PassState | None,
        *,
        most_missing: int,
        rests: bool,
    ) -> None:
        self._items: Iterable[Any]
        begun_from, misfits = WorkerState(num_items=start), progress.misfits
        if resume is not None and resume.source is not None:
            give_state(keeper, resume.source, "source")
            num_after = min(resume.num_after, start)
            begun_from = begun_from._replace(state=resume.source, num_after=num_after)
            self._items = Behind(
                _Begun(keeper) if num_after == start else keeper,
                num_after,
                most_missing,
                misfits,
                field="num_after",
                may_jump=False,
            )
        else:
            items = _Begun(keeper) if rests else keeper
            self._items = source_behind(items, start, most_missing, misfits)
        self._progress = progress
        self._start = start
        self._own = OwnState(None, keeper, begun_from)
        if begun_from.state is None and not start and progress.is_wanted:
            self._own.ask(0, ended=False)
        first = self._own.reached(start, ended=False)
        self.at_beginning = first if first.num_after == start else WorkerState()
        """The state before the first item of the pass, if it is known."""
        # The source's thread appends, and removes states that the trainer has passed; the trainer's
        # thread copies the list, which is atomic with a GIL and without, and searches the copy.
        self._reached = [first]

    def __iter__(self) -> Iterator[Any]:
        reached = self._reached
        for number, item in enumerate(self._items, self._start + 1):
            if self._progress.is_wanted:
                self._own.ask(number, ended=False)
                reached.append(self._own.reached(number, ended=False))
                least = self._progress.num_source_before
                while len(reached) > 1 and reached[1].num_items <= least:
                    del reached[0]
            yield item

    def state_behind(self, num_items: int) -> WorkerState:
        """Return the source's state after ``num_items`` items."""
        found, *later = self._reached.copy()
        for each in later:
            if each.num_items <= num_items:
                found = each
        if found.state is None:
            return found
        return found._replace(num_after=found.num_after + num_items - found.num_items)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A source before the first item of a pass. One whose state is a position, and that has just
    been given that of its end, has none until it is iterated once more."""

    source: Any

    @property
    def undivided(self) -> Any:
        """The source, for errors."""
        return getattr(self.source, "undivided", self.source)

    def __iter__(self) -> Iterator[Any]:
        is_empty = True
        for item in self.source:
            is_empty = False
            yield item
        if is_empty:
            yield from self.source


def keeping(part: Any) -> Any:
    """Return a part of a source as one that has a state, if its source keeps one."""
    if not isinstance(part, Stride) or not keeps_state(undivided(part)):
        return part
    return _KeepingStride(keeping(part.source), part.part, part.tail)


@dataclass(slots=True)
class _KeepingStride(Stride):
    """A stride whose state is that of the source, and how many items are left of the round. So one
    rank's state serves all.

    ``tail="pad"`` repeats the items that the source has given first since the state.
    """

    num_left: int = 0

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.source)
        for _ in islice(items, self.num_left):
            pass
        self.num_left = 0
        num_left = self.part.count - self.part.index - 1 if self.tail == "uneven" else 0
        for item in self.of(items):
            self.num_left = num_left
            yield item
        self.num_left = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item."""
        return {"source": state_of(self.source), "num_left": self.num_left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a state, before the first item."""
        give_state(self.source, state_dict["source"], "source")
        self.num_left = state_dict["num_left"]
