"""Pack a batch into a small pickle and large blocks, which are copied once: into a slab.

Tensors and arrays of 64 KiB or more lie in the slab, and the trainer's batch views them. Smaller
ones are in the pickle and get their own memory, so keeping labels keeps no images alive.
Everything else that pickle can handle is in the pickle too. torch's ``default_collate``, the rows
of a ``TensorDataset`` and the batch kernel write straight into the slab.
"""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from ....engine.failures import attach_note
from ....objects.kinds import is_plain_tensor
from ...fetching.collating import LARGE_BYTES
from .shared_memory import SlabPool
from .wire import Packed

if TYPE_CHECKING:
    from ..jobs import Loaded
    from .shared_memory import Mappings, Slab
    from .wire import File, Span

_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)

_ALIGNMENT = 128  # bytes; at least torch's alignment of tensors in host memory
_INLINE_BYTES = 2 * 1024  # a longer pickle lies in the slab, so that no message is long


class SlabWriter:
    """Offers space in slabs for batches, and packs them, one at a time: the worker, on its own
    thread, calls ``begin``, ``room`` for each large tensor, ``pack``, and ``sent``. A batch that
    gets no further leaves its slab to the next one.
    """

    def __init__(self) -> None:
        self.slabs = SlabPool()
        self.slab: Slab | None = None
        """The slab of the batch; None = it needs none yet."""
        self._view: torch.Tensor | None = None  # of the slab, for tensors that are made there
        self._is_packed = False
        self._end = 0  # of what lies in the slab
        self._expected = 0  # the bytes of the previous batch

    def begin(self) -> None:
        """Begin a batch."""
        self._leave()
        self._is_packed, self._end = False, 0

    def _leave(self) -> None:
        slab, self.slab, self._view = self.slab, None, None
        if slab is not None:
            self.slabs.freed((slab.number,), ())

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """Return bytes of the batch's slab for a tensor: uint8, one dimension; None = use other
        memory: the tensor is small, or does not fit.
        """
        if num_bytes < LARGE_BYTES:
            return None
        if self.slab is None:
            # The first batch cannot know how many tensors follow.
            is_guess = self._expected == 0
            self.slab = self.slabs.take(max(self._expected, num_bytes), is_guess=is_guess)
        start = self._end
        if start + num_bytes > self.slab.size:
            return None
        if self._view is None:
            self._view = self.slabs.viewed(self.slab)
        self._end = _aligned(start + num_bytes)
        return self._view[start : start + num_bytes]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the slab of the batch."""
        address = tensor.untyped_storage().data_ptr()
        return self.slab is not None and self.slab.has(address)

    def end(self) -> None:
        """Do nothing: ``pack`` ends the batch."""

    def pack(self, batch: Any) -> Packed:
        """Pack a batch on the worker that made it. Large copies release the GIL.

        Raises: what pickle raises on a part that cannot be pickled.
        """
        if self._is_packed:
            self.begin()
        body, contents = _pickled(batch)
        is_long = len(body) > _INLINE_BYTES
        if is_long:
            contents.append(np.frombuffer(body, np.uint8))
        blocks = tuple(self._placed(contents)) if contents else ()
        self._view, self._is_packed = None, True
        if not contents:
            self._leave()
        slab, content = self.slab, b"" if is_long else bytes(body)
        if slab is None:
            return Packed(None, 0, content, blocks)
        return Packed(slab.number, 0 if slab.file is None else slab.size, content, blocks)

    def sent(self) -> tuple[File, ...]:
        """Note that the batch is sent: the trainer has its slab, and reports when it is free.
        Return the file that goes with it, if the slab is new."""
        slab, self.slab = self.slab, None
        if slab is None or slab.file is None:
            return ()
        file, slab.file = slab.file, None
        return (file,)

    def _placed(self, contents: list[Any]) -> list[Span]:
        """Copy into a slab whatever does not lie there yet; return the spans of all."""
        slab = self.slab
        spans = [None if slab is None else slab.span_of(content) for content in contents]
        rest = sum(
            _aligned(content.nbytes)
            for content, span in zip(contents, spans, strict=True)
            if span is None
        )
        if slab is None or self._end + rest > slab.size:
            # The first batch, or a larger one than before: all of it goes elsewhere.
            self.slab = self.slabs.take(sum(_aligned(each.nbytes) for each in contents))
            self._end, spans = 0, [None] * len(contents)
            if slab is not None:
                self.slabs.freed((slab.number,), ())
            slab = self.slab
        written = []
        for content, span in zip(contents, spans, strict=True):
            if span is None:
                span = self._end, content.nbytes
                slab.write(self._end, content)
                self._end += _aligned(content.nbytes)
            written.append(span)
        self._expected = self._end
        return written


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _pickled(batch: Any) -> tuple[Any, list[Any]]:
    """Return the pickle of a batch, and the bytes of its large blocks in the pickle's order."""
    buffers: list[pickle.PickleBuffer] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LARGE_BYTES:
            return True
        buffers.append(buffer)
        return False

    file = io.BytesIO()
    try:
        _BatchPickler(file, 5, buffer_callback=is_small).dump(batch)
    except BaseException as error:
        attach_note(
            error,
            f"a batch of type {type(batch).__name__} has to be pickled on its way from the loading "
            "process. Let collate_fn return what can be pickled, or load on threads: "
            'isolation="thread".',
        )
        raise
    return file.getbuffer(), [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]


