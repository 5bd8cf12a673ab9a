"""States that the user's own objects keep: datasets, their iterators, samplers, sources; and the
passes of a ``PipelineDataset`` in a loader, which go on from epoch to epoch: a loader's state has
the number of the one that it is within, or of the next one.

These objects are asked for their states only if somebody asks for the loader's. Their
``state_dict`` may serve another purpose (it takes arguments), may fail, and may be slow: plain
loading must not be affected. A state is copied at once, because some objects return a container
that they keep using.
"""

from __future__ import annotations

import copy
import logging
import sys
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch.utils.data import get_worker_info

from ...handlers import unless_of_handler
from ...objects.members import all_datasets
from ..error_notes import Reason, add_thread_note

if TYPE_CHECKING:
    from .saved_state import ResumeState

_logger = logging.getLogger("spdl_torch.data")

_CHEAP_NS = 1_000_000
_MOST_SHARE = 20
"""The reciprocal of the share of a worker's time that may go into taking expensive states."""


def keeps_state(each: Any) -> bool:
    """Return whether the object has both methods, with any arguments. Calls neither."""
    try:
        own = getattr(each, "state_dict", None), getattr(each, "load_state_dict", None)
    except unless_of_handler(Exception):  # the user's property fails; torch would not read it
        return False
    return callable(own[0]) and callable(own[1])


def state_of(each: Any) -> Any:
    """Return a copy of the object's state. Raises: what ``state_dict()`` or copying its result
    raises."""
    try:
        return copy.deepcopy(each.state_dict())
    except BaseException as error:
        add_thread_note(error, f"in {type(each).__name__}.state_dict(), asked by a loader's")
        raise


def give_state(each: Any, state: Any, field: str) -> None:
    """Load a copy of ``state`` into the object. ``field``: its name in the loader's state.

    Raises: ValueError: the object has no suitable method; what its method raises, with a note.
    """
    kind = type(each).__name__
    if not keeps_state(each):
        raise ValueError(
            f"load_state_dict: {field} holds the state of an object that keeps one, but {kind} has "
            "no load_state_dict(state). Load it into a loader that is made as it was then."
        )
    try:
        each.load_state_dict(copy.deepcopy(state))
    except BaseException as error:
        add_thread_note(error, f"load_state_dict: {field} is not taken by {kind}.load_state_dict")
        raise


class EndedEarly(ValueError):
    """A source cannot resume its own state: what is inside ended before it."""


def ended_early(field: str, each: Any, num_items: int, expected: int) -> ValueError:
    """Return the error of resuming by counting, where an iterable has fewer items than were handed
    out before the state. ``field``: the state's, which has the number.
    """
    kind = type(getattr(each, "undivided", each)).__name__
    return ValueError(
        f"load_state_dict: {field}: resuming makes {expected} item(s) of {kind} again, which were "
        f"handed out before the state was taken, but it ended after {num_items}. Resume with the "
        "data that the state was saved with. If it keeps a position from one iter() to the next, "
        "resume with a new object, and give it state_dict() and load_state_dict(state); if it has "
        "them, call the loader's state_dict() once before training, so that states hold its own."
    )


class WorkerState(NamedTuple):
    """The progress of one worker's iterable."""

    num_items: int = 0
    ended: bool = False
    state: Any = None
    """The state of the iterator or the dataset, if one keeps it and was asked. Without it, items
    are skipped by making them again."""
    of_dataset: bool = False
    """Whether the state is the dataset's, which outlives an epoch."""
    num_after: int = 0
    """The number of items since ``state`` was taken."""
    keeper: Literal["iterator", "dataset"] | None = None
    """The object that keeps a state, asked or not; None = neither. Not saved."""
    failure: Reason | None = None
    """The reason why a wanted state could not be taken. Not saved."""


