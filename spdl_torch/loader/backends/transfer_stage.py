"""The thread between the workers and the loop, where there is one: it receives the batches of
processes that have to be pinned, or that take long to unpack; with ``device=`` it copies batches to
the GPU. And the hand-over, and whether there is a device at all.

The transfer thread takes finished batches in the order of delivery and begins to copy them; the
trainer's thread receives them on its own stream. The transfer thread is at most two batches ahead
of the trainer: one waits in the outlet, one is staged and waits for room there.

``break``, an exception and Ctrl-C close the thread's channels, which also ends its wait for a model
that is far behind. A copy in progress is not interrupted: it ends within milliseconds, and the
thread after it. Only the interpreter's exit waits for that, at most 5 s. Batches that nobody took
are freed.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from ...engine.channel import ChannelClosed
from ...engine.hooks import StageInfo, TaskStatsHook
from ...errors import UnsupportedOptionError
from ..error_notes import add_thread_note
from ..fetching.batch_maker import timed
from .jobs import Failed, Loaded

if TYPE_CHECKING:
    from ...engine.channel import Channel
    from ...engine.counters import TaskCell
    from ...io._transfer.region import BatchMemory, LimitedLocker
    from ...io._transfer.transfer import Staged, Transfer
    from .jobs import Epoch, Result


AHEAD = 1
"""The number of staged batches that wait for the trainer, besides the one that the thread holds:
enough to copy one while the trainer works on another. More would only hold device memory."""


def check_device(
    device: torch.device | str | int | None, where: str = "DataLoader"
) -> torch.device | None:
    """Return the CUDA device, or None for host memory. Does not touch CUDA: the loader may be built
    before the process that uses it is forked, or before its device is chosen.

    Raises: UnsupportedOptionError: neither CUDA nor the CPU.
    """
    if device is None:
        return None
    try:
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedOptionError(
            f'{where}: device must be None, the CPU or a CUDA device ("cuda", "cuda:1", a number, '
            f"a torch.device), got {device!r}."
        ) from error
    if target.type not in ("cpu", "cuda"):
        from ...io._transfer.cuda import refusal  # brings the CUDA runtime's calls

        raise UnsupportedOptionError(
            f"{where}: device must be None, the CPU or a CUDA device, got {str(target)!r}: "
            f"{refusal(target)}"
        )
    return target if target.type == "cuda" else None


def most_pieces(max_outstanding: int) -> int:
    """Return how many batches may lie in pinned memory, besides the transfer's own two slabs: with
    those, three more than can be outstanding. Two may be under way to the device, one is spare.
    """
    return max_outstanding + 1


def most_regions(max_outstanding: int, num_processes: int) -> int:
    """Return the same for batches in the shared memory of processes: each has one more, which is
    free already, but the process has not yet read so.
    """
    return most_pieces(max_outstanding) + num_processes


def forward(epochs: Channel[Epoch], stage: DeviceStage | None) -> None:
    """Pass on what comes from the workers, epoch after epoch, until ``epochs`` is closed. Runs on
    its own thread. ``stage``: copies the batches; None = their queue unpacks, and may pin, them.
    """
    while True:
        try:
            _forward_epoch(epochs.get(), stage)  # no variable holds an epoch that is over
        except ChannelClosed:
            if epochs.closed:
                return


def _forward_epoch(epoch: Epoch, stage: DeviceStage | None) -> None:
    inlet, outlet = epoch.results, epoch.outlet
    ring = epoch.recorder.new_ring(forwarder_name(stage), 2)
    since_ns = ring.begin()
    while True:
        result = inlet.get()
        if stage is not None:
            result = stage.when_due(result, outlet)
        started_ns, number = perf_counter_ns(), result.number
        if stage is not None and isinstance(result, Loaded):
            result = stage.staged(result)
        ended_ns = perf_counter_ns()
        outlet.put(result)
        # While this thread waits, its last error would otherwise stay alive, and with it the
        # frames of the loop, the iterator among them.
        del result
        done_ns = perf_counter_ns()
        if done_ns - since_ns >= ring.shortest_ns:
            times = since_ns, started_ns, ended_ns, done_ns, -1
            ring.add(times, number, number, inlet, outlet)
        since_ns = done_ns


def forwarder_name(stage: DeviceStage | None) -> str:
    """Return the name of the thread that forwards, and of its row in traces."""
    return "receive" if stage is None else "transfer"


class DeviceStage:
    """Copies one iterator's batches to the device and counts the time."""

    def __init__(self, transfer: Transfer, *, stats: bool) -> None:
        self._transfer = transfer
        self.hook = TaskStatsHook(StageInfo(0, 3, "transfer"))
        # Written by the transfer thread or, without workers, by the trainer's in transfer().
        self._cell: TaskCell | None = self.hook.new_cell() if stats else None
        self.has_met_device = False
        """Whether a batch, or a part of one, was on a device before it was copied there."""

    def limited(self, max_outstanding: int, num_processes: int) -> LimitedLocker | None:
        """Return the locker of memory that other processes write; batches are copied from there.
        None = it stays pageable."""
        return self._transfer.limited(most_regions(max_outstanding, num_processes))

    def batch_memory(self, max_outstanding: int) -> BatchMemory | None:
        """Return pinned memory for the batches of a loader with so many outstanding; None = they
        are made in ordinary memory."""
        return self._transfer.batch_memory(most_pieces(max_outstanding))

    def when_due(self, result: Result, outlet: Channel[Result]) -> Result:
        """Wait while the model is far behind; the stage's own time does not include it."""
        try:
            self._transfer.await_model(lambda: not outlet.closed)
        except ChannelClosed:  # the loop has ended, or the interpreter exits
            raise
        except BaseException as error:  # the device's: what the model did has failed
            return self._failed(error, result)
        return result

    def staged(self, result: Loaded) -> Result:
        """Return a batch whose copy has begun, for ``hand_over``."""
        try:
            return result._replace(batch=self._stage(result.batch))
        except BaseException as error:  # the trainer waits for an answer
            return self._failed(error, result)

    def hand_over(self, result: Loaded) -> Result:
        """Make the batch ready for the current stream. Called on the trainer's thread."""
        try:
            batch = result.batch.receive()
            return Loaded(result.number, batch, result.progress, result.tries)
        except BaseException as error:
            return self._failed(error, result)

    def transfer(self, batch: Any, number: int) -> Any:
        """Copy a batch without the thread, and return it for the caller's current stream."""
        try:
            return self._stage(batch).receive()
        except BaseException as error:
            self._say_where(error, number)
            raise

    def _stage(self, batch: Any) -> Staged:
        staged: Staged = timed(self._cell, self._transfer.stage, batch)
        self.has_met_device = self.has_met_device or staged.has_met_device
        return staged

    def _failed(self, error: BaseException, result: Result) -> Failed:
        self._say_where(error, result.number)
        return Failed(result.number, error, result.progress)

    def _say_where(self, error: BaseException, number: int) -> None:
        add_thread_note(error, f"in the transfer to {self._transfer.device}", f"batch {number}")
