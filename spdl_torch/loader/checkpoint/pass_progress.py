"""The progress of a pass of a PipelineDataset, from which its state is made."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..sampling.parts import undivided
from .pipeline_state import PassState, items_per_output
from .source_behind import source_behind
from .user_state import WorkerState, ended_early, keeps_state, state_of
from .watched import Watched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...engine.definition import StageSpec
    from ...pipeline.pipeline import Pipeline

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
        self._misfits: list[str] = []
        self._resume: PassState | None = None
        self._epoch = epoch
        self._world = world
        self._per_output = items_per_output(stages)
        self._source: Any = None
        self._watched: Watched | None = None
        self._finished = False
        self.is_over = False
        """Whether the source is at rest: the loop has seen the end, or has left the pass."""

    @property
    def resumed(self) -> PassState | None:
        """The state that the pass resumes in its middle; None = it began at its beginning."""
        return self._resume

    @property
    def resumed_at(self) -> int:
        """The number of items handed out before the resume."""
        return 0 if self._resume is None else self._resume.num_items

    def begin(
        self, part: Any, resume: PassState | None, *, is_fixed: bool, rests: bool = False
    ) -> Any:
        """Begin the pass, and return the rest of the source's ``part`` after ``resume``. ``rests``:
        the source has just been given its state after the pass before.
        """
        start, self._source, self._resume = 0, part, resume
        if resume is not None and resume.num_source is not None:
            start = resume.start_for(self._world, fixed=is_fixed)
            self.num_items = start // (self._per_output or 1)
        if isinstance(part, AsyncIterable) or not keeps_state(part):
            if resume is not None and resume.source is not None and resume.world == self._world:
                raise ValueError(
                    f"load_state_dict: source holds the state of a source that keeps one, but "
                    f"{type(part).__name__} here does not."
                )
            return source_behind(part, start, self._most_missing(resume), self._misfits)
        missing = self._most_missing(resume)
        # A source's state fits only the same number of ranks: with another, ranks count items.
        own = resume if resume is not None and resume.world == self._world else None
        self._watched = Watched(
            part, self, start, own, self._misfits, most_missing=missing, rests=rests
        )
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
        """Make again, and drop, the items that were handed out before the resume; see ``fits``
        where there are fewer."""
        if self._resume is None or self._resume.num_source is not None:
            return
        num_before = self._resume.num_items
        if num_before:
            _logger.info("PipelineDataset: making %d items again", num_before)
        for _ in islice(items, num_before):
            self.num_items += 1
        if self.num_items < num_before:
            early = ended_early("num_items", self._source, self.num_items, num_before)
            self._misfits.append(str(early))

    @property
    def fits(self) -> bool:
        """Whether there were all items before the resume, as far as it was iterated."""
        return not self._misfits

    def check_fit(self) -> None:
        """Raise the error of a source that ended before the resume. The pipeline's failure has it,
        too, but would hide it; and a run keeps its errors, with the frames that they come through.
        """
        if self._misfits:
            raise ValueError(self._misfits.pop())

    def finish(self) -> None:
        """Mark the pass as finished: the loop has seen the end."""
        self._finished = self.is_over = True

    def is_counting(self, source: Any) -> bool:
        """Return whether a state that does not hold the source's own would count items since the
        pass began. ``source``: the whole one, of which this is a part."""
        return not self._finished and self.num_items > 0 and keeps_state(source)

    def source_at_rest(self) -> Any:
        """Return the source's own state after the pass, from which it makes the next one; None = it
        keeps none, or the pass is not over. Raises: as ``state_of``.
        """
        keeps_one = self._watched is not None
        return state_of(undivided(self._source)) if self.is_over and keeps_one else None

    def state(self, *, num_back: int) -> PassState:
        """Return the state as it was before the last ``num_back`` items, two at most."""
        if self._finished and not num_back:
            return PassState(
                epoch=self._epoch, finished=True, world=self._world, source=self.source_at_rest()
            )
        if self.pipeline is None and self._resume is not None:
            return self._resume  # the pass has begun, its pipeline has not
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
