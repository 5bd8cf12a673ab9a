"""The position in a pass of a PipelineDataset as a state, and how to resume there.

If every stage maps one item to one, or aggregates, and nothing was dropped, the number of items
that the trainer received gives the number of source items: the next pass begins after those. Once
an op has dropped or failed an item it does not: the pass then runs from its beginning, and the
items that were already handed out are thrown away.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from ...pipeline.definition.ops import OpKind
from ..state_fields import Field, check_fields, check_version, is_flag, is_whole_number
from .contents import length_of
from .made_by import PIPELINE_FIELDS
from .user_state import OwnState, WorkerState, ended_early, give_state, keeps_state, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ...pipeline.definition.specs import StageSpec
    from ...pipeline.pipeline import Pipeline

_logger = logging.getLogger("spdl_torch.data")

_VERSION = 2

_ONE_FOR_ONE = (OpKind.FUNCTION, OpKind.ASYNC_FUNCTION)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassState:
    """The checked contents of a state."""

    epoch: int
    finished: bool
    """Whether the loop saw the end: the next pass then starts from the beginning."""
    begun: bool = True
    """Whether a pass has ever begun."""
    num_items: int = 0
    """The number of items handed out on this rank."""
    num_source: int | None = None
    """The number of items of this rank's part of the source in those; None = unknown."""
    world: int = 1
    source: Any = None
    """The source's own state, if it keeps one and was asked."""
    num_after: int = 0
    """The number of source items since ``source`` was taken."""
    made_by: dict[str, Any] = field(default_factory=dict)
    """The source and stages that the state is of; {} = a state of version 1."""

    @classmethod
    def checked(cls, state: Mapping[str, Any]) -> PassState:
        """Check a state. Raises: ValueError: not a dataset's state, or of a newer release."""
        check_version(state, _VERSION, "PipelineDataset")
        values = copy.deepcopy({**state})
        left_out = ("made_by",) if values.pop("version") == 1 else ()
        required = [name for name in _FIELDS if name not in left_out]
        check_fields(values, _FIELDS, required, "PipelineDataset")
        check_fields(values.get("made_by", {}), PIPELINE_FIELDS, (), "PipelineDataset", "made_by.")
        resume = cls(**values)
        if resume.num_after > (resume.num_source or 0):
            raise ValueError("load_state_dict: num_after must be at most num_source.")
        return resume

    def as_dict(self) -> dict[str, Any]:
        """Return the state as numbers alone, apart from the source's own state."""
        return {**asdict(self), "version": _VERSION}  # asdict makes a deep copy

    def rest(self, source: Any, world: int) -> bool:
        """Give the source its own state after the pass, which has finished. Return whether there is
        one. Raises: ValueError: the source keeps none now.
        """
        # It fits only the same number of ranks, as in the middle of a pass.
        is_given = self.source is not None and self.world == world
        if is_given:
            give_state(source, self.source, "source")
        return is_given

    def start_for(self, world: int, *, fixed: bool) -> int:
        """Return how many items of a rank's part to skip. ``fixed``: the source makes the parts,
        so their number must stay. Raises: ValueError: the state does not fit.
        """
        assert self.num_source is not None, "guaranteed by the caller: it replays otherwise"
        if world == self.world:
            return self.num_source
        total, rest = divmod(self.num_source * self.world, world)
        if fixed or rest:
            raise ValueError(
                f"load_state_dict: the state is of {self.world} rank(s), this run has {world}. "
                + (
                    "The source makes each rank's part itself, and the parts are others now."
                    if fixed
                    else f"{self.num_source * self.world} items cannot be shared out among them."
                )
            )
        return total


_NUMBER = Field("a whole number >= 0 of 64 bits", is_whole_number)
_FLAG = Field("true or false", is_flag)
_FIELDS = {
    "epoch": _NUMBER,
    "finished": _FLAG,
    "begun": _FLAG,
    "num_items": _NUMBER,
    "num_source": Field(
        "a whole number >= 0 or null", lambda value: value is None or is_whole_number(value)
    ),
    "world": Field("a whole number >= 1", lambda value: is_whole_number(value, 1)),
    "source": Field("anything", lambda _: True),
    "num_after": _NUMBER,
    "made_by": Field("a dict", lambda value: isinstance(value, dict)),
}