class OwnState:
    """The state of one worker's iterable: its iterator's or, if that keeps none, its dataset's.

    It is taken after a batch. A state that takes more than a millisecond, twice in a row, is taken
    only so often that this costs at most a twentieth of the worker's time; resuming from it skips
    the items that came since. Once does not count: the thread may have waited for a core.
    """

    def __init__(self, iterator: Any, dataset: Any, begun_from: WorkerState) -> None:
        self._keeper: Literal["iterator", "dataset"] | None = None
        self._owner: Any = None
        if keeps_state(iterator):
            self._keeper, self._owner = "iterator", iterator
        elif keeps_state(dataset):
            self._keeper, self._owner = "dataset", dataset
        self._failure: Reason | None = None
        self._state = begun_from.state  # the last one; None = none was taken
        self._is_datasets = begun_from.of_dataset  # whether that outlives an epoch
        self._num_items = begun_from.num_items - begun_from.num_after  # items before it
        self._is_of_end = begun_from.ended
        self._cost_ns = self._last_cost_ns = self._asked_ns = 0
        self.num_drawn = begun_from.num_items
        """The number of items that were drawn from the iterable at most, handed out or not."""

    def ask(self, num_items: int, *, ended: bool, now: bool = False) -> None:
        """Take the state after ``num_items`` items; skip one that is expensive, unless ``now``.

        Never raises, but for Ctrl-C: an error is kept for whoever wants the state.
        """
        begun_ns, outer = perf_counter_ns(), sys.exception()
        is_dear = self._cost_ns > _CHEAP_NS
        is_recent = begun_ns - self._asked_ns < _MOST_SHARE * self._cost_ns
        if self._owner is None or (is_dear and is_recent and not (ended or now)):
            return
        try:
            self._state, self._num_items, self._failure = state_of(self._owner), num_items, None
            self._is_datasets = self._keeper == "dataset"
        except BaseException as error:
            if not isinstance(error, Exception) and get_worker_info() is None:
                raise  # Ctrl-C comes on the trainer's thread; a worker has to answer
            # The error's frames would keep this worker's objects alive. So would the frames of its
            # context: the exception, or the iterable's end, that is being handled here.
            _cut_context(error, outer)
            self._failure = Reason(error.with_traceback(None))
        self._is_of_end = ended
        self._asked_ns = perf_counter_ns()
        cost_ns = self._asked_ns - begun_ns
        self._cost_ns, self._last_cost_ns = min(cost_ns, self._last_cost_ns), cost_ns

    def warn_of_lost(self, num_handed: int) -> None:
        """Log that the state, just taken, has passed items that nobody has had: those of a batch
        that Ctrl-C has cut off, or that is under way. The iterable alone knows where it stands."""
        if self._owner is not None and (num_lost := self.num_drawn - num_handed) > 0:
            _logger.warning(
                "state_dict: the loop has not had the last batch (Ctrl-C? a handler?), and %s, "
                "which keeps a state of its own, is past its items, %d at most: they do not come "
                "again.",
                type(self._owner).__name__,
                num_lost,
            )

    def reached(self, num_items: int, *, ended: bool) -> WorkerState:
        """Return the iterable's progress after ``num_items`` items."""
        reached = WorkerState(num_items, ended, keeper=self._keeper, failure=self._failure)
        is_known = self._state is not None and self._failure is None
        # The state after the last item is not that of the end: code may follow the last yield.
        if not is_known or (ended and not self._is_of_end):
            return reached
        return reached._replace(
            state=self._state,
            of_dataset=self._is_datasets,
            num_after=num_items - self._num_items,
        )


def _cut_context(error: BaseException, outer: BaseException | None) -> None:
    """Cut the error's context at ``outer``, the exception that was being handled."""
    each: BaseException | None = error
    while each is not None:
        if each.__context__ is outer:
            each.__context__ = None
        each = each.__context__


class Passes(Protocol):
    """Those of a ``PipelineDataset``, whose module is not imported here: it brings the engine."""

    named_epoch: int | None
    """The epoch that ``set_epoch`` has named since; None lets a state that is loaded decide."""

    def of_next_pass(self) -> dict[str, Any]:
        """Return the state before the first item of the next pass."""

    def want(self) -> None:
        """Collect states from now on."""

    def move_to(self, epoch: int) -> None:
        """Let the next pass be that one, unless one was named or a state says which it is."""

    def hand_out(self) -> int | None:
        """Count the next pass, which copies begin, and return its number; None = they know it."""


def passes_of(dataset: Any) -> Passes | None:
    """Return the passes of a dataset that has them. Asks the class: an object that answers to any
    attribute name would seem to have some."""
    return dataset._state if hasattr(type(dataset), "_begun_pass") else None


