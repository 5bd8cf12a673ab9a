"""The child's end of ``pipelines``: an iterable as the dataset of a loader's one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.utils.data import IterableDataset

from ...pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from ...engine.definition import BuildOptions, PipelineSpec
    from ...engine.statistics import PipelineStats
    from ...objects.generator_states import GeneratorStates

    Initializer = Callable[[], object]

T = TypeVar("T")

_STATS_SECONDS = 0.1  # the minimum between readings sent; the end of a pass always has one


class Sent(NamedTuple):
    """An item as the child sends it, with the current statistics if they are due."""

    item: Any
    stats: PipelineStats | None
    is_last: bool = False
    """Whether it is the end of a pass, which has statistics and no item."""


class SubprocessItems(IterableDataset[Sent]):
    """The dataset of the child's one worker: makes the iterable there, and yields its items and
    statistics."""

    def __init__(
        self,
        make: Callable[[], Iterable[Any]],
        initializers: list[Initializer],
        states: GeneratorStates,
    ) -> None:
        self._make = make
        self._initializers = initializers
        self._states: GeneratorStates | None = states
        self._iterable: Iterable[Any] | None = None

    def __copy__(self) -> SubprocessItems:
        return self  # there is one worker

    def __iter__(self) -> Iterator[Sent]:
        if self._states is not None:
            _on_a_plain_thread(partial(self._set_up, self._states))
            self._states.restore()  # those of this worker, too
            self._states = None
        if self._iterable is None:
            self._iterable = _on_a_plain_thread(self._make)
        iterable, iterator = self._iterable, iter(self._iterable)
        if iterator is iterable:  # used up after this pass
            self._iterable = None
        due = monotonic()
        for item in iterator:
            stats, now = None, monotonic()
            if now >= due:
                stats, due = _stats_of(iterable), now + _STATS_SECONDS
            yield Sent(item, stats)
            del item  # do not keep it alive while waiting for the next one
        if (stats := _stats_of(iterable)) is not None:
            yield Sent(None, stats, is_last=True)

    def _set_up(self, states: GeneratorStates) -> None:
        # Threads started later, such as a pipeline's, begin with this setting: as in torch's
        # workers, none of them starts a team of intra-op threads.
        torch.set_num_threads(1)
        states.restore()
        for initializer in self._initializers:
            initializer()


def _stats_of(iterable: Any) -> PipelineStats | None:
    """Read a pipeline's or a dataset's statistics; None = it is neither, or nothing has run yet."""
    method = getattr(type(iterable), "snapshot", None)
    if not getattr(method, "__module__", "").startswith("spdl_torch."):
        return None  # a user's own function of that name is none of ours to call
    try:
        figures: PipelineStats | None = iterable.snapshot()
    except RuntimeError:
        return None
    return figures


class Passes:
    """The child's pipelines: one for each pass, or one for all epochs."""

    def __init__(self, config: PipelineSpec[Any], options: BuildOptions) -> None:
        self._config = config
        self._options = options
        self._pipeline: Pipeline[Any] | None = None
        if config.src.continuous:
            self._build()

    def __iter__(self) -> Iterator[Any]:
        if not self._config.src.continuous:
            with self._build().auto_stop() as pipeline:
                yield from pipeline
            return
        pipeline = self._pipeline or self._build()
        try:
            yield from pipeline
        except Exception:
            self._pipeline = None  # it has ended; the next epoch needs a new one
            raise

    def _build(self) -> Pipeline[Any]:
        self._pipeline = Pipeline(self._config, self._options)
        self._pipeline.start()
        return self._pipeline

    def snapshot(self) -> PipelineStats | None:
        """Return the statistics of the pipeline that runs, or ran last; None = there was none."""
        return None if self._pipeline is None else self._pipeline.snapshot()


def _on_a_plain_thread(function: Callable[[], T]) -> T:
    """Call ``function`` on a new thread and return its result.

    A loader's worker has its own random streams and intra-op setting; set-up code has to see those
    of the process, and of the threads that start here.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="spdl-set-up") as threads:
        return threads.submit(function).result()
