"""Random generators that a dataset, a transform or a collate function keeps as its own.

``self.rng = np.random.default_rng()`` in a transform (albumentations and MONAI do this) would be
copied into every worker in the same state: of 64 numbers, two workers draw 32 distinct ones, four
draw 16, and the numbers of a sample depend on the number of workers. So the loader finds these
objects and seeds each one anew for every sample.

The seed follows from the state in which the loader found the generator, from the epoch's number
and from the sample's position. A user's own seed keeps its meaning: the same seed gives the same
numbers, another seed gives others, and every epoch differs. With the loader's ``seed=``, that
replaces the state, so generators without a seed are reproducible too.

The search is bounded; generators that it does not reach are left as they are.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import random
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ...objects.members import GENERATORS, Unfinished, is_leaf, members, reachable, walk
from .keys import mix

if TYPE_CHECKING:
    from ...objects.members import Generator
    from .keys import Purpose, StreamKey

_logger = logging.getLogger("spdl_torch.data")

_PROTOCOL = 4
"""Of the pickles that are hashed. Python's own choice is another from 3.14 on."""

_MOST_OBJECTS = 2_000
_MOST_LOOKED_AT = 4 * _MOST_OBJECTS  # types and dicts of attributes count here, too
_MOST_MEMBERS = 256
"""The most members of a container that is searched; a longer one holds data."""


class OwnedGenerators:
    """The generators reachable from a worker's dataset and functions, in a fixed order."""

    def __init__(self, *roots: Any) -> None:
        self.found = tuple(_found_in(roots)) if _may_hold_any(roots) else ()
        self._identities = [state_digest(generator) for generator in self.found]
        self._reseed = [_way_to_reseed(generator) for generator in self.found]
        self._key: StreamKey | None = None
        self._seeds: list[int] = []  # this epoch's seed of each generator, of 256 bits

    def __bool__(self) -> bool:
        return bool(self.found)

    def seed(self, key: StreamKey, position: int, purpose: Purpose) -> None:
        """Seed the generators for the sample at ``position`` of the epoch: 1 to 4 µs for each of
        the common kinds."""
        if key is not self._key:
            self._begin(key)
        # One hash for all of them: generators that were seeded alike draw alike in every sample,
        # as an image's and its mask's have to.
        bits = _hash(key.place_of(position), purpose)
        for seed, reseed in zip(self._seeds, self._reseed, strict=True):
            reseed(seed ^ bits)

    def states(self) -> list[Any]:
        """Return the generators' states, for ``restore``."""
        return [state_of(generator) for generator in self.found]

    def restore(self, states: list[Any]) -> None:
        """Restore the generators' states."""
        for generator, state in zip(self.found, states, strict=True):
            set_state(generator, state)

    def _begin(self, key: StreamKey) -> None:
        """Compute the generators' seeds of another epoch."""
        base = mix(key.epoch_seed)
        self._seeds = [
            _hash(base, number) if key.is_seeded else _hash(identity, key.epoch)
            for number, identity in enumerate(self._identities)
        ]
        self._key = key  # last: Ctrl-C may come before


def _may_hold_any(roots: tuple[Any, ...]) -> bool:
    """Return False if no generator is reachable, without a look at any ``__dict__``."""
    of_process = ids_of_the_process()
    try:
        return any(
            _is_seedable(each) and id(each) not in of_process
            for each in reachable(roots, _MOST_LOOKED_AT, _MOST_MEMBERS)
        )
    except Unfinished:
        return True  # the walk has its own bound


def ids_of_the_process() -> set[int]:
    """Return the ids of the process's own generators, whose draws are led by the thread."""
    process = random.__dict__.get("_inst"), vars(np.random.mtrand).get("_rand")
    return {id(generator) for generator in (*process, torch.default_generator)}


def _found_in(roots: tuple[Any, ...]) -> Iterator[Generator]:
    """Yield the generators breadth first, so that the bound leaves out the deepest."""
    of_process = ids_of_the_process()
    try:
        for value in walk(roots, _searched, _MOST_OBJECTS):
            if _is_seedable(value) and id(value) not in of_process:
                yield value
    except Unfinished:
        _warn_of_bound(roots)


