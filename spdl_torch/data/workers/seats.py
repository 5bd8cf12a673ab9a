"""Where a crew's workers sit: on threads of this process, or in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...observe.verdict.placement import Placement
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from .epoch import Epoch
    from .jobs import Given
    from .stats import Source


class Seats(Protocol):
    """Workers of one kind. They make the batches of their jobs and deliver them to the epoch that
    their crew has begun; the loop's thread calls the methods, but for ``request_stop``.
    """

    placement: Placement | None
    """Where they are, and why; None = nobody has said."""
    look_seconds: float
    """The interval at which a waiting loop calls ``tend``; inf = never."""

    @property
    def failure(self) -> BaseException | None:
        """The error of a worker that could not start, which comes before the next batch; None = all
        have started, or theirs comes in place of a batch."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether they were stopped, for good."""
        ...

    @property
    def counts(self) -> Source:
        """What the workers count."""
        ...

    def prepare(self, key: StreamKey, workers: Sequence[WorkerState]) -> None:
        """Have the workers there for an epoch that is about to begin; drop what is outstanding."""
        ...

    def begin(self, epoch: Epoch) -> None:
        """Deliver to this epoch from now on; nothing happens if they do already."""
        ...

    def submit(self, job: Given) -> Exception | None:
        """Give out the job of one batch, to its worker or, where any can make it, to whom it suits;
        never blocks. Return the error for which its index cannot be sent; None = none.

        Raises: ChannelClosed: the workers have ended.
        """
        ...

    def tend(self, epoch: Epoch) -> None:
        """Do what is due before the loop waits for a batch."""
        ...

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Change the number of workers, and return the new number: the old one if it stays."""
        ...

    @property
    def loss(self) -> BaseException | None:
        """The error for which no batch comes any more in this epoch; None = all is well."""
        ...

    def at_work(self, awaited: int | None) -> str:
        """Describe what each worker does now, for the message of a loop that waited too long; ""
        = nothing."""
        ...

    def rest(self) -> None:
        """Note that an epoch is over; the workers stay for the next one."""
        ...

    def request_stop(self) -> None:
        """End every wait. Never blocks; safe in a finalizer."""
        ...

    def stop(self) -> None:
        """Stop the workers, and wait a moment for their end."""
        ...
