"""Indices of a dataset, divided among ranks, in order or at random."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...checks import check_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = 4096  # indices that become Python ints at once


class DistributedDeterministicSampler:
    """The indices ``rank, rank + world_size, ...`` below ``n``, the same in every pass.

    11 indices, 4 ranks -> 0 4 | 1 5 | 2 6 | 3 7; with the last round: 0 4 8 | 1 5 9 | 2 6 10 | 3 7

    Args:
        n: the number of indices, at least 1.
        rank, world_size: the rank whose share this is, and the number of ranks.
        ddp_drop_last_distributed_round: leave out a last round that is too short for every rank to
            get one; False: every index goes to some rank, and some ranks have one more.

    Raises: TypeError, ValueError: a number out of range; fewer indices than ranks, where the last
        round is left out.
    Warns: UserWarning: indices are left out.
    """

    is_shared_out = True
    """Each rank already has its own part: nothing is to be divided again."""

    def __init__(
        self, n: int, /, *, rank: int, world_size: int, ddp_drop_last_distributed_round: bool = True
    ) -> None:
        name = type(self).__name__
        n = _checked(name, n, rank, world_size)
        left_over = n % world_size if ddp_drop_last_distributed_round else 0
        if ddp_drop_last_distributed_round and n < world_size:
            raise ValueError(
                f"{name}: n must be >= world_size where the last round is dropped, got {n=}, "
                f"{world_size=}. Pass ddp_drop_last_distributed_round=False."
            )
        if left_over:
            warnings.warn(
                f"{name}: the last {left_over} of {n} indices are never visited, since "
                f"{world_size} ranks do not divide them. "
                "ddp_drop_last_distributed_round=False visits all.",
                stacklevel=2,
            )
        self._indices = range(rank, n - left_over, world_size)

    def __len__(self) -> int:
        """Return the number of indices in a pass on this rank."""
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)


class DistributedRandomSampler:
    """Indices drawn at random, and divided among ranks: rank ``r`` of ``n`` takes the draws
    ``r, r + n, ...``. The same in every pass until :meth:`shuffle` gets another seed.

    The draws depend on the seed and the arguments alone, never on anyone's random state, and are
    those of SPDL's sampler with the same NumPy.

    Args:
        n: the number of indices, at least 1.
        rank, world_size: the rank whose share this is, and the number of ranks.
        num_draws: by all ranks together in a pass; None = ``n``. More than ``n`` only with weights.
        weights: of the indices: they are drawn with replacement, in proportion to these. None =
            every index at most once.
        seed: of the draws.
        ddp_drop_last_distributed_round: draw only as many as divide equally among the ranks; False:
            some ranks have one more.

    Raises: TypeError, ValueError: a number out of range; weights that are not ``n`` finite numbers
        >= 0, or all of them 0; fewer draws than ranks, where the last round is left out.
    """

    is_shared_out = True
    """Each rank already has its own part: nothing is to be divided again."""

    def __init__(
        self,
        n: int,
        /,
        *,
        rank: int,
        world_size: int,
        num_draws: int | None = None,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        ddp_drop_last_distributed_round: bool = True,
    ) -> None:
        name = type(self).__name__
        self._n = _checked(name, n, rank, world_size)
        check_whole(name, num_draws=num_draws, optional=True)
        draws = self._n if num_draws is None else num_draws
        if weights is None and draws > self._n:
            raise ValueError(
                f"{name}: num_draws must be <= n without weights, as no index is drawn twice, got "
                f"num_draws={draws}, n={self._n}."
            )
        if ddp_drop_last_distributed_round:
            if draws < world_size:
                raise ValueError(
                    f"{name}: there must be a draw for every rank where the last round is dropped, "
                    f"got {draws} draws, {world_size=}. Pass ddp_drop_last_distributed_round=False."
                )
            draws -= draws % world_size
        self._rank, self._world_size, self._num_draws = rank, world_size, draws
        self._weights = None
        if weights is not None:
            shares = checked_weights(name, weights, self._n, "index")
            self._weights = shares / shares.sum()
        self._seed = seed

    def __len__(self) -> int:
        """Return the number of indices in a pass on this rank."""
        return len(range(self._rank, self._num_draws, self._world_size))

    def __iter__(self) -> Iterator[int]:
        replace = self._weights is not None
        drawn = np.random.default_rng(self._seed).choice(
            self._n, size=self._num_draws, replace=replace, p=self._weights
        )
        if self._world_size > 1:  # a copy, which does not keep the other ranks' draws
            drawn = drawn[self._rank :: self._world_size].copy()
        for start in range(0, len(drawn), _CHUNK):
            yield from drawn[start : start + _CHUNK].tolist()

    def shuffle(self, seed: int) -> None:
        """Make passes that begin from now on use the draws of ``seed``, whatever came before."""
        self._seed = seed


def _checked(name: str, n: int, rank: int, world_size: int) -> int:
    check_whole(name, n=n, world_size=world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"{name}: rank must be between 0 and {world_size - 1}, got {rank}.")
    return n


def checked_weights(
    name: str, weights: Sequence[float], count: int, of_what: str
) -> NDArray[np.float64]:
    """Return weights as an array. Raises: ValueError, see the classes that have some."""
    try:
        numbers = np.array(weights, dtype=np.float64)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: weights must be numbers: {error}.") from error
    if numbers.shape != (count,):
        raise ValueError(
            f"{name}: weights must be {count} numbers, one for each {of_what}, got shape "
            f"{numbers.shape}."
        )
    if not np.isfinite(numbers).all() or (numbers < 0).any():
        raise ValueError(f"{name}: weights must be finite and >= 0.")
    with np.errstate(over="ignore"):
        total = numbers.sum()
    if not 0 < total < np.inf:
        raise ValueError(f"{name}: weights must add up to a finite number > 0, got {total}.")
    return numbers
