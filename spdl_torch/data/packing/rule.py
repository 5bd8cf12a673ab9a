"""The rule of a pack or bucket: the sizes of samples, read, checked, and split if asked to, and how
they are put into groups within a budget: full packs, or batches of similar length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from ..sources._base import seed_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Sizes = NDArray[np.integer]
    Size = int | tuple[int, ...]
    SizeOf = Sequence[Size] | NDArray[Any] | torch.Tensor | Callable[[int], Size]

_MOST_SIZES = 1 << 16  # different sizes that first-fit tells apart
_STEPS_PER_OCTAVE = 8
Oversize = Literal["error", "split"]
"""The treatment of samples that are larger than the budget."""


class Piece(NamedTuple):
    """A sample of a group, or a piece of one."""

    sample: int
    """The number of the sample."""
    size: int
    start: int
    """The number of its first token in the sample."""
    has_more: bool
    """Whether the sample goes on after this piece."""


class Pieces(NamedTuple):
    """What is grouped, by number: samples, or pieces of those that are too large."""

    sizes: NDArray[Any]
    samples: NDArray[Any] | None = None
    """The sample of each piece; None = all are whole."""
    starts: NDArray[Any] | None = None
    """The first token of each piece."""
    first: int = 0
    """The number of the first sample: an item of a stream, a position of a mixture."""

    def piece(self, number: int) -> Piece:
        """Return a piece."""
        size = int(self.sizes[number])
        if self.samples is None or self.starts is None:
            return Piece(self.first + number, size, 0, False)
        sample = self.samples[number]
        has_more = number + 1 < len(self.samples) and self.samples[number + 1] == sample
        return Piece(self.first + int(sample), size, int(self.starts[number]), bool(has_more))


@dataclass(frozen=True, slots=True)
class Rule:
    """What pack() or bucket() was asked for: how samples become batches within a budget.

    Raises: ValueError: the budget is no number of tokens, or ``oversize`` is unknown.
    """

    who: Literal["pack", "bucket"]
    """The function that was called, also for errors."""
    budget: int
    collate_fn: Callable[[list[Any]], Any]
    oversize: Oversize
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.oversize not in get_args(Oversize):
            raise ValueError(
                f'{self.who}: oversize must be "error" or "split", got {self.oversize!r}.'
            )

    @property
    def waste(self) -> str:
        """What the room that no sample fills is, in words."""
        return "unused" if self.who == "pack" else "padding"

    def grouped(self, sizes: NDArray[Any]) -> tuple[NDArray[np.int64], list[int]]:
        """Return the places of the sizes in the order of their groups, and the number of samples up
        to the end of each group.
        """
        return (packed if self.who == "pack" else bucketed)(sizes, self.budget)

    def generator(self, *seed: int | str) -> torch.Generator:
        """Return a new generator for ``order``."""
        return torch.Generator(device="cpu").manual_seed(seed_of("budget", self.seed, *seed))

    def order(self, length: int, generator: torch.Generator) -> NDArray[Any]:
        """Return the numbers below ``length``, shuffled if that was asked for."""
        dtype = torch.int32 if length < 1 << 31 else torch.int64
        if not self.shuffle:
            return torch.arange(length, dtype=dtype, device="cpu").numpy()
        return torch.randperm(length, generator=generator, dtype=dtype, device="cpu").numpy()

    def pieces_of(self, sizes: NDArray[Any], first: int = 0) -> Pieces:
        """Return the pieces to group. ``first``: the number of the first sample.

        Raises: ValueError: a sample is empty, or too large.
        """
        budget, is_split = self.budget, self.oversize == "split"
        empty = sizes < 1 if sizes.ndim == 1 else (sizes < 1).any(1)
        for wrong in (empty, volumes_of(sizes) > budget):
            if wrong.any() and not (is_split and wrong is not empty):
                number = int(wrong.argmax())
                shape = tuple(np.atleast_1d(sizes[number]).tolist())
                raise self._wrong_size(shape, f"sample {first + number}", int(wrong.sum()))
        num_pieces = -(-sizes // budget)
        if sizes.ndim > 1 or len(sizes) == 0 or num_pieces.max() == 1:
            return Pieces(sizes, first=first)
        samples = np.repeat(np.arange(len(sizes), dtype=sizes.dtype), num_pieces)
        firsts = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        starts = (np.arange(len(samples)) - firsts).astype(sizes.dtype) * budget
        return Pieces(np.minimum(budget, sizes[samples] - starts), samples, starts, first)

    def _wrong_size(self, shape: tuple[int, ...], name: str, number: int) -> ValueError:
        who, budget = self.who, self.budget
        others = f" It is the first of {number} such samples." if number > 1 else ""
        size = " x ".join(map(str, shape))
        if min(shape) < 1:
            return ValueError(
                f"{who}: {name} has size {size}; sizes must be >= 1.{others} Leave it out of the "
                "dataset."
            )
        hint = ' oversize="split" divides such documents.' if who == "pack" else ""
        return ValueError(
            f"{who}: {name} has size {size}, more than the budget of {budget}.{others} Make the "
            f"budget larger, or leave it out.{hint}"
        )


def sizes_of(dataset: Any, size_of: Any, who: str) -> NDArray[Any]:
    """Return the size of every sample: int32 if they fit, else int64; of shape (samples,), or
    (samples, dimensions).

    Raises: ValueError: another number of sizes than of samples, or sizes that are not whole.
    """
    length = len(dataset)
    sizes = as_sizes(_sizes_by(size_of, length) if callable(size_of) else size_of, who)
    if len(sizes) != length:
        raise ValueError(
            f"{who}: size_of must have one size for each of the dataset's {length} samples, got "
            f"shape {sizes.shape}."
        )
    fits = length == 0 or (int(sizes.min()) >= 0 and int(sizes.max()) < 1 << 31)
    return sizes.astype(np.int32 if fits else np.int64, copy=False)


def as_sizes(given: Any, who: str) -> NDArray[Any]:
    """Return sizes as an array of (samples,), or (samples, dimensions) where they are tuples.

    Raises: ValueError: they are neither, or not whole.
    """
    try:
        sizes = np.asarray(given)
    except ValueError as error:  # not all of one length
        raise ValueError(
            f"{who}: sizes must be ints, or tuples of ints that all have the same length."
        ) from error
    if sizes.ndim not in (1, 2) or (sizes.ndim == 2 and who == "pack"):
        expected = "ints" if who == "pack" else "ints or tuples of ints"
        raise ValueError(f"{who}: sizes must be {expected}, got an array of shape {sizes.shape}.")
    if sizes.size and not np.issubdtype(sizes.dtype, np.integer):
        raise ValueError(f"{who}: sizes must be whole numbers, got {sizes.dtype}.")
    return sizes


def volumes_of(sizes: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers of elements of samples: sizes of (samples,) as they are, the products of
    those of (samples, dimensions).
    """
    return sizes if sizes.ndim == 1 else sizes.prod(1, dtype=np.int64)


