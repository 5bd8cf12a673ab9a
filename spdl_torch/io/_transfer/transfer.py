"""Host to device: nested batches through reused pinned memory, on a separate stream."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from spdl_torch.engine.channel import ChannelClosed
from spdl_torch.engine.ops import on_one_thread
from spdl_torch.engine.threads import exit_has_begun
from spdl_torch.errors import UnsupportedOptionError

from ...checks import check_whole
from ...locks import RLock
from . import cuda, slabs
from .region import BatchMemory, LimitedLocker
from .tree import (
    Leaf,
    Recordable,
    Spots,
    can_be_pinned,
    goes_ahead,
    is_plain,
    leaves_of,
    map_spots,
    memory_of,
    move,
    spots_of,
    spots_where,
)

T = TypeVar("T")

MOST_BEHIND = 4
"""The most batches handed over that the device has yet to reach, before ``stage`` waits for it. A
thread may launch work far ahead of the device, and each batch keeps its memory until its turn. Four
steps ahead keep any device busy."""

_LONGEST_PAUSE_SECONDS = 0.01

PINS_AT_HAND_OVER = os.environ.get("SPDL_TORCH_PINS") == "hand-over"
"""Not yet decided, as it was measured on no GPU: batches are made in ordinary memory, and the
thread that copies them packs them into three slabs of torch's pinned memory. It would replace
locked memory that is lent to whoever makes a batch, and all that says when that is free."""

Allocator = tuple["Callable[[int, int, int], int]", "Callable[[int], None]"]


@dataclass(frozen=True, slots=True)
class CUDAConfig:
    """The CUDA device that data goes to, and the stream of the copies."""

    device_index: int
    stream: int = cuda.PER_THREAD_STREAM
    """A ``cudaStream_t`` as an integer (``torch.cuda.Stream().cuda_stream``; the caller keeps
    that stream alive), 0 = the device's default stream, 2 = this package's own on the device."""
    allocator: Allocator | None = None
    """None, or the two functions of torch's caching allocator, which always provides the memory."""

    def __post_init__(self) -> None:
        check_whole("cuda_config", device_index=self.device_index, least=0)
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


cuda_config = CUDAConfig
"""The device and the stream of copies, for ``device_config=``; does not touch CUDA."""


@dataclass(slots=True, eq=False, repr=False)
class Staged:
    """A batch in transfer to the device. ``receive()`` hands it over, once."""

    _transfer: Transfer
    _batch: Any
    _blocks: Sequence[Recordable]
    _event: cuda.Event | None
    _late: Spots
    """Where the leaves are that move at the hand-over."""
    _is_late: bool
    """Whether there are any."""
    _there: Sequence[Any]
    """What was on the device before."""
    _made: cuda.Event | None
    _is_received: bool = False

    @property
    def has_met_device(self) -> bool:
        """Whether a part of the batch was on the device before. Asked before it is received."""
        return bool(self._there)

    def receive(self) -> Any:
        """Return the batch for use on the calling thread's current stream. Does not wait.

        Call it on the training thread while the model's stream is current: that stream waits for
        the copy, and the memory is kept until that stream is done with it.

        Raises: RuntimeError: it was received before.
        """
        if self._is_received:
            raise RuntimeError("Staged.receive: this batch was handed over already; call it once.")
        self._is_received = True
        transfer = self._transfer
        if self._event is not None:
            transfer._behind.append(transfer._backend.hand_over(self._event, self._blocks))
        if self._made is not None:
            blocks = [each for leaf in self._there for each in memory_of(leaf)]
            transfer._backend.hand_over(self._made, blocks)
            self._there, self._made = (), None
        transfer._readers.handed_over(transfer._backend)
        batch, late = self._batch, self._late
        self._batch, self._blocks, self._late = None, (), {}
        return map_spots(batch, late, lambda leaf: move(leaf, transfer.device)) if late else batch

    def synchronize(self) -> None:
        """Wait, without the GIL, until the copy is done."""
        if self._event is not None:
            self._event.synchronize()

    def wait_for_the_late(self) -> None:
        """Wait, without the GIL, for what moved by itself as the batch was received: on the current
        stream, so for all that this has.
        """
        backend = self._transfer._backend
        if self._is_late and (event := backend.mark(backend.current_stream())) is not None:
            event.synchronize()


