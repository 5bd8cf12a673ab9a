"""A worker thread's private copy of a dataset's whole state, as a process would have it.

Deep, but for what cannot change (numbers, texts, functions, ...), for large arrays and tensors,
which are shared and guarded, and for locks and queues, which are made to be shared. An attribute
of a dataset is private as a whole or, if it would take too much time or memory, or holds something
that cannot be copied, shared as a whole, which is reported.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from ...objects.copies import deep_copy, set_state, shallow_copy, unfinalized
from ...objects.kinds import (
    ARRAYS,
    GENERATORS,
    SHARED_MODULES,
    is_flat,
    is_immutable,
    is_memory,
    is_ours,
)
from ...objects.members import Way, reachable, slots_of, text_of, variables_of
from .object_state import (
    attributes_of_copy,
    bytes_in,
    can_be_written,
    has_own_attributes,
    is_seen_through,
)
from .private_memory import PrivateMemory, TornMemory, root_bytes
from .shared_arrays import SharedArrays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LARGE_BYTES = 1 << 20
"""Arrays and tensors from here on are shared."""
_MOST_OBJECTS = 20_000
"""The most objects of an attribute that are copied one by one, at 1 to 5 µs each."""
_MOST_BYTES = 32 << 20
"""The most bytes that a worker's copies take, all attributes together."""
_ENTRY_BYTES = 8  # of a list; dictionaries take more
_DEEPEST = 100
_MOST_NAMED = 5

TRANSFORM_NAMES = ("transform", "transforms", "target_transform")  # torchvision's convention

# Attributes of our own objects that may be the user's; the rest was written for threads.
_OF_USERS = (
    *(*TRANSFORM_NAMES, "loader", "dataset", "datasets"),
    *("_spec", "_state", "src", "pipes", "paths", "op", "source"),  # of a pipeline
    *("_items", "sources"),
)
_HOLDERS = (
    *("spdl_torch.engine.definition.specs", "spdl_torch.data.dataset_state"),
    *("spdl_torch.data.sources", "spdl_torch.data.mixing"),
)
"""Packages of ours whose objects hold the user's: each worker has such objects of its own, where a
dataset has them in one of those attributes."""
_LOADERS = "spdl_torch.data.loader.dataloader"
"""A loader may be a source. Its copies begin anew, as its pickle does."""

_UNSET = types.CellType()  # a variable around a function, before its first value


class _Shared(Exception):
    """Raised for a value that is not to be copied; its text says why."""