def _sizes_by(size_of: Callable[[int], Any], length: int) -> Any:
    sizes = map(size_of, range(length))
    first = next(sizes, 0)
    if isinstance(first, tuple):
        return [first, *sizes]
    return np.fromiter(chain((first,), sizes), np.int64, length)  # without a list of objects


def packed(sizes: Sizes, budget: int) -> tuple[NDArray[np.int64], list[int]]:
    """Group samples whose sizes together are within the budget: first-fit decreasing.

    Each pack takes the largest sample that still fits, until none does. The samples of a size are a
    count and a place in the sorted order, so a step is one lookup in a table of sizes; of samples
    of one size, those that came first are taken first.
    """
    unit = -(-budget // _MOST_SIZES)  # large sizes are rounded up to units of 1/65536 of the budget
    capacity = budget // unit
    units = np.minimum(-(-sizes // unit), capacity)
    by_size = np.argsort(units, kind="stable")
    counts = np.bincount(units, minlength=capacity + 1)
    following = (np.cumsum(counts) - counts).tolist()  # the place of the next sample of each size
    left = counts.tolist()
    # For each size, the largest up to it that has samples left; 0 = none. A size that runs out
    # points down, and each lookup shortens the path of the next one.
    down = np.maximum.accumulate(np.where(counts, np.arange(capacity + 1), 0)).tolist()
    places: list[int] = []
    ends: list[int] = []
    while len(places) < len(sizes):
        space = capacity
        while space:
            size = space
            while (lower := down[size]) != size:
                down[size] = down[lower]
                size = lower
            if not size:
                break
            number = min(left[size], space // size)
            first = following[size]
            places.extend(range(first, first + number))
            following[size] = first + number
            left[size] -= number
            if not left[size]:
                down[size] = size - 1
            space -= number * size
        ends.append(len(places))
    return by_size[np.array(places, np.int64)], ends


def bucketed(sizes: Sizes, budget: int) -> tuple[NDArray[np.int64], list[int]]:
    """Group samples of similar size: the largest of a group, times their number, is within the
    budget, as in a batch that is padded to its longest sample. Sizes may have several dimensions:
    (samples, dimensions).
    """
    if sizes.ndim > 1:
        return _bucketed_by_shape(sizes, budget)
    by_size = np.argsort(sizes, kind="stable")[::-1]
    ordered = sizes[by_size].tolist()
    ends: list[int] = []
    end = 0
    while end < len(ordered):
        end = min(len(ordered), end + budget // ordered[end])
        ends.append(end)
    return by_size.astype(np.int64), ends


def _bucketed_by_shape(shapes: Sizes, budget: int) -> tuple[NDArray[np.int64], list[int]]:
    """Group samples of similar shape: the largest of each dimension, times one another and the
    number of samples, is within the budget.

    Samples are sorted by all dimensions but the last in steps of an eighth of an octave, then by
    the last: so those of one group differ by little in every dimension.
    """
    steps = np.floor(np.log2(shapes[:, :-1]) * _STEPS_PER_OCTAVE)
    order = np.lexsort((shapes[:, -1], *steps.T[::-1]))[::-1]
    ends: list[int] = []
    largest, number = (0,) * shapes.shape[1], 0
    for place, shape in enumerate(shapes[order].tolist()):
        joined = tuple(map(max, largest, shape))
        if number and math.prod(joined) * (number + 1) > budget:
            ends.append(place)
            joined, number = tuple(shape), 0
        largest, number = joined, number + 1
    if number:
        ends.append(len(order))
    return order.astype(np.int64), ends