class Transfer:
    """Copies batches to one CUDA device ahead of training: ``stage`` on a loading thread, then
    ``receive`` on the training thread.

    Owns ``num_slabs`` slabs of pinned memory, each grown to the largest batch. A slab is reused
    only after the copy out of it is done; waiting for that and packing do not hold the GIL. Any
    thread may call ``stage``; one batch is staged at a time. ``stage`` also waits while the
    receivers' streams lag by more than 4 batches. All transfers of a process to a device share one
    copy stream.

    Tensors of 64 KiB or more that are already pinned are copied from where they are; tensors on
    the device are passed on. Other tensors (sparse, subclasses), packed sequences and objects with
    ``to`` and ``record_stream`` are moved by their own ``to`` in ``stage``. What is left (tensors
    that need gradients, nested and quantized ones, other objects with a ``to`` method) is moved at
    ``receive``, pinned before that if it has a ``pin_memory`` method.

    Raises: RuntimeError: torch finds no CUDA, or no such device; UnsupportedOptionError: not a
        CUDA device.
    """

    def __init__(
        self, device: torch.device | str | int | CUDAConfig = "cuda", *, num_slabs: int = 2
    ) -> None:
        check_whole("Transfer", num_slabs=num_slabs)
        config = _config_of(device, "Transfer")
        self._backend = cuda.CudaBackend(config.device, config.stream)
        self._readers = self._backend.readers
        memory = self._backend.torchs_pinned if PINS_AT_HAND_OVER else self._backend.pinned
        self._ring = ring = slabs.SlabRing(memory, num_slabs, at_once=PINS_AT_HAND_OVER)
        readers = self._readers

        def let_go() -> None:  # without this object, which would not go by itself
            ring.let_go()
            readers.look()

        self._memory = BatchMemory(self._backend, 0, let_go)
        # Held while a batch is staged, waits included: the ring serves one at a time.
        # receive() does not take it, so a receiver never waits for a batch that is being packed.
        self._lock = RLock()
        # The marks of batches whose kernels may still run. The receiving thread appends without the
        # lock; only its holder takes from the left, so it removes the mark that it has waited for.
        self._behind: deque[cuda.Event] = deque()

    @property
    def device(self) -> torch.device:
        """The device of the batches, with its index."""
        return self._backend.device

    @on_one_thread
    def stage(self, batch: Any) -> Staged:
        """Start copying every tensor of ``batch`` (dicts, lists, tuples, named tuples and
        dataclasses, nested); return when all are packed and the copies are queued.

        Afterwards the batch may be changed or dropped; already pinned tensors may only be dropped.

        Raises: torch.OutOfMemoryError: the device has too little memory. Whatever a container's
            constructor or a leaf's own ``to`` raises.
        """
        spots = spots_of(batch)
        load = _sorted(leaves_of(spots), self.device)
        self._readers.staged(batch, load.plain)
        with self._lock:
            self.await_model(lambda: True)
            moved, blocks, event = self._copy(load)
            self._readers.look()  # the sources of an earlier batch are gone
            made = self._made(load.there)

        def now(leaf: Any) -> Any:
            return moved.get(id(leaf), leaf)

        late_ids = {id(leaf) for leaf in load.late}
        late = spots_where(spots, lambda leaf: Leaf(now(leaf)) if id(leaf) in late_ids else None)
        staged = map_spots(batch, spots, now)
        return Staged(self, staged, blocks, event, late, bool(late), load.there, made)

    def await_model(self, is_wanted: Callable[[], bool]) -> None:
        """Wait, without the GIL, while the receivers' streams lag by more than 4 batches.

        ``stage`` does so too; a caller that comes here first can end the wait, and need not count
        it as its own time.

        Raises: ChannelClosed: ``is_wanted()`` was false meanwhile, or the interpreter exits.
        """
        with self._lock:
            while len(self._behind) > MOST_BEHIND:
                wait_while(is_wanted, self._behind[0])
                self._behind.popleft()

    def limited(self, most_regions: int) -> LimitedLocker | None:
        """Return a locker of memory, for at most that many regions at once. Tensors in these are
        copied without a slab, and kept until their copies are done; write to the memory only then.
        None = they are to be packed.
        """
        return None if PINS_AT_HAND_OVER else LimitedLocker(self._backend, most_regions)

    def batch_memory(self, most_pieces: int) -> BatchMemory | None:
        """Return pinned memory in which to make batches, which are then copied without a slab: the
        same each time, of no fewer pieces than before. None = they are to be packed.
        """
        if PINS_AT_HAND_OVER:
            return None
        self._memory.grow(most_pieces)
        return self._memory

    def rest(self) -> None:
        """Let go of batches whose copies are done. Never blocks; any thread may call it."""
        self._memory.let_go()

    @property
    def idle_bytes(self) -> int:
        """The bytes of pinned memory that this would keep if it were not used."""
        return self._ring.num_bytes + self._memory.free_bytes

    def _copy(self, load: _Load) -> tuple[dict[int, Any], list[Recordable], cuda.Event | None]:
        """Return the copies by the ids of their originals, their memory, and the last event."""
        tensors, backend = load.plain, self._backend
        if not (tensors or load.ahead or load.late):
            return {}, [], None
        with backend.on_copy_stream():
            pinned = [tensor for tensor in tensors if self._needs_no_slab(tensor)]
            their_ids = {id(tensor) for tensor in pinned}
            layout = slabs.plan([tensor for tensor in tensors if id(tensor) not in their_ids])
            slab = self._ring.take()  # waits until the copy out of it is done
            # Allocations that may fail come before the first copy is under way. The device's come
            # first: it fails at once, while a host that is short of memory begins to swap.
            blocks = [backend.empty(size) for _, size in layout.blocks]
            direct = [backend.empty(tensor.nbytes) for tensor in pinned]
            memory = self._ring.room(slab, layout.num_bytes)
            guarded: list[Recordable] = [*blocks, *direct]
            try:
                moved = self._copy_packed(layout, memory, blocks)
                for tensor, block in zip(pinned, direct, strict=True):
                    copy = slabs.typed(block, slabs.Slot(tensor, 0, 0, tensor.stride()), 0)
                    backend.copy(copy, tensor)
                    moved[id(tensor)] = copy
                for leaf in load.ahead:
                    moved[id(leaf)] = gone = move(leaf, self.device)
                    guarded += memory_of(gone)
                for leaf in filter(can_be_pinned, load.late):
                    moved[id(leaf)] = leaf.pin_memory()
            finally:
                # After an error, too: copies that have begun still read the slab and the sources.
                event = backend.record()
                slab.busy_until(event, [*pinned, *load.ahead])
        return moved, guarded, event

    def _made(self, there: list[Any]) -> cuda.Event | None:
        """Return the event after which leaves that came on the device are made; None = none came.

        A worker has made them on the default stream, for which a trainer on another one has to
        wait; and it may work on them when they have been dropped.
        """
        if not there:
            return None
        with self._backend.on_copy_stream():
            return self._backend.record_made()

    def _copy_packed(
        self, layout: slabs.Layout, memory: Tensor, blocks: list[Tensor]
    ) -> dict[int, Any]:
        for slot in layout.slots:
            target = slabs.typed(memory, slot, slot.offset)
            slabs.copy_alone(target, slot.tensor)
        for (start, size), block in zip(layout.blocks, blocks, strict=True):
            self._backend.copy(block, memory[start : start + size])
        return {
            id(slot.tensor): slabs.typed(
                blocks[slot.block], slot, slot.offset - layout.blocks[slot.block][0]
            )
            for slot in layout.slots
        }

    def _needs_no_slab(self, tensor: Tensor) -> bool:
        return (
            tensor.nbytes >= slabs.SMALL_BYTES
            and not (tensor.is_conj() or tensor.is_neg())
            and self._backend.is_pinned(tensor)
            and tensor.stride() == slabs.dense_strides(tensor)
        )


