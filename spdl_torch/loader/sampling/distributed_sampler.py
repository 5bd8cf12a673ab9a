"""A sampler of this rank's indices of a map-style dataset, in an order that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler as TorchDistributedSampler, Sampler

from ...checks import check_whole
from .parts import OwnRank, Shard, check_tail

if TYPE_CHECKING:
    from .parts import Tail

_CHUNK = 4096  # indices that become Python ints at once


class DistributedSampler(TorchDistributedSampler[int]):
    """This rank's share of the indices of a map-style dataset, for torch's DataLoader and ours.

    All ranks together walk through one order, which depends on ``(seed, epoch)`` alone: rank ``r``
    of ``n`` takes its positions ``r, r + n, ...``. So the batches of one step, taken from all
    ranks, are one stretch of that order, and any number of ranks with the same global batch trains
    on the same global batches. The order and the shares are those of torch's DistributedSampler.

    The rank is looked up whenever it is needed, not when this object is made: from the process
    group, else from torchrun's variables ``RANK`` and ``WORLD_SIZE``, else there is one rank.

    Where the number of ranks does not divide that of samples, ``tail`` decides the last round::

        10 samples, 4 ranks       rank 0      rank 1      rank 2   rank 3
        tail="drop"               0 4         1 5         2 6      3 7      8, 9 left out
        tail="pad"                0 4 8       1 5 9       2 6 0    3 7 1    0, 1 twice
        tail="uneven"             0 4 8       1 5 9       2 6      3 7      each once

    Args:
        dataset: a map-style dataset, or the number of samples.
        num_replicas, rank: override torch.distributed's world size and rank.
        shuffle: another order for every epoch. False = 0, 1, 2, ...
        seed: the seed of the order; the same on every rank.
        tail: ``"drop"``: equal shares, up to ``n - 1`` samples of the epoch left out (different
            ones each epoch when shuffled). ``"pad"``: equal shares, the last sample of some ranks
            repeats one of another rank; see ``num_valid``. ``"uneven"``: each sample once, some
            ranks have one more; training hangs if that makes one batch more.
    Raises: TypeError: ``dataset`` is a sampler; ValueError: see the message; RuntimeError, when
        asked for indices or length: this is one of several ranks and cannot know which.

    Memory: 4 bytes a sample of the dataset while an epoch begins, then 4 bytes a sample of this
    rank (8 for 2**31 samples and more); nothing when not shuffled.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        *,
        tail: Tail = "drop",
    ) -> None:
        # Not torch's __init__: it asks for the process group, which Lightning sets up later.
        _check_dataset(dataset)
        check_tail(tail, "DistributedSampler")
        self.dataset: Any = range(dataset) if isinstance(dataset, int) else dataset
        self.shuffle = shuffle
        self.seed = seed
        self.tail = tail
        self.epoch = 0
        self._own_rank = OwnRank("DistributedSampler", num_replicas, rank)
        self._start = 0

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # attributes in torch
        """The number of ranks that share the samples."""
        return self._shard().count

    @property
    def rank(self) -> int:  # type: ignore[override]  # attributes in torch
        """The rank whose share this is."""
        return self._shard().index

    @property
    def drop_last(self) -> bool:  # type: ignore[override]  # attributes in torch
        """Whether samples are left out to make shares equal, as in torch's sampler."""
        return self.tail == "drop"

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # attributes in torch
        """The same as ``len()``, as in torch's sampler."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]  # attributes in torch
        """The number of samples of an epoch on all ranks together, as in torch's sampler."""
        return _end(0, self._length(), self._shard().count, self.tail)

    @property
    def num_padded(self) -> int:
        """The number of padding samples in this rank's epoch: 1, its last one, or 0."""
        numbers = self._numbers(0, self._shard())
        return int(len(numbers) > 0 and numbers[-1] >= self._length())

    def num_valid(self, batch: int, batch_size: int) -> int:
        """Return the number of samples in this rank's batch number ``batch`` (from 0 in the epoch)
        that are not padding. They come first; in a whole batch it is ``batch_size``.
        """
        first = batch * batch_size
        return max(0, min(batch_size, len(self) - self.num_padded - first))

    def __len__(self) -> int:
        """Return the samples of a whole epoch on this rank, even if a pass starts in its middle."""
        return len(self._numbers(0, self._shard()))

    def __iter__(self) -> Iterator[int]:
        numbers, length = self._numbers(self._start, self._shard()), self._length()
        inside = range(numbers.start, min(numbers.stop, length), numbers.step)
        # Padding: after its end the order begins again, for one sample at most.
        beyond = [number % length for number in numbers[len(inside) :]]
        own: Any = inside
        order = self._permutation() if numbers else None
        if order is not None:
            # A part must not keep the whole permutation.
            own = order[inside.start : inside.stop : inside.step].clone()
            beyond = [int(order[number]) for number in beyond]
        return self._walk(own, beyond)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the passes that begin from now on; a running one keeps its own.

        A start in the middle (``start_at``) belongs to its epoch: naming that one again keeps it,
        naming another begins at the beginning.
        """
        check_whole("DistributedSampler", epoch=epoch, least=0)
        if epoch != self.epoch:
            self.epoch, self._start = epoch, 0

    def start_at(self, num_consumed: int) -> None:
        """Start the next pass after ``num_consumed`` samples of this epoch, on all ranks together,
        without iterating up to there. Later passes start from the beginning.

        Raises: ValueError: there are fewer samples. (With ``"pad"`` or ``"uneven"``, one rank's
            count times the ranks may exceed the length by part of a round; that means the end.)
        """
        length = self._length()
        if num_consumed < 0 or (num_consumed > length and self.tail == "drop"):
            raise ValueError(
                f"DistributedSampler: num_consumed must be between 0 and {length}, the length of "
                f"the dataset, got {num_consumed}."
            )
        self._start = min(num_consumed, length)

    def _length(self) -> int:
        """Return the number of samples that all ranks share in the epoch that is set."""
        return len(self.dataset)

    def _shard(self) -> Shard:
        return self._own_rank.shard()

    def _numbers(self, start: int, shard: Shard) -> range:
        """Return the rank's places in the epoch's order. Padding lies after the order's end."""
        end = _end(start, self._length(), shard.count, self.tail)
        return range(start + shard.index, end, shard.count)

    def _permutation(self) -> torch.Tensor | None:
        """Return the order of this epoch; None = the dataset's."""
        if not self.shuffle:
            return None
        length = self._length()
        generator = torch.Generator(device="cpu").manual_seed(self.seed + self.epoch)
        # Both dtypes give the same permutation.
        dtype = torch.int32 if length < 1 << 31 else torch.int64
        return torch.randperm(length, generator=generator, dtype=dtype, device="cpu")

    def _walk(self, own: Any, beyond: list[int]) -> Iterator[int]:
        # The pass begins at the first index, not at iter(), which Lightning and loaders also call
        # without iterating.
        self._start = 0
        for first in range(0, len(own), _CHUNK):
            chunk = own[first : first + _CHUNK]
            yield from chunk if isinstance(chunk, range) else chunk.tolist()
        yield from beyond


def _end(start: int, length: int, world: int, tail: Tail) -> int:
    """Return the end of an order that ``world`` ranks share from ``start`` on."""
    left_over = (length - start) % world
    if tail == "uneven" or left_over == 0:
        return length
    return length - left_over + (world if tail == "pad" else 0)


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, Sampler):
        raise TypeError(
            f"DistributedSampler: dataset must be a dataset or its length, got the sampler "
            f"{type(dataset).__name__}. A sampler cannot be shared out again; for another choice "
            "of samples, wrap the dataset in torch.utils.data.Subset."
        )
    if isinstance(dataset, int) and (isinstance(dataset, bool) or dataset < 0):
        raise ValueError(f"DistributedSampler: a length must be >= 0, got {dataset}.")
