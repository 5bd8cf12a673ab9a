"""The drop-in: torch's DataLoader whose workers are threads where that is safe, else processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader, Dataset, IterableDataset, Sampler

from ..autotune.workers import AutoWorkers
from ..errors import UnsupportedOptionError
from ..machine.limits import Limits
from ..observe.store.epoch_watchers import between_epochs
from . import opening as backends
from .arguments import check_options
from .checkpoint.lightning_states import follow_trainer
from .error_notes import not_an_end
from .fetching.samples import is_read_at_once
from .iterator import LoaderIterator
from .loader_state import LoaderState
from .placing import placement_of
from .sampling.sampler_chain import divides_itself, has_length, is_shared_out
from .stats.stats import with_remarks_of
from .user_warnings import warn_once

if TYPE_CHECKING:
    import torch
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from ..autotune.tuner import Decision
    from ..autotune.tuning import TuningState
    from ..engine.statistics import PipelineStats
    from ..observe.trace.profile import Profile
    from ..observe.verdict.advice import Trait
    from ..observe.verdict.report import Report
    from .fetching.bad_samples import SkippedSample
    from .stats.stats import EpochStats

T_co = TypeVar("T_co", covariant=True)

_MOST_DECISIONS = 5  # in a report
_END_SECONDS = 5.0  # for the samples under way


class DataLoader(TorchDataLoader[T_co]):
    """``torch.utils.data.DataLoader`` whose workers are threads where that is safe and fast, and
    processes where the dataset needs them.

    Change the import and nothing else: the arguments, the order of the batches and the batches are
    torch's. ``num_workers=N`` starts N workers, see ``isolation``; 0 loads in the calling thread;
    ``"auto"`` finds the number while training runs (see ``is_tuned``) and keeps it in
    ``num_workers``.

    What differs is listed in the documentation. Above all: random numbers follow the sample, see
    ``rng``; an exception of the dataset arrives with its own text and a note, from a thread as the
    same object; a map-style dataset that raises StopIteration raises RuntimeError instead of
    ending the epoch early; a worker process that is killed is replaced where its batches can be
    made again.

    Stopping: ``break``, an error in the loop, dropping the iterator and Ctrl-C stop the workers. A
    sample that is being fetched is finished first; a process has 5 s for it, and the interpreter's
    exit waits no longer.

    Extra arguments, keyword-only:
        device: a CUDA device on which batches arrive, ready for the stream that is current when
            the loop receives them; ``"cuda"`` is the device that is current at ``iter()``. With
            None or the CPU, batches stay in host memory.
        isolation: ``"auto"``: the workers are threads of this process where the dataset is known
            to be safe there (its class is known, or its attribute ``thread_safe = True`` says so);
            else each is a process of its own, as in torch. It is decided once for each iterator;
            where the GIL holds threads up, the log and the report say so. ``"thread"``: always
            threads.
            ``"process"``: always processes; batches come back through shared memory. Processes
            start as torch starts its workers: by ``multiprocessing_context``, else Python's
            default; unless that is fork, what they need has to be picklable.
        seed: base seed of the random streams. With None it is drawn from ``generator`` or torch's
            global generator at ``iter()``, as torch draws it. With a number the streams of an
            epoch depend on it and on the epoch alone: the one given to the sampler by
            ``set_epoch``, else the count of ``iter(loader)``. It does not seed the order.
        rng: ``"sample"``: each sample draws from its own stream, given by its position in the
            epoch, through the functions of torch, ``random`` and ``numpy.random``: the same bits
            for any ``num_workers``, 0 included, on threads and in processes, and for any number of
            ranks. ``"worker"``: torch's rule, one stream for each worker, which makes whole
            batches; the process's generators with ``num_workers=0``.
        on_error: ``"raise"``: a sample that fails raises in place of its batch. ``"skip"``: it is
            logged and reported, and the batch is built from the rest. Errors of ``collate_fn``
            are never skipped.
        error_budget: with ``"skip"``, how many samples of an epoch may fail: a count, or a share
            (``0.01``) that counts from 100 samples on; None is 5 %. The batch that exceeds it
            raises PipelineFailure, a group of the samples' own errors.
        replace: with ``"skip"``, the next good sample (index + 1, ...) replaces one that fails, so
            batches stay whole and all ranks have the same number. Without it, a batch without any
            good sample is left out or, with several ranks, raises PipelineFailure.
        stats: collect the statistics that ``snapshot()`` returns, at 1 to 2 µs a sample or batch.
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
        num_workers: int | Literal["auto"] = 0,
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
        isolation: Literal["auto", "thread", "process"] = "auto",
        seed: int | None = None,
        rng: Literal["sample", "worker"] = "sample",
        on_error: Literal["raise", "skip"] = "raise",
        error_budget: float | Fraction | None = None,
        replace: bool = False,
        stats: bool = True,
    ) -> None:
        if num_workers == "auto":
            from ..autotune.tuning import Tuning  # for tuned workers alone

            num_workers = AutoWorkers.to_begin_with(Tuning())
        if isinstance(num_workers, AutoWorkers) and not stats:
            raise UnsupportedOptionError(
                'DataLoader: num_workers="auto" needs figures to go by, got stats=False. Leave it '
                "out, or pass a number of threads."
            )
        # Lightning copies a loader from its attributes, so each parameter stays under its own
        # public name, as it was given.
        self.device = device
        self.isolation = isolation
        self.seed = seed
        self.rng = rng
        self.on_error = on_error
        self.error_budget = error_budget
        self.replace = replace
        self.stats = stats
        check_options(self, dataset, num_workers)
        # numpy's numbers are other numbers where they are added, and end at 255.
        self.seed = None if seed is None else int(seed)
        if not isinstance(num_workers, AutoWorkers):
            num_workers = int(num_workers)
        prefetch_factor = None if prefetch_factor is None else int(prefetch_factor)
        self._state = LoaderState()
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
        if self.num_workers:
            backends.import_workers(self)
        # Accelerate would divide among its ranks a second time what they already share.
        if is_shared_out(self) or divides_itself(dataset):
            self._is_accelerate_prepared = True
        if isolation == "thread" and multiprocessing_context is not None:
            warn_once(
                f"DataLoader: multiprocessing_context={multiprocessing_context!r} has no effect: "
                "workers are threads of this process. Remove it."
            )

    def __iter__(self) -> _BaseDataLoaderIter:
        follow_trainer()
        kept: Any = self._iterator
        if kept is not None and not getattr(kept, "is_here", True):
            self._iterator = None  # persistent workers stayed behind in a fork, or with a thread
        position = self._state.position
        if position.to_resume is not None and isinstance(self.dataset, IterableDataset):
            # Where persistent workers have left their datasets, the state does not know. It is of
            # datasets as new workers have them.
            self._close_persistent()
        with between_epochs(self):
            try:
                iterator = super().__iter__()
            except StopIteration as error:  # of a sampler, or of an iterable without workers
                raise not_an_end(error) from error
        position.to_resume = None
        return iterator

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers and not backends.has_processes and placement_of(self).num_processes:
            return backends.torchs_iterator(self)
        iterator = LoaderIterator(self)
        self._state.add(iterator)
        return iterator

    def __repr__(self) -> str:
        """Return the dataset's class and the settings, also of a loader that is being made."""
        names = ("batch_size", "num_workers", "isolation")
        settings = [f"{name}={getattr(self, name, None)!r}" for name in names]
        dataset = type(getattr(self, "dataset", None)).__name__
        return f"{type(self).__name__}({', '.join([dataset, *settings])})"

    def close(self) -> None:
        """End the workers of all iterators of this loader, persistent ones and those of an epoch
        that nobody finished, as dropping the iterators does. An iterator that is used afterwards
        raises ``PipelineStopped``. The loader stays usable: ``iter(loader)`` begins another epoch
        with new workers. Closing it twice, or before it has loaded anything, does nothing.

        Blocks until the samples under way are made, for 5 seconds at most.
        """
        self._close_persistent()
        for iterator in self._state.iterators():
            iterator.close()
        backends.await_ended(_END_SECONDS)  # those of dropped iterators, too

    def _close_persistent(self) -> None:
        """End persistent workers; the next epoch begins with new ones."""
        kept: Any = self._iterator
        self._iterator = None
        if kept is not None and hasattr(kept, "close"):  # torch's ends when it is dropped
            kept.close()

    @property
    def decisions(self) -> list[Decision]:
        """The changes made so far by ``num_workers="auto"``, and why; at most the last 1000."""
        return [] if self._state.tuning is None else self._state.tuning.decisions

    def snapshot(self) -> PipelineStats:
        """Return the statistics of the running epoch or, between epochs, of the last one: the
        stages ``fetch``, ``collate`` and, to a CUDA device, ``transfer``, and the share of the time
        that the trainer waited. Its ``data`` has the dataset's own: what a cache and shards found,
        the waste of a stream's packs. What worker processes count beside their tasks (the
        dataset's own, waits for cores and for the GIL) may be 0.2 s old while they have work.

        Raises: RuntimeError: nothing was loaded yet, or ``stats=False``.
        """
        return self._measured().snapshot()

    def report(self) -> Report:
        """Return what holds training back in the running epoch or, between epochs, did in the last
        one: ``print(loader.report())`` shows a verdict, its evidence and what to do.

        Raises: RuntimeError: nothing was loaded yet, or ``stats=False``.
        """
        return self.profile().report() if self._state.cached_step else self._report()

    def profile(self) -> Profile:
        """Return the report, and what every worker did in the last seconds of the running epoch
        or, between epochs, of the last one: ``loader.profile().write_trace("trace.json.gz")``.

        Raises: RuntimeError: nothing was loaded yet, or ``stats=False``.
        """
        from ..observe.trace.tracing import profile_of_run  # brings pages and a store

        cached_step = self._state.cached_step
        return profile_of_run(self._report(), self._measured().timeline(), cached_step)

    def headspace(self, num_batches: int = 10, *, num_steps: int = 100) -> Iterator[T_co]:
        """Yield cached batches: loop over this instead of the loader to see how fast training is
        without loading. It keeps ``num_batches`` batches and repeats them for ``num_steps`` steps.
        From then on ``report()`` says how much longer the loader's steps take than these.

        It holds ``num_batches`` batches in memory, and draws the order of an epoch.
        Raises: ValueError: a number < 1.
        """

        def keep(seconds: float) -> None:
            own.cached_step = seconds
            own.stats = measured or own.stats

        from ..pipeline.caching import cached_batches

        own = self._state
        measured = own.stats  # the statistics of a real epoch stay; keep() puts them back
        return cached_batches(self, num_batches, num_steps, keep)

    @property
    def skipped(self) -> list[SkippedSample]:
        """The samples that ``on_error="skip"`` left out in the running epoch or, between epochs,
        in the last one: in the order of their batches, up to the loop's position, at most the last
        1000. ``key`` is the key given to the dataset (for an iterable dataset, the number of the
        item in its worker's iterator), ``error`` the type and text.
        """
        stats = self._state.stats
        skipped = None if stats is None else stats.skipped
        return [] if skipped is None else skipped.samples.copy()

    def _report(self, earlier: Report | None = None) -> Report:
        """Return the report on the last epoch; ``earlier``: and on what that one is of."""
        has_samples = self.batch_sampler is not None and not isinstance(
            self.dataset, IterableDataset
        )
        own: list[Trait] = ["persistent workers"] if self.persistent_workers else []
        if has_samples and not is_read_at_once(self.dataset, self.collate_fn):
            own.append("one by one")
        report = self._measured().report()
        if earlier is not None:
            from ..observe.verdict.report import joined  # it was brought by the report

            report = joined(earlier, report)
        decided = (f'num_workers="auto": {each}' for each in self.decisions[-_MOST_DECISIONS:])
        return with_remarks_of(self.dataset, report, own, decided)

    def _measured(self) -> EpochStats:
        measured = self._state.stats
        if not self.stats or measured is None:
            state = "stats=False was given" if not self.stats else "nothing was loaded yet"
            raise RuntimeError(f"DataLoader: there are no figures: {state}.")
        return measured

    def state_dict(self) -> dict[str, Any]:
        """Return a state of the epoch: what the loop has received, not what was prefetched.

        It holds only numbers and text, apart from what a dataset or sampler with a
        ``state_dict()`` adds (states, and indices), so it can be saved as JSON and by
        ``torch.save``. Call it only from the loop's thread.

        From the first call on, workers ask an iterable dataset that keeps a state for it after
        every batch. If the first call comes in the middle of an epoch with workers, the state
        counts the items instead, and resuming makes them again; call this once before training to
        avoid that.

        Raises: TypeError: the dataset's or sampler's ``state_dict()`` takes arguments; whatever
            that ``state_dict()`` raises.
        """
        return self._state.position.state(self)

    def _state_to_resume(self) -> dict[str, Any] | None:
        resume = self._state.position.to_resume
        return None if resume is None else resume.as_dict()

    def _ends_empty_tail(self) -> bool:
        """Return whether the last epoch was resumed after its last batch, or the last that the
        length of an iterable has."""
        order = self._state.position.order
        if order is None:
            return False
        num_batches = -(-sum(each.num_items for each in order.workers) // (self.batch_size or 1))
        is_whole = has_length(self) and num_batches >= len(self) > 0
        return order.start.nothing_left or is_whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a state at the next ``iter(loader)``; if the loop had seen the end of that epoch,
        begin the next one. Later epochs follow as they would have.

        Build the loader as it was then. For a map-style dataset ``num_workers`` may differ, and so
        may ``batch_size`` and the number of ranks, as long as the state stands between two
        batches. A sampler with ``set_epoch`` gets the state's epoch.

        Raises: ValueError, which names the field of the state: not a loader's state, or one that
            does not fit. Values of types that no loader saves are not looked for. Some misfits show
            only at ``iter()``, and a worker's iterable that refuses its state at the first batch.
        """
        self._state.position.load(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy or a pickle, which has loaded nothing yet."""
        fresh = {"_state": LoaderState(), "_iterator": None}
        return {**self.__dict__, **fresh}

    @property
    def _is_tuned(self) -> bool:
        """Whether ``num_workers="auto"`` may change the number of workers while they run.

        It may only where that affects nothing but the speed. The first number stays for an
        iterable dataset, which divides itself among its workers, and with ``rng="worker"``, where
        each worker has its own random stream.
        """
        return (
            isinstance(self.num_workers, AutoWorkers)
            and self.stats
            and not isinstance(self.dataset, IterableDataset)
            and self.rng != "worker"
        )

    def _tuning_state(self) -> TuningState:
        """Return what tuning has found so far, over all epochs. Requires ``_is_tuned``."""
        from ..autotune.tuning import TuningState  # for tuned workers alone

        state = self._state.tuning
        if state is None:
            assert isinstance(self.num_workers, AutoWorkers), "guaranteed by _is_tuned"
            are_processes = placement_of(self).num_processes > 0
            state = TuningState(self.num_workers.tuning, "DataLoader", are_processes=are_processes)
            self._state.tuning = state
        return state

    def check_worker_number_rationality(self) -> None:
        """Warn about more workers than usable cores; torch's constructor calls it."""
        if isinstance(self.num_workers, AutoWorkers):
            return  # the user did not choose the number
        limits = Limits.of_this_machine()
        cores, num_ranks = limits.num_cores, limits.local_world_size
        if self.num_workers > limits.own_cores:
            of_ranks = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
            warn_once(
                f"This DataLoader will create {self.num_workers} workers in total"
                f"{of_ranks}, on {cores:g} usable cores. More workers than cores help only where "
                "they wait for storage or a network; otherwise they slow the training step."
            )
