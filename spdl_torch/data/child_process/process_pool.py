"""A pool with the interface of WorkerPool whose workers are threads of a child process.

Nothing here refers to the iterator that the trainer holds, so dropping it ends the child.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from ...errors import PipelineStopped
from ...observe.verdict.probes import probe_counters
from ...pipeline.channel.channel import Channel, ChannelClosed
from ...pipeline.hooks.stage_info import StageInfo
from ...pipeline.hooks.task_hooks import TaskStatsHook
from ...pipeline.stats.counters import TaskCounters
from ...pipeline.threads.thread_group import ThreadGroup
from ..workers.activity import describe_activities
from ..workers.contention import Crowd
from ..workers.epoch import Epoch
from ..workers.jobs import Failed, Loaded, Result
from ..workers.transfer_stage import AHEAD
from ..workers.worker_info import use_one_intra_op_thread
from .batch_packing import unpack
from .child import Beginning
from .connection import ChildConnection
from .dataset_pickle import PickledSpec
from .error_pickle import unpack_errors_of
from .messages import Answer, Restart, Submit
from .shared_memory import Mappings
from .start_methods import context_of
from .stats import ProcessFigures, ProcessRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..checkpoint.resume_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.load_spec import LoadSpec
    from ..workers.transfer_stage import DeviceStage

__all__ = ["ProcessPool"]

_MOST_KEPT = 8
"""The number of batches that the loop may keep, besides those that wait for it, before more are
copied: enough for gradient accumulation or a prefetcher of the user's."""

_JOIN_SECONDS = 1.0
_ASK_SECONDS = 2.0
_MOST_EPOCHS_WAITING = 1_000


