"""What stands in for a worker's BatchMaker that could not be made."""

from __future__ import annotations

from typing import Any

__all__ = ["Broken"]


class Broken:
    """Stands for a BatchMaker that could not be made: raises the reason once, then what it was.

    Once, because the error that the trainer gets refers to the trainer's frames, perhaps to the
    iterator: a thread that kept it would keep itself alive.
    """

    def __init__(self, error: BaseException, *, raised: bool = False) -> None:
        self._error: BaseException | None = None if raised else error
        self._reason = f"{type(error).__name__}: {error}"

    def make(self, *_: Any) -> Any:
        error, self._error = self._error, None
        raise error or RuntimeError(f"DataLoader: this worker could not start, {self._reason}")

    sample_at = collate = good_of = make

    def tries(self) -> None:
        """It fetched nothing."""

    def progress(self) -> None:
        """It gets nowhere."""

    def begin(self, *_: Any) -> None:
        """Nothing will follow."""

    def forget_bad(self) -> None:
        """It notes none."""
