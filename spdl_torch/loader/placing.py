"""Decide where a loader's workers live: on threads of this process, or in processes of their own.

torch's workers own a copy of everything: the dataset, globals, the environment, the working
directory. Threads share all but the dataset object itself. So the workers are threads only where
that is known to be safe: the dataset's class is known, or the dataset says so itself, or the user
does (``isolation="thread"``). Everything else loads in processes with one worker each, started as
torch starts its workers, where whatever is right in torch is right by construction.

A class is known by its exact type and listed in a table, with those of its attributes that belong
to somebody else: these are examined in turn. A class that is not listed is not known, subclasses of
known ones included.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate, default_convert

from ..handlers import unless_of_handler
from ..objects.members import PLAIN_VALUES, Unfinished, members, walk
from ..observe.verdict.placement import Placement
from .rng.patches import install

if TYPE_CHECKING:
    from .dataloader import DataLoader


def starts_threads(given: Any) -> bool:
    """Return whether a context's processes are threads in truth, by which some libraries have
    torch's loader use threads."""
    kind = getattr(given, "Process", None)
    return isinstance(kind, type) and issubclass(kind, threading.Thread)


class Vouching(NamedTuple):
    """The outcome of a look at a dataset and the functions that are used with it."""

    unknown: str = ""
    """The part that nothing vouches for, in words; "" = there is none."""
    refusing: Any = None
    """The dataset, or the one inside it, that says ``thread_safe = False``."""
    declaring: Any = None
    """The dataset, or the first one inside it, that says ``thread_safe = True``."""
    covers_functions: bool = False
    """Whether all that declare it cover ``collate_fn`` and ``worker_init_fn`` as well."""

    @property
    def is_safe(self) -> bool:
        return not self.unknown and self.refusing is None


class _Parts(NamedTuple):
    """The attributes of a known class that hold somebody else's objects."""

    datasets: str = ""
    """A dataset, or a list, tuple or dict of them."""
    functions: tuple[str, ...] = ()
    """Transforms and loaders: they may keep no state."""
    collate: str = ""
    """A function that makes batches: it has to give them new memory."""
    containers: tuple[str, ...] = ()
    """Plain containers, whose entries are not examined."""


# By name, because importing some of them takes long.
KNOWN = {
    "torch.utils.data.dataset.Subset": _Parts(datasets="dataset", containers=("indices",)),
    "torch.utils.data.dataset.ConcatDataset": _Parts(datasets="datasets"),
    "torch.utils.data.dataset.StackDataset": _Parts(datasets="datasets"),
    "datasets.arrow_dataset.Dataset": _Parts(functions=("_format_kwargs",)),
    "spdl_torch.data.folder.ImageFolder": _Parts(
        functions=("transform", "target_transform", "loader"), containers=("samples",)
    ),
    "spdl_torch.data.caching.CachedDataset": _Parts(datasets="dataset", functions=("transform",)),
    "spdl_torch.data.mixing.mixture.Mixture": _Parts(datasets="datasets"),
    "spdl_torch.data.packing.dataset.GroupedDataset": _Parts(
        datasets="dataset", collate="collate_fn"
    ),
}

CONTAINERS = (list, tuple, range, np.ndarray, torch.Tensor)

_DEEPEST = 20  # a bound, should a dataset contain itself


def vouching_for(loader: DataLoader[Any], *, looks_at_data: bool = True) -> Vouching:
    """Look at a loader's dataset and functions. ``looks_at_data``: and at every object of a list;
    else it is taken to hold data."""
    dataset, collate_fn = loader.dataset, loader.collate_fn
    found = _look(dataset, looks_at_data, _DEEPEST)
    if not found.is_safe or found.covers_functions:
        return found
    # Without default_collate, which copies, a batch may be the dataset's own memory. Groups are
    # batches already.
    parts = _parts_of(dataset)
    makes_batches = default_convert if parts and parts.collate else default_collate
    if collate_fn is not default_collate and collate_fn is not makes_batches:
        return Vouching(unknown=f"collate_fn={name_of(collate_fn)}")
    if loader.worker_init_fn is not None:
        return Vouching(unknown=f"worker_init_fn={name_of(loader.worker_init_fn)}")
    return found


