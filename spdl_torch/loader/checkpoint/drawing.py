"""The indices of a sampler that keeps its own state, and that state at the loop's position."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...handlers import unless_of_handler
from ..error_notes import is_of_handler
from ..sampling.sampler_chain import unshared
from .epoch import SamplerState
from .user_state import state_of

_logger = logging.getLogger("spdl_torch.data")

_PASSED = (
    "DataLoader.state_dict: Ctrl-C came while %s was asked for an index, and its own state may be "
    "past indices that the loop has not had, those of one batch at most: resuming leaves them out. "
    "A state that was saved before Ctrl-C has them."
)


class Drawing:
    """An iterator over the indices of a sampler that keeps its own state.

    It gives the indices that a saved loop had drawn and not received, then those of the sampler.

    A sampler's state alone may mean two things. A generator that has not begun knows nothing of its
    epoch yet, so its first index is drawn before it is asked. One that has given its last index may
    begin the next epoch once it is restored, so a state says how many are left, where the sampler
    has a length.

    Args:
        indices: the epoch's indices from there on, after ``pending``.
        begin: begins an epoch of the sampler.
        num_left: the number of ``indices``; None = unknown.
        restored: the state in the middle of this epoch that the sampler was given; None = none.
    """

    def __init__(
        self,
        sampler: Any,
        indices: Iterator[Any],
        begin: Callable[[], Iterator[Any]],
        num_left: int | None,
        *,
        pending: Iterable[Any] = (),
        restored: Any = None,
    ) -> None:
        self._sampler = sampler
        self._indices = indices
        self._begin = begin
        self._num_left = num_left
        self._pending = deque(pending)
        self._restored = restored
        self._has_begun = restored is not None
        self._has_ended = self._has_begun and num_left == 0
        self._failure: BaseException | None = None
        self.given: tuple[Any, ...] = ()
        """The index given to the loop that nobody has recorded yet; () = there is none. Ctrl-C may
        come before it is, so it stays until then."""
        self._is_asking = False
        """Whether the sampler is at an index or, for ever, Ctrl-C has come while it was."""

    def __iter__(self) -> Drawing:
        return self

    def __next__(self) -> Any:
        if not (self.given or self._pending):
            self._draw()
        elif not self.given:
            # No calls, and so no places where Python looks for Ctrl-C: it is here or there.
            self.given = (self._pending[0],)
            del self._pending[0]
        return self.given[0]

    @property
    def is_over(self) -> bool:
        """Whether it is known that there are no more indices."""
        return self._has_ended and not (self.given or self._pending)

    def now(self) -> SamplerState:
        """Return the sampler's state here. Raises: what its ``state_dict()`` raises."""
        if self._is_asking:  # its generator may have ended, which is not the epoch's end
            _logger.warning(_PASSED, type(self._sampler).__name__)
        elif not self._has_begun:
            try:
                next(self, None)  # it stays for the loop
            except unless_of_handler(Exception) as error:
                self._failure = error
        left = self._num_left
        if left is not None and left < 0:  # its length is too small
            left = None
        return SamplerState(self.at_end(), (*self.given, *self._pending), left)

    def at_end(self) -> Any:
        """Return the sampler's state, whatever is left of its indices."""
        if self._restored is not None:  # it was not asked for an index since: it may not know yet
            return copy.deepcopy(self._restored)
        return state_of(self._sampler)

    def _draw(self) -> None:
        """Have the sampler give an index."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._has_ended:
            raise StopIteration
        is_first, self._has_begun, self._restored = not self._has_begun, True, None
        self._is_asking = True
        try:
            for index in self._indices:  # as next(), but no place where Python looks for Ctrl-C
                self.given = (index,)
                self.given = (unshared(index),)  # the sampler may change it
                if self._num_left is not None:
                    self._num_left -= 1
                self._is_asking = False
                return
        except Exception as error:
            self._is_asking = is_of_handler(error)
            raise
        self._is_asking = False
        if not is_first:
            self._has_ended, self._num_left = True, 0
            raise StopIteration
        # A sampler that keeps its position, restored at the end of an epoch, has none left.
        self._indices = self._begin()
        self._draw()
