"""Host to device: nested batches through reused pinned memory on a stream of their own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from spdl_torch.errors import UnsupportedOptionError

from . import cuda
from .region import Region
from .slabs import SMALL_BYTES, Place, SlabRing, copy_alone, dense_strides, plan, typed
from .tree import map_leaves

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable

    from .slabs import Event, Layout, Slab

__all__ = [
    "CUDAConfig",
    "Staged",
    "Transfer",
    "check_device_config",
    "cuda_config",
    "is_moved_whole",
    "to_device",
    "transfer_buffer",
    "transfer_tensor",
    "transfer_tensor_h2d",
]

T = TypeVar("T")

MOST_BEHIND = 4
"""Batches that were handed over and that the device has not come to, before ``stage`` waits for
it. A thread may launch work far ahead of the device, and each batch keeps its memory until then.
Four steps ahead keep any device busy."""
Allocator = tuple["Callable[[int, int, int], int]", "Callable[[int], None]"]


@dataclass(frozen=True, slots=True)
class CUDAConfig:
    """Which CUDA device data goes to, and on which stream it is copied."""

    device_index: int
    stream: int = cuda.PER_THREAD_STREAM
    """A ``cudaStream_t`` as an integer (``torch.cuda.Stream().cuda_stream``; the caller keeps
    that stream alive), 0 = the device's default stream, 2 = our own, one for each device."""
    allocator: Allocator | None = None
    """Memory always comes from torch's caching allocator: None, or torch's own two functions."""

    def __post_init__(self) -> None:
        if isinstance(self.device_index, bool) or not isinstance(self.device_index, int):
            raise TypeError(f"cuda_config: device_index must be an int, got {self.device_index!r}.")
        if self.device_index < 0:
            raise ValueError(f"cuda_config: device_index must be >= 0, got {self.device_index}.")
        torchs = (torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete)
        if self.allocator is not None and tuple(self.allocator) != torchs:
            raise UnsupportedOptionError(
                f"cuda_config: allocator must be None or (torch.cuda.caching_allocator_alloc, "
                f"torch.cuda.caching_allocator_delete), got {self.allocator!r}. Tensors have their "
                "memory from torch; to change where torch has it from, use "
                "torch.cuda.memory.change_current_allocator."
            )

    @property
    def device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device("cuda", self.device_index)


def cuda_config(
    device_index: int,
    stream: int = cuda.PER_THREAD_STREAM,
    allocator: Allocator | None = None,
) -> CUDAConfig:
    """Return a CUDAConfig; called like SPDL's function of this name. Does not touch CUDA.

    Raises: UnsupportedOptionError: an ``allocator`` that is not torch's.
    """
    return CUDAConfig(device_index, stream, allocator)