def begun(dataset: Any) -> Any:
    """Return ``iter(dataset)``; of passes one that has begun, so that the next one is another,
    unless a class of the user's has an ``__iter__`` of its own."""
    owner = next((each for each in type(dataset).__mro__ if "__iter__" in vars(each)), object)
    return dataset._begun_pass() if "_begun_pass" in vars(owner) else iter(dataset)


def pass_of_workers(dataset: object, resume: ResumeState | None, num_workers: int) -> int | None:
    """Return the number of the pass with which the workers' copies of a loader's dataset begin an
    epoch, and count it there; None = there are none, or they know it.

    Without workers the dataset itself counts, and is told where a state lacks the number.
    """
    passes = passes_of(dataset)
    if passes is not None and resume is not None:
        passes.move_to(_pass_of(resume, is_begun=num_workers > 0))
    return passes.hand_out() if passes and num_workers else None


def left_for_another_pass(dataset: object, resume: ResumeState) -> bool:
    """Return whether ``set_epoch`` has named another pass than that within which a state is."""
    passes = passes_of(dataset)
    named = None if passes is None else passes.named_epoch
    return named is not None and named != _pass_of(resume, is_begun=True)


def _pass_of(resume: ResumeState, *, is_begun: bool) -> int:
    """Return the number of the pass of a state's epoch; of the next one after a finished epoch.
    ``is_begun``: whether a pass begins even where nothing is left of the epoch."""
    is_left = is_begun or not all(each.ended for each in resume.workers)
    if not resume.finished and isinstance(resume.dataset, dict):
        return int(resume.dataset.get("epoch", resume.epoch)) + (not is_left)
    for each in resume.workers:
        state = each.state if each.of_dataset and isinstance(each.state, dict) else {}
        if isinstance(state.get("epoch"), int):
            # A worker that has given nothing of the epoch yet has the state of the pass before.
            is_before = resume.finished or not (each.ended or each.num_items)
            is_over = is_before and state.get("finished") and state.get("begun", True)
            return int(state["epoch"]) + bool(is_over)
    return resume.epoch + (resume.finished or not is_left)


def give_state_between_epochs(dataset: Any, state: Any, field: str) -> None:
    """Give a dataset its state before the first item of an epoch; ``field``: its name in the
    loader's state. An epoch that was named after the loader's ``load_state_dict`` counts.
    """
    passes = passes_of(dataset)
    epoch = None if passes is None else passes.named_epoch
    give_state(dataset, state, field)
    if epoch is not None:
        dataset.set_epoch(epoch)


def name_saved_pass(dataset: Any, state: Any) -> None:
    """Let the pass be next that was next when a loader's state was taken, between two epochs,
    unless another one was named since. Raises: ValueError: it is no state of passes."""
    epoch = state.get("epoch") if isinstance(state, dict) else None
    if type(epoch) is not int or epoch < 0:
        raise ValueError(
            "load_state_dict: dataset is not of a PipelineDataset, which this loader has. Make the "
            "loader as it was then."
        )
    if dataset._state.named_epoch is None:
        dataset.set_epoch(epoch)


def check_no_passes_inside(dataset: Any, resume: ResumeState) -> None:
    """Check that the items which a state within a later epoch counts come again: not where they are
    of a later pass of a ``PipelineDataset`` inside, of which no state knows the number.

    Raises: ValueError: they do not.
    """
    is_counted = any(each.num_items and each.state is None for each in resume.workers)
    if not (resume.epoch and is_counted) or keeps_state(dataset):
        return
    inside = filter(None, map(passes_of, all_datasets(dataset)))
    if all(each.named_epoch is not None for each in inside):
        return
    kind = type(dataset).__name__
    raise ValueError(
        f"load_state_dict: the state is of epoch {resume.epoch}, within which {kind} has given "
        f"items of a later pass of the PipelineDataset inside, but no state has that pass's "
        f"number: other items would be skipped. Make one PipelineDataset of all sources, give "
        f"{kind} state_dict() and load_state_dict(state), or call set_epoch(epoch) of each "
        "PipelineDataset inside between load_state_dict() and iter()."
    )
