"""What batches are made of, by which of torch's rules, and the batch that a thread is making: its
position, the streams of its samples, its bad samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset

from .bad_samples import BadSample

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..rng.keys import StreamKey
    from ..rng.streams import SampleStreams
    from .bad_samples import Tolerance


class BatchRecipe(NamedTuple):
    """The dataset of a loader and how its samples become batches; a worker has a copy of it with
    its own dataset and functions."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    auto_collation: bool
    drop_last: bool
    tolerance: Tolerance | None = None
    """The treatment of samples that fail; None = the batch fails with them."""

    @property
    def iterable(self) -> bool:
        """Whether the dataset gives its samples itself, without indices."""
        return isinstance(self.dataset, IterableDataset)


class Batch:
    """The current batch of one thread, reused for every batch.

    streams: the thread's; None = draws are left as they are.
    key: the epoch's, from which every stream follows.
    tolerance: None = an error of a sample is an error of its batch.
    """

    __slots__ = ("bad", "first", "key", "streams", "tolerance")

    def __init__(
        self, streams: SampleStreams | None, key: StreamKey | None, tolerance: Tolerance | None
    ) -> None:
        self.streams = None if key is None else streams
        self.key = key
        self.tolerance = tolerance
        self.first = 0
        """The position in the epoch of the batch's first sample."""
        self.bad: list[BadSample] = []

    def begin_again_at(self, place: int) -> None:
        """Restart every stream, as if no sample had drawn; the sample at ``place`` is next."""
        if self.streams is not None and self.key is not None:
            self.streams.begin(self.key, self.first)
            self.streams.at(place)

    def at(self, place: int) -> None:
        """Go to the stream of the sample at ``place`` of the batch."""
        if self.streams is not None:
            self.streams.at(place)

    def note_bad(self, place: int, key: Any, error: Exception) -> None:
        """Keep an error that is tolerated."""
        self.bad.append(BadSample(place, key, error))

    def forget_bad(self) -> None:
        """Let go of the errors, which may refer to the frames of the training loop."""
        self.bad = []
