"""Pickles between the trainer and its processes: of batches, whose large blocks are left to shared
memory, and of the loader, for a child that is not forked.

Tensors and arrays of 64 KiB or more are the blocks; the trainer's batch views them. Smaller ones
are in the pickle and get their own memory, so keeping labels keeps no images alive. Everything else
that pickle can handle is in the pickle too.

The loader is pickled while a process starts, as only then does multiprocessing pickle its own
locks, queues and shared values; and unpickled by the child's main function, so late that an error
in doing so can be reported to the trainer. The pickle itself lies in a file in memory.
multiprocessing would write it into a pipe that holds 64 KiB, and wait until the child, which
imports torch first, has read the rest: seconds for each child, one after another, and for ever
where it ends before.
"""

from __future__ import annotations

import importlib
import io
import pickle
import random
import types
from functools import partial
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from ....engine.failures import attach_note
from ....objects.members import is_plain_tensor
from ...fetching.collating import LARGE_BYTES
from .wire import File, content_of, in_file

if TYPE_CHECKING:
    from ..backend import LoadSpec
    from ..jobs import Loaded
    from .shared_memory import Mappings
    from .wire import Packed

_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


def pickled(batch: Any) -> tuple[Any, list[Any]]:
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
    owner: Any = mappings.lend(packed.slab, max(map(sum, packed.blocks)))
    parts = [owner[offset : offset + size] for offset, size in packed.blocks]
    content = packed.body or parts.pop()
    return loaded._replace(batch=pickle.loads(content, buffers=parts))


class TensorReducer(pickle.Pickler):
    """Pickles tensors in host memory as plain bytes, without torch's file format, and read-only
    arrays as torch does."""

    refuses_graphs = False
    """Whether a tensor whose graph would be lost between the processes is an error."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors in host memory and read-only arrays; leave everything else to pickle."""
        if type(obj) is np.ndarray:
            is_plain = obj.flags.writeable or obj.dtype.hasobject
            return NotImplemented if is_plain else _reduced_read_only(obj)
        if isinstance(obj, torch.Tensor):
            if is_plain_tensor(obj):
                return _reduced_tensor(obj)
            if self.refuses_graphs and obj.requires_grad and not obj.is_leaf:
                return cast("Any", reduce_tensor)(obj)  # torch's own, which refuses
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
    refuses_graphs = True


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


class PickledSpec:
    """A LoadSpec that is packed when it is pickled."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._file: File | None = None

    def __reduce__(self) -> Any:
        self._file = in_file(_dumps(self._spec))
        return partial, (_opened, reduction.DupFd(int(self._file)))


def _opened(duplicate: Any) -> LoadSpec:
    """Return the spec in the child. Raises: what pickle raises if a class or function is not
    found."""
    spec: LoadSpec = pickle.loads(content_of(File(duplicate.detach())))
    return spec


class _Pickler(ForkingPickler, TensorReducer):
    """Pickles multiprocessing's objects its way, and tensors by value unless already shared."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object; see ``pickle.Pickler``."""
        if isinstance(obj, types.MethodType | types.BuiltinMethodType):
            return _reduced_method(obj)
        has_storage = isinstance(obj, torch.Tensor) and obj.layout is torch.strided
        if (has_storage or isinstance(obj, torch.UntypedStorage)) and obj.is_shared():
            return NotImplemented
        return TensorReducer.reducer_override(self, obj)


def _reduced_method(method: Any) -> Any:
    """Reduce a function of ``random`` or ``numpy.random`` to its name: in the child it draws from
    the sample's stream. pickle would make it a method of another generator."""
    name = getattr(method, "__name__", "")
    for module in (random, np.random):
        generator = getattr(getattr(module, name, None), "__self__", None)
        if generator is not None and generator is method.__self__:
            return _function_of, (module.__name__, name)
    return NotImplemented


def _function_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


_NOT_SENT = (
    "in pickling what a worker process gets. Define functions and classes at the top level of a "
    "module, and open files and connections on first use. A DataLoader with "
    'multiprocessing_context="fork" or isolation="thread" pickles nothing.'
)


def _dumps(spec: LoadSpec) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, 5).dump(spec)
    except BaseException as error:
        attach_note(error, _NOT_SENT)
        raise
    return file.getvalue()