def name_of(value: Any) -> str:
    """Return the name of a function or class, or of an object's class."""
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _look(dataset: Any, looks_at_data: bool, depth: int) -> Vouching:
    declared = _declared(dataset)
    if declared is not None:
        if not declared:
            return Vouching(refusing=dataset)
        return Vouching(declaring=dataset, covers_functions=True)
    kind = type(dataset)
    if kind in CONTAINERS:
        is_data = not looks_at_data or is_plain_data(dataset)
        other = f"{name_of(dataset)}, which holds objects other than data,"
        return Vouching(unknown="" if is_data else other)
    if kind is TensorDataset:
        is_plain = set(map(type, dataset.tensors)) <= {torch.Tensor}
        return Vouching(unknown="" if is_plain else name_of(dataset))
    parts = _parts_of(dataset)
    if parts is None or not depth:
        return Vouching(unknown=name_of(dataset))
    if unknown := _unknown_attribute(dataset, parts):
        return Vouching(unknown=unknown)
    inner = getattr(dataset, parts.datasets) if parts.datasets else ()
    if parts.datasets == "dataset":
        inner = (inner,)
    members = inner.values() if isinstance(inner, dict) else inner
    found = [_look(each, looks_at_data, depth - 1) for each in members]
    for each in found:
        if not each.is_safe:
            return each
    return Vouching(
        declaring=next((each.declaring for each in found if each.declaring is not None), None),
        covers_functions=bool(found) and all(each.covers_functions for each in found),
    )


def _declared(dataset: Any) -> bool | None:
    """Return what the dataset says of itself, on the object or in its own class; None = nothing.

    Neither what ``__getattr__`` forwards from a dataset inside counts, nor what a base class says,
    whose author does not know the subclass.
    """
    own = getattr(dataset, "__dict__", None)
    if type(own) is dict and "thread_safe" in own:
        declared = own["thread_safe"]
    else:
        declared = vars(type(dataset)).get("thread_safe")
        if inspect.isdatadescriptor(declared):  # a property, or a slot
            try:
                declared = dataset.thread_safe
            except unless_of_handler(Exception):  # the user's own: it says nothing
                return None
    return declared if isinstance(declared, bool) else None


def _parts_of(dataset: Any) -> _Parts | None:
    kind = type(dataset)
    return KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")


def _unknown_attribute(dataset: Any, parts: _Parts) -> str:
    for name in parts.containers:
        if type(getattr(dataset, name)) not in CONTAINERS:
            return f"{name_of(dataset)}.{name}, a {name_of(getattr(dataset, name))},"
    for name in parts.functions:
        function = getattr(dataset, name)
        if not is_stateless(function):
            given = function if isinstance(function, dict) else {name: function}
            return ", ".join(f"{each}={name_of(value)}" for each, value in given.items())
    if parts.collate and not _copies(getattr(dataset, parts.collate)):
        return f"{parts.collate}={name_of(getattr(dataset, parts.collate))}"
    return ""


def _copies(collate_fn: Any) -> bool:
    """Return whether a function is known to make batches of new memory."""
    groups = sys.modules.get("spdl_torch.data.packing.collate")  # None: nobody has made groups
    return collate_fn is default_collate or (
        groups is not None
        and (collate_fn is groups.pad_collate or type(collate_fn) is groups.PackCollate)
    )


_CHECK = "assert_thread_safe checks it"
_PUTS = 'thread_safe = True in the dataset or isolation="thread" puts the workers there'


def placement_of(loader: DataLoader[Any]) -> Placement:
    """Return where the loader's workers live."""
    num_workers = int(loader.num_workers)
    reason, remedy = _reason_of(loader)
    num_processes = 0 if remedy is None else num_workers
    return Placement(
        num_workers=num_workers, num_processes=num_processes, reason=reason, remedy=remedy or ""
    )


def _reason_of(loader: DataLoader[Any]) -> tuple[str, str | None]:
    """Return why the workers live where they do, and what would let them be threads; None = they
    are, or there are none."""
    isolation = loader.isolation
    if loader.num_workers == 0:
        return "num_workers=0 loads in the calling thread", None
    if isolation == "process":
        remedy = (
            f'If the dataset is safe on threads ({_CHECK}), isolation="thread" puts them there.'
        )
        return 'isolation="process" was given', remedy
    if isolation == "auto" and starts_threads(loader.multiprocessing_context):
        return "the multiprocessing_context starts threads", None
    found = vouching_for(loader)
    refuses = f"{name_of(found.refusing)} says thread_safe = False"
    if isolation == "thread":
        reason = 'isolation="thread" was given'
        if found.refusing is not None:
            reason = f"{reason}, though {refuses}"
        elif found.unknown:
            reason = f"{reason}, and nothing else vouches for {found.unknown}"
        return reason, None
    if found.refusing is not None:
        return refuses, (
            f"Once it is safe on threads ({_CHECK}), thread_safe = True puts the workers there."
        )
    if found.unknown:
        return (
            f"{found.unknown} is not known to be safe on threads",
            f"If it is ({_CHECK}), {_PUTS}.",
        )
    if not install():
        reason = f"torch {torch.__version__} cannot redirect the random draws of one thread"
        return reason, "On another release of torch they may be threads."
    if found.declaring is not None:
        return f"{name_of(found.declaring)} says thread_safe = True", None
    return f"{name_of(loader.dataset)} is known to be safe on threads", None


