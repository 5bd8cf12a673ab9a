"""The random streams of a batch's samples, for a dataset that makes whole batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...objects.datasets import nested_datasets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch import Generator

    from .owned import OwnedGenerators
    from .streams import SampleStreams

    SampleContext = Callable[[int], AbstractContextManager[Generator | None]]


class SampleContexts:
    """The ``sample_context`` that a loader sets: ``contexts(k)`` is that of the k-th sample.

    A dataset that only wants torch's numbers takes the seeds of all samples in one call instead:
    entering 256 contexts holds the GIL for 5 ms, in which the training loop launches nothing.
    """

    __slots__ = ("_places", "_streams")

    def __init__(self, streams: SampleStreams, places: Sequence[int] | None = None) -> None:
        """``places``: of these samples in the loader's batch; None = they are the batch."""
        self._streams = streams
        self._places = places

    def __call__(self, k: int) -> AbstractContextManager[Generator | None]:
        return self._streams.sample_context(k if self._places is None else self._places[k])

    def torch_seeds(self, samples: Iterable[int]) -> list[int] | None:
        """Return the seeds of torch's generator for these samples; None: some have drawn already,
        so that their streams go on within the contexts alone.
        """
        own = self._places
        places = [*samples] if own is None else [own[k] for k in samples]
        return self._streams.torch_seeds(places)

    def of_part(self, places: Sequence[int]) -> SampleContexts:
        """Return those of the samples at ``places`` of this batch."""
        own = self._places
        return SampleContexts(
            self._streams, places if own is None else [own[place] for place in places]
        )


def contexts_of_part(context: SampleContext, places: Sequence[int]) -> SampleContext:
    """Return the contexts of the samples at ``places`` of a batch, whoever set the batch's."""
    if isinstance(context, SampleContexts):
        return context.of_part(places)
    return lambda k: context(places[k])


def torch_seeds(context: SampleContext, samples: Iterable[int]) -> list[int] | None:
    """Return the seeds of torch's generator for the samples; None: only the contexts know."""
    return context.torch_seeds(samples) if isinstance(context, SampleContexts) else None


def borrowers_in(dataset: Any) -> list[Any]:
    """Return the datasets, this one and those inside it, that make whole batches and enter the
    stream of each sample: their class has ``sample_context``, which the loader sets."""
    return [each for each in nested_datasets(dataset) if hasattr(type(each), "sample_context")]


class Lending:
    """A context in which ``streams``, which the trainer's thread has entered, are lent to datasets.

    These and ``owned`` are the trainer's own objects: their contexts and generators are restored
    afterwards. Whoever enters it leaves it again if ``is_open`` is still True then: Ctrl-C may come
    where ``__exit__`` begins.
    """

    def __init__(
        self, streams: SampleStreams, datasets: list[Any], owned: OwnedGenerators | None
    ) -> None:
        self.is_open = False
        self._streams = streams
        self._datasets = datasets
        self._owned = owned
        self._contexts = [vars(dataset).get("sample_context") for dataset in datasets]
        self._states = [] if owned is None else owned.states()

    def __enter__(self) -> None:
        self.is_open = True
        for dataset in self._datasets:
            dataset.sample_context = SampleContexts(self._streams)

    def __exit__(self, *_: object) -> None:
        for dataset, context in zip(self._datasets, self._contexts, strict=True):
            dataset.sample_context = context
        if self._owned is not None:
            self._owned.restore(self._states)
        self.is_open = False
