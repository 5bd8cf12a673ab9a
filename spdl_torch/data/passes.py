"""Where a pass of a PipelineDataset stands, as a state, and how to get there again.

Where every stage passes one item on for one, or aggregates, and nothing was dropped, what the
trainer was handed tells which items of the source that was: the next pass begins behind those. As
soon as an op has dropped or failed an item, it does not; then the pass runs from its beginning and
what was handed out is thrown away.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from ..pipeline.definition import OpKind
from .states import check_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..pipeline.definition import StageSpec
    from ..pipeline.pipeline import Pipeline

__all__ = ["PassProgress", "PassState", "unordered_stage"]

_logger = logging.getLogger("spdl_torch.data")

_VERSION = 1

_ONE_FOR_ONE = (OpKind.FUNCTION, OpKind.ASYNC_FUNCTION)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassState:
    """What a state says, checked."""

    epoch: int
    finished: bool
    """The loop saw the end: the next pass begins at its beginning."""
    begun: bool = True
    """False: nothing was iterated over yet."""
    num_items: int = 0
    """Handed out on this rank."""
    num_source: int | None = None
    """Items of this rank's part of the source that are in those; None = that cannot be told."""
    world: int = 1
    source: Any = None
    """Of a source that has ``state_dict()`` of its own, behind those items."""
    version: int = _VERSION

    @classmethod
    def checked(cls, state: Mapping[str, Any]) -> PassState:
        """Raises: ValueError: not such a state, or of a newer release."""
        check_version(state, _VERSION, "PipelineDataset")
        try:
            return cls(**state)
        except TypeError as error:
            raise ValueError(f"load_state_dict: no state of a PipelineDataset: {error}.") from None

    def as_dict(self) -> dict[str, Any]:
        """Numbers alone, but for what the source puts in."""
        return asdict(self)

    def start_for(self, world: int, *, fixed: bool) -> int:
        """How many items of a rank's part to pass over. ``fixed``: the parts are made by the
        source, so their number must stay. Raises: ValueError: it does not fit.
        """
        assert self.num_source is not None, "guaranteed by the caller: it replays otherwise"
        if world == self.world:
            return self.num_source
        total, rest = divmod(self.num_source * self.world, world)
        if fixed or rest:
            raise ValueError(
                f"load_state_dict: the state is of {self.world} rank(s), here are {world}. "
                + (
                    "The source makes the ranks' parts itself, which are others now."
                    if fixed
                    else f"{self.num_source * self.world} items cannot be shared out among them."
                )
            )
        return total


def items_per_output(stages: Sequence[StageSpec]) -> int | None:
    """Source items in one item of the last stage; None = that varies."""
    if any(stage.kind not in (*_ONE_FOR_ONE, OpKind.AGGREGATE) for stage in stages):
        return None
    return prod(stage.batch_size for stage in stages if stage.kind is OpKind.AGGREGATE)


def unordered_stage(stages: Sequence[StageSpec]) -> str | None:
    """The first stage behind which items may come in another order than the source's."""
    for stage in stages:
        is_open = stage.kind is OpKind.PATH_VARIANTS and not stage.batched
        if is_open or (stage.concurrency > 1 and stage.output_order == "completion"):
            return stage.name
    return None


def source_behind(source: Any, start: int) -> Any:
    """The source without its first ``start`` items; at once where it can begin anywhere."""
    if not start:
        return source
    return (
        _AsyncBehind(source, start) if isinstance(source, AsyncIterable) else _Behind(source, start)
    )


@dataclass(frozen=True, slots=True)
class _Behind:
    source: Any
    start: int

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.source, "iterate"):
            return iter(self.source.iterate(self.start))
        return islice(iter(self.source), self.start, None)


@dataclass(frozen=True, slots=True)
class _AsyncBehind:
    source: AsyncIterable[Any]
    start: int

    async def __aiter__(self) -> AsyncIterator[Any]:
        left = self.start
        async for item in self.source:
            if left:
                left -= 1
            else:
                yield item


class PassProgress:
    """Of one pass. The thread that iterates writes, and asks for the state."""

    def __init__(self, epoch: int, world: int, stages: Sequence[StageSpec]) -> None:
        self.num_items = 0
        """Handed out, those before a resume included."""
        self.pipeline: Pipeline[Any] | None = None
        self.resumed_at = 0
        self._epoch = epoch
        self._world = world
        self._per_output = items_per_output(stages)
        self._num_to_throw_away = 0
        self._start = 0
        self._watched: Watched | None = None
        self._finished = False

    def begin(self, part: Any, resume: PassState | None, *, is_fixed: bool) -> Any:
        """The part of the source that is still to come."""
        start = 0
        if resume is not None:
            if resume.num_source is None:
                self._num_to_throw_away = resume.num_items
            else:
                start = resume.start_for(self._world, fixed=is_fixed)
                self.num_items = start // (self._per_output or 1)
            self.resumed_at = resume.num_items
        keeps_state = all(hasattr(part, name) for name in ("state_dict", "load_state_dict"))
        if not keeps_state or isinstance(part, AsyncIterable):
            return source_behind(part, start)
        if start and resume is not None and resume.source is not None:
            part.load_state_dict(resume.source)
        else:
            start = 0
            self._num_to_throw_away = 0 if resume is None else resume.num_items
            self.num_items = 0
        self._watched = Watched(part, start)
        return self._watched

    def throw_away(self, items: Iterator[Any]) -> None:
        """What was handed out before."""
        if self._num_to_throw_away:
            _logger.info("PipelineDataset: making %d items again", self._num_to_throw_away)
        for _ in islice(items, self._num_to_throw_away):
            self.num_items += 1

    def finish(self) -> None:
        """The loop has seen the end."""
        self._finished = True

    def state(self, *, behind: bool) -> PassState:
        """``behind``: of before the last item was handed out."""
        if self._finished and not behind:
            return PassState(epoch=self._epoch, finished=True, world=self._world)
        num_items, num_source = self.num_items - behind, None
        assert self.pipeline is not None, "guaranteed by the dataset: a pass has begun"
        if self._per_output is not None and not self.pipeline.num_lost:
            num_source = num_items * self._per_output
        source = None
        if self._watched is not None and num_source is not None and not behind:
            source = self._watched.state_behind(num_source)
        return PassState(
            epoch=self._epoch,
            finished=False,
            num_items=num_items,
            num_source=num_source,
            world=self._world,
            source=source,
        )


class Watched:
    """A source that keeps its own state: remembers it behind each item that is on its way."""

    def __init__(self, source: Any, start: int) -> None:
        self._source = source
        self._start = start
        self._states: deque[tuple[int, Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        self._states.append((self._start, self._source.state_dict()))
        for number, item in enumerate(self._source, self._start + 1):
            self._states.append((number, self._source.state_dict()))
            yield item

    def state_behind(self, num_items: int) -> Any:
        """The source's state when it had given so many; earlier ones are forgotten."""
        while len(self._states) > 1 and self._states[1][0] <= num_items:
            self._states.popleft()
        return self._states[0][1] if self._states else None