class _Load(NamedTuple):
    """The leaves of a batch, each once, by the way they take."""

    plain: list[Tensor]
    """Bytes and strides, packed or copied from where they are."""
    ahead: list[Any]
    """Moved by themselves on the copy stream."""
    late: list[Any]
    """Moved by themselves at the hand-over."""
    there: list[Any]
    """Tensors that are on the device."""


def _sorted(leaves: Iterable[Any], device: torch.device) -> _Load:
    load, seen = _Load([], [], [], []), set()
    for leaf in leaves:
        if id(leaf) not in seen:
            seen.add(id(leaf))
            if is_plain(leaf):
                load.plain.append(leaf)
            elif isinstance(leaf, Tensor) and leaf.device == device:
                if leaf.is_cuda:
                    load.there.append(leaf)
            else:
                (load.ahead if goes_ahead(leaf) else load.late).append(leaf)
    return load


def wait_while(is_wanted: Callable[[], bool], event: cuda.Event) -> None:
    """Wait for an event as long as somebody wants what follows it.

    CUDA's own wait cannot be ended from outside, and a step of the model may take seconds, for
    which a loop that breaks, or an interpreter that exits, would wait. So this looks at the event
    again and again, after ever longer pauses: the device has several steps left to do meanwhile.
    """
    pause_seconds = 50e-6
    while not event.query():
        if exit_has_begun() or not is_wanted():
            raise ChannelClosed
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)


