"""All uses of CUDA by transfers, in one place."""

from __future__ import annotations

import mmap
import threading
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import torch

from ...pipeline.threads.thread_group import takes_over
from .region import PageLocker, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from .slabs import Event

__all__ = ["PER_THREAD_STREAM", "Backend", "CudaBackend", "Use", "resolve"]

PER_THREAD_STREAM = 2
"""``cudaStreamPerThread``, SPDL's default for ``cuda_config(stream=)``: here the stream that this
package has of its own on each device, which is what the default is for there."""

Use = Literal["copy", "decode"]


class Backend(PageLocker, Protocol):
    """A device with a stream of its own for copies. The tests have one that is no GPU."""

    device: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked host memory: uint8, one dimension."""
        ...

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a host tensor is in page-locked memory."""
        ...

    def on_copy_stream(self) -> AbstractContextManager[None]:
        """Inside, this thread's memory, copies and events belong to the copy stream."""
        ...

    def empty(self, num_bytes: int) -> Tensor:
        """Memory on the device: uint8, one dimension."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy from pinned memory to the device; returns at once."""
        ...

    def record(self) -> Event:
        """Return an event after all work begun so far."""
        ...

    def hand_over(self, event: Event, blocks: Sequence[Tensor]) -> Event:
        """Let the caller's current stream wait for ``event`` (the caller itself does not), and
        keep the blocks' memory until that stream's use of it is over, too.

        Returns: the point that the stream had been given work up to before.
        """
        ...


class CudaBackend:
    """The backend of a CUDA device.

    Memory safety. Blocks are allocated on the copy stream, so the caching allocator gives them
    out again to this stream alone, whose work is in order. The one other stream that uses them
    is recorded at the hand-over: when the batch is freed, the allocator waits for what was
    queued on that stream up to then before it gives the memory out again. Hence a batch may be
    dropped as soon as its last kernel was *launched*.
    """

    def __init__(
        self, device: torch.device, stream: int = PER_THREAD_STREAM, *, use: Use = "copy"
    ) -> None:
        self.device = device
        self._stream = _stream_of(stream, device, use)

    def lock_pages(self, address: int, num_bytes: int) -> bool:
        with torch.cuda.device(self.device):
            return int(_runtime().cudaHostRegister(address, num_bytes, 0)) == 0

    def unlock_pages(self, address: int) -> None:
        with torch.cuda.device(self.device):
            _runtime().cudaHostUnregister(address)

    def pinned(self, num_bytes: int) -> Tensor:
        # torch's allocator of pinned memory takes powers of two: 64 MiB for 256 photographs, which
        # are 38.5 MB. A shared mapping, because the pages of a private one move when it is written
        # after a fork, and the device would go on reading where they were.
        region = Region(mmap.mmap(-1, max(1, num_bytes)), self)
        if region.is_locked:
            return torch.from_numpy(region.array(num_bytes))
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    @contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        # The device first: selecting a stream of another device would create a context (500 MB)
        # on the one that happens to be current on this thread.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        return self._event_on(self._stream)

    def hand_over(self, event: Event, blocks: Sequence[Tensor]) -> Event:
        stream = torch.cuda.current_stream(self.device)
        before = self._event_on(stream)
        stream.wait_event(cast("_Event", event).event)
        for block in blocks:
            block.record_stream(stream)
        return before

    def _event_on(self, stream: torch.cuda.Stream) -> Event:
        # A new event for each batch: one that is recorded anew would move under those who wait.
        # blocking: the thread that waits for it sleeps instead of keeping a core busy.
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return _Event(event, self.device)


class _Event(NamedTuple):
    """A point in a stream that any thread may wait for."""

    event: torch.cuda.Event
    device: torch.device

    def synchronize(self) -> None:
        # CUDA would create a context (500 MB) on the device that is current on this thread.
        with torch.cuda.device(self.device):
            self.event.synchronize()


def resolve(device: torch.device) -> torch.device:
    """Return a CUDA device with its index, by default that of this thread's current device.

    Raises: RuntimeError: torch finds no CUDA, or no such device, or the process was forked from one
        that had used CUDA.
    """
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            f"device {str(device)!r} cannot be used here: this process was forked from one that "
            'had used CUDA. Start it by "spawn" or "forkserver" (multiprocessing_context= of a '
            "DataLoader, multiprocessing.get_context() elsewhere), or move batches to the device "
            "in the process that trains."
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device {str(device)!r} needs CUDA, and torch finds none here "
            "(torch.cuda.is_available() is False). Leave the device out to load into host memory."
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise RuntimeError(
            f"device 'cuda:{index}' does not exist: torch sees {count} CUDA device(s), from "
            "'cuda:0' on. Pass another index, or look at CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", index)


def _runtime() -> Any:
    return cast("Any", torch.cuda).cudart()


@takes_over
def _device_of_thread() -> Callable[[], None] | None:
    """Threads begin with device 0. Those that a pipeline or loader starts have the device of the
    thread that starts it, so that ``"cuda"`` means the same there.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    index = torch.cuda.current_device()
    # torch.cuda.set_device may be told to look for contexts on other devices each time.
    return partial(torch.accelerator.set_device_index, index) if index else None


# One for each device and use, for as long as the process lives. The allocator keeps freed memory
# apart by stream: with a new stream for each epoch, the memory of old epochs would lie idle.
_own_streams: dict[tuple[torch.device, Use], torch.cuda.Stream] = {}
_own_streams_lock = threading.Lock()


def _stream_of(handle: int, device: torch.device, use: Use) -> torch.cuda.Stream:
    if handle == PER_THREAD_STREAM:
        with _own_streams_lock:
            if (device, use) not in _own_streams:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                _own_streams[device, use] = stream
            return _own_streams[device, use]
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]
