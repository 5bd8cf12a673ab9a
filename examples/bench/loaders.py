"""One dataset in each peer's loader.

Every function takes a :class:`Work` and returns a function that begins a pass: an iterator over
batches, which ends its threads and processes when it ends or is dropped. Options that a loader's
user would not choose for speed are not chosen here either: each runs as its own documentation
shows.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .peers import imported
from .tables import Contender, Refused

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
    shuffle: bool = False

    def indices(self) -> list[int]:
        """Return the indices, in the order of the pass."""
        if not self.shuffle:
            return list(range(self.num_samples))
        import torch

        order: list[int] = torch.randperm(self.num_samples).tolist()
        return order

    def groups(self) -> list[list[int]]:
        """Return the indices of each batch."""
        indices, size = self.indices(), self.batch_size
        return [indices[first : first + size] for first in range(0, len(indices), size)]

    def load_group(self, indices: Sequence[int]) -> Any:
        """Make one batch in one call."""
        get_many = getattr(self.dataset, "__getitems__", None)
        samples = get_many(indices) if get_many else [self.dataset[index] for index in indices]
        return self.collate_fn()(samples)

    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """Return the given function, or torch's."""
        if self.collate is not None:
            return self.collate
        from torch.utils.data import default_collate

        return default_collate


def ours(work: Work, **options: Any) -> Batches:
    """Our DataLoader; ``options``, such as ``isolation``, are its own.

    Raises: Refused: this release has no such option.
    """
    loader = our_loader(
        work.dataset,
        batch_size=work.batch_size,
        shuffle=work.shuffle,
        collate_fn=work.collate,
        **{"num_workers": work.num_workers, **options},
    )
    return lambda: iter(loader)


def our_loader(dataset: Any, **options: Any) -> Any:
    """``spdl_torch.DataLoader``.

    Raises: Refused: this release has no such option.
    """
    import spdl_torch
    from spdl_torch.errors import UnsupportedOptionError

    try:
        return spdl_torch.DataLoader(dataset, **options)
    except UnsupportedOptionError as error:
        raise Refused(str(error)) from error


def torch_loader(
    work: Work, *, context: str = "fork", stateful: bool = False, **options: Any
) -> Batches:
    """torch's DataLoader, or torchdata's resumable one; ``options`` are the loader's own."""
    if stateful:
        loader_class = imported("torchdata.stateful_dataloader").StatefulDataLoader
    else:
        loader_class = imported("torch.utils.data").DataLoader
    loader = loader_class(
        work.dataset,
        batch_size=work.batch_size,
        shuffle=work.shuffle,
        collate_fn=work.collate,
        num_workers=work.num_workers,
        multiprocessing_context=context if work.num_workers else None,
        **options,
    )
    return lambda: iter(loader)


def nodes(work: Work, *, whole_batches: bool = False) -> Batches:
    """torchdata's nodes, on threads; one sample or one batch per task."""
    torch_nodes = imported("torchdata.nodes")

    def begin() -> Iterator[Any]:
        if whole_batches:
            node = torch_nodes.ParallelMapper(
                torch_nodes.IterableWrapper(work.groups()),
                work.load_group,
                num_workers=work.num_workers,
                method="thread",
            )
        else:
            node = torch_nodes.ParallelMapper(
                torch_nodes.IterableWrapper(work.indices()),
                work.dataset.__getitem__,
                num_workers=work.num_workers,
                method="thread",
            )
            node = torch_nodes.Batcher(node, work.batch_size, drop_last=False)
            node = torch_nodes.ParallelMapper(
                node, work.collate_fn(), num_workers=1, method="thread"
            )
        return iter(torch_nodes.Loader(torch_nodes.Prefetcher(node, prefetch_factor=2)))

    return begin


def our_pipeline(work: Work) -> Batches:
    """Our pipeline on threads, one batch per task, written as for SPDL's."""
    from spdl_torch.pipeline import PipelineBuilder

    def begin() -> Iterator[Any]:
        builder: Any = PipelineBuilder().add_source(work.groups())
        builder.pipe(work.load_group, concurrency=work.num_workers, output_order="input")
        return _items(builder.add_sink(3).build(num_threads=work.num_workers))

    return begin


def spdl_batches(work: Work, load: Callable[[list[int]], Any] | None = None) -> Batches:
    """SPDL's pipeline on threads, one batch per task; ``load`` in place of the dataset's own."""
    spdl_pipeline = imported("spdl.pipeline")

    def begin() -> Iterator[Any]:
        builder = spdl_pipeline.PipelineBuilder().add_source(work.groups())
        builder.pipe(
            load or work.load_group, concurrency=work.num_workers, output_order="input"
        ).add_sink(3)
        return _items(builder.build(num_threads=work.num_workers))

    return begin


def spdl_items(work: Work) -> Batches:
    """SPDL's pipeline on threads, one sample per task, as in its tutorials."""
    spdl_pipeline = imported("spdl.pipeline")

    def begin() -> Iterator[Any]:
        builder = spdl_pipeline.PipelineBuilder().add_source(work.indices())
        builder.pipe(
            work.dataset.__getitem__, concurrency=work.num_workers, output_order="input"
        ).aggregate(work.batch_size).pipe(work.collate_fn()).add_sink(3)
        return _items(builder.build(num_threads=work.num_workers))

    return begin