def unpack(loaded: Loaded, mappings: Mappings) -> Loaded:
    """Rebuild a batch in the trainer. Raises: what a class in the batch raises when rebuilt."""
    packed: Packed = loaded.batch
    if packed.slab is None:
        return loaded._replace(batch=pickle.loads(packed.body))
    # An array of bytes is a buffer, though numpy's types hide it.
    owner: Any = mappings.lend(packed.slab, sum(packed.blocks[-1]))
    parts = [owner[offset : offset + size] for offset, size in packed.blocks]
    content = packed.body or parts.pop()
    return loaded._replace(batch=pickle.loads(content, buffers=parts))


class TensorReducer(pickle.Pickler):
    """Pickles tensors in host memory as plain bytes, without torch's file format, and read-only
    arrays as torch does."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors in host memory and read-only arrays; leave everything else to pickle."""
        if type(obj) is np.ndarray:
            is_plain = obj.flags.writeable or obj.dtype.hasobject
            return NotImplemented if is_plain else _reduced_read_only(obj)
        if isinstance(obj, torch.Tensor):
            if is_plain_tensor(obj):
                return _reduced_tensor(obj)
            if _is_plain_sparse(obj):
                _, layout_and_parts = cast("Any", obj).__reduce_ex__(5)  # torch's own
                return _load_sparse, layout_and_parts
            return NotImplemented
        if isinstance(obj, torch.storage.TypedStorage) and _is_on_host(obj._untyped_storage):
            return _load_typed, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and _is_on_host(obj):
            whole = torch.empty(0, dtype=torch.uint8).set_(obj)
            return load_storage, (_buffer_of(whole),)
        return NotImplemented


class _BatchPickler(TensorReducer):
    def reducer_override(self, obj: Any) -> Any:
        """Reduce as ``TensorReducer``. Raises: RuntimeError: torch's own, for a tensor whose graph
        would be lost between the processes."""
        if isinstance(obj, torch.Tensor) and obj.requires_grad and not obj.is_leaf:
            return cast("Any", reduce_tensor)(obj)  # which refuses
        return super().reducer_override(obj)


def _reduced_read_only(array: np.ndarray[Any, Any]) -> Any:
    """Reduce an array as torch does, by the default protocol: before Python 3.14 that has no
    read-only arrays."""
    if pickle.DEFAULT_PROTOCOL >= 5:
        return NotImplemented
    if not array.size:
        return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    # Not copied: numpy takes whoever names the memory as its owner's word.
    memory = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    owner = SimpleNamespace(__array_interface__=memory, array=array)
    return np.asarray(owner).view(array.dtype).__reduce_ex__(5)


def _is_on_host(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"


def _reduced_tensor(tensor: torch.Tensor) -> Any:
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return _load_tensor, (b"", tensor.dtype, shape, tensor.stride(), shape)
    if 0 in tensor.stride():  # expanded: one of the equal entries is enough
        steps = zip(shape, tensor.stride(), strict=True)
        small = [1 if stride == 0 else size for size, stride in steps]
        tensor = tensor.as_strided(small, tensor.stride())
    if not tensor.is_contiguous() and tensor.stride() != _dense_strides(tensor):
        tensor = tensor.clone()
    flat = torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize, (tensor.nbytes,), (1,)
    )
    inner = tuple(tensor.shape)
    if inner == shape and tensor.is_contiguous():
        return _load_dense, (_buffer_of(flat), tensor.dtype, shape)
    return _load_tensor, (_buffer_of(flat), tensor.dtype, inner, tensor.stride(), shape)


def _is_plain_sparse(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout in _SPARSE
        and not (tensor.requires_grad or tensor.__dict__)
    )


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()


def _buffer_of(flat: torch.Tensor) -> Any:
    return pickle.PickleBuffer(cast("Any", flat.numpy())) if flat.numel() else b""


def load_storage(buffer: Any) -> torch.UntypedStorage:
    """Return a storage with those bytes."""
    if not len(buffer):
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _load_dense(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # Not view(), which would make it a view to autograd: resize_() finds room enough.
    return torch.frombuffer(buffer, dtype=dtype).resize_(shape)


def _load_tensor(
    buffer: Any,
    dtype: torch.dtype,
    inner: tuple[int, ...],
    strides: tuple[int, ...],
    shape: tuple[int, ...],
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(load_storage(buffer), 0, inner, strides)
    return tensor if inner == shape else tensor.expand(shape)


def _load_sparse(layout: torch.layout, parts: Any) -> torch.Tensor:
    # torch's own function, made for files, keeps every such tensor until the next torch.load.
    if layout is torch.sparse_coo:
        *parts, is_coalesced = parts
        return torch.sparse_coo_tensor(*parts, check_invariants=False, is_coalesced=is_coalesced)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _load_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    make: Any = torch.storage.TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)
