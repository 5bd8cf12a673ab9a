"""``spdl.dataloader``: loaders around a pipeline; ``spdl_torch.DataLoader`` is torch's."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from spdl_torch.lazy_names import import_name

from ..pipeline import PipelineBuilder, build_pipeline, cache_iterator

if TYPE_CHECKING:
    from ..engine.definition import OutputOrder

__all__ = ["CacheDataLoader", "DataLoader"]

Source = TypeVar("Source")
Output = TypeVar("Output")


class DataLoader(Generic[Source, Output]):
    """A source, a function for its items, one for lists of them and one for what that returns: each
    pass builds and runs a pipeline of these.

    Ends: ``break``, an exception in the loop and dropping the iterator stop every thread.

    Args:
        src: an iterable of items, which each pass begins anew.
        preprocessor: called with every item, by ``num_threads`` threads; as for
            ``PipelineBuilder.pipe``.
        batch_size: items in a list; None = no lists are made.
        drop_last: leave out a last list that is shorter.
        aggregator: called with every list (without ``batch_size``: with every item), by
            ``num_threads`` threads.
        transfer_fn: called with the result of these, one call at a time.
        buffer_size: finished items that may wait.
        num_threads: calls at once, over all three together.
        timeout: seconds to wait for the next item, then a TimeoutError; None = as long as it takes.
        output_order: ``"completion"`` or ``"input"``.

    Raises, in the loop: PipelineFailure: more than 10 % of a function's items failed, or the source
        raised; TimeoutError; RuntimeError: ``src`` is an iterator, and was used up before.
    """

    def __init__(
        self,
        src: Iterable[Source] | AsyncIterable[Source],
        *,
        preprocessor: Callable[[Any], Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        aggregator: Callable[[Any], Any] | None = None,
        transfer_fn: Callable[[Any], Any] | None = None,
        buffer_size: int = 3,
        num_threads: int = 8,
        timeout: float | None = None,
        output_order: OutputOrder = "completion",
    ) -> None:
        self._src = src
        self._is_spent = False
        self._num_threads = num_threads
        self._timeout = timeout
        builder: PipelineBuilder[Any, Any] = PipelineBuilder().add_source(src)
        threads: dict[str, Any] = {"concurrency": num_threads, "output_order": output_order}
        if preprocessor is not None:
            builder.pipe(preprocessor, **threads)
        if batch_size is not None:
            builder.aggregate(batch_size, drop_last=drop_last)
        if aggregator is not None:
            builder.pipe(aggregator, **threads)
        if transfer_fn is not None:
            builder.pipe(transfer_fn)
        self._config = builder.add_sink(buffer_size).get_config()

    def __iter__(self) -> Iterator[Output]:
        if self._is_spent:
            raise RuntimeError(
                f"DataLoader: src, a {type(self._src).__name__}, can be iterated only once, and "
                "was. Pass an object whose __iter__ begins anew: a list, a sampler, a class."
            )
        self._is_spent = isinstance(self._src, Iterator | AsyncIterator)
        pipeline = build_pipeline(self._config, num_threads=self._num_threads)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=self._timeout)


class CacheDataLoader(Generic[Output]):
    """The batches of a loader, and then its first ones over and over: how fast would training be if
    loading cost nothing?

    Args:
        dl: any iterable; this object has its other attributes, too.
        num_caches: batches that are kept, at least 1.
        return_caches_after: batches that come from ``dl``, at least ``num_caches``.
        stop_after: batches in all, at least ``return_caches_after``; None = no end.

    Raises: ValueError: a number is below these limits.
    """

    def __init__(
        self,
        dl: Iterable[Output],
        num_caches: int,
        return_caches_after: int,
        stop_after: int | None = None,
    ) -> None:
        self.dl = dl
        self.num_caches = num_caches
        self.return_caches_after = return_caches_after
        self.stop_after = stop_after
        self._replay(())  # wrong numbers raise here, not in the loop

    def __iter__(self) -> Iterator[Output]:
        return self._replay(self.dl)

    def __len__(self) -> int:
        """Return the length of ``dl``, as SPDL does, whatever ``stop_after`` is."""
        return len(self.dl)  # type: ignore[arg-type]  # or a TypeError, as SPDL

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dl":  # a copy that is being made has no dl yet
            raise AttributeError(name)
        return getattr(self.dl, name)

    def _replay(self, batches: Iterable[Output]) -> Iterator[Output]:
        return cache_iterator(
            batches,
            self.num_caches,
            return_caches_after=self.return_caches_after,
            stop_after=self.stop_after,
        )


__path__: list[str] = []  # as a package's: imports of names then ask __getattr__


def __getattr__(name: str) -> Any:
    return import_name(__name__, {}, name)
