"""All uses of CUDA by transfers, in one place; and functions of CUDA's runtime that torch has no
call for.

These come from the library that torch itself uses, which is loaded wherever torch was built for
CUDA: its state belongs to the thread and to the contexts that torch has made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ...engine.threads import takes_over
from ...locks import RLock
from ...scopes import scope
from .readers import Readers
from .region import Region, keepers, mapped

if TYPE_CHECKING:
    from torch import Tensor

    from .tree import Recordable

PER_THREAD_STREAM = 2
"""``cudaStreamPerThread``, SPDL's default for ``cuda_config(stream=)``. Here it stands for this
package's own stream on each device, which serves the same purpose."""


_SUCCESS = 0  # cudaSuccess
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_NON_BLOCKING = 1  # cudaStreamNonBlocking: does not wait for the legacy default stream


class CudaBackend:
    """A CUDA device with a separate stream for copies: it locks pages, and knows who reads them.

    Memory safety. Blocks are allocated on the copy stream, so the caching allocator gives them
    out again to this stream alone, whose work is in order. The one other stream that uses them
    is recorded at the hand-over: when the batch is freed, the allocator waits for the work queued
    on that stream so far before it gives the memory out again. Hence a batch may be dropped as
    soon as its last kernel was *launched*.
    """

    def __init__(self, device: torch.device, stream: int = PER_THREAD_STREAM) -> None:
        self.device = device
        self.readers = _readers.setdefault(device, Readers())
        """What is lent of the memory that it has locked."""
        self.own_stream = _stream_of(stream, device)

    def lock_pages(self, address: int, num_bytes: int) -> bool:
        """Lock pages; return False if the system refuses, whoever lets go of what it keeps."""
        if self._lock_pages(address, num_bytes):
            return True
        idle = [keeper for keeper in keepers.now() if keeper.idle_bytes]
        for keeper in idle:
            keeper.let_go()
        return bool(idle) and self._lock_pages(address, num_bytes)

    def _lock_pages(self, address: int, num_bytes: int) -> bool:
        with torch.cuda.device(self.device), captures_unharmed():
            is_locked = int(_runtime().cudaHostRegister(address, num_bytes, 0)) == 0
            if not is_locked and (library := cuda_library()) is not None:
                # torch would find the error after the next kernel that this thread launches, and
                # raise it for that.
                library.cudaGetLastError()
            return is_locked

    def unlock_pages(self, address: int) -> None:
        """Unlock the pages of memory that is still mapped."""
        # The last view may die on the trainer's thread, even while it captures a graph itself.
        with torch.cuda.device(self.device), captures_unharmed():
            _runtime().cudaHostUnregister(address)

    def pinned(self, num_bytes: int) -> Tensor:
        """Return at least that much page-locked host memory: uint8, one dimension."""
        # torch's allocator of pinned memory takes powers of two: 64 MiB for 256 photographs of
        # 38.5 MB.
        region = Region(mapped(num_bytes), self)
        if region.is_locked:
            return torch.from_numpy(region.array(num_bytes))
        return self.torchs_pinned(num_bytes)

    def torchs_pinned(self, num_bytes: int) -> Tensor:
        """Return at least that much from torch's allocator, whose blocks are powers of two."""
        size = 1 << max(0, num_bytes - 1).bit_length()
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a host tensor is in page-locked memory."""
        return tensor.is_pinned()

    @scope
    def on_copy_stream(self) -> Iterator[None]:
        """Direct this thread's allocations, copies and events to the copy stream."""
        # The device first, here and elsewhere: whatever is asked of CUDA may create a context (500
        # MB) on the one that is current on this thread.
        with (
            torch.cuda.device(self.device),
            captures_unharmed(),
            torch.cuda.stream(self.own_stream),
        ):
            yield

    def empty(self, num_bytes: int) -> Tensor:
        """Return memory on the device: uint8, one dimension."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start a copy from pinned memory to the device; return at once."""
        target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """Return an event after all copies begun so far."""
        return self._event_on(self.own_stream)

    def record_made(self) -> Event:
        """Return an event after the work of the default stream, which threads use unless they
        choose another: what they have made on the device is there.
        """
        return self._event_on(torch.cuda.default_stream(self.device))

    def hand_over(self, event: Event, blocks: Sequence[Recordable]) -> Event:
        """Let the caller's current stream (not the caller itself) wait for ``event``, and keep
        the blocks' memory until that stream is done with it, too.

        Returns: an event after the work that the stream had before.
        """
        stream = self.current_stream()
        before = self._event_on(stream)
        stream.wait_event(event.event)
        for block in blocks:
            block.record_stream(stream)
        return before

    def current_stream(self) -> torch.cuda.Stream:
        """Return the calling thread's stream."""
        # For each batch, on the thread that trains: torch's own looks its arguments over, and makes
        # an object, which takes 45 us where the caches are cold.
        known = torch._C._cuda_getCurrentStream(self.device.index)
        if known not in _streams:
            _streams[known] = torch.cuda.current_stream(self.device)
        return _streams[known]

    def mark(self, stream: torch.cuda.Stream) -> Event | None:
        """Return an event after the work that a stream has; None while it captures a graph."""
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                return None
        return self._event_on(stream)

    def _event_on(self, stream: torch.cuda.Stream) -> Event:
        # A new event for each batch: recording one again would move it under its waiters.
        # blocking: a waiting thread sleeps instead of keeping a core busy.
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # untyped in torch
        event.record(stream)
        return Event(event, self.device)


