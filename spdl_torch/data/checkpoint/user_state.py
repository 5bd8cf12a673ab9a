"""States that the user's own objects keep: datasets, their iterators, samplers, sources.

Only who asks for a loader's state has these objects asked for theirs. Their ``state_dict`` may be
meant for somebody else (it takes arguments), may fail, and may take long: plain loading must not
notice. A state is copied as soon as it is had, because some return a container that they go on
using.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal

from ...pipeline.failures import text_of
from ..error_notes import Reason, add_thread_note

__all__ = ["OwnState", "WorkerState", "check_protocol", "give_state", "keeps_state", "state_of"]

_CHEAP_NS = 1_000_000
_MOST_SHARE = 20
"""Of a worker's time, one in so many parts may go into asking for states that take longer."""


def keeps_state(each: Any) -> bool:
    """Whether it has both methods, whatever arguments they take. Asks for nothing."""
    return all(callable(_attribute(each, name)) for name in ("state_dict", "load_state_dict"))


def check_protocol(each: Any) -> TypeError | None:
    """What is wrong with the methods of something that has both, if they cannot be called as
    ``state_dict()`` and ``load_state_dict(state)``. Calls neither.
    """
    for name, arguments in (("state_dict", ()), ("load_state_dict", ({},))):
        try:
            signature = inspect.signature(_attribute(each, name))
        except (TypeError, ValueError):
            continue  # written in C, perhaps: calling it will tell
        try:
            signature.bind(*arguments)
        except TypeError:
            kind = type(each).__name__
            wanted = "state_dict()" if name == "state_dict" else "load_state_dict(state)"
            return TypeError(
                f"state_dict: {kind}.{name}{signature} cannot be called as {wanted}. "
                "Give the other arguments defaults; or, if it is not meant for a loader, set "
                f"state_dict = None on the {kind}, and its items are counted instead."
            )
    return None


def state_of(each: Any) -> Any:
    """Its state at this moment, as a copy.

    Raises: TypeError: it does not fit; what ``state_dict()`` or copying its result raises.
    """
    misfit = check_protocol(each)
    if misfit is not None:
        raise misfit
    try:
        return copy.deepcopy(each.state_dict())
    except Exception as error:
        add_thread_note(error, f"in {type(each).__name__}.state_dict(), asked by a loader's")
        raise


def give_state(each: Any, state: Any, field: str) -> None:
    """Let it go on from a state, of which it gets a copy. ``field``: of the loader's state.

    Raises: ValueError: it does not take it.
    """
    kind = type(each).__name__
    if not keeps_state(each) or check_protocol(each) is not None:
        raise ValueError(
            f"load_state_dict: {field} holds the state of an object that keeps one, but {kind} has "
            "no load_state_dict(state). Load it into a loader that is made as it was then."
        )
    try:
        each.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        raise ValueError(
            f"load_state_dict: {field} is not taken by {kind}.load_state_dict: {text_of(error)}."
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """How far one worker's iterable has got."""

    num_items: int = 0
    ended: bool = False
    state: Any = None
    """Of the iterator or the dataset, if it keeps one and was asked; otherwise items are passed
    over by making them again."""
    of_dataset: bool = False
    """The state is the dataset's, which outlives an epoch."""
    num_behind: int = 0
    """Items given since ``state`` was taken."""
    keeper: Literal["iterator", "dataset"] | None = None
    """Who keeps a state, asked or not; None = nobody. Not saved."""
    failure: Reason | None = None
    """Why a state that was wanted could not be had. Not saved."""


class OwnState:
    """The state of one worker's iterable: its iterator's or, if that keeps none, its dataset's.

    It is asked for behind a batch. One that takes more than a millisecond is asked for only so
    often that this takes no more than a twentieth of the worker's time; who resumes from it passes
    over the items that came since.
    """

    def __init__(self, iterator: Any, dataset: Any, begun_from: WorkerState) -> None:
        self._keeper: Literal["iterator", "dataset"] | None = None
        self._owner: Any = None
        if keeps_state(iterator):
            self._keeper, self._owner = "iterator", iterator
        elif keeps_state(dataset):
            self._keeper, self._owner = "dataset", dataset
        misfit = None if self._owner is None else check_protocol(self._owner)
        self._can_ask = self._owner is not None and misfit is None
        self._failure = None if misfit is None else Reason(misfit)
        self._state = begun_from.state  # the last one; None = nobody asked
        self._num_items = begun_from.num_items - begun_from.num_behind  # given before that
        self._is_of_end = begun_from.ended
        self._cost_ns = self._asked_ns = 0

    def ask(self, num_items: int, *, ended: bool, now: bool = False) -> None:
        """Take the state, behind so many items; unless it is dear, where it need not be ``now``.

        Never raises: who wants the state is told.
        """
        begun_ns, outer = perf_counter_ns(), sys.exception()
        is_dear = self._cost_ns > _CHEAP_NS
        is_recent = begun_ns - self._asked_ns < _MOST_SHARE * self._cost_ns
        if not self._can_ask or (is_dear and is_recent and not (ended or now)):
            return
        try:
            self._state, self._num_items, self._failure = state_of(self._owner), num_items, None
        except Exception as error:
            # Its frames would keep this worker's objects alive, and so would those of the end of
            # the iterable, or of an error, which is being handled here.
            _cut_context(error, outer)
            self._failure = Reason(error.with_traceback(None))
        self._is_of_end = ended
        self._asked_ns = perf_counter_ns()
        self._cost_ns = self._asked_ns - begun_ns

    def reached(self, num_items: int, *, ended: bool) -> WorkerState:
        """Where the iterable stands, behind so many items."""
        is_known = self._state is not None and self._failure is None
        # What the last item left is not yet what the end left: the code behind its last yield.
        if not is_known or (ended and not self._is_of_end):
            return WorkerState(
                num_items=num_items, ended=ended, keeper=self._keeper, failure=self._failure
            )
        return WorkerState(
            num_items=num_items,
            ended=ended,
            state=self._state,
            of_dataset=self._keeper == "dataset",
            num_behind=num_items - self._num_items,
            keeper=self._keeper,
        )


def _cut_context(error: BaseException, outer: BaseException | None) -> None:
    """Where it comes to what was being handled when it was raised."""
    each: BaseException | None = error
    while each is not None:
        if each.__context__ is outer:
            each.__context__ = None
        each = each.__context__


def _attribute(each: Any, name: str) -> Any:
    try:
        return getattr(each, name, None)
    except Exception:  # a property of the user's: torch does not look at it
        return None
