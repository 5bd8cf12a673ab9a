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
import types
from functools import partial
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....engine.failures import attach_note
from .batch_packing import TensorReducer
from .wire import File, content_of, in_file

if TYPE_CHECKING:
    from ..backend import LoadSpec


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
