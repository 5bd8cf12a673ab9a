"""The drop-in: torch's DataLoader with threads of this process in place of worker processes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterDataPipe, MapDataPipe, Sampler

from ..errors import UnsupportedOptionError
from ._device import check_device
from .iterator import InlineIterator, ThreadIterator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from ..observe.report import Report
    from ..pipeline.stats import PipelineStats
    from .iterator import Figures

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)


class DataLoader(TorchDataLoader[T_co]):
    """``torch.utils.data.DataLoader`` whose workers are threads of this process.

    Change the import and nothing else: the arguments, the order of the batches, the batches and
    the errors are torch's. ``num_workers=N`` starts N threads; 0 loads in the calling thread.

    What differs, each for a reason told in the documentation: an exception of the dataset
    arrives as the very same object with a note instead of a copy rebuilt from text; a map-style
    dataset that raises StopIteration raises RuntimeError instead of ending the epoch early;
    ``multiprocessing_context`` has no effect on threads, and a warning says so.

    Ends: ``break``, an error in the loop, dropping the iterator and Ctrl-C stop the threads; a
    sample that is being fetched is finished first. The interpreter's exit waits for it at most
    5 s.

    Extra arguments, keyword-only:
        device: a CUDA device on which batches arrive, ready for the stream that is current where
            they are taken; ``"cuda"`` is the device that is current at ``iter()``. None or the
            CPU: they stay in host memory.
        isolation: ``"thread"``; this release refuses ``"process"``.
        seed, rng: of random streams; this release refuses both. On threads torch's random
            functions draw from a stream of each sample's own, seeded from ``generator`` (or
            torch's global generator) and the sample's place in the epoch: the same for any
            ``num_workers`` >= 1. ``random`` and ``numpy.random`` are the process's own.
        on_error: ``"raise"``; this release refuses ``"skip"``.
        stats: collect the figures that ``snapshot()`` returns, at 1 to 2 µs a sample or batch.
    Raises: UnsupportedOptionError (a ValueError): an option that this release does not honour;
        everything else as torch does.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: torch.device | str | int | None = None,
        isolation: Literal["thread", "process"] = "thread",
        seed: int | None = None,
        rng: Literal["sample", "worker"] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        stats: bool = True,
    ) -> None:
        _check_options(dataset, num_workers, device, isolation, seed, rng, on_error)
        # Lightning builds a copy of a loader from its attributes, so each parameter is kept under
        # its own public name as it was given.
        self.device = device
        self.isolation = isolation
        self.seed = seed
        self.rng = rng
        self.on_error = on_error
        self.stats = stats
        self._figures: Figures | None = None
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if multiprocessing_context is not None:
            warnings.warn(
                f"DataLoader: multiprocessing_context={multiprocessing_context!r} has no effect: "
                "workers are threads of this process. Remove it.",
                stacklevel=2,
            )

    def _get_iterator(self) -> _BaseDataLoaderIter:
        iterator: InlineIterator | ThreadIterator
        if self.num_workers == 0:
            iterator = InlineIterator(self, self.device, stats=self.stats)
        else:
            self.check_worker_number_rationality()
            iterator = ThreadIterator(self, self.device, stats=self.stats)
        self._figures = iterator.figures()
        return iterator

    def snapshot(self) -> PipelineStats:
        """Figures of the epoch that is running or, between epochs, of the last one: the stages
        ``fetch``, ``collate`` and, to a CUDA device, ``transfer``, and the share of the time in
        which the trainer waited.

        Raises: RuntimeError: nothing was loaded yet, or ``stats=False``.
        """
        return self._measured().stats()

    def report(self) -> Report:
        """What holds training back in the epoch that is running or, between epochs, did in the
        last one: ``print(loader.report())`` shows a verdict, its evidence and what to do.

        Raises: RuntimeError: nothing was loaded yet, or ``stats=False``.
        """
        return self._measured().report()

    def _measured(self) -> Figures:
        if not self.stats or self._figures is None:
            state = "stats=False was given" if not self.stats else "nothing was loaded yet"
            raise RuntimeError(f"DataLoader: there are no figures: {state}.")
        return self._figures

    def __getattr__(self, name: str) -> Any:
        # Not methods that raise: Lightning and torchdata would take the loader for a stateful one
        # and call them at every checkpoint.
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(
                f"DataLoader.{name} is not in this release: an epoch cannot be resumed in its "
                "middle. Save at the end of an epoch, or use torchdata's StatefulDataLoader."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle has loaded nothing yet."""
        return {**self.__dict__, "_figures": None}

    def check_worker_number_rationality(self) -> None:
        """Warn, where torch does, of more workers than usable cores."""
        cores = torch._utils.cpu_count()
        if cores is None or self.num_workers > cores:
            warnings.warn(
                f"This DataLoader will create {self.num_workers} worker threads in total, on "
                f"{cores} usable cores. More threads than cores help only where they wait for "
                "storage or a network; otherwise they slow the training step.",
                stacklevel=3,
            )


def _check_options(
    dataset: object,
    num_workers: object,
    device: torch.device | str | int | None,
    isolation: object,
    seed: object,
    rng: object,
    on_error: object,
) -> None:
    """Refuse what this release cannot honour, and say what to do instead."""
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise UnsupportedOptionError(
            f"DataLoader: dataset must not be a DataPipe, got {type(dataset).__name__}. torch has "
            "deprecated DataPipes; pass a Dataset or an IterableDataset."
        )
    if num_workers == "auto":
        raise UnsupportedOptionError(
            'DataLoader: num_workers="auto" is not in this release. Pass a number of threads; the '
            "number of cores is a good start."
        )
    check_device(device)
    for name, value, honoured, instead in (
        ("isolation", isolation, "thread", "torch's own DataLoader runs workers as processes."),
        (
            "on_error",
            on_error,
            "raise",
            "Catch the error in the dataset and return another sample.",
        ),
        ("seed", seed, None, "Seed torch's generator, as for torch's DataLoader."),
        ("rng", rng, None, "Leave it out: on threads each sample has a stream of its own already."),
    ):
        if value != honoured:
            raise UnsupportedOptionError(
                f"DataLoader: {name}={value!r} is not in this release; only {honoured!r} is. "
                f"{instead}"
            )