class ProcessPool:
    """The child of one iterator, and the epoch that it works on.

    ``break``, an exception and Ctrl-C call ``request_stop``, which asks the child to end. It has
    5 s to finish the sample that it is fetching; then it is killed. Only the interpreter's exit
    waits for that.
    """

    def __init__(
        self,
        spec: LoadSpec,
        device_stage: DeviceStage | None = None,
        *,
        context: Any = None,
    ) -> None:
        self._finalize = spec.finalize
        self._spec = replace(spec, finalize=None, device_index=None)
        self._context = context_of(context)
        self._device_stage = device_stage
        self._pid = os.getpid()
        self._threads = ThreadGroup(_weakly(self.request_stop))
        stages = [TaskStatsHook(StageInfo(0, n, s, spec.num_workers)) for n, s in _STAGES]
        hook = None if device_stage is None else device_stage.hook
        self.figures = ProcessFigures(stages[0], stages[1], hook)
        self._num_epochs = 0
        self._epochs = Channel[Epoch](_MOST_EPOCHS_WAITING)
        self._epoch: Epoch | None = None
        self._connection: Any = None  # a ChildConnection once it is started

    # -- the trainer's thread ------------------------------------------------------------------

    def start(self, key: StreamKey, workers: Sequence[WorkerState] = ()) -> None:
        """Start the child, and the first epoch in it; see ``WorkerPool.start``."""
        self._connection = self._new_connection(key, workers)
        try:
            self._start_child()
            self._begin_epoch(key, workers)
            if self._device_stage is not None:
                self._start_transfer(self._device_stage)
        except BaseException:  # Ctrl-C too
            self.request_stop()
            raise

    def submit(
        self, number: int, index: Any, worker: int, first: int, *, wants_state: bool = False
    ) -> None:
        """Submit a job; see ``WorkerPool.submit``. Raises: what pickle raises on an index."""
        self._running()
        freed = self._connection.mappings.freed()
        self._connection.send(Submit(number, index, worker, first, wants_state, freed))

    @property
    def num_taken(self) -> int:
        """The number of results that ``get`` has taken; see ``WorkerPool.num_taken``."""
        return 0 if self._epoch is None else self._epoch.outlet.num_got

    def get(self, timeout: float | None) -> Result:
        """Return the next result. Raises: TimeoutError; RuntimeError: the child has ended."""
        epoch, connection = self._running(), self._connection
        if connection.mappings.has_freed and not len(epoch.outlet):
            # The workers may need the freed slabs for the very batch that the loop waits for.
            connection.send(connection.mappings.freed())
        epoch.consumer.ask(epoch.outlet)
        try:
            result = epoch.outlet.get(timeout)
        except ChannelClosed:
            if connection.is_over:
                death = connection.death()
                raise death from death.__cause__
            raise
        epoch.consumer.got(result.number)
        return result if self._device_stage is None else self._device_stage.hand_over(result)

    def at_work(self, awaited: int | None) -> str:
        """Describe what the child's threads do. Blocks up to 2 s for the child's answer."""
        told = self._connection.ask("at_work", awaited, timeout=_ASK_SECONDS)
        if told is None:
            told = (
                f"The loading process (pid {self._connection.pid}) is being started, or did not "
                f"answer within {_ASK_SECONDS:g} s because native code there keeps the GIL."
            )
        own = [thread for thread in self._threads.threads() if thread.name == "spdl-transfer"]
        return f"{told}\n{describe_activities([], own, None)}" if own else told

    def restart(self, key: StreamKey, workers: Sequence[WorkerState] = ()) -> None:
        """Begin another epoch in the same child, or in a new one if the child has died."""
        self._running().close()
        self._num_epochs += 1
        if self._connection.is_over:
            self._num_epochs = 0
            self._connection = self._new_connection(key, workers)
            self._start_child()
        self._begin_epoch(key, workers)
        if self._num_epochs:
            self._connection.send(Restart(self._num_epochs, key, tuple(workers)))

    def request_stop(self) -> None:
        """End every wait, and ask the child to end. Never blocks; safe in a finalizer."""
        if not self.in_this_process:
            return
        epoch, connection = self._epoch, self._connection
        try:
            self.figures.end()
        finally:  # the child ends even if the figures fail
            if epoch is not None:
                epoch.close()
            self._epoch = None
            self._epochs.close()
            if connection is not None:
                connection.hang_up()

    def __del__(self) -> None:
        # The iterator's finalizer does this too, but Ctrl-C may come before it begins.
        if hasattr(self, "_connection"):
            self.request_stop()

    def stop(self) -> None:
        """Call ``request_stop`` and wait for the child, which has nothing left to do."""
        self.request_stop()
        self._threads.join(_JOIN_SECONDS)

    @property
    def in_this_process(self) -> bool:
        """Whether this is the pool's process, and not one forked from it."""
        return os.getpid() == self._pid

    def _running(self) -> Epoch:
        if self._epoch is None or not self.in_this_process:
            raise PipelineStopped(
                "DataLoader: the loading process of this iterator has ended"
                + ("." if self.in_this_process else " for this process, which was forked.")
                + " Call iter(loader) for a new one."
            )
        return self._epoch

    # -- beginning -----------------------------------------------------------------------------

    def _new_connection(self, key: StreamKey, workers: Sequence[WorkerState]) -> ChildConnection:
        """Return a connection to a child that is yet to be started."""
        most_held = self._spec.max_outstanding + _MOST_KEPT
        # Lock the slabs' pages only for a device stage, which knows when the GPU has copied.
        # Otherwise pin_memory() has to find pageable memory: it then copies into pinned memory of
        # its own, which torch does not reuse too early.
        lock = None if self._device_stage is None else self._device_stage.region
        mappings = self.figures.mappings = Mappings(most_held, lock=lock)
        beginning = Beginning(
            PickledSpec(self._spec), key, tuple(workers), torch.get_default_dtype(), _environment()
        )
        return ChildConnection(
            *(self._context, beginning, mappings),
            hear=partial(_weakly(self._hear), mappings),
            ended=_weakly(self._child_has_ended),
        )

    def _start_child(self) -> None:
        if self._finalize is None:
            self._connection.start(self._threads)
            return
        # Pinning copies, on the receiver's thread: give it one intra-op thread, and restore the
        # trainer's setting, as WorkerPool._start_threads does for its workers.
        intra_op = torch.get_num_threads()
        try:
            self._connection.start(self._threads, begin=use_one_intra_op_thread)
        finally:
            torch.set_num_threads(intra_op)

    def _begin_epoch(self, key: StreamKey, workers: Sequence[WorkerState]) -> None:
        spec, stage = self._spec, self._device_stage
        results = Channel[Result](spec.max_outstanding)
        outlet = results if stage is None else Channel[Result](AHEAD)
        recorder = ProcessRecorder(
            self._connection, "DataLoader", spec.pipeline_number, enabled=spec.stats
        )
        recorder.belongs_to(self.figures)
        epoch = Epoch(
            jobs=(),  # jobs wait in the child
            results=results,
            outlet=outlet,
            in_order=False,  # the child has put the results in order
            key=key,
            workers=tuple(workers),
            fetch_before=TaskCounters(),
            collate_before=TaskCounters(),
            transfer_before=TaskCounters() if stage is None else stage.hook.counters(),
            probes_before=probe_counters(),
            crowd=Crowd((), shares_jobs=False, adapts=False),  # the workers are in the child
            recorder=recorder,
            consumer=recorder.new_consumer_ring(2 if stage is None else 3, outlet),
        )
        self.figures.begin(epoch)
        recorder.add_queue(1, "batches", results.capacity)
        if stage is not None:
            recorder.add_queue(2, "device batches", outlet.capacity)
            self._epochs.put(epoch)
        self._epoch = epoch
        # The child may have ended before the receiver could see this epoch: nobody else closes it.
        if self._connection.is_over:
            epoch.close()

    def _start_transfer(self, stage: DeviceStage) -> None:
        def run(epochs: Channel[Epoch] = self._epochs, group: ThreadGroup = self._threads) -> None:
            stage.run(epochs)  # group is a default so it stays alive: the exit waits for it

        self._threads.spawn("transfer", run)

    # -- the receiver's thread -----------------------------------------------------------------

    def _hear(self, mappings: Mappings, answer: Answer) -> None:
        mappings.forget(answer.retired)
        epoch, result = self._epoch, unpack_errors_of(answer.result)
        if epoch is None or answer.epoch != self._num_epochs:
            if isinstance(result, Loaded) and result.batch.ticket is not None:
                mappings.give_back(result.batch.ticket.slab)
            return
        if answer.readings is not None:
            self.figures.latest = answer.readings
        if isinstance(result, Loaded):
            result = self._unpacked(result, mappings)
        try:
            epoch.results.put(result)
        except ChannelClosed:
            pass  # the epoch has just ended

    def _unpacked(self, loaded: Loaded, mappings: Mappings) -> Result:
        try:
            loaded = unpack(loaded, mappings)
            if self._finalize is not None:
                loaded = replace(loaded, batch=self._finalize(loaded.batch))
        except BaseException as error:
            return Failed(loaded.number, error, loaded.progress, loaded.tries)
        return loaded

    def _child_has_ended(self) -> None:
        epoch = self._epoch
        if epoch is not None:
            epoch.close()  # wakes a waiting get(), which raises the reason


def _environment() -> dict[str, str]:
    """Return the environment with this process's rank and world size: datasets that divide
    themselves among ranks read them, as the child has no process group."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return dict(os.environ)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}


_STAGES = ((1, "fetch"), (2, "collate"))


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return the method without a reference to its pool, for threads. They must not keep the pool
    alive: if Ctrl-C comes right after the pool was made, nothing else refers to it.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        method = reference()
        if method is not None:
            method(*args)

    return call
