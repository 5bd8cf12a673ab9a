"""One dataset in each peer's loader.

Every function takes a :class:`Work` and returns a function that begins a pass: an iterator over
batches, which ends its threads and processes when it ends or is dropped. Options that a loader's
user would not choose for speed are not chosen here either: each runs as its own documentation
shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from .peers import imported

Batches = Callable[[], Iterator[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The data and options that all loaders get; picklable, for workers that are spawned."""

    dataset: Any
    """Map-style. If it has ``__getitems__``, torch's loader and ours ask it for whole batches."""
    num_samples: int
    batch_size: int
    num_workers: int
    collate: Callable[[list[Any]], Any] | None = None
    """None = torch's default_collate."""
    size_of: Callable[[Any], int] = len
    """Returns the number of samples in a batch."""

    def groups(self) -> list[list[int]]:
        """Return the indices of each batch."""
        indices, size = list(range(self.num_samples)), self.batch_size
        return [indices[first : first + size] for first in range(0, len(indices), size)]

    def load_group(self, indices: Sequence[int]) -> Any:
        """Make one batch in one call."""
        get_many = getattr(self.dataset, "__getitems__", None)
        samples = get_many(indices) if get_many else [self.dataset[index] for index in indices]
        return self.collate_fn(samples)

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """The given function, or torch's."""
        return self.collate or default_collate


def ours(work: Work, **options: Any) -> Batches:
    """Our DataLoader; ``options``, such as ``isolation``, are its own."""
    return _loader("spdl_torch", work, options)


def torch_loader(work: Work, **options: Any) -> Batches:
    """torch's DataLoader, whose workers are forked; ``options`` are its own."""
    if options.get("num_workers", work.num_workers):
        options.setdefault("multiprocessing_context", "fork")
    return _loader("torch.utils.data", work, options)


def _loader(module: str, work: Work, options: dict[str, Any]) -> Batches:
    loader = imported(module).DataLoader(
        work.dataset,
        batch_size=work.batch_size,
        collate_fn=work.collate,
        **{"num_workers": work.num_workers, **options},
    )
    return lambda: iter(loader)


def spdl_batches(work: Work, load: Callable[[list[int]], Any] | None = None) -> Batches:
    """SPDL's pipeline on threads, one batch per task; ``load`` in place of the dataset's own."""

    def begin() -> Iterator[Any]:
        builder = imported("spdl.pipeline").PipelineBuilder().add_source(work.groups())
        order = {"concurrency": work.num_workers, "output_order": "input"}
        builder.pipe(load or work.load_group, **order).add_sink(3)
        pipeline = builder.build(num_threads=work.num_workers)
        with pipeline.auto_stop():
            yield from pipeline

    return begin


def spdl_items(work: Work) -> Batches:
    """SPDL's pipeline on threads, one sample per task, as in its tutorials."""

    def begin() -> Iterator[Any]:
        builder = imported("spdl.pipeline").PipelineBuilder().add_source(range(work.num_samples))
        order = {"concurrency": work.num_workers, "output_order": "input"}
        builder.pipe(work.dataset.__getitem__, **order).aggregate(work.batch_size)
        builder.pipe(work.collate_fn).add_sink(3)
        pipeline = builder.build(num_threads=work.num_workers)
        with pipeline.auto_stop():
            yield from pipeline

    return begin


def grain_threads(work: Work) -> Batches:
    """Grain: a map of the indices, read on threads."""
    grain = imported("grain")

    def begin() -> Iterator[Any]:
        source = grain.MapDataset.source(range(work.num_samples)).map(work.dataset.__getitem__)
        # Its own batching would make numpy arrays and join them.
        source = source.batch(work.batch_size, batch_fn=work.collate_fn)
        options = grain.ReadOptions(
            num_threads=work.num_workers, prefetch_buffer_size=2 * work.num_workers
        )
        return iter(source.to_iter_dataset(read_options=options))

    return begin


def bare_threads(work: Work) -> Batches:
    """A pool of threads, a few batches ahead, and nothing else: what no loader can exceed."""

    def begin() -> Iterator[Any]:
        with ThreadPoolExecutor(work.num_workers) as threads:
            pending = deque[Future[Any]]()
            for group in work.groups():
                pending.append(threads.submit(work.load_group, group))
                if len(pending) > 2 * work.num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    return begin


def nothing(work: Work) -> Batches:
    """No loader at all: how far its ratio is from 1 is the noise."""
    return lambda: iter(())