class PrivateState:
    """Makes one worker's copies. An object that functions and datasets share has one copy."""

    def __init__(self) -> None:
        self.arrays = SharedArrays()
        self.shared: list[str] = []
        """Sentences on what all workers share though it may be written."""
        self._memory = PrivateMemory()
        self._memo: dict[int, Any] = {}  # own objects by the ids of the originals, as deepcopy has
        self._kept: list[Any] = []  # the originals, alive so that their ids are not reused
        self._num_left, self._bytes_left = _MOST_OBJECTS, _MOST_BYTES

    def dataset(self, dataset: Any, name: str = "dataset") -> Any:
        """Return a private copy of a dataset, or of a function-like object."""
        return self._owner(dataset, (None, name, 0))

    def function(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a private copy of a function, or of an object that is called like one."""
        return cast("Callable[..., Any]", self._owner(function, (None, name, 0)))

    def _owner(self, value: Any, where: Way) -> Any:
        """Copy an object whose attributes are each private or shared as a whole."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if not has_own_attributes(value):
            return self._attempt(value, where)
        try:
            own = shallow_copy(value)
            if own is value:
                raise _Shared("its copy is the object itself")
            attributes = attributes_of_copy(own)
            slots = slots_of(own)
        except Exception as error:
            self._share(where, value, _reason(error))
            return value
        self._note(value, own)
        ours = is_ours(type(value))
        for name, each in tuple(attributes.items()):
            if not ours or name in _OF_USERS or isinstance(each, Dataset):
                attributes[name] = self._attempt(each, (where, name, where[2] + 1))
        for name, each in slots.items():
            private = self._attempt(each, (where, name, where[2] + 1))
            object.__setattr__(own, name, private)
        return own

    def forget(self) -> None:
        """Let go of the originals: all copies are made."""
        self._memo.clear()
        self._kept.clear()
        self._memory = PrivateMemory()

    def _attempt(self, value: Any, where: Way) -> Any:
        """Return a private copy, or the value itself if it is shared, which is noted."""
        if is_immutable(type(value)):
            return value
        num_known, kept, bytes_left = len(self._memo), len(self._kept), self._bytes_left
        self._num_left = _MOST_OBJECTS
        try:
            return self._own(value, where)
        except _Shared as reason:
            why = str(reason)
        except TornMemory:
            why = "another attribute views a part of its memory"
        except Exception as error:  # of the user's methods that copying calls
            why = _reason(error)
        while len(self._memo) > num_known:  # drop the partial copies, which came last
            self._memo.popitem()
        self._bytes_left = bytes_left
        del self._kept[kept:]
        if where[1] in TRANSFORM_NAMES:  # they keep state more often than data
            try:
                return deep_copy(value, self._memo)
            except Exception as error:
                why = _reason(error)
        self._share(where, value, why)
        return value

    def _share(self, where: Way, value: Any, reason: str) -> None:
        self.shared.append(f"{text_of(where)} ({type(value).__name__}): {reason}")

    def _note(self, value: Any, own: Any) -> Any:
        self._memo[id(value)] = own
        self._kept.append(value)
        return own

    def _own(self, value: Any, where: Way) -> Any:
        kind = type(value)
        if is_immutable(kind):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        self._num_left -= 1
        if self._num_left < 0:
            raise _Shared(f"it holds more than {_MOST_OBJECTS} objects")
        if where[2] > _DEEPEST:
            raise _Shared(f"its objects are nested more than {_DEEPEST} deep")
        is_holder = is_ours(kind) and kind.__module__.startswith(_HOLDERS)
        if (is_holder or isinstance(value, Dataset)) and has_own_attributes(value):
            return self._owner(value, where)
        copy_it = _COPIES.get(kind) or self._copy_of_kind(kind)
        return copy_it(self, value, where)

    def _copy_of_kind(self, kind: type) -> Callable[[PrivateState, Any, Way], Any]:
        """Return how objects of a type without an entry in ``_COPIES`` are copied."""
        if kind.__module__.partition(".")[0] in SHARED_MODULES:
            return PrivateState._same
        if is_ours(kind) and kind.__module__ != _LOADERS:
            return PrivateState._same
        if issubclass(kind, np.ndarray):
            return PrivateState._array_of_subclass
        if issubclass(kind, GENERATORS):
            return PrivateState._by_deepcopy
        if issubclass(kind, torch.Tensor):
            return PrivateState._tensor_of_subclass
        if isinstance(getattr(kind, "__deepcopy__", None), types.FunctionType):
            return PrivateState._by_deepcopy
        if is_seen_through(kind):
            return PrivateState._by_parts
        return PrivateState._cannot

    def _same(self, value: Any, _: Way) -> Any:
        return value

    def _cannot(self, value: Any, where: Way) -> NoReturn:
        raise _Shared(f"{text_of(where)} is a {type(value).__qualname__}, which cannot be copied")

    def _take(self, num_bytes: int) -> None:
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise _Shared(f"the copies of a worker would take more than {_MOST_BYTES >> 20} MiB")

    def _list(self, value: list[Any], where: Way) -> list[Any]:
        self._take(_ENTRY_BYTES * len(value))
        if is_flat(value):
            return cast("list[Any]", self._note(value, value.copy()))
        own: list[Any] = self._note(value, [])
        own.extend(self._members(value, where))
        return own

    def _dict(self, value: dict[Any, Any], where: Way) -> dict[Any, Any]:
        self._take(10 * _ENTRY_BYTES * len(value))
        if is_flat(value.values()) and is_flat(value):
            return cast("dict[Any, Any]", self._note(value, value.copy()))
        own: dict[Any, Any] = self._note(value, {})
        keys = list(value) if is_flat(value) else self._members(value, where)
        self._expect(len(value))
        for key, each in zip(keys, tuple(value.values()), strict=True):
            own[key] = self._own(each, (where, (key,), where[2] + 1))
        return own

    def _tuple(self, value: tuple[Any, ...], where: Way) -> tuple[Any, ...]:
        if is_flat(value):
            return value
        own = self._members(value, where)
        if all(mine is theirs for mine, theirs in zip(own, value, strict=True)):
            return value
        return cast("tuple[Any, ...]", self._note(value, tuple(own)))

    def _set(self, value: Any, where: Way) -> Any:
        self._take(10 * _ENTRY_BYTES * len(value))
        return self._note(value, type(value)(self._members(value, where)))

    def _members(self, values: Iterable[Any], where: Way) -> list[Any]:
        values = list(values)
        if is_flat(values):
            return values
        self._expect(len(values))
        return [
            self._own(each, (where, number, where[2] + 1)) for number, each in enumerate(values)
        ]

    def _expect(self, number: int) -> None:
        """Give up before a container is copied in vain."""
        if number > self._num_left:
            self._num_left = -1
            raise _Shared(f"it holds more than {_MOST_OBJECTS} objects")

    def _bytearray(self, value: Any, _: Way) -> Any:
        self._take(len(value))
        return self._note(value, value[:])

    def _method(self, value: Any, where: Way) -> Any:
        return types.MethodType(value.__func__, self._own(value.__self__, where))

    def _function(self, value: types.FunctionType, where: Way) -> Any:
        """Copy the variables around a function; what it finds in its module is shared."""
        if not value.__closure__:
            return value
        variables = [
            (name, cell, self._memo.get(id(cell)) or types.CellType())
            for name, cell in variables_of(value)
        ]
        cells = tuple(new for _, _, new in variables)
        own = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        functools.update_wrapper(own, value)
        del own.__wrapped__  # type: ignore[attr-defined]  # update_wrapper set it
        vars(own).update(vars(value))
        own.__kwdefaults__ = value.__kwdefaults__
        self._note(value, own)
        for name, cell, new in variables:
            if id(cell) not in self._memo and cell != _UNSET:
                self._note(cell, new)
                new.cell_contents = self._own(cell.cell_contents, (where, name, where[2]))
        return own

    def _partial(self, value: Any, where: Way) -> Any:
        parts = (value.func, value.args, value.keywords)
        function, args, keywords = (self._own(each, where) for each in parts)
        return self._note(value, functools.partial(function, *args, **keywords))

    def _array(self, value: np.ndarray[Any, Any], where: Way) -> Any:
        if value.dtype.hasobject:
            return self._array_of_objects(value, where)
        if not can_be_written(value):
            return value
        if self._is_to_be_shared(value):
            return self._note(value, self.arrays.array(text_of(where), value))
        own = self._memory.array(value)
        own.flags.writeable = value.flags.writeable
        return self._note(value, own)

    def _is_to_be_shared(self, value: Any) -> bool:
        """Return whether an array or tensor, or what it views, is large; else count its bytes."""
        num_bytes = root_bytes(value)
        if num_bytes >= _LARGE_BYTES or num_bytes > self._bytes_left:
            return True
        self._take(num_bytes)
        return False

    def _array_of_objects(self, value: np.ndarray[Any, Any], where: Way) -> Any:
        self._take(_ENTRY_BYTES * value.size)
        own = self._note(value, value.copy())
        flat, entries = own.reshape(-1), self._members(value.reshape(-1).tolist(), where)
        for number, each in enumerate(entries):
            flat[number] = each
        return own

    def _array_of_subclass(self, value: Any, where: Way) -> Any:
        if isinstance(value, np.memmap) and getattr(value, "mode", "c") != "c":
            return value  # a file, which processes share as well
        if not can_be_written(value):
            return value
        if value.nbytes >= _LARGE_BYTES or isinstance(value, np.memmap):
            return self._note(value, self.arrays.array(text_of(where), value))
        self._take(value.nbytes)
        return self._by_deepcopy(value, where)

    def _tensor(self, value: torch.Tensor, where: Way) -> Any:
        is_plain = value.device.type == "cpu" and value.layout is torch.strided
        if is_plain and cast("Any", value).is_shared():
            return value  # on purpose: worker processes would share it, too
        if not is_memory(value):
            return self._tensor_of_subclass(value, where)
        if value.device.type != "cpu" or self._is_to_be_shared(value):
            return self._note(value, self.arrays.tensor(text_of(where), value))
        return self._note(value, self._memory.tensor(value))

    def _tensor_of_subclass(self, value: Any, where: Way) -> Any:
        num_bytes = value.nbytes if value.layout is torch.strided else _LARGE_BYTES
        if num_bytes >= _LARGE_BYTES:
            raise _Shared(f"{text_of(where)} is a large {type(value).__qualname__}")
        self._take(num_bytes)
        return self._by_deepcopy(value, where)

    def _by_deepcopy(self, value: Any, where: Way) -> Any:
        self._weigh(value)
        own = deep_copy(value, self._memo)
        self._kept.append(value)
        return own

    def _weigh(self, value: Any) -> None:
        """Count the bytes of arrays reachable from an object with its own ``__deepcopy__``."""
        for number, each in enumerate(reachable([value], _MOST_OBJECTS)):
            self._expect(number)
            if isinstance(each, ARRAYS):
                self._take(each.nbytes if hasattr(each, "nbytes") else len(each))

    def _by_parts(self, value: Any, where: Way) -> Any:
        """Copy an object the way pickle takes it apart and puts it together."""
        try:
            reduced: Any = value.__reduce_ex__(4)
        except TypeError:  # handles, iterators: pickle refuses
            self._cannot(value, where)
        if isinstance(reduced, str):
            return value
        make, args, state, members, pairs = (*reduced, None, None, None)[:5]
        # pickle's own state is the object's dictionary; that of a __getstate__ is made anew.
        self._take(bytes_in(state))
        own = make(*self._members(args, where))
        own = self._note(value, own if own is value else unfinalized(own, value))
        if state is not None:
            self._kept.append(state)
            set_state(own, self._state(state, where))
        for each in members or ():
            own.append(self._own(each, where))
        for key, each in pairs or ():
            own[self._own(key, where)] = self._own(each, where)
        return own

    def _state(self, state: Any, where: Way) -> Any:
        """Return the private copy of an object's state."""
        if type(state) is tuple and len(state) == 2:
            return tuple(self._state(each, where) for each in state)
        if type(state) is not dict:
            return self._own(state, where)
        return {
            name: self._own(each, (where, str(name), where[2] + 1)) for name, each in state.items()
        }


_COPIES: dict[type, Callable[[PrivateState, Any, Way], Any]] = {
    list: PrivateState._list,
    dict: PrivateState._dict,
    tuple: PrivateState._tuple,
    set: PrivateState._set,
    frozenset: PrivateState._set,
    bytearray: PrivateState._bytearray,
    types.MethodType: PrivateState._method,
    types.FunctionType: PrivateState._function,
    functools.partial: PrivateState._partial,
    np.ndarray: PrivateState._array,
    torch.Tensor: PrivateState._tensor,
}


def shared_remark(parts: list[str]) -> str:
    """Return a sentence on the parts that all workers share though samples may change them."""
    named = "; ".join(parts[:_MOST_NAMED])
    more = len(parts) - _MOST_NAMED
    named += f"; and {more} more" if more > 0 else ""
    return (
        f"The worker threads share parts of the dataset that each worker process would have "
        f"a copy of: {named}. If a sample changes them, all others see it."
    )


def _reason(error: Exception) -> str:
    if isinstance(error, _Shared):
        return str(error)
    return f"copying it fails ({type(error).__name__}: {error})"
