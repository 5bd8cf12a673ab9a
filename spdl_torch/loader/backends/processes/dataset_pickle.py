"""Send the loader to a child that is not forked: pickled while the process starts, unpickled by
its main function.

Only while a process starts does multiprocessing pickle its own locks, queues and shared values. The
pickle itself lies in a file in memory. multiprocessing would write it into a pipe that holds
64 KiB, and wait until the child, which imports torch first, has read the rest: seconds for each
child, one after another, and for ever where it ends before. It is opened late, so that an error in
doing so can be reported to the trainer.
"""

from __future__ import annotations

import importlib
import io
import pickle
import random
import traceback
import types
from functools import partial
from itertools import islice
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch

from ....engine.failures import attach_note
from ....objects.kinds import is_plain_tensor
from ....objects.members import members, text_of
from ....shown_text import short_repr
from .batch_packing import TensorReducer, load_storage
from .wire import File, content_of, in_file

if TYPE_CHECKING:
    from ....objects.members import Way
    from ..backend import LoadSpec

_LIBRARY, _TORCH, _OURS = (
    str(Path(file).parent) for file in (pickle.__file__, torch.__file__, __file__)
)

_LEAST_SHARED_BYTES = 1 << 20  # of a storage that tensors have in common in the child, too
_MOST_STEPS = 12  # the depth to which the search goes
_MOST_MEMBERS = 1_000  # the members of one container that it examines


class PickledSpec:
    """A LoadSpec that is packed when it is pickled."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._file: File | None = None

    def __reduce__(self) -> Any:
        self._file = in_file(_dumps_or_explain(self._spec))
        return partial, (_opened, reduction.DupFd(int(self._file)))


def _opened(duplicate: Any) -> LoadSpec:
    """Return the spec in the child. Raises: what pickle raises if a class or function is not
    found."""
    spec: LoadSpec = pickle.loads(content_of(File(duplicate.detach())))
    return spec


class _Pickler(ForkingPickler, TensorReducer):
    """Pickles multiprocessing's objects its way, and tensors by value unless already shared.

    Two tensors of a large storage view one storage in the child, too. (Arrays do not: pickle knows
    no views.)
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # By address and size: several storages may stand for the memory of one array.
        self._storages: dict[tuple[int, int], _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object; see ``pickle.Pickler``."""
        if isinstance(obj, types.MethodType | types.BuiltinMethodType):
            return _reduced_method(obj)
        if isinstance(obj, torch.UntypedStorage) or _has_storage(obj):
            if obj.is_shared():
                return NotImplemented
            if isinstance(obj, torch.Tensor) and _is_most_of_its_storage(obj):
                return self._reduced_view(obj)
        return TensorReducer.reducer_override(self, obj)

    def _reduced_view(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        which = storage.data_ptr(), storage.nbytes()
        kept = self._storages.setdefault(which, _Storage(storage))
        view = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _load_view, (kept, tensor.dtype, *view)


class _Storage:
    """A storage in the pickle; the same object stands for the same storage."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __reduce__(self) -> Any:
        whole = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        return load_storage, (pickle.PickleBuffer(cast("Any", whole.numpy())),)


def _load_view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)


def _has_storage(obj: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(obj, torch.Tensor) and obj.layout is torch.strided


def _is_most_of_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is best sent with its whole storage, which is large."""
    if not is_plain_tensor(tensor):
        return False
    num_bytes = tensor.untyped_storage().nbytes()
    return num_bytes >= _LEAST_SHARED_BYTES and 2 * tensor.nbytes >= num_bytes


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


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()


def _dumps_or_explain(spec: LoadSpec) -> bytes:
    try:
        return _dumps(spec)
    except BaseException as error:
        if _is_of_an_object(error):
            attach_note(error, "in pickling the dataset and its functions for a worker process")
            raise
        parts = {
            "dataset": spec.recipe.dataset,
            "collate_fn": spec.recipe.collate_fn,
            "worker_init_fn": spec.worker_init_fn,
        }
        for name, part in parts.items():
            found = find_unpicklable(part, name)
            if found is not None:
                path, value = found
                raise pickle.PicklingError(
                    "DataLoader: the dataset and its functions are sent to the worker processes, "
                    f"but {path} cannot be pickled: {short_repr(value, 120)} "
                    f"({type(error).__name__}: {error}). Define functions and classes at the top "
                    "level of a module, open files and connections on first use, or pass "
                    'multiprocessing_context="fork" where the system has it, or '
                    'isolation="thread" for a dataset that several threads may use: neither '
                    "pickles anything."
                ) from error
        raise


def _is_of_an_object(error: BaseException) -> bool:
    """Return whether a method of an object's own raised the error, and not what pickles it."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = frames[-1]
    if where.startswith(_LIBRARY) and "site-packages" not in where:
        return False  # pickle, or a class of Python's that refuses
    return not where.startswith((_TORCH, _OURS))


def find_unpicklable(value: Any, name: str) -> tuple[str, Any] | None:
    """Return the innermost part that cannot be pickled, with the expression that leads there; None
    = all can."""
    found = _innermost(value, (None, name, 0), {})
    return None if found is None else (text_of(found[0]), found[1])


def _innermost(value: Any, path: Way, seen: dict[int, Any]) -> tuple[Way, Any] | None:
    if id(value) in seen or _can_pickle(value):
        return None
    seen[id(value)] = value
    if path[2] < _MOST_STEPS:
        for step, member in islice(members(value, state_of=_state_of), _MOST_MEMBERS):
            found = _innermost(member, (path, step, path[2] + 1), seen)
            if found is not None:
                return found
    return path, value


def _can_pickle(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


def _state_of(value: Any) -> Any:
    """Return the state that pickle would take; None = the object's own method fails."""
    try:
        return value.__getstate__()
    except Exception:
        return None
