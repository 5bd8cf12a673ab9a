"""A pipeline, or any iterable, in a child process, so that loading stays out of the trainer's.

    trainer                                          child, started once
      SubprocessIterable ── iter(), room for items ──▶ the one worker of a loader
        items that view shared memory ◀───── slabs ────  SubprocessItems ─▶ pipeline, any iterable

The process and its connection are those of ``DataLoader(isolation="process")``, which documents how
it starts and ends, and handles errors, log lines, forks and Ctrl-C. This file adds a dataset whose
"samples" are the iterable's items.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch.utils.data import IterableDataset

from ..checks import check_whole
from ..engine.definition import BuildOptions
from ..errors import PipelineStopped, UnsupportedOptionError
from ..loader.dataloader import DataLoader
from ..loader.error_notes import is_of_handler
from ..locks import RLock
from ..objects.generator_states import GeneratorStates
from ..observe.verdict.report import make_report
from ..pipeline.builder import PipelineBuilder
from ..pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from ..engine.definition import MaxFailures, PipelineSpec
    from ..engine.hooks import HookFactory
    from ..engine.stage_hooks import StatsQueue
    from ..engine.statistics import PipelineStats
    from ..observe.verdict.report import Report

    Initializer = Callable[[], object]

__all__ = ["SubprocessIterable", "iterate_in_subprocess", "run_pipeline_in_subprocess"]

T = TypeVar("T")

_PREFIX = "DataLoader"
_STATS_SECONDS = 0.1  # the minimum between readings sent; the end of a pass always has one

_CUT_SHORT = (
    ": Ctrl-C, or what a signal's handler raised, has ended the child process while a loop waited "
    "for an item, and the rest of the epoch is lost. The next iter() starts another process, which "
    "begins with the source's first epoch."
)


def run_pipeline_in_subprocess(
    config_or_builder: PipelineSpec[T] | PipelineBuilder[Any, T],
    /,
    *,
    num_threads: int | None = None,
    max_failures: MaxFailures | None = None,
    report_stats_interval: float | None = None,
    queue_class: Callable[..., StatsQueue] | None = None,
    task_hook_factory: HookFactory | None = None,
    use_thread_output_queue: bool = False,
    buffer_size: int = 3,
    initializer: Initializer | Sequence[Initializer] | None = None,
    mp_context: Any = None,
    timeout: float | None = None,
    daemon: bool = False,
) -> SubprocessIterable[T]:
    """Run a pipeline in a child process; each ``iter()`` of the result is one pass or, if the
    source is continuous, one epoch.

    The child is started now and serves every pass. With a continuous source it has one pipeline,
    which goes on between epochs; otherwise each pass builds a new one. The definition, its ops and
    its source have to be picklable, and its stages must have no executor. In the child, the global
    generators of ``random``, numpy and torch begin in the states that they have here now.

    num_threads, max_failures, report_stats_interval, queue_class, task_hook_factory,
        use_thread_output_queue: as for ``PipelineBuilder.build``; hooks and queues run in the
        child.
    buffer_size, initializer, mp_context, timeout, daemon: as for ``iterate_in_subprocess``.
    Raises: UnsupportedOptionError: ``mp_context="fork"``; what pickle raises: see above. From the
        loop: ``PipelineFailure`` and all that a pipeline raises; RuntimeError: the child has died.
    """
    given = config_or_builder
    config = given.get_config() if isinstance(given, PipelineBuilder) else given
    options = BuildOptions(
        num_threads=num_threads,
        max_failures=max_failures,
        report_stats_interval=report_stats_interval,
        queue_class=queue_class,
        task_hook_factory=task_hook_factory,
    )
    return SubprocessIterable(
        "run_pipeline_in_subprocess",
        partial(Passes, config, options),
        is_continuous=config.src.continuous,
        buffer_size=buffer_size,
        initializer=initializer,
        mp_context=mp_context,
        timeout=timeout,
    )


def iterate_in_subprocess(
    fn: Callable[[], Iterable[T]],
    *,
    buffer_size: int = 3,
    initializer: Initializer | Sequence[Initializer] | None = None,
    mp_context: Any = None,
    timeout: float | None = None,
    daemon: bool = False,
) -> SubprocessIterable[T]:
    """Iterate in a child process over the iterable that ``fn()`` returns there.

    The child is started now and serves every ``iter()``. ``fn`` is called once, or for each pass if
    it returns an iterator, such as a generator, which can be used only once.

    buffer_size: the number of items that may wait for the loop, besides those in the child.
    initializer: one function or several, called first in the child.
    mp_context: ``"forkserver"``, ``"spawn"`` or such a context; None = ``"forkserver"`` where the
        system has it. A script's own code has to be under ``if __name__ == "__main__":``.
    timeout: seconds that the loop waits for an item before RuntimeError; the child is then ended,
        and the next pass starts another. None = no limit.
    daemon: no effect: the child ends with this process, its running ops within seconds, and cannot
        use ``multiprocessing``.
    Raises: as ``run_pipeline_in_subprocess``; from the loop, what the iterable raises.
    """
    return SubprocessIterable(
        "iterate_in_subprocess",
        fn,
        is_continuous=False,
        buffer_size=buffer_size,
        initializer=initializer,
        mp_context=mp_context,
        timeout=timeout,
    )


class SubprocessIterable(Generic[T]):
    """An iterable whose items are made in a child process, for one loop at a time. A new ``iter()``
    ends the previous one or, for a continuous pipeline, continues its epoch.

    Stopping: dropping this object and the interpreter's exit end the child, which has 5 s to finish
    its running ops. ``break`` and what is raised in the loop do not end it: it waits to serve the
    next ``iter()``. Ctrl-C while an item is waited for ends it, and the next pass starts another;
    where that was an epoch of a continuous pipeline, a PipelineStopped comes first.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Iterable[T]],
        *,
        is_continuous: bool,
        buffer_size: int,
        initializer: Initializer | Sequence[Initializer] | None,
        mp_context: Any,
        timeout: float | None,
    ) -> None:
        check_whole(name, buffer_size=buffer_size)
        if timeout is not None and timeout <= 0:
            raise ValueError(f"{name}: timeout must be > 0 seconds or None, got {timeout}.")
        _check_context(name, mp_context)
        self._name = name
        self._is_continuous = is_continuous
        initializers = [initializer] if callable(initializer) else list(initializer or ())
        self._loader: DataLoader[Any] = DataLoader(
            SubprocessItems(make, initializers, GeneratorStates.now()),
            batch_size=None,
            num_workers=1,
            collate_fn=_as_it_is,
            timeout=timeout or 0,
            multiprocessing_context=mp_context or _start_method(),
            generator=torch.Generator(),  # draw nothing from the global one, which is the user's
            prefetch_factor=buffer_size,
            persistent_workers=True,
            isolation="process",
            rng="worker",
        )
        # Held by the thread that asks the loader, also while it waits for an item. A thread that
        # begins another pass meanwhile has to wait for that item: for instance while the source's
        # thread of a stopped pipeline still waits for an item of the last pass.
        self._lock = RLock()
        self._num_passes = 0
        self._stats: PipelineStats | None = None
        self._items: Iterator[Sent] | None = self._begin()  # for the first pass

    def __iter__(self) -> Iterator[T]:
        with self._lock:
            self._num_passes += 1
            number = self._num_passes
            if number > 1 and not self._is_continuous:
                self._items = None
            if self._items is None:
                self._items = self._begin()
        while True:
            with self._lock:
                if self._num_passes != number and not self._is_continuous:
                    raise RuntimeError(
                        f"{self._name}: another loop has begun since, and there is one at a time."
                    )
                sent = self._next()
            if sent is None:
                return
            yield sent.item

    def snapshot(self) -> PipelineStats:
        """Return the statistics of the child's pipeline since it began, as of the last item
        received or up to 0.1 s older.

        Raises: RuntimeError: no item has come yet, or the child does not run a pipeline.
        """
        if self._stats is None:
            raise RuntimeError(
                f"{self._name}: there are no figures: no item has come yet, or what iterates in "
                "the child has no snapshot()."
            )
        return self._stats

    def report(self) -> Report:
        """Judge what holds the loop back: the child's stages, and how long the loop waits.

        Raises: as ``snapshot``.
        """
        stats, waits = self.snapshot(), self._loader.snapshot().consumer_wait_ratio
        return make_report(replace(stats, waited_ns=round(waits * stats.elapsed_ns)))

    def _begin(self) -> Iterator[Sent]:
        try:
            return iter(self._loader)
        except RuntimeError as error:
            self._raise_renamed(error)

    def _next(self) -> Sent | None:
        """Return the next item sent; None = the end of the pass."""
        while self._items is not None:
            try:
                sent = next(self._items)
            except StopIteration:
                self._items = None
            except Exception as error:
                if not is_of_handler(error):  # else as after Ctrl-C: the next loop is told
                    self._items = None  # the next loop begins another pass
                self._raise_renamed(error)
            else:
                self._stats = sent.stats or self._stats
                if not sent.is_last:
                    return sent
        return None

    def _raise_renamed(self, error: Exception) -> NoReturn:
        """Raise a loader's error under this function's name: its caller knows of no loader."""
        is_loaders = type(error) in (RuntimeError, PipelineStopped)
        if is_loaders and (text := str(error)).startswith(_PREFIX):
            text = _CUT_SHORT if "Ctrl-C" in text else text.removeprefix(_PREFIX)
            error.args = (self._name + text,)
            if "timed out" in text:
                self._end_child()
        raise error

    def _end_child(self) -> None:
        """Stop the child explicitly: the error's traceback keeps the iterator alive."""
        iterator: Any = self._loader._iterator
        self._loader._iterator = None
        iterator._backend.request_stop()


def _as_it_is(item: Any) -> Any:
    """Return the item unchanged: torch's own conversion would turn arrays into tensors."""
    return item


def _start_method() -> str:
    """Return the start method where none is given: the program's own, else the fastest safe one.

    Never fork: a continuous pipeline is started beside threads that this package cannot bring to
    rest, those of the program's other pipelines.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    if chosen in ("spawn", "forkserver"):
        return chosen
    is_served = "forkserver" in multiprocessing.get_all_start_methods()
    return "forkserver" if is_served else "spawn"


def _check_context(name: str, context: Any) -> None:
    method = context if isinstance(context, str) else getattr(context, "get_start_method", str)()
    if method == "fork":
        raise UnsupportedOptionError(
            f'{name}: mp_context must not be "fork": a lock that a thread of this process holds at '
            "that moment would stay held in the child for ever. Pass "
            '"forkserver" or "spawn", or leave it out.'
        )


# The child's end: an iterable as the dataset of a loader's one worker.


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
        if self._iterable is None:
            self._iterable = _on_a_plain_thread(self._make)
        if self._states is not None:  # this worker's own streams go on where those have come to
            _on_a_plain_thread(GeneratorStates.now).restore()
            self._states = None
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
