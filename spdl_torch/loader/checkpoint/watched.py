"""A source that keeps a state of its own, asked as a pass goes on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .source_behind import Behind, source_behind
from .user_state import OwnState, WorkerState, give_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .pipeline_state import PassState


class Asking(Protocol):
    """The progress of the pass."""

    is_wanted: bool

    @property
    def num_source_before(self) -> int:
        """The number of source items in the items handed out before the last two."""


class Watched:
    """A source that keeps its own state and, while states are wanted, the state after each item in
    flight.

    Args:
        start: the number of items before the first one.
        resume: the state to resume, if it is of as many ranks.
        rests: whether the source has just been given its state after the pass before.
    """

    def __init__(
        self,
        keeper: Any,
        progress: Asking,
        start: int,
        resume: PassState | None,
        misfits: list[str],
        *,
        most_missing: int,
        rests: bool,
    ) -> None:
        self._items: Iterable[Any]
        begun_from = WorkerState(num_items=start)
        if resume is not None and resume.source is not None:
            give_state(keeper, resume.source, "source")
            num_after = min(resume.num_after, start)
            begun_from = begun_from._replace(state=resume.source, num_after=num_after)
            self._items = Behind(
                _Begun(keeper) if num_after == start else keeper,
                num_after,
                misfits,
                may_jump=False,
                most_missing=most_missing,
                field="num_after",
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
        # thread copies the deque, which is atomic with a GIL and without, and searches the copy.
        self._reached: deque[WorkerState] = deque([first])

    def __iter__(self) -> Iterator[Any]:
        reached = self._reached
        for number, item in enumerate(self._items, self._start + 1):
            if self._progress.is_wanted:
                self._own.ask(number, ended=False)
                reached.append(self._own.reached(number, ended=False))
                least = self._progress.num_source_before
                while len(reached) > 1 and reached[1].num_items <= least:
                    reached.popleft()
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
