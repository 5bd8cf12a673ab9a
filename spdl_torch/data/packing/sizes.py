"""Read the sizes of samples, check them against the budget, and split samples if asked to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from .grouping import Grouping

    Size = int | tuple[int, ...]
    SizeOf = Sequence[Size] | NDArray[Any] | Tensor | Callable[[int], Size]

Oversize = Literal["error", "split"]
"""The treatment of samples that are larger than the budget."""


class Pieces(NamedTuple):
    """The samples that a plan groups: whole ones, or pieces of those that are too large."""

    sizes: NDArray[Any]
    samples: NDArray[Any] | None
    """The sample of each piece; None = all are whole."""
    starts: NDArray[Any] | None
    """The first token of each piece."""

    def piece(self, number: int) -> tuple[int, int, int, bool]:
        """Return a piece's sample, its size and first token, and whether the sample goes on."""
        sizes, samples, starts = self
        size = int(sizes[number])
        if samples is None or starts is None:
            return number, size, 0, False
        sample = int(samples[number])
        has_more = number + 1 < len(samples) and samples[number + 1] == sample
        return sample, size, int(starts[number]), bool(has_more)


@dataclass(frozen=True, slots=True)
class Rule:
    """What pack() or bucket() was asked for: how samples become batches within a budget.

    Raises: ValueError: the budget is no number of tokens, or ``oversize`` is unknown.
    """

    who: Literal["pack", "bucket"]
    """The function that was called, for errors."""
    budget: int
    grouping: Grouping
    collate_fn: Callable[[list[Any]], Any]
    oversize: Oversize
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        budget = self.budget
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
            raise ValueError(f"{self.who}: budget must be an int >= 1, got {budget!r}.")
        if self.oversize not in get_args(Oversize):
            raise ValueError(
                f'{self.who}: oversize must be "error" or "split", got {self.oversize!r}.'
            )

    def check_size(self, size: Any, name: str) -> None:
        """Check the size of one sample. Raises: ValueError: it is below 1 or above the budget."""
        shape = size if isinstance(size, tuple) else (size,)
        if min(shape) < 1 or math.prod(shape) > self.budget:
            raise self._wrong_size(shape, name, 1)

    def pieces_of(self, sizes: NDArray[Any], first_sample: int = 0) -> Pieces:
        """Return the pieces to group; ``first_sample``: the number, in errors, of the first sample.

        Raises: ValueError: a sample is empty, or too large.
        """
        budget, is_split = self.budget, self.oversize == "split"
        empty = sizes < 1 if sizes.ndim == 1 else (sizes < 1).any(1)
        for wrong in (empty, volumes_of(sizes) > budget):
            if wrong.any() and not (is_split and wrong is not empty):
                first = int(wrong.argmax())
                shape = tuple(np.atleast_1d(sizes[first]).tolist())
                raise self._wrong_size(shape, f"sample {first_sample + first}", int(wrong.sum()))
        if sizes.ndim > 1:
            return Pieces(sizes, None, None)
        num_pieces = -(-sizes // budget)
        if len(sizes) == 0 or num_pieces.max() == 1:
            return Pieces(sizes, None, None)
        samples = np.repeat(np.arange(len(sizes), dtype=sizes.dtype), num_pieces)
        firsts = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        starts = (np.arange(len(samples)) - firsts).astype(sizes.dtype) * budget
        return Pieces(np.minimum(budget, sizes[samples] - starts), samples, starts)

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
