"""A worker thread's own copy of the dataset object: what it sets there stays with it."""

from __future__ import annotations

import functools
import logging
import types
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch.utils.data import Dataset

from ...objects.copies import deep_copy, shallow_copy
from ...objects.members import slots_of
from ..rng.owned import OwnedGenerators

if TYPE_CHECKING:
    from ...locks import RLock

_logger = logging.getLogger("spdl_torch.data")


TRANSFORM_NAMES = ("transform", "transforms", "target_transform")  # torchvision's convention


def own_copies(dataset: Any, collate_fn: Any, init_fn: Any, lock: RLock) -> tuple[Any, Any, Any]:
    """Copy the dataset object, and every dataset inside it, for one worker; return it, and the
    worker's own functions: methods of a dataset are bound to its copy, and a ``collate_fn`` that
    keeps a random generator is copied deeply.

    The copies are shallow: attributes that user code sets in a worker (a lazily opened file, a
    shard chosen in ``worker_init_fn``) stay in that worker, while lists of samples are shared.
    Transforms are copied deeply, because many keep state, and so is every attribute that holds a
    random generator; one that cannot be copied is shared.

    ``lock`` is held while copying, so workers copy one after another. Copying reads ``__dict__``,
    and Python 3.11 creates that dictionary at the first read. If the allocation starts the garbage
    collector, which may switch threads, another thread creates a second one: both own the object's
    values, and the interpreter crashes in a later collection. The lock belongs to one pool, not to
    all loaders: a copy may itself use a loader.
    """
    memo: dict[int, Any] = {}
    with lock:
        own = _copy_dataset(dataset, memo)
        return own, _own_attribute("", collate_fn, memo), _own_method(init_fn, memo) or init_fn


def _attributes_of_copy(own: Any) -> dict[str, Any]:
    """Return a copy's attributes, in its own dictionary: where ``__getstate__`` returns
    ``self.__dict__`` and ``__setstate__`` assigns it, copy and original would share one.
    """
    if not hasattr(own, "__dict__"):
        return {}
    attributes = cast("dict[str, Any]", vars(own))
    if type(attributes) is dict:
        attributes = dict(attributes)
        object.__setattr__(own, "__dict__", attributes)  # past a __setattr__ of the class
    return attributes


def _copy_dataset(dataset: Any, memo: dict[int, Any]) -> Any:
    if id(dataset) in memo:
        return memo[id(dataset)]
    if not isinstance(dataset, Dataset) and (
        not hasattr(dataset, "__dict__") or isinstance(dataset, list | dict | tuple | np.ndarray)
    ):
        return dataset  # a plain container: workers set nothing on it, and a copy would be large
    try:
        own = shallow_copy(dataset)
        if own is dataset:
            return own
        attributes, slots = _attributes_of_copy(own), slots_of(own)
    except Exception as error:
        _warn_shared(dataset, error)
        return dataset
    memo[id(dataset)] = own
    for name, value in tuple(attributes.items()):
        attributes[name] = _own_attribute(name, value, memo)
    for name, value in slots.items():
        object.__setattr__(own, name, _own_attribute(name, value, memo))
    return own


def _own_attribute(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if (own := _own_method(value, memo)) is not None:
        return own
    if name in TRANSFORM_NAMES:
        return _deep_copy_or_share(value, memo)
    if isinstance(value, Dataset):
        return _copy_dataset(value, memo)
    if isinstance(value, list | tuple | dict) and _holds_datasets(value):
        return _copy_held_by(value, memo)
    return _deep_copy_or_share(value, memo) if OwnedGenerators(value) else value


def _own_method(value: Any, memo: dict[int, Any]) -> Any:
    """Return a method of a dataset, or a partial of one, bound to the worker's own dataset; None =
    it is neither."""
    method = value.func if type(value) is functools.partial else value
    if not isinstance(method, types.MethodType):
        return None
    if id(method.__self__) not in memo and not isinstance(method.__self__, Dataset):
        return None
    own = types.MethodType(method.__func__, _copy_dataset(method.__self__, memo))
    return own if method is value else functools.partial(own, *value.args, **value.keywords)


def _holds_datasets(value: Any) -> bool:
    """Return whether a container's first member is a dataset, or a method."""
    try:
        first = next(iter(value.values() if isinstance(value, dict) else value))
        return isinstance(first, Dataset | types.MethodType)
    except Exception:  # empty, or a user's container that cannot be iterated
        return False


def _copy_held_by(value: Any, memo: dict[int, Any]) -> Any:
    """Return a container of the same kind that holds the worker's own datasets and methods."""
    members = value.values() if isinstance(value, dict) else value
    own = [_own_attribute("", member, memo) for member in members]
    try:
        if isinstance(value, tuple):
            return value._make(own) if hasattr(value, "_make") else type(value)(own)
        copied = shallow_copy(value)
        if isinstance(value, dict):
            copied.update(zip(value, own, strict=True))
        else:
            copied[:] = own
    except Exception as error:
        _warn_shared(value, error)
        return value
    return copied


def _deep_copy_or_share(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return deep_copy(value, memo)
    except Exception as error:
        _warn_shared(value, error)
        return value


def _warn_shared(value: Any, error: Exception) -> None:
    """Warn that the workers share ``value``: processes would each have their own."""
    _logger.warning(
        "DataLoader: %s cannot be copied (%s: %s), so all worker threads share it. If it keeps "
        "state, give it a __copy__ or __deepcopy__.",
        type(value).__name__,
        type(error).__name__,
        error,
    )
