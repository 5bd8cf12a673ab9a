"""A source without the items that were handed out before a state."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from .made_by import length_of
from .user_state import EndedEarly, ended_early

if TYPE_CHECKING:
    from collections.abc import Iterable


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
    if isinstance(source, AsyncIterable):
        return _AsyncBehind(source, start, most_missing, misfits)
    return Behind(source, start, misfits, most_missing=most_missing)


@dataclass(frozen=True, slots=True)
class Behind:
    """A source without its first items."""

    source: Any
    start: int
    misfits: list[str]
    may_jump: bool = True
    """Whether the source may begin at ``start`` by its ``iterate``."""
    most_missing: int = 0
    """The most items by which the source may be shorter than ``start``: what an incomplete last
    group lacked."""
    field: str = "num_source"
    """The state's field from which ``start`` is."""

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
        if is_empty and least > 0 and not _has_any(self.source.iterate(least - 1)):
            self._check(sum(1 for _ in self.source.iterate(0)))

    def _after_skipping(self) -> Iterator[Any]:
        try:
            items = iter(self.source)
        except EndedEarly as error:
            self.misfits.append(str(error))
            raise
        self._check(sum(1 for _ in islice(items, self.start)))
        yield from items

    def _check(self, num_items: int) -> None:
        if num_items < self.start - self.most_missing:
            error = ended_early(self.field, self.source, num_items, self.start)
            self.misfits.append(str(error))
            raise error


def _has_any(items: Iterable[Any]) -> bool:
    return any(True for _ in items)


@dataclass(frozen=True, slots=True)
class _AsyncBehind:
    source: AsyncIterable[Any]
    start: int
    most_missing: int
    misfits: list[str]

    async def __aiter__(self) -> AsyncIterator[Any]:
        left = self.start
        async for item in self.source:
            if left:
                left -= 1
            else:
                yield item
        if left > self.most_missing:
            num_items = self.start - left
            error = ended_early("num_source", self.source, num_items, self.start)
            self.misfits.append(str(error))
            raise error