def items_per_output(stages: Sequence[StageSpec]) -> int | None:
    """Return the number of source items in one item of the last stage; None = it varies."""
    if any(stage.kind not in (*_ONE_FOR_ONE, OpKind.AGGREGATE) for stage in stages):
        return None
    return prod(stage.batch_size for stage in stages if stage.kind is OpKind.AGGREGATE)


def unordered_stage(stages: Sequence[StageSpec]) -> str | None:
    """Return the name of the first stage that may change the order of items, or None."""
    for stage in stages:
        is_open = stage.kind is OpKind.PATH_VARIANTS and not stage.batched
        if is_open or (stage.concurrency > 1 and stage.output_order == "completion"):
            return stage.name
    return None


def source_behind(source: Any, start: int, most_missing: int = 0) -> Any:
    """Return the source without its first ``start`` items; at once, if it can begin anywhere.

    Raises (while iterating): ValueError: it has fewer, by more than ``most_missing``.
    """
    if not start:
        return source
    if isinstance(source, AsyncIterable):
        return _AsyncBehind(source, start, most_missing)
    return _Behind(source, start, most_missing=most_missing)


@dataclass(frozen=True, slots=True)
class _Behind:
    source: Any
    start: int
    may_jump: bool = True

    most_missing: int = 0
    """The most items by which the source may be shorter than ``start``: what an incomplete last
    group lacked."""
    field: str = "num_source"
    """The state's field from which ``start`` is."""

    def __iter__(self) -> Iterator[Any]:
        if self.may_jump and hasattr(self.source, "iterate"):
            length = length_of(self.source)
            if length is not None and length < self.start - self.most_missing:
                raise ended_early(self.field, self.source, length, self.start)
            return iter(self.source.iterate(self.start))
        return self._after_skipping()

    def _after_skipping(self) -> Iterator[Any]:
        items = iter(self.source)
        num_skipped = sum(1 for _ in islice(items, self.start))
        if num_skipped < self.start - self.most_missing:
            raise ended_early(self.field, self.source, num_skipped, self.start)
        yield from items


@dataclass(frozen=True, slots=True)
class _AsyncBehind:
    source: AsyncIterable[Any]
    start: int
    most_missing: int

    async def __aiter__(self) -> AsyncIterator[Any]:
        left = self.start
        async for item in self.source:
            if left:
                left -= 1
            else:
                yield item
        if left > self.most_missing:
            raise ended_early("num_source", self.source, self.start - left, self.start)


