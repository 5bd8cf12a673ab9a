"""The memory of a pipeline dataset: which pass comes next, and the position in the present one."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from ..loader.checkpoint.pipeline_state import PassProgress, PassState, unordered_stage
from ..loader.checkpoint.source_behind import keeping
from ..loader.checkpoint.user_state import keeps_state
from ..loader.sampling.parts import Shard, Tail, take_shard, worker_shard
from ..loader.sampling.sampler_chain import deals_in_turn, is_shared_out
from .sources._base import DataSource

if TYPE_CHECKING:
    from ..engine.definition import PipelineSpec, SourceSpec

_logger = logging.getLogger("spdl_torch.data")


class DatasetState:
    """The position of one dataset's passes. A copy of the dataset has begun none."""

    def __init__(self, spec: PipelineSpec[Any]) -> None:
        self._spec = spec
        self._next_epoch = 0
        self.named_epoch: int | None = None
        """The epoch that ``set_epoch`` has named since a state was loaded or a pass has begun."""
        self._source_is_spent = False
        self._progress: PassProgress | None = None
        self._to_resume: PassState | None = None
        self._is_wanted = False
        self._has_warned = self._has_warned_counted = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None}

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be number ``epoch``."""
        resume = self._to_resume
        if resume is not None and resume.finished:  # the source's own state stays
            self._to_resume = replace(resume, epoch=epoch, begun=False)
        elif resume is not None and resume.epoch != epoch:
            self._to_resume = None  # the caller wants another pass, from its beginning
        self._next_epoch = self.named_epoch = epoch

    def move_to(self, epoch: int) -> None:
        """Let the next pass be number ``epoch``, unless one was named or a state says which."""
        if self.named_epoch is None and self._to_resume is None:
            self.set_epoch(epoch)

    def hand_out(self) -> int | None:
        """Count the next pass, which copies begin in place of this dataset, and return its number;
        None = they have it in a state within a pass, or with the source's."""
        resume, number = self._to_resume, self._next_epoch
        if resume is not None:
            if not resume.finished or resume.source is not None:
                return None
            number = resume.epoch + resume.begun
        self._to_resume = self.named_epoch = None
        self._next_epoch = number + 1
        return number

    def begin(self, ranks: Shard, tail: Tail) -> tuple[SourceSpec, PassProgress]:
        """Return the source of the new pass, and its progress: this rank's and worker's part, in
        its epoch, from the position of a state if there is one.
        """
        source = self._spec.src.source
        if self._source_is_spent:
            raise RuntimeError(
                f"PipelineDataset: the source, a {type(source).__name__}, can be iterated only "
                "once, and was. Pass an object whose __iter__ begins anew (a list, a sampler, a "
                "class with a generator for __iter__) instead of an iterator."
            )
        resume, epoch = self._to_resume, self._next_epoch
        rests = False
        if resume is not None and resume.finished:
            rests = resume.rest(source, ranks.count)
            epoch, resume = resume.epoch + resume.begun, None
        if hasattr(source, "set_epoch"):
            if isinstance(source, DataSource) and get_worker_info() and not keeps_state(source):
                # A worker thread of an iterator that was just dropped may still begin its pass.
                source = source._with()
            source.set_epoch(epoch)
        part = keeping(take_shard(source, ranks, worker_shard(), tail))
        progress = PassProgress(epoch, ranks.count, self._spec.pipes, is_wanted=self._is_wanted)
        makes_parts = hasattr(source, "shard") and not deals_in_turn(source)
        is_fixed = makes_parts or is_shared_out(source)
        part = progress.begin(part, resume, is_fixed=is_fixed, rests=rests)
        # Now that it has begun: a state that does not fit stays.
        self._source_is_spent = _runs_once(source)
        self._progress, self._to_resume, self.named_epoch = progress, None, None
        self._next_epoch = epoch + 1
        return replace(self._spec.src, source=part), progress

    def put_back(self, progress: PassProgress) -> None:
        """Have the state of a pass that its source did not fit, to resume it again."""
        if progress is self._progress and progress.resumed is not None:
            self._progress, self._to_resume = None, progress.resumed
            self._next_epoch = progress.resumed.epoch

    def load(self, state: dict[str, Any]) -> None:
        """Resume ``state`` in the next pass. Raises: ValueError: not a dataset's state."""
        self._to_resume = PassState.checked(state)
        self._next_epoch, self.named_epoch = self._to_resume.epoch, None
        self._is_wanted = True

    def to_resume(self) -> dict[str, Any] | None:
        """Return the state that the next pass resumes; None = there is none."""
        return None if self._to_resume is None else self._to_resume.as_dict()

    def want(self) -> None:
        """Collect states from now on."""
        self._is_wanted = True
        if self._progress is not None:
            self._progress.want()

    def _warn_if_counted(self, progress: PassProgress) -> None:
        """Log that a state, now, counts the items of a source that keeps one."""
        source = self._spec.src.source
        if self._has_warned_counted or not progress.is_counting(source):
            return
        self._has_warned_counted = True
        _logger.warning(
            "PipelineDataset.state_dict: nobody had asked %s for its state as the pass began, so "
            "this one counts its items instead of holding it: resuming makes %d items again, and "
            "is exact only if all its passes are alike. Call state_dict() once before training.",
            type(source).__name__,
            progress.num_items,
        )

    def state(self, *, num_back: int = 0) -> dict[str, Any]:
        """Return the state as it was before the last ``num_back`` items, two at most."""
        self.want()
        if self._to_resume is not None:
            return self._to_resume.as_dict()
        is_named = self.named_epoch is not None and not num_back
        if self._progress is None or (is_named and self._progress.finished):
            return self.of_next_pass()
        unordered = unordered_stage(self._spec.pipes)
        if unordered is not None and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "PipelineDataset.state_dict: stage %r passes items on as they are done, so what "
                'was under way is lost or repeated. Give it output_order="input".',
                unordered,
            )
        state = self._progress.state(num_back=num_back)
        # Of a first state within a pass the loader tells, in a worker.
        if state.source is None and (self._progress.began_wanted or get_worker_info() is None):
            self._warn_if_counted(self._progress)
        return state.as_dict()

    def of_next_pass(self) -> dict[str, Any]:
        """Return the state before the first item of the pass that ``iter()`` would begin now."""
        if self._to_resume is not None:
            return self._to_resume.as_dict()
        source = None
        if self._is_wanted and self._progress is not None:
            source = self._progress.source_at_rest()
        state = PassState(epoch=self._next_epoch, finished=True, begun=False, source=source)
        return state.as_dict()

    def ends_empty_tail(self, length: int) -> bool:
        """Return whether the present or coming pass, of ``length`` items, resumes after its last
        one. If it is the coming one, move on to the next pass.
        """
        resume = self._to_resume
        if resume is not None and not resume.finished:
            is_empty = resume.num_items >= length > 0
            if is_empty:
                self._next_epoch, self._to_resume = resume.epoch + 1, None
            return is_empty
        resumed = None if self._progress is None else self._progress.resumed
        return resumed is not None and resumed.num_items >= length > 0


def _runs_once(source: Any) -> bool:
    """Return whether a source is its own iterator, as generators and files are."""
    if isinstance(source, AsyncIterable):
        return hasattr(source, "__anext__")
    return hasattr(source, "__next__")