class Staged:
    """A batch in transfer to the device. ``receive()`` hands it over, once."""

    __slots__ = ("_batch", "_blocks", "_event", "_has_leaves_to_move", "_received", "_transfer")

    def __init__(
        self,
        transfer: Transfer,
        batch: Any,
        blocks: list[Tensor],
        event: Event | None,
        has_leaves_to_move: bool,
    ) -> None:
        self._transfer = transfer
        self._batch = batch
        self._blocks = blocks
        self._event = event
        self._has_leaves_to_move = has_leaves_to_move
        self._received = False

    def receive(self) -> Any:
        """Return the batch for use on the calling thread's current stream. Does not wait.

        Call it on the thread that trains, with the stream current that the model runs on: that
        stream waits for the copy, and the memory is kept until that stream is done with it.

        Raises: RuntimeError: it was received before.
        """
        if self._received:
            raise RuntimeError("Staged.receive: this batch was handed over already; call it once.")
        self._received = True
        if self._event is not None:
            self._transfer._hand_over(self._event, self._blocks)
        batch, self._batch, self._blocks = self._batch, None, []
        return map_leaves(batch, self._move) if self._has_leaves_to_move else batch

    def synchronize(self) -> None:
        """Wait, without the GIL, until the copy is done."""
        if self._event is not None:
            self._event.synchronize()

    def _move(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == self._transfer.device:
            return leaf
        return leaf.to(self._transfer.device)


class Transfer:
    """Copies batches to one CUDA device, ahead of the trainer: ``stage`` there, ``receive`` here.

    Owns ``num_slabs`` slabs of pinned memory, each grown to the largest batch. A slab is used
    again when the copy out of it is done, not before; waiting for that and packing do not hold the
    GIL. Any thread may call ``stage``; one batch is staged at a time. ``stage`` also waits where
    the receivers' streams are more than 4 batches behind. All transfers of a process to a device
    share one copy stream.

    Tensors of 64 KiB or more that are pinned already are copied from where they are; tensors on
    the device pass. What is no plain dense host tensor (sparse, nested, quantized, of a subclass,
    one that needs gradients, an object with a ``to`` method) is moved by its own ``to`` at
    ``receive``.

    Raises: RuntimeError: torch finds no CUDA, or no such device; UnsupportedOptionError: not a
        CUDA device.
    """

    def __init__(
        self, device: torch.device | str | int | CUDAConfig = "cuda", *, num_slabs: int = 2
    ) -> None:
        place = cuda.resolve(_cuda_device(device, "Transfer"))
        self._backend: cuda.Backend = cuda.CudaBackend(place, _stream_of(device))
        self._ring = SlabRing(self._backend.pinned, num_slabs)
        self._lock = threading.Lock()
        self._behind: deque[Event] = deque()

    @property
    def device(self) -> torch.device:
        """The device of the batches, with its index."""
        return self._backend.device

    def stage(self, batch: Any) -> Staged:
        """Begin to copy every tensor of ``batch`` (dicts, lists, tuples, named tuples and
        dataclasses, nested); returns when all is packed and the copies are queued.

        The batch may be changed or dropped afterwards; what was pinned already may only be
        dropped.

        Raises: torch.OutOfMemoryError: of the device; what a container's constructor raises.
        """
        leaves: list[Any] = []

        def collect(leaf: Any) -> Any:
            leaves.append(leaf)
            return leaf

        map_leaves(batch, collect)
        tensors = {id(leaf): leaf for leaf in leaves if _is_plain(leaf)}
        with self._lock:
            self._await_the_model()
            moved, blocks, event = self._copy(list(tensors.values()))
        has_leaves_to_move = False

        def replace(leaf: Any) -> Any:
            nonlocal has_leaves_to_move
            if id(leaf) not in moved:
                has_leaves_to_move = True
            return moved.get(id(leaf), leaf)

        batch = map_leaves(batch, replace)
        return Staged(self, batch, blocks, event, has_leaves_to_move)

    def region(self, memory: mmap.mmap) -> Region:
        """Memory from which tensors are copied without a slab. They are kept until their copies are
        done; only then may it be written again.
        """
        return Region(memory, self._backend)

    def _hand_over(self, event: Event, blocks: list[Tensor]) -> None:
        self._behind.append(self._backend.hand_over(event, blocks))

    def _await_the_model(self) -> None:
        while len(self._behind) > MOST_BEHIND:
            self._behind[0].synchronize()
            self._behind.popleft()

    def _copy(self, tensors: list[Tensor]) -> tuple[dict[int, Tensor], list[Tensor], Event | None]:
        """Copies by the ids of their originals, the memory that they are in, and the end."""
        if not tensors:
            return {}, [], None
        backend = self._backend
        with backend.on_copy_stream():
            pinned = [tensor for tensor in tensors if self._needs_no_slab(tensor)]
            their_ids = {id(tensor) for tensor in pinned}
            layout = plan([tensor for tensor in tensors if id(tensor) not in their_ids])
            slab = self._ring.take()
            # What can fail for want of memory comes before the first copy is under way, the
            # device first: it says so at once, a host that is short of memory begins to swap.
            blocks = [backend.empty(size) for _, size in layout.blocks]
            direct = [backend.empty(tensor.nbytes) for tensor in pinned]
            memory = slab.room(layout.num_bytes)
            try:
                moved = self._copy_packed(layout, memory, blocks)
                for tensor, block in zip(pinned, direct, strict=True):
                    copy = typed(block, Place(tensor, 0, 0, tensor.stride()), 0)
                    backend.copy(copy, tensor)
                    moved[id(tensor)] = copy
            finally:
                event = _mark_busy(slab, backend, pinned)
        return moved, blocks + direct, event

    def _copy_packed(
        self, layout: Layout, memory: Tensor, blocks: list[Tensor]
    ) -> dict[int, Tensor]:
        for place in layout.places:
            copy_alone(typed(memory, place, place.offset), place.tensor)
        for (start, size), block in zip(layout.blocks, blocks, strict=True):
            self._backend.copy(block, memory[start : start + size])
        return {
            id(place.tensor): typed(
                blocks[place.block], place, place.offset - layout.blocks[place.block][0]
            )
            for place in layout.places
        }

    def _needs_no_slab(self, tensor: Tensor) -> bool:
        return (
            tensor.nbytes >= SMALL_BYTES
            and not (tensor.is_conj() or tensor.is_neg())
            and self._backend.is_pinned(tensor)
            and tensor.stride() == dense_strides(tensor)
        )


def _mark_busy(slab: Slab, backend: cuda.Backend, sources: list[Tensor]) -> Event:
    event = backend.record()
    slab.busy_until(event, sources)
    return event


def _is_plain(leaf: Any) -> bool:
    """Return whether bytes and strides describe a leaf completely."""
    return (
        type(leaf) is Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_nested)
    )


