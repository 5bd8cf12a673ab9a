"""The stand-in for a worker's BatchMaker that could not be made."""

from __future__ import annotations

from typing import Any

from ..error_notes import Reason
from .items import EndOfIterable


class Broken:
    """A stand-in for a BatchMaker that could not be made.

    The first call raises the reason. From then on an iterable has ended: nobody else can make its
    items, and without an end a loop that goes on after errors would never come to one. A map-style
    dataset's batches end by themselves: each raises the reason again, unless others make it.
    """

    def __init__(self, error: BaseException, *, ends: bool, told: bool = False) -> None:
        """``ends``: whether the dataset is iterable. ``told``: whether another one raises the error
        the first time."""
        self._reason = Reason(error)
        self._ends = ends
        self._is_told = told
        if told:
            self._reason.taken()
        self.is_again = False
        """Whether the last call raised the reason again."""

    def begin_epoch(self) -> None:
        """Raise the reason anew: what this worker does not make is missing in each epoch."""
        self._is_told = False

    def make(self, *_: Any) -> Any:
        """Raise the reason, or EndOfIterable."""
        self.is_again, self._is_told = self._is_told, True
        if self._ends and self.is_again:
            raise EndOfIterable
        raise self._reason.taken()

    sample_at = collate = good_of = make

    def tries(self) -> None:
        """Return None: nothing was fetched."""

    def progress(self, *, wanted: bool) -> None:
        """Return None: there is no progress."""

    def begin(self, *_: Any) -> None:
        """Do nothing: no sample follows."""

    def forget_bad(self) -> None:
        """Do nothing: no bad sample was noted."""