# What threads may share without a word of the user's: datasets that are lists and arrays of nothing
# but data, and the libraries' functions, which keep no state from one sample to the next. None of
# the user's code runs here.

_MOST_OBJECTS = 2_000_000
"""The most objects that are examined, at 15 to 50 ns each."""
_SEQUENCES = (list, tuple, set, frozenset)
_VALUES = PLAIN_VALUES | {np.ndarray, np.memmap, torch.Tensor, dict, *_SEQUENCES}

_MOST_PARTS = 10_000  # of a function
_PARTS = PLAIN_VALUES | {torch.Tensor, dict, OrderedDict, *_SEQUENCES}
_LIBRARIES = ("torch", "torchvision", "spdl_torch")


def is_plain_data(dataset: Any) -> bool:
    """Return whether a container holds nothing but numbers, strings, arrays, tensors and plain
    containers of these. Looking any of them up then runs no code that could keep state.
    """
    groups = _groups([dataset], {type(dataset)})
    num_seen = 0
    while groups:
        kind, values = groups.pop()
        num_seen += sum(map(len, values))
        if num_seen > _MOST_OBJECTS:  # before a look at any of them
            return False
        kinds = set(map(type, _members(kind, values)))  # in C, and without a list of them all
        if not all(map(_is_data, kinds)):
            return False
        if any(map(_may_hold_objects, kinds)):
            groups += _groups(list(_members(kind, values)), kinds)
    return True


def _groups(values: list[Any], kinds: set[type]) -> list[tuple[type, list[Any]]]:
    """Return the containers among the values, by type; arrays of objects are lists of these."""
    found = []
    for kind in filter(_may_hold_objects, kinds):
        same: list[Any] = [value for value in values if type(value) is kind]
        if kind is np.ndarray:
            same = [each.ravel().tolist() for each in same if each.dtype.hasobject]
        found.append((list if kind is np.ndarray else kind, same))
    return found


def _members(kind: type, values: list[Any]) -> Iterable[Any]:
    """Return what containers of one type hold."""
    if kind is dict:
        return chain(chain.from_iterable(values), chain.from_iterable(map(dict.values, values)))
    return chain.from_iterable(values)


def _may_hold_objects(kind: type) -> bool:
    return kind in _SEQUENCES or kind in (dict, np.ndarray) or _is_named_tuple(kind)


def _is_data(kind: type) -> bool:
    return kind in _VALUES or issubclass(kind, np.generic) or _is_named_tuple(kind)


def _is_named_tuple(kind: type) -> bool:
    """Return whether a type is a namedtuple whose entries are looked up like any tuple's."""
    own = (kind.__getitem__, kind.__iter__) if issubclass(kind, tuple) else ()
    return hasattr(kind, "_fields") and own == (tuple.__getitem__, tuple.__iter__)


def is_stateless(function: Any) -> bool:
    """Return whether a transform or loader is None, or torchvision's, ours, or an exact
    ``nn.Sequential``, and holds nothing but the same and data: no function of the user's, not even
    as a hook or an argument.
    """
    try:
        return all(map(_keeps_nothing, walk([function], members, _MOST_PARTS, values=True)))
    except Unfinished:
        return False


def _keeps_nothing(value: Any) -> bool:
    kind = type(value)
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if isinstance(value, type | types.FunctionType):
        return _is_libraries(value)
    if isinstance(value, Enum):
        return _is_libraries(kind)
    return kind in _PARTS or issubclass(kind, np.generic) or _is_transform(kind)


def _is_transform(kind: type) -> bool:
    is_known = kind.__module__.startswith(("spdl_torch.nn", "torchvision.transforms."))
    return kind is torch.nn.Sequential or (is_known and _is_libraries(kind))


def _is_libraries(value: Any) -> bool:
    """Return whether a library has this very class or function under its name: a wrapper, such as
    ``lru_cache``, has that name but is another object.
    """
    module = str(value.__module__)  # of a function that was made by hand it may be None
    if module.partition(".")[0] not in _LIBRARIES:
        return False
    return getattr(sys.modules.get(module), value.__qualname__, None) is value