def is_moved_whole(batch: Any) -> bool:
    """Return whether ``stage`` takes all tensors and arrays of a batch but those below 64 KiB, and
    so leaves nobody a view of the memory that they were in. False where that is unknown.
    """
    if isinstance(batch, Tensor):
        return _is_plain(batch)
    if batch is None or isinstance(batch, str | bytes | int | float | complex | np.generic):
        return True
    if isinstance(batch, np.ndarray):
        return batch.nbytes < SMALL_BYTES and not batch.dtype.hasobject
    members: Iterable[Any]
    if isinstance(batch, Mapping):
        members = batch.values()
    elif isinstance(batch, list | tuple):
        members = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        members = (getattr(batch, f.name, None) for f in fields(batch))
    else:
        return False
    return all(map(is_moved_whole, (*members, *getattr(batch, "__dict__", {}).values())))


def transfer_tensor(
    batch: T,
    /,
    device: torch.device | str | int | CUDAConfig | None = None,
    *,
    num_caches: int | None = None,
) -> T:
    """A copy of ``batch`` on a CUDA device, for the pipeline stage or the loop that calls it.

    Blocks, without the GIL, until the copy is done, so any thread and any stream may read the
    result. Its memory is guarded for the stream that is current on the calling thread: unless
    changed the default stream, the same on all threads. A model that runs on another stream
    calls ``record_stream`` itself, or uses :class:`Transfer`. All threads share one copy stream
    and one ring of slabs per device, which stay until the process ends.

    Args:
        batch: tensors, or dicts, lists, tuples, named tuples and dataclasses of them, nested.
        device: None = ``cuda:$LOCAL_RANK``, or without that variable the current device. A CPU
            device moves everything there.
        num_caches: SPDL's, taken for its callers' sake: no batches need to be kept here.

    Returns: the same containers; what is no tensor is passed on as it is.
    Raises: RuntimeError: torch finds no CUDA, or no such device.
    """
    if device is None:
        device = _device_of_rank()
    if not isinstance(device, CUDAConfig | int) and torch.device(device).type == "cpu":
        moved: T = map_leaves(batch, lambda leaf: leaf.to("cpu"))
        return moved
    staged = _shared_transfer(device).stage(batch)
    staged.synchronize()
    received: T = staged.receive()
    return received


def transfer_tensor_h2d(
    batch: T,
    /,
    device: torch.device | str | int | CUDAConfig | None = None,
    *,
    num_caches: int | None = None,
) -> T:
    """:func:`transfer_tensor` by the name that SPDL has given it since 0.8."""
    return transfer_tensor(batch, device, num_caches=num_caches)


def transfer_buffer(buffer: Any, *, device_config: CUDAConfig) -> Tensor:
    """A tensor or array (anything that ``torch.as_tensor`` takes) as a tensor on the device.

    Blocks and raises as :func:`transfer_tensor`.
    """
    check_device_config(device_config, "transfer_buffer")
    flags = getattr(buffer, "flags", None)
    if flags is not None and not flags.writeable:
        buffer = buffer.copy()  # torch warns of arrays that it must not write to
    return to_device(torch.as_tensor(buffer), device_config)


def to_device(tensor: Tensor, config: CUDAConfig) -> Tensor:
    """Transfer a tensor as ``device_config=`` says, by :func:`transfer_tensor`."""
    return transfer_tensor(tensor, config)


def check_device_config(config: object, where: str) -> None:
    """Check ``config`` for function ``where``. Raises: UnsupportedOptionError: no CUDAConfig."""
    if not isinstance(config, CUDAConfig):
        raise UnsupportedOptionError(
            f"{where}: device_config must be None or a CUDAConfig, got {type(config).__name__}. "
            "Make one with cuda_config(device_index). Pass None and move the batch with "
            "batch.to(device) where there is no CUDA."
        )


_shared: dict[tuple[torch.device, int], Transfer] = {}
_shared_lock = threading.Lock()


def _shared_transfer(device: torch.device | str | int | CUDAConfig) -> Transfer:
    """Return the transfer of a device and stream, shared by all threads."""
    stream = _stream_of(device)
    place = cuda.resolve(_cuda_device(device, "transfer_tensor"))
    with _shared_lock:
        if (place, stream) not in _shared:
            _shared[place, stream] = Transfer(CUDAConfig(place.index, stream))
        return _shared[place, stream]


def _stream_of(device: torch.device | str | int | CUDAConfig) -> int:
    return device.stream if isinstance(device, CUDAConfig) else cuda.PER_THREAD_STREAM


def _cuda_device(device: torch.device | str | int | CUDAConfig, where: str) -> torch.device:
    if isinstance(device, CUDAConfig):
        return device.device
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type != "cuda":
        raise UnsupportedOptionError(
            f"{where}: device must be a CUDA device, got {str(place)!r}. Move batches to other "
            "devices with batch.to(device)."
        )
    return place


def _device_of_rank() -> torch.device:
    """Return the device of this rank, by the local rank that torchrun and others set."""
    rank = os.environ.get("LOCAL_RANK")
    return torch.device("cuda") if rank is None else torch.device("cuda", int(rank))
