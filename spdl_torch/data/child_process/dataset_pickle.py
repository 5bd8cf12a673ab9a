"""Send the loader to the child: pickled while the process starts, opened by its main function.

Only while a process starts does multiprocessing pickle its own locks, queues and shared values. The
pickle is opened late, so that an error in opening it can be reported to the trainer.
"""

from __future__ import annotations

import functools
import io
import pickle
import types
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch

from .batch_packing import TensorReducer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..workers.load_spec import LoadSpec

__all__ = ["PickledSpec", "find_unpicklable", "shown"]

_MOST_STEPS = 12  # the depth to which the search goes
_MOST_MEMBERS = 1_000  # the members of one container that it looks at


class PickledSpec:
    """A LoadSpec that is packed when it is pickled."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec

    def __reduce__(self) -> Any:
        return _Packed, (_dumps_or_explain(self._spec),)


class _Packed:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def open(self) -> LoadSpec:
        """Return the spec. Raises: what pickle raises if a class or function is not found."""
        content, self._content = self._content, b""
        spec: LoadSpec = pickle.loads(content)
        return spec


class _Pickler(ForkingPickler, TensorReducer):
    """Pickles multiprocessing's objects its way, and tensors by value unless already shared."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object; see ``pickle.Pickler``."""
        if isinstance(obj, torch.Tensor | torch.UntypedStorage) and obj.is_shared():
            return NotImplemented
        return TensorReducer.reducer_override(self, obj)


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()


def _dumps_or_explain(spec: LoadSpec) -> bytes:
    try:
        return _dumps(spec)
    except Exception as error:
        parts = ("dataset", "collate_fn", "worker_init_fn")
        for name in parts:
            found = find_unpicklable(getattr(spec, name), name)
            if found is not None:
                path, value = found
                raise pickle.PicklingError(
                    f'DataLoader: isolation="process" sends the dataset and its functions to a '
                    f"child process, but {path} cannot be pickled: {shown(value)} "
                    f"({type(error).__name__}: {error}). Define functions and classes at the top "
                    "level of a module, open files and connections on first use, or leave "
                    "isolation out: threads need no pickling."
                ) from error
        raise


def find_unpicklable(value: Any, path: str, seen: set[int] | None = None) -> tuple[str, Any] | None:
    """Return the innermost part that cannot be pickled, with its path; None = all can."""
    seen = set() if seen is None else seen
    if id(value) in seen or _can_pickle(value):
        return None
    seen.add(id(value))
    if path.count(".") + path.count("[") < _MOST_STEPS:
        for name, member in _members(value):
            found = find_unpicklable(member, path + name, seen)
            if found is not None:
                return found
    return path, value


def _can_pickle(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, dict):
        for key, member in list(value.items())[:_MOST_MEMBERS]:
            yield f"[{key!r}]", member
    elif isinstance(value, list | tuple | set | frozenset):
        for number, member in enumerate(list(value)[:_MOST_MEMBERS]):
            yield f"[{number}]", member
    elif not isinstance(value, type | types.FunctionType | types.ModuleType):
        yield from ((f".{name}", member) for name, member in _state_of(value).items())


def _state_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that pickle would take."""
    try:
        state = value.__getstate__()
    except Exception:
        return {}
    states = state if isinstance(state, tuple) else (state,)
    return {
        name: member
        for each in states
        if isinstance(each, dict)
        for name, member in each.items()
        if isinstance(name, str)
    }


def shown(value: Any) -> str:
    """Return the value's ``repr``, shortened to 120 characters."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