def spdl_subprocess(work: Work, load: Callable[[list[int]], Any] | None = None) -> Batches:
    """The same pipeline in one spawned process, whose start is part of the first batch."""
    spdl_pipeline = imported("spdl.pipeline")

    def begin() -> Iterator[Any]:
        builder = spdl_pipeline.PipelineBuilder().add_source(work.groups())
        builder.pipe(
            load or work.load_group, concurrency=work.num_workers, output_order="input"
        ).add_sink(3)
        running = spdl_pipeline.run_pipeline_in_subprocess(
            builder.get_config(), num_threads=work.num_workers, mp_context="spawn"
        )
        yield from running

    return begin


def spdl_processes(work: Work) -> Batches:
    """SPDL's answer to torch's DataLoader: a pipeline over worker processes."""
    loader = imported("spdl.dataloader").get_pytorch_dataloader(
        work.dataset,
        batch_size=work.batch_size,
        shuffle=work.shuffle,
        num_workers=work.num_workers,
        collate_fn=work.collate,
        multiprocessing_context="fork",
        in_order=True,
    )
    return lambda: iter(loader)


def grain_threads(work: Work) -> Batches:
    """Grain: a map of the indices, read on threads."""
    grain = imported("grain")

    def begin() -> Iterator[Any]:
        # Its own batching would make numpy arrays and join them.
        if hasattr(work.dataset, "__getitems__"):
            source = grain.MapDataset.source(work.groups()).map(work.load_group)
            num_buffered = 2 * work.num_workers
        else:
            source = grain.MapDataset.source(work.indices()).map(work.dataset.__getitem__)
            source = source.batch(work.batch_size, batch_fn=work.collate_fn())
            num_buffered = 2 * work.num_workers
        options = grain.ReadOptions(num_threads=work.num_workers, prefetch_buffer_size=num_buffered)
        return iter(source.to_iter_dataset(read_options=options))

    return begin


def bare_threads(work: Work, load: Callable[[list[int]], Any] | None = None) -> Batches:
    """Threads that share an iterator and a queue, nothing else: what no loader can exceed."""
    return partial(_bare, work.groups, load or work.load_group, work.num_workers)


def _bare(
    groups: Callable[[], Iterable[Any]], load: Callable[[Any], Any], num_threads: int
) -> Iterator[Any]:
    remaining, lock = iter(groups()), threading.Lock()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    room = threading.Semaphore(2 * num_threads)

    def work() -> None:
        try:
            while True:
                room.acquire()
                with lock:
                    group = next(remaining, None)
                if group is None:
                    return
                done.put((load(group), None))
        except BaseException as error:
            done.put((None, error))
        finally:
            done.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for _ in range(num_threads):
        while (answer := done.get()) is not None:
            batch, error = answer
            if error is not None:
                raise error
            room.release()
            yield batch
            del batch, answer
        room.release()
    for thread in threads:
        thread.join()


def _items(pipeline: Any) -> Iterator[Any]:
    with pipeline.auto_stop():
        yield from pipeline


def loader_contenders(
    prefix: str = "", *, smoke: bool = True, **arguments: Any
) -> tuple[Contender, ...]:
    """Return every loader above, for tables whose contenders differ only in the loader.

    ours: with the defaults, which choose between threads and processes. prefix: of the names, for
    tables with several kinds of data. smoke: a smoke run also measures torch's loader, besides
    ours. arguments: of the contenders, with which the table makes its :class:`Work`.
    """

    def contender(name: str, run: Callable[..., Batches], **more: Any) -> Contender:
        options = more.pop("options", {})
        return Contender(
            name=prefix + name, run=partial(run, **options), arguments=arguments, **more
        )

    return (
        contender("ours", ours, smoke=True),
        contender("ours, 0 workers", ours, options={"num_workers": 0}),
        contender("ours, threads", ours, options={"isolation": "thread"}),
        contender("ours, process", ours, options={"isolation": "process"}),
        contender("ours, auto", ours, options={"num_workers": "auto"}),
        contender("torch, forked", torch_loader, smoke=smoke),
        contender("torch, 0 workers", _inline_torch),
        contender("torch, spawned", torch_loader, options={"context": "spawn"}),
        contender(
            "StatefulDataLoader", torch_loader, options={"stateful": True}, needs=("torchdata",)
        ),
        contender("torchdata.nodes, items", nodes, needs=("torchdata",)),
        contender(
            "torchdata.nodes, batches",
            nodes,
            options={"whole_batches": True},
            needs=("torchdata",),
        ),
        contender("SPDL, items", spdl_items, needs=("spdl",)),
        contender("SPDL, batches", spdl_batches, needs=("spdl",)),
        contender("SPDL, subprocess", spdl_subprocess, needs=("spdl",)),
        contender("SPDL, PyTorchDataLoader", spdl_processes, needs=("spdl",)),
        contender("Grain, threads", grain_threads, needs=("grain",)),
        contender("bare threads", bare_threads),
    )


def _inline_torch(work: Work) -> Batches:
    import dataclasses

    return torch_loader(dataclasses.replace(work, num_workers=0))
