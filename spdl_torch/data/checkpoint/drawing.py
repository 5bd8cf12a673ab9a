"""The indices of a sampler that keeps its own state, and that state at the loop's position."""

from __future__ import annotations

import copy
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from ..sampling.sampler_chain import unshared
from .epoch_start import SamplerState
from .user_state import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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
    epoch yet; and one that has given its last index may begin the next epoch once it is restored.
    So a state is asked of a sampler that has begun, and says whether the epoch's indices have
    ended. To know that, the next one is drawn, and kept for the loop.

    After a ``break`` a sampler may go on in the next epoch where it was. Then what was drawn ahead
    is that epoch's: a question would cost an index otherwise.

    Args:
        indices: the epoch's indices from there on, after ``pending``.
        begin: begins an epoch of the sampler.
        may_go_on: whether the sampler may go on across epochs, as far as is known.
        restored: the state in the middle of this epoch that the sampler was given; None = none.
        ended: whether ``pending`` are the epoch's last ones.
    """

    def __init__(
        self,
        sampler: Any,
        indices: Iterator[Any],
        begin: Callable[[], Iterator[Any]],
        *,
        may_go_on: bool = False,
        pending: Iterable[Any] = (),
        restored: Any = None,
        ended: bool = False,
    ) -> None:
        self._sampler = sampler
        self._indices = indices
        self._begin = begin
        self._ahead = deque(pending)
        self._restored = restored
        self._ended = ended
        self.may_go_on = may_go_on
        self._has_begun = restored is not None or bool(self._ahead)
        self._before_last: Any = None
        """The sampler's state before the last of ``_ahead`` was drawn, if it was asked then."""
        self._failure: BaseException | None = None
        self.given: tuple[Any, ...] = ()
        """The index given to the loop that nobody has recorded yet; () = there is none. Ctrl-C may
        come before it is, so it stays until then."""
        self._is_asking = False
        """Whether the sampler is at an index or, for ever, Ctrl-C has come while it was."""

    def __iter__(self) -> Drawing:
        return self

    def __next__(self) -> Any:
        if not self.given:
            if not self._ahead:
                self._draw()
            if len(self._ahead) == 1:
                self._before_last = None
            # No calls, and so no places where Python looks for Ctrl-C: it is here or there.
            self.given = (self._ahead[0],)
            del self._ahead[0]
        return self.given[0]

    def look_ahead(self) -> list[Any]:
        """Return the indices that come next, at least one unless there are no more."""
        if not self._ahead:
            self._draw_ahead()
        return list(self._ahead)

    def left_over(self) -> list[Any]:
        """Return the indices drawn ahead that the next epoch begins with, and let go of them."""
        if not self.may_go_on:
            return []
        left, self._before_last = [*self.given, *self._ahead], None
        self._ahead.clear()
        self.given = ()
        return left

    def now(self) -> SamplerState:
        """Return the sampler's state here. Raises: what its ``state_dict()`` raises."""
        if self._is_asking:  # its generator may have ended, which is not the epoch's end
            _logger.warning(_PASSED, type(self._sampler).__name__)
            return SamplerState(self.at_end(), (*self.given, *self._ahead))
        if not self._has_begun:
            self._draw_ahead()
        if self._before_last is not None:
            *ahead, _ = self._ahead
            return SamplerState(copy.deepcopy(self._before_last), (*self.given, *ahead))
        state, drawn = self.at_end(), (*self.given, *self._ahead)
        if self._restored is None and not self._ended and self._draw_ahead():
            self._before_last = copy.deepcopy(state)
        return SamplerState(state, drawn, self._ended)

    def at_end(self) -> Any:
        """Return the sampler's state, whatever is left of its indices."""
        if self._restored is not None:  # it was not asked for an index since: it may not know yet
            return copy.deepcopy(self._restored)
        return state_of(self._sampler)

    def _draw_ahead(self) -> bool:
        """Draw an index and keep it for the loop, or the sampler's error in its place."""
        if self._ended or self._failure is not None:
            return False
        try:
            self._draw()
        except StopIteration:
            return False
        except Exception as error:
            self._failure = error
            return False
        return True

    def _draw(self) -> None:
        """Draw an index to the end of those ahead."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._ended:
            raise StopIteration
        is_first, self._has_begun, self._restored = not self._has_begun, True, None
        self._is_asking = True
        try:
            for index in self._indices:  # as next(), but no place where Python looks for Ctrl-C
                self._ahead += (index,)
                self._ahead[-1] = unshared(index)  # the sampler may change it
                self._is_asking = False
                return
        except Exception:
            self._is_asking = False
            raise
        self._is_asking = False
        if not is_first:
            self._ended, self.may_go_on = True, False
            raise StopIteration
        # A sampler that keeps its position, restored at the end of an epoch, has none left.
        self._indices = self._begin()
        self._draw()
