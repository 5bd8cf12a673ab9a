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
    """The time in which the loop drew from the sampler, which is in no queue's."""
    starting_ns: int
    """Likewise, in which it started workers, and waited until they were ready."""

    def since(self, before: Queues) -> Queues:
        """Return what was counted after ``before``."""
        return Queues(
            self.results.since(before.results),
            self.outlet.since(before.outlet),
            self.transfer.since(before.transfer),
            self.sampling_ns - before.sampling_ns,
            self.starting_ns - before.starting_ns,
        )


class Measured(NamedTuple):
    """What the figures on some workers in an epoch are computed from, read at one moment."""

    readings: Readings
    queues: Queues
    """Without workers there is no queue: all zero, but for the transfer and the sampler."""
    elapsed_ns: int
    waited_ns: int
    """The time that the loop waited for batches; without workers it makes them in it. Without what
    is in ``queues``: drawing from the sampler, and starting workers."""
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
        """The same where drawing from the sampler, and starting workers, count as the loop's own
        work: more workers make these no shorter."""
        return self._replace(queues=self.queues._replace(sampling_ns=0, starting_ns=0))