@on_one_thread
def transfer_tensor(
    batch: T,
    /,
    device: torch.device | str | int | CUDAConfig | None = None,
    *,
    num_caches: int | None = None,
) -> T:
    """Copy ``batch`` to a CUDA device, in a pipeline stage or in the training loop.

    Blocks, without the GIL, until the copy is done, so any thread and any stream may read the
    result. Its memory is guarded for the calling thread's current stream, which unless changed is
    the default stream, the same on all threads. A model on another stream calls ``record_stream``
    itself, or uses :class:`Transfer`. All threads share one copy stream and one ring of slabs per
    device, which stay until the process ends.

    Args:
        batch: tensors, or dicts, lists, tuples, named tuples and dataclasses of them, nested.
        device: None = ``cuda:$LOCAL_RANK``, or without that variable the current device. A CPU
            device moves everything there.
        num_caches: accepted for compatibility with SPDL and ignored: no batches are cached here.

    Returns: the same containers; everything but tensors is passed on as it is.
    Raises: RuntimeError: torch finds no CUDA, or no such device.
    """
    if device is None:
        device = _device_of_rank()
    if not isinstance(device, CUDAConfig | int) and torch.device(device).type == "cpu":
        moved: T = map_spots(batch, spots_of(batch), lambda leaf: leaf.to("cpu"))
        return moved
    staged = _shared_transfer(device).stage(batch)
    staged.synchronize()
    received: T = staged.receive()
    staged.wait_for_the_late()
    return received


transfer_tensor_h2d = transfer_tensor
"""The same, by the name that SPDL has used since 0.8."""


@on_one_thread
def transfer_buffer(buffer: Any, *, device_config: CUDAConfig) -> Tensor:
    """Copy a tensor or array (anything that ``torch.as_tensor`` takes) to a CUDA device.

    Blocks and raises as :func:`transfer_tensor`.
    """
    check_device_config(device_config, "transfer_buffer")
    flags = getattr(buffer, "flags", None)
    if flags is not None and not flags.writeable:
        buffer = buffer.copy()  # torch warns of read-only arrays
    return to_device(torch.as_tensor(buffer), device_config)


def to_device(tensor: Tensor, config: CUDAConfig) -> Tensor:
    """Copy a tensor to the device of a ``device_config=``, by :func:`transfer_tensor`."""
    return transfer_tensor(tensor, config)


def check_device_config(config: object, where: str) -> None:
    """Check ``config`` for function ``where``. Raises: UnsupportedOptionError: no CUDAConfig."""
    if not isinstance(config, CUDAConfig):
        raise UnsupportedOptionError(
            f"{where}: device_config must be None or a CUDAConfig, got {type(config).__name__}. "
            "Make one with cuda_config(device_index). Pass None and move the batch with "
            "batch.to(device) where there is no CUDA."
        )


shared_transfers: dict[CUDAConfig, Transfer] = {}
_shared_lock = RLock()


def _shared_transfer(device: torch.device | str | int | CUDAConfig) -> Transfer:
    """Return the transfer of a device and stream, shared by all threads."""
    config = _config_of(device, "transfer_tensor")
    with _shared_lock:
        if config not in shared_transfers:
            shared_transfers[config] = Transfer(config)
        return shared_transfers[config]


def _config_of(device: torch.device | str | int | CUDAConfig, where: str) -> CUDAConfig:
    """Return the device, with its index, and the stream. Raises: as :class:`Transfer`."""
    if isinstance(device, CUDAConfig):
        return CUDAConfig(cuda.resolve(device.device).index, device.stream)
    target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if target.type != "cuda":
        raise UnsupportedOptionError(
            f"{where}: device must be a CUDA device, got {str(target)!r}: {cuda.refusal(target)}"
        )
    return CUDAConfig(cuda.resolve(target).index)


def _device_of_rank() -> torch.device:
    """Return the device of this rank, by the local rank that launchers such as torchrun set."""
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return torch.device("cuda")
    count = cuda.num_visible()
    if count == 1:  # the launcher shows each rank its own device alone
        return torch.device("cuda", 0)
    if int(rank) >= count > 1:
        raise RuntimeError(
            f"transfer_tensor: LOCAL_RANK is {rank}, but torch sees {count} CUDA devices, from "
            "'cuda:0' on. Start as many ranks as there are devices, look at CUDA_VISIBLE_DEVICES, "
            "or pass device=."
        )
    return torch.device("cuda", int(rank))
