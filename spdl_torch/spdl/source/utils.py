"""Sources made of other sources: shuffled for every pass, repeated, merged."""

from __future__ import annotations

import logging
import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Sized
from fractions import Fraction
from itertools import accumulate, count, islice
from typing import Any, Generic, TypeVar, overload

from ...checks import check_whole
from . import IterableWithShuffle, SizedIterable, SizedIterableWithShuffle
from ._sampler import checked_weights

__all__ = ["MergeIterator", "embed_shuffle", "repeat_source"]

T = TypeVar("T")

_logger = logging.getLogger("spdl_torch.spdl.source")


@overload
def embed_shuffle(
    src: SizedIterableWithShuffle[T], /, *, shuffle_last: bool = ..., epoch: int = ...
) -> SizedIterable[T]: ...
@overload
def embed_shuffle(
    src: IterableWithShuffle[T], /, *, shuffle_last: bool = ..., epoch: int = ...
) -> Iterable[T]: ...
def embed_shuffle(
    src: IterableWithShuffle[T], /, *, shuffle_last: bool = False, epoch: int = 0
) -> Iterable[T]:
    """Return a source that shuffles itself: pass 0 has the order of ``src.shuffle(seed=epoch)``,
    the next that of ``epoch + 1``, and so on.

    For sources that live in another process, where nobody can call ``shuffle`` any more. It can be
    pickled, and has a length if ``src`` has one.

    Args:
        src: has ``shuffle(seed)``.
        shuffle_last: call it when a pass ends, however it ends, rather than when one begins: then
            the first pass has the order that ``src`` comes with.
        epoch: the first seed.
    """
    if not isinstance(src, IterableWithShuffle):
        raise TypeError(
            f"embed_shuffle: src must be iterable and have shuffle(seed), got {type(src).__name__}."
        )
    return _Shuffled(src, shuffle_last, epoch)


class _Shuffled(Generic[T]):
    def __init__(self, src: IterableWithShuffle[T], shuffle_last: bool, epoch: int) -> None:
        self.src = src
        self._shuffle_last = shuffle_last
        self._epoch = epoch

    @property
    def is_shared_out(self) -> bool:
        """Whether each rank already has its own part."""
        return bool(getattr(self.src, "is_shared_out", False))

    def __iter__(self) -> Iterator[T]:
        if not self._shuffle_last:
            self._shuffle()
        try:
            yield from self.src
        finally:
            if self._shuffle_last:  # also where the pass was left before its end
                self._shuffle()

    def __len__(self) -> int:
        if not isinstance(self.src, Sized):
            raise TypeError(f"embed_shuffle: a {type(self.src).__name__} has no len().")
        return len(self.src)

    def _shuffle(self) -> None:
        self.src.shuffle(seed=self._epoch)
        self._epoch += 1


def repeat_source(src: Iterable[T] | IterableWithShuffle[T], /, epoch: int = 0) -> Iterator[T]:
    """Return an endless iterator over ``src``: one pass after the other, each shuffled with the
    number of its epoch if ``src`` has ``shuffle(seed)``.

    Can be pickled until iteration begins.

    Args:
        src: can be iterated over any number of times.
        epoch: the number of the first pass.

    Raises, when a pass was empty: RuntimeError: it would look for an item forever.
    """
    return _Repeated(src, epoch)


class _Repeated(Iterator[T]):
    def __init__(self, src: Iterable[T], epoch: int) -> None:
        self.src = src
        self.epoch = epoch
        self._items: Iterator[T] | None = None

    def __next__(self) -> T:
        if self._items is None:
            self._items = self._passes()
        return next(self._items)

    def __getstate__(self) -> dict[str, Any]:
        if self._items is not None:
            raise ValueError("repeat_source: it was begun, and cannot be pickled or copied.")
        return self.__dict__

    def _passes(self) -> Iterator[T]:
        for epoch in count(self.epoch):
            _logger.info("repeat_source: epoch %d begins", epoch)
            if isinstance(self.src, IterableWithShuffle):
                self.src.shuffle(seed=epoch)
            is_empty = True
            for item in self.src:
                is_empty = False
                yield item
            if is_empty:
                raise RuntimeError(
                    f"repeat_source: epoch {epoch} of the {type(self.src).__name__} is empty. Pass "
                    "something that can be iterated over again, and has items."
                )


class MergeIterator(Iterable[T]):
    """Items of several iterables, one from each in turn, or from one drawn each time.

    [0, 1, 2], [10, 11], [20, 21, 22] -> 0 10 20 1 11 21 2 22; with stop_after=-1: 0 10 20 1 11 21 2

    Args:
        iterables: at least one.
        weights: of the iterables: one is drawn in proportion to these, among those that still have
            items. None = in turn. One of weight 0 is left out.
        stop_after: 0 = until all have ended; n = after n items, or when all have ended; -1 = when
            one whose turn it is has ended.
        seed: of the draws; the same in every pass.

    Raises: ValueError: nothing to merge; weights that are not as many finite numbers >= 0, or all
        of them 0; ``stop_after`` < -1.
    """

    def __init__(
        self,
        iterables: Sequence[Iterable[T]],
        *,
        weights: Sequence[float] | None = None,
        stop_after: int = 0,
        seed: int = 0,
    ) -> None:
        if not iterables:
            raise ValueError("MergeIterator: iterables must hold at least one, got none.")
        check_whole("MergeIterator", stop_after=stop_after, least=-1)
        self.iterables = iterables
        self.weights = weights
        self.stop_after = stop_after
        self.seed = seed
        if weights is not None:
            numbers = checked_weights("MergeIterator", weights, len(iterables), "iterable").tolist()
            self.iterables = [each for each, w in zip(iterables, numbers, strict=True) if w]
            self.weights = [weight for weight in numbers if weight]

    def __iter__(self) -> Iterator[T]:
        iterators = [iter(each) for each in self.iterables]
        ends_early = self.stop_after == -1
        if self.weights is None:
            merged = _in_turn(iterators, ends_early)
        else:
            merged = _drawn(iterators, _whole_numbers(self.weights), ends_early, self.seed)
        return islice(merged, self.stop_after if self.stop_after > 0 else None)


_END: Any = object()


def _in_turn(iterators: list[Iterator[T]], ends_early: bool) -> Iterator[T]:
    while iterators:
        left = []
        for iterator in iterators:
            item = next(iterator, _END)
            if item is not _END:
                left.append(iterator)
                yield item
            elif ends_early:
                return
        iterators = left


def _drawn(
    iterators: list[Iterator[T]], weights: list[int], ends_early: bool, seed: int
) -> Iterator[T]:
    generator = random.Random(seed)
    bounds = list(accumulate(weights))
    while len(iterators) > 1:
        place = bisect_right(bounds, generator.randrange(bounds[-1]))
        item = next(iterators[place], _END)
        if item is not _END:
            yield item
        elif ends_early:
            return
        else:
            del iterators[place], weights[place]
            bounds = list(accumulate(weights))
    yield from iterators[0]


def _whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return the weights' exact ratios, so that no rounding favours one."""
    fractions = [Fraction(weight) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*numbers)
    return [number // divisor for number in numbers]
