"""Large arrays and tensors of a dataset, which worker threads share and may not write.

An array is given to each worker as a read-only view: a write raises numpy's own error, which gets a
note. Tensors have no such flag, so each worker gets an alias that counts its own writes: after
each batch the worker checks the counters.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data._utils.collate import default_convert

from ...engine.failures import attach_note
from ...io._transfer.tree import map_leaves

_MOST_LOOKED_AT = 256
"""The most tensors that are checked after one batch; the next batch checks the next ones."""
_MOST_NAMED = 4
_REFUSALS = ("read-only", "readonly", "read only", "read-write", "not writ")

_REMEDY = (
    "Copy what you change, such as data[index].copy(); or leave isolation out, so that every "
    "worker has a process with memory of its own; or set thread_safe = True in the dataset if the "
    "workers may write there"
)


class SharedArrays:
    """One worker's views of what all share. Used by its thread alone."""

    def __init__(self) -> None:
        self._arrays: list[str] = []
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._versions: list[int] = []
        self._storages: set[int] = set()  # the addresses of the tensors' memory
        self._next = 0  # the tensor at which the next check begins

    @property
    def has_arrays(self) -> bool:
        return bool(self._arrays)

    def array(self, path: str, shared: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return a read-only view of a shared array."""
        view = shared.view()
        view.flags.writeable = False
        self._arrays.append(f"{path} ({_size(view.nbytes)})")
        return view

    def tensor(self, path: str, shared: torch.Tensor) -> torch.Tensor:
        """Return an alias of a shared tensor whose writes are counted apart from all others'."""
        alias = shared.data
        self._tensors.append((f"{path} ({_size(alias.nbytes)})", alias))
        self._versions.append(alias._version)
        if alias.layout is torch.strided:
            self._storages.add(alias.untyped_storage().data_ptr())
        return alias

    def owned(self, batch: Any) -> Any:
        """Return the batch with copies of tensors that view shared memory: the loop may write to
        them, as to those of a worker process."""
        return map_leaves(batch, self._owned_leaf) if self._storages else batch

    def _owned_leaf(self, leaf: Any) -> Any:
        has_storage = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        if not has_storage or hasattr(leaf, "__tensor_flatten__"):  # a subclass that wraps others
            return leaf
        return leaf.clone() if leaf.untyped_storage().data_ptr() in self._storages else leaf

    def look(self) -> BaseException | None:
        """Return an error if a tensor was written since it was last checked, else None."""
        number = len(self._tensors)
        if not number:
            return None
        for index in range(self._next, self._next + min(number, _MOST_LOOKED_AT)):
            path, tensor = self._tensors[index % number]
            if tensor._version != self._versions[index % number]:
                self._versions[index % number] = tensor._version
                return RuntimeError(
                    f"DataLoader: {path} was changed in place by a sample, or by the loop through "
                    "a batch that views it. All worker threads share this tensor, so the change "
                    f"is in what they read from now on. {_REMEDY.replace('copy()', 'clone()')}."
                )
        self._next = (self._next + _MOST_LOOKED_AT) % number if number > _MOST_LOOKED_AT else 0
        return None

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of numpy, or of what writes into its arrays, about a write that
        was refused."""
        if not self._arrays or not isinstance(error, ValueError | TypeError | BufferError):
            return
        if not any(word in str(error) for word in _REFUSALS):
            return
        named = ", ".join(self._arrays[:_MOST_NAMED])
        more = len(self._arrays) - _MOST_NAMED
        named += f" and {more} more" if more > 0 else ""
        attach_note(
            error,
            f"the worker threads share large arrays and have read-only views of them: {named}. "
            f"{_REMEDY}.",
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def convert_read_only(sample: Any) -> Any:
    """Return ``default_convert(sample)`` with read-only arrays copied: the tensors made of them are
    the loop's own, and it may write to them.
    """
    return cast("Any", default_convert)(tree_map_only(np.ndarray, _owned, sample))


def _owned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array if array.flags.writeable else array.copy()