class PassProgress:
    """The progress of one pass. Only the iterating thread writes it and asks for the state."""

    def __init__(
        self, epoch: int, world: int, stages: Sequence[StageSpec], *, is_wanted: bool
    ) -> None:
        self.is_wanted = is_wanted
        """Whether states are wanted: a source that keeps one is then asked after every item."""
        self.num_items = 0
        """The number of items handed out, including those before a resume."""
        self.pipeline: Pipeline[Any] | None = None
        self.resumed_at = 0
        self._resume: PassState | None = None
        self._epoch = epoch
        self._world = world
        self._per_output = items_per_output(stages)
        self._num_to_throw_away = 0
        self._source: Any = None
        self._watched: Watched | None = None
        self._finished = False

    def begin(
        self, part: Any, resume: PassState | None, *, is_fixed: bool, rests: bool = False
    ) -> Any:
        """Begin the pass, and return the rest of the source's ``part`` after ``resume``. ``rests``:
        the source has just been given its state after the pass before.
        """
        start, self._source, self._resume = 0, part, resume
        if resume is not None:
            if resume.num_source is None:
                self._num_to_throw_away = resume.num_items
            else:
                start = resume.start_for(self._world, fixed=is_fixed)
                self.num_items = start // (self._per_output or 1)
            self.resumed_at = resume.num_items
        if isinstance(part, AsyncIterable) or not keeps_state(part):
            # A source's state fits only the same number of ranks: with another, ranks count items.
            if resume is not None and resume.source is not None and resume.world == self._world:
                raise ValueError(
                    f"load_state_dict: source holds the state of a source that keeps one, but "
                    f"{type(part).__name__} here does not."
                )
            return source_behind(part, start, self._most_missing(resume))
        missing = self._most_missing(resume)
        self._watched = Watched(part, self, start, resume, most_missing=missing, rests=rests)
        return self._watched

    def _most_missing(self, resume: PassState | None) -> int:
        """Return by how many items the source may be shorter than ``num_source`` says, which counts
        the last group as a whole one. Parts for another number of ranks may lack one item more.
        """
        if resume is None or resume.world == self._world:
            return (self._per_output or 1) - 1
        return (self._per_output or 1) * resume.world

    @property
    def num_source_before_last(self) -> int:
        """The number of source items in the items handed out before the last one."""
        return max(0, self.num_items - 1) * (self._per_output or 0)

    def throw_away(self, items: Iterator[Any]) -> None:
        """Make again, and drop, the items that were handed out before the resume.

        Raises: ValueError: there are fewer.
        """
        if self._num_to_throw_away:
            _logger.info("PipelineDataset: making %d items again", self._num_to_throw_away)
        for _ in islice(items, self._num_to_throw_away):
            self.num_items += 1
        if self.num_items < self._num_to_throw_away:
            raise ended_early("num_items", self._source, self.num_items, self._num_to_throw_away)

    def finish(self) -> None:
        """Mark the pass as finished: the loop has seen the end."""
        self._finished = True

    def source_at_rest(self) -> Any:
        """Return the source's own state after the pass, from which it makes the next one; None = it
        keeps none, or the pass has not finished. Raises: as ``state_of``.
        """
        keeps_one = self._watched is not None
        return state_of(self._source) if self._finished and keeps_one else None

    def state(self, *, before_last: bool) -> PassState:
        """Return the state now or, with ``before_last``, as it was before the last item."""
        if self._finished and not before_last:
            return PassState(
                epoch=self._epoch, finished=True, world=self._world, source=self.source_at_rest()
            )
        if self.pipeline is None and self._resume is not None:
            return self._resume  # a mixture has begun the pass, and has drawn nothing from it yet
        num_items, num_source = self.num_items - before_last, None
        num_lost = 0 if self.pipeline is None else self.pipeline.num_lost
        if self._per_output is not None and not num_lost:
            num_source = num_items * self._per_output
        own = WorkerState()
        if self._watched is not None and num_source is not None:
            own = self._watched.state_behind(num_source)
        if own.failure is not None:
            raise own.failure.taken()
        return PassState(
            epoch=self._epoch,
            finished=False,
            num_items=num_items,
            num_source=num_source,
            world=self._world,
            source=own.state,
            num_after=own.num_after,
        )


class Watched:
    """A source that keeps its own state and, while states are wanted, the state after each item in
    flight.
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
        self._rests = rests
        begun_from = WorkerState(num_items=start)
        if resume is not None and start and resume.source is not None:
            give_state(keeper, resume.source, "source")
            num_after = min(resume.num_after, start)
            begun_from = begun_from._replace(state=resume.source, num_after=num_after)
            self._items = _Behind(
                keeper, num_after, may_jump=False, most_missing=most_missing, field="num_after"
            )
        else:
            self._items = source_behind(keeper, start, most_missing)
        self._progress = progress
        self._start = start
        self._own = OwnState(None, keeper, begun_from)
        # The source's thread appends, and removes states that the trainer has passed; the trainer's
        # thread copies the deque, which is atomic with a GIL and without, and searches the copy.
        self._reached: deque[WorkerState] = deque([self._own.reached(start, ended=False)])

    def __iter__(self) -> Iterator[Any]:
        reached = self._reached
        for number, item in enumerate(self._items_or_again(), self._start + 1):
            if self._progress.is_wanted:
                self._own.ask(number, ended=False)
                reached.append(self._own.reached(number, ended=False))
                least = self._progress.num_source_before_last
                while len(reached) > 1 and reached[1].num_items <= least:
                    reached.popleft()
            yield item

    def _items_or_again(self) -> Iterator[Any]:
        """Yield the items. A source whose state is a position, and that has just been given that of
        its end, has none until it is iterated once more."""
        is_empty = True
        for item in self._items:
            is_empty = False
            yield item
        if is_empty and self._rests:
            yield from self._items

    def state_behind(self, num_items: int) -> WorkerState:
        """Return the source's state after ``num_items`` items."""
        found, *later = self._reached.copy()
        for each in later:
            if each.num_items <= num_items:
                found = each
        if found.state is None:
            return found
        return found._replace(num_after=found.num_after + num_items - found.num_items)
