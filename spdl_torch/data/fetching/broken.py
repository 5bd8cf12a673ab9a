"""The stand-in for a worker's BatchMaker that could not be made."""

from __future__ import annotations

from typing import Any

from ..error_notes import Reason

__all__ = ["Broken"]


class Broken:
    """A stand-in for a BatchMaker that could not be made: every call raises the reason."""

    def __init__(self, error: BaseException, *, raised: bool = False) -> None:
        self._reason = Reason(error)
        if raised:
            self._reason.taken("")

    def make(self, *_: Any) -> Any:
        raise self._reason.taken("DataLoader: this worker could not start")

    sample_at = collate = good_of = make

    def tries(self) -> None:
        """Return None: nothing was fetched."""

    def progress(self, *, wanted: bool) -> None:
        """Return None: there is no progress."""

    def begin(self, *_: Any) -> None:
        """Do nothing: no sample follows."""

    def forget_bad(self) -> None:
        """Do nothing: no bad sample was noted."""