def _searched(value: Any) -> Iterator[Any]:
    """Yield the members of a value in which a generator may lie."""
    if isinstance(value, GENERATORS):
        return
    # Its workers may rely on equal states: all shuffle the list of files in the same way, and each
    # takes its share. So only transforms, which are called, are looked at.
    only_called = isinstance(value, IterableDataset)
    for each in members(value, most=_MOST_MEMBERS):
        if is_leaf(each) or isinstance(each, types.FunctionType):
            continue
        if not only_called or _is_called(each):
            yield each


_has_warned = False


def _warn_of_bound(roots: tuple[Any, ...]) -> None:
    """Say once that the search has ended before everything was seen."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    _logger.warning(
        "DataLoader: looked for random generators in %s, and stopped after %d objects: one that "
        "lies deeper is not seeded for each sample, so workers repeat each other's draws. Keep "
        "generators in attributes of the dataset or its transforms, and data in arrays or in "
        "containers of more than %d entries; or draw from torch, random or numpy.random.",
        " and ".join(type(root).__name__ for root in roots),
        _MOST_OBJECTS,
        _MOST_MEMBERS,
    )


def _is_seedable(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu"
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def _is_called(value: Any) -> bool:
    """Return whether the value is a function-like object, or a container of such objects."""
    if callable(value):
        return True
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, list | tuple) and bool(value) and all(map(callable, value))


_WORD, _LONG_WORD = (1 << 64) - 1, (1 << 128) - 1


def _hash(*values: int) -> int:
    """Return 256 bits, each of which depends on every bit of the values."""
    packed = b"".join((value & _WORD).to_bytes(8, "little") for value in values)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=32).digest(), "little")


def _way_to_reseed(generator: Generator) -> Callable[[int], object]:
    """Return the function that seeds the generator by 256 random bits: a stream for each."""
    if isinstance(generator, np.random.Generator):
        return _way_to_reseed_bits(generator.bit_generator)
    if isinstance(generator, np.random.BitGenerator):
        return _way_to_reseed_bits(generator)
    if isinstance(generator, np.random.RandomState):
        if isinstance(generator._bit_generator, np.random.MT19937):
            # One word: 1.3 µs, against 8.7 µs for two.
            return lambda bits: generator.seed(bits & 0xFFFFFFFF)
        return _way_to_reseed_bits(generator._bit_generator)
    if isinstance(generator, torch.Generator):
        return lambda bits: generator.manual_seed(bits & _WORD)
    return lambda bits: generator.seed(bits & _WORD)


def _way_to_reseed_bits(generator: Any) -> Callable[[int], object]:
    kind = type(generator)
    if kind is not np.random.PCG64:
        return lambda bits: setattr(generator, "state", kind(bits & _WORD).state)

    def reseed(bits: int) -> None:
        # The state has 128 bits, the increment 128 bits and is odd
        # (https://www.pcg-random.org/paper.html). A SeedSequence would take ten times as long.
        inner = {"state": bits & _LONG_WORD, "inc": bits >> 128 | 1}
        generator.state = {"bit_generator": "PCG64", "state": inner, "has_uint32": 0, "uinteger": 0}

    return reseed


def state_of(generator: Generator) -> Any:
    """Return the generator's state, for :func:`set_state`."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate()


def set_state(generator: Generator, state: Any) -> None:
    """Put a generator into a state that :func:`state_of` has returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, np.random.RandomState | torch.Generator):
        generator.set_state(state)
    else:
        generator.setstate(state)


def state_digest(generator: Generator) -> int:
    """Return a 64-bit digest of the generator's state."""
    state = state_of(generator)
    if isinstance(state, torch.Tensor):
        state = state.numpy().tobytes()
    digest = hashlib.blake2b(pickle.dumps(state, _PROTOCOL), digest_size=8).digest()
    return int.from_bytes(digest, "little")
