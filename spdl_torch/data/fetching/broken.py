"""What stands in for a worker's BatchMaker that could not be made."""

from __future__ import annotations

from typing import Any

from ..error_notes import Reason

__all__ = ["Broken"]


class Broken:
    """Stands for a BatchMaker that could not be made: raises the reason."""

    def __init__(self, error: BaseException, *, raised: bool = False) -> None:
        self._reason = Reason(error)
        if raised:
            self._reason.taken("")

    def make(self, *_: Any) -> Any:
        raise self._reason.taken("DataLoader: this worker could not start")

    sample_at = collate = good_of = make

    def tries(self) -> None:
        """It fetched nothing."""

    def progress(self, *, wanted: bool) -> None:
        """It gets nowhere."""

    def begin(self, *_: Any) -> None:
        """Nothing will follow."""

    def forget_bad(self) -> None:
        """It notes none."""