class Event(NamedTuple):
    """A point in a stream that any thread can wait for."""

    event: torch.cuda.Event
    device: torch.device

    def synchronize(self) -> None:
        """Wait, without the GIL, until the work before the event is done."""
        # CUDA would create a context (500 MB) on the device that is current on this thread.
        with torch.cuda.device(self.device), captures_unharmed():
            self.event.synchronize()

    def query(self) -> bool:
        """Return whether the work before the event is done."""
        with torch.cuda.device(self.device), captures_unharmed():
            return bool(self.event.query())  # type: ignore[no-untyped-call]  # untyped in torch


def resolve(device: torch.device) -> torch.device:
    """Return a CUDA device with its index, by default this thread's current device.

    Raises: RuntimeError: torch finds no CUDA or no such device, or the process was forked from one
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


def num_visible() -> int:
    """Return how many CUDA devices this process sees. Makes no context."""
    return torch.cuda.device_count()


_REASONS = {
    "mps": "MPS has a single stream, on which no copy can run beside the model",
    "xpu": "what keeps a batch whole while it is copied has been tested for CUDA alone",
}


def refusal(device: torch.device) -> str:
    """Return why batches are not sent to a device that is not CUDA's, and what to do instead."""
    reason = _REASONS.get(device.type, "the owner of the copies uses CUDA's streams and events")
    how, move = "Leave the device out", repr(str(device))
    if device.type == "xpu":  # torch pins for it
        how, move = "Pass pin_memory=True to the loader instead", f"{move}, non_blocking=True"
    return f"{reason}. {how}, and move each batch in the loop with batch.to({move})."


def _runtime() -> Any:
    return cast("Any", torch.cuda).cudart()


@takes_over
def _device_of_thread() -> Callable[[], None] | None:
    """Return a function that selects this thread's device on a thread that it starts.

    Threads begin with device 0; so ``"cuda"`` means the same on those of a pipeline or loader.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        return None
    index = torch.cuda.current_device()
    # torch.cuda.set_device may be configured to look for contexts on other devices each time.
    return partial(torch.accelerator.set_device_index, index) if index else None


# For each device: a batch that one transfer handed over may be read while another has its memory.
_readers: dict[torch.device, Readers] = {}


# By what torch knows them: those that were current where a batch was handed over.
_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


# One for each device, as long as the process lives. The allocator keeps freed memory
# apart by stream: with a new stream for each epoch, the memory of old epochs would lie idle.
_own_streams: dict[torch.device, torch.cuda.Stream] = {}
_own_streams_lock = RLock()


def _stream_of(handle: int, device: torch.device) -> torch.cuda.Stream:
    if handle == PER_THREAD_STREAM:
        with _own_streams_lock:
            if device not in _own_streams:
                _own_streams[device] = _new_stream(device)
            return _own_streams[device]
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]  # untyped in torch


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    with torch.cuda.device(device), captures_unharmed():
        handle = new_stream()
    if handle is not None:
        return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]  # untyped in torch
    # From the pool of high-priority streams, which fewer programs use.
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]  # untyped in torch


@scope
def captures_unharmed() -> Iterator[None]:
    """Keep what this thread asks of CUDA from spoiling a graph that another thread captures.

    A capture in the default mode, "global", fails if any thread of the process locks pages,
    allocates or looks at an event meanwhile. Nothing that transfers do belongs to such a graph.
    The mode is put back: on the trainer's thread, captures of its own are to stay guarded.
    """
    library, mode = cuda_library(), ctypes.c_int(_RELAXED)
    is_relaxed = library is not None and (
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == _SUCCESS
    )
    try:
        yield
    finally:
        if is_relaxed:  # otherwise this would relax the thread for good
            library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def new_stream() -> int | None:
    """Return a new stream of the thread's current device, as a number; None where none can be made.

    It belongs to nobody else: ``torch.cuda.Stream()`` hands out 32 streams in turn, so that a
    user's 33rd is the first again. It is never destroyed: memory may be recorded for it until the
    process ends.
    """
    library, stream = cuda_library(), ctypes.c_void_p()
    if library is None:
        return None
    status = library.cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING)
    return stream.value if status == _SUCCESS else None


@cache
def cuda_library() -> Any:
    """Return the process's own symbols, if the runtime's are among them; else None: torch for
    ROCm, without CUDA, or with a runtime of its own inside (as on Windows).
    """
    if torch.version.cuda is None:
        return None
    try:
        # PyDLL: the calls return at once, and releasing the GIL may cost milliseconds.
        library = ctypes.PyDLL(None)
        return library if library.cudaThreadExchangeStreamCaptureMode else None
    except (AttributeError, OSError, TypeError):  # no such symbol; no such thing as "own" symbols
        return None
