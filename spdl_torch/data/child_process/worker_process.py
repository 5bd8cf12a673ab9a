"""One worker process of a crew, and the jobs that it has; and what all of them are started with."""

from __future__ import annotations

import os
import pickle
import weakref
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from ..workers.device import most_regions
from .child import Beginning
from .connection import ChildConnection
from .mappings import Mappings
from .messages import Answer, Restart
from .start_methods import context_of, forks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from ...io._transfer.region import LimitedLocker, Region
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.jobs import Given
    from ..workers.load_spec import LoadSpec
    from ..workers.transfer_stage import DeviceStage


class Equipment:
    """The start method of the processes, and the memory that they share with the trainer."""

    def __init__(self, context: Any, spec: LoadSpec, stage: DeviceStage | None) -> None:
        """Raises: as ``context_of``."""
        self.context = context_of(context)
        self.are_copies = forks(self.context)
        """Whether the processes are forked: copies of this one and the thread that starts them."""
        self._locker: LimitedLocker | None = None  # one bound for the slabs of all processes
        if stage is not None:
            self._locker = stage.limited(spec.max_outstanding, spec.num_workers)

    @property
    def lock(self) -> Callable[[Any], Region] | None:
        """What locks the pages of slabs; None = they stay pageable.

        They are locked only for a device stage, which knows when the GPU has copied. Otherwise
        pin_memory() has to find pageable memory: it then copies into pinned memory of its own,
        which torch does not reuse too early.
        """
        return None if self._locker is None else self._locker.region

    def grow(self, max_outstanding: int, num_processes: int) -> None:
        """Let slabs for so many batches be locked."""
        if self._locker is not None:
            self._locker.grow(most_regions(max_outstanding, num_processes))


_MOST_KEPT = 8
"""The number of batches that the loop may keep, besides those that wait for it, before more are
copied: enough for gradient accumulation or a prefetcher of the user's."""


class InheritedSpec:
    """A LoadSpec for a forked child, which already has it in memory."""

    content = None

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec

    def open(self, connection: Connection) -> LoadSpec:
        """Return the spec."""
        return self._spec


class WorkerProcess:
    """A child from its start to its end; its number is that of its worker."""

    def __init__(
        self,
        number: int,
        spec: LoadSpec,
        equipment: Equipment,
        key: StreamKey,
        workers: Sequence[WorkerState],
        *,
        hear: Callable[[WorkerProcess, Answer], None],
        ended: Callable[[WorkerProcess], None],
    ) -> None:
        self.number = number
        self.jobs: dict[int, Given] = {}
        """The jobs that it has not answered, in the order in which it got them. The seats guard
        them: its receivers and the trainer's thread change them."""
        self.epoch = 0
        """The number of epochs begun in it after the first."""
        self.latest: bytes | None = None
        """The pickle of its last ``Readings`` of this epoch."""
        # A child reports a wait for a job when that has come. Until then it is counted here: waits
        # that have ended, and since when it has had none; 0 = it has one. Replaced as a whole, so
        # that other threads may read it.
        self._unreported_ns = 0, 0
        most, is_forked = spec.max_outstanding + _MOST_KEPT, equipment.are_copies
        self.mappings = Mappings(most, lock=equipment.lock)
        beginning = Beginning(
            InheritedSpec(spec) if is_forked else _packed(spec),
            number,
            key,
            tuple(workers),
            torch.get_default_dtype(),
            None if is_forked else _environment(),
        )
        # Weakly: the connection's thread must not keep this object, whose jobs hold user indices.
        own = weakref.ref(self)

        def hear_answer(answer: Answer) -> None:
            found = own()
            if found is not None:
                hear(found, answer)

        def has_ended() -> None:
            found = own()
            if found is not None:
                ended(found)

        self.connection = ChildConnection(
            equipment.context, beginning, self.mappings, hear=hear_answer, ended=has_ended
        )

    def submit(self, job: Given) -> Exception | None:
        """Give the child a job, and with it the slabs that are free. The roster's lock is held, and
        answers are heard with it. Return what pickle raises; None = it is sent.

        It is sent as a plain tuple, with the two fields of a ``Free`` after its own: the thread
        that trains sends one for each batch, and a named tuple is pickled by calls of Python code.
        """
        freed = self.mappings.freed()
        try:
            content = pickle.dumps((*job, *freed), 5)
        except Exception as error:
            if any(freed):
                self.connection.send(freed)  # nobody reports them again
            return error
        # Noted first: sending to a child that has just died raises nothing, and what is noted is
        # made again.
        self.jobs[job.number] = job
        self._unreported_ns = self.waited_ns, 0
        self.connection.say(content)
        return None

    def answered(self, readings: bytes | None) -> None:
        """Note that the child has answered a job. ``readings``: those that came with it. The
        roster's lock is held."""
        waited_ns, _ = self._unreported_ns
        if readings is not None:
            self.latest, waited_ns = readings, 0
        self._unreported_ns = waited_ns, 0 if self.jobs else perf_counter_ns()

    @property
    def waited_ns(self) -> int:
        """The time without a job that is not in ``latest`` yet."""
        waited_ns, since_ns = self._unreported_ns
        return waited_ns + (perf_counter_ns() - since_ns if since_ns else 0)

    def send_freed(self) -> None:
        """Send the slabs that have become free, if there are any."""
        if any(freed := self.mappings.freed()):
            self.connection.send(freed)

    def restart(self, key: StreamKey, workers: Sequence[WorkerState]) -> None:
        """Begin another epoch: outstanding jobs are dropped."""
        self.epoch += 1
        self.jobs.clear()
        self.latest = None
        self._unreported_ns = 0, 0
        self.connection.send(Restart(self.epoch, key, tuple(workers)))


def _packed(spec: LoadSpec) -> Any:
    from .dataset_pickle import PickledSpec  # forked children need none of it

    return PickledSpec(spec)


def _environment() -> dict[str, str]:
    """Return the environment with this process's rank and world size: datasets that divide
    themselves among ranks read them, as the child has no process group."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return dict(os.environ)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
