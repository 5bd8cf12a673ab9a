"""The position in a pass of a PipelineDataset as a state, and how to resume there.

If every stage maps one item to one, or aggregates, and nothing was dropped, the number of items
that the trainer received gives the number of source items: the next pass begins after those. Once
an op has dropped or failed an item it does not: the pass then runs from its beginning, and the
items that were already handed out are thrown away.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

from ...engine.ops import OpKind
from ..sampling.parts import undivided
from ..state_fields import checked_values
from .source_behind import Watched, source_behind
from .user_state import WorkerState, ended_early, give_state, keeps_state, state_of

if TYPE_CHECKING:
    from ...engine.definition import StageSpec
    from ...pipeline.pipeline import Pipeline


_VERSION = 4

_ONE_FOR_ONE = (OpKind.FUNCTION, OpKind.ASYNC_FUNCTION)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassState:
    """The checked contents of a state: its fields are those of the state."""

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

    @classmethod
    def checked(cls, state: Mapping[str, Any]) -> PassState:
        """Check a state. Raises: ValueError: not a dataset's state, or of another format."""
        names = [each.name for each in fields(cls)]
        return cls(**checked_values(names, state, _VERSION, "PipelineDataset"))

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


def items_per_output(stages: Sequence[StageSpec]) -> int | None:
    """Return the number of source items in one item of the last stage; None = it varies."""
    if any(stage.kind not in (*_ONE_FOR_ONE, OpKind.AGGREGATE) for stage in stages):
        return None
    return prod(stage.batch_size for stage in stages if stage.kind is OpKind.AGGREGATE)


def unordered_stage(stages: Sequence[StageSpec]) -> str | None:
    """Return the name of the first stage that may change the order of items, or None."""
    for stage in stages:
        if stage.concurrency > 1 and stage.output_order == "completion":
            return stage.name
    return None


_logger = logging.getLogger("spdl_torch.data")


class PassProgress:
    """The progress of one pass. Only the iterating thread writes it and asks for the state."""

    def __init__(
        self, epoch: int, world: int, stages: Sequence[StageSpec], *, is_wanted: bool
    ) -> None:
        self.began_wanted = self.is_wanted = is_wanted
        """Whether states are wanted: a source that keeps one is then asked after every item."""
        self.num_items = 0
        """The number of items handed out, including those before a resume."""
        self.pipeline: Pipeline[Any] | None = None
        self.misfits: list[str] = []
        """What says that the source is shorter than the state's position, as far as it was
        iterated."""
        self.resumed: PassState | None = None
        """The state that the pass resumes in its middle; None = it began at its beginning."""
        self._epoch = epoch
        self._world = world
        self._per_output = items_per_output(stages)
        self._source: Any = None
        self._watched: Watched | None = None
        self.finished = False
        """Whether the loop has seen the end."""
        self.is_over = False
        """Whether the source is at rest: the loop has seen the end, or has left the pass."""

    def want(self) -> None:
        """Collect states from now on."""
        self.is_wanted, self.began_wanted = True, self.began_wanted or self.pipeline is None

    def begin(
        self, part: Any, resume: PassState | None, *, is_fixed: bool, rests: bool = False
    ) -> Any:
        """Begin the pass, and return the rest of the source's ``part`` after ``resume``. ``rests``:
        the source has just been given its state after the pass before.
        """
        start, self._source, self.resumed = 0, part, resume
        if resume is not None and resume.num_source is not None:
            start = resume.start_for(self._world, fixed=is_fixed)
            self.num_items = start // (self._per_output or 1)
        missing = self._most_missing(resume)
        # A source's state fits only the same number of ranks: with another, ranks count items.
        own = resume if resume is not None and resume.world == self._world else None
        if isinstance(part, AsyncIterable) or not keeps_state(part):
            if own is not None and own.source is not None:
                raise ValueError(
                    f"load_state_dict: source holds the state of a source that keeps one, but "
                    f"{type(part).__name__} here does not."
                )
            return source_behind(part, start, missing, self.misfits)
        self._watched = Watched(part, self, start, own, most_missing=missing, rests=rests)
        return self._watched

    def _most_missing(self, resume: PassState | None) -> int:
        """Return by how many items the source may be shorter than ``num_source`` says, which counts
        the last group as a whole one. Parts for another number of ranks may lack one item more.
        """
        if resume is None or resume.world == self._world:
            return (self._per_output or 1) - 1
        return (self._per_output or 1) * resume.world

    @property
    def num_source_before(self) -> int:
        """The number of source items in the items handed out before the last two."""
        return max(0, self.num_items - 2) * (self._per_output or 0)

    def throw_away(self, items: Iterator[Any]) -> None:
        """Make again, and drop, the items that were handed out before the resume; see ``misfits``
        where there are fewer."""
        if self.resumed is None or self.resumed.num_source is not None:
            return
        num_before = self.resumed.num_items
        if num_before:
            _logger.info("PipelineDataset: making %d items again", num_before)
        for _ in islice(items, num_before):
            self.num_items += 1
        if self.num_items < num_before:
            early = ended_early("num_items", self._source, self.num_items, num_before)
            self.misfits.append(str(early))

    def check_fit(self) -> None:
        """Raise the error of a source that ended before the resume. The pipeline's failure has it,
        too, but would hide it; and a run keeps its errors, with the frames that they come through.
        """
        if self.misfits:
            raise ValueError(self.misfits.pop())

    def is_counting(self, source: Any) -> bool:
        """Return whether a state that does not hold the source's own would count items since the
        pass began. ``source``: the whole one, of which this is a part."""
        return not self.finished and self.num_items > 0 and keeps_state(source)

    def source_at_rest(self) -> Any:
        """Return the source's own state after the pass, from which it makes the next one; None = it
        keeps none, or the pass is not over. Raises: as ``state_of``.
        """
        keeps_one = self._watched is not None
        return state_of(undivided(self._source)) if self.is_over and keeps_one else None

    def state(self, *, num_back: int) -> PassState:
        """Return the state as it was before the last ``num_back`` items, two at most."""
        if self.finished and not num_back:
            return PassState(
                epoch=self._epoch, finished=True, world=self._world, source=self.source_at_rest()
            )
        if self.pipeline is None and self.resumed is not None:
            return self.resumed  # the pass has begun, its pipeline has not
        num_items, num_source = self.num_items - num_back, None
        num_lost = 0 if self.pipeline is None else self.pipeline.num_lost
        if self._per_output is not None and not num_lost:
            num_source = num_items * self._per_output
        own = WorkerState()
        if self._watched is not None:
            watched = self._watched
            own = watched.at_beginning if num_source is None else watched.state_behind(num_source)
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
