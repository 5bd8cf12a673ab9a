"""What the figures of an epoch are computed from: counts, read at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...named_tuples import NamedTuple

if TYPE_CHECKING:
    from ...engine.stats.counters import QueueCounters, TaskCounters
    from ...machine.probes import ProbeCounters
    from ...observe.verdict.placement import Placement
    from .counts import Readings


class Queues(NamedTuple):
    """Readings of the way of an epoch's batches from the workers to the loop."""

    results: QueueCounters
    outlet: QueueCounters
    transfer: TaskCounters
    sampling_ns: int
    """The time in which the loop drew from the sampler."""
    waited_ns: int
    """The time that the loop spent in the loader, for whatever reason: to begin the epoch, and
    until it had each batch."""

    def since(self, before: Queues) -> Queues:
        """Return what was counted after ``before``."""
        return Queues(
            self.results.since(before.results),
            self.outlet.since(before.outlet),
            self.transfer.since(before.transfer),
            self.sampling_ns - before.sampling_ns,
            self.waited_ns - before.waited_ns,
        )


class Measured(NamedTuple):
    """What the figures on some workers in an epoch are computed from, read at one moment."""

    readings: Readings
    queues: Queues
    """Without workers there is no queue: all zero, but for the transfer and the loop's times."""
    elapsed_ns: int
    has_transfer: bool
    own_probes: tuple[ProbeCounters, ProbeCounters] | None
    """This process's, at the begin and now; None = the workers, if any, are in this process."""
    num_workers: int
    thread_ns: int
    """The time that all workers together had."""
    placements: tuple[Placement, ...]
    remarks: tuple[str, ...]

    @property
    def of_workers(self) -> Measured:
        """The same where the loop waits in the queue alone: what it does itself for a batch, draws
        from the sampler and starts workers among it, gets no shorter with more of them."""
        waited_ns = self.queues.outlet.get_wait[0]
        return self._replace(queues=self.queues._replace(sampling_ns=0, waited_ns=waited_ns))
