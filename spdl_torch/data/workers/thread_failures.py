"""What went wrong on a crew's threads, for the loop to raise."""

from __future__ import annotations

from ...engine.failures import text_of


class ThreadFailures:
    """The workers that could not start, and the failure of a thread through a bug in this package.

    A worker writes the first before it says that it is ready, and the loop's thread reads them
    after that. The second is written before the epoch is closed, and read after that has woken the
    loop.
    """

    def __init__(self) -> None:
        self.of_workers: dict[int, BaseException] = {}
        """Why they could not start, as long as the loop has not had it."""
        self.is_whole = True
        """False once a worker could not start."""
        self.death: BaseException | None = None
        """The failure of a thread, through no fault of the dataset."""

    def could_not_start(self, number: int, error: BaseException) -> None:
        """Keep the error for the loop, in place of the batch that torch gives this worker first."""
        self.of_workers[number] = error
        self.is_whole = False

    @property
    def loss(self) -> BaseException | None:
        """A new error that says which thread has failed; None = none has."""
        if self.death is None:
            return None
        error = RuntimeError(
            "DataLoader: a thread of the loader has failed, through no fault of the dataset: "
            f"{text_of(self.death)}. The log has its traceback; please report it."
        )
        error.__cause__ = self.death
        return error
