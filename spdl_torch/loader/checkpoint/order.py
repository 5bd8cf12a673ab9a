"""The order of one epoch: the jobs that were drawn of it, and what the loop has had of them; from
which a loader's state is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...handlers import unless_of_handler
from ..error_notes import add_thread_note
from ..sampling.sampler_chain import epoch_of, names_of, unshared
from .epoch import NUM_LAST, Given, HandedOut, SamplerState, Told, checksum_of, kinds_of, last_of
from .resume_state import encoded
from .user_state import WorkerState

if TYPE_CHECKING:
    import torch

    from .drawing import Drawing
    from .epoch import EpochStart
    from .saved_state import ResumeState
    from .user_state import OwnState

END = object()
"""In place of an index that there is not."""


class Order:
    """The order of one epoch. The iterator writes it, on the trainer's thread; the loader reads it.
    It does not refer to the iterator, so dropping that ends its threads.

    Args:
        start: what the epoch began with.
        so_far: what the loop has had of it before this iterator's first batch.
        drawing: the indices of a sampler that keeps its own state; None = it keeps none.
        is_wanted: whether states are wanted: those of iterables are taken after every batch. An
            iterable without a state counts its items, and resuming makes them again.
    """

    def __init__(
        self,
        start: EpochStart,
        so_far: HandedOut,
        *,
        drawing: Drawing | None,
        sampler_epoch: int | None,
        is_wanted: bool,
    ) -> None:
        self.start = start
        self.drawing = drawing
        self.sampler_epoch = sampler_epoch
        self.is_wanted = is_wanted
        self.own: OwnState | None = None
        """The state of an iterable loaded on the trainer's thread. Nothing is prefetched there, so
        it is asked when the loader is."""
        self.finished = False
        """Whether the loop has seen the end."""
        self._num_drawn = 0  # batches of the sampler
        self.num_jobs = 0
        """The number of the jobs drawn so far, and so that of the next one."""
        self._samples_drawn = so_far.local_samples  # this rank's up to the end of those
        # The drawn batches that were not handed out in order, and the last ones that were: by their
        # numbers, ascending, this rank's samples up to the batch's end, its index or the end of it,
        # and the worker that makes it.
        self._drawn: dict[int, tuple[int, Any, int]] = {}
        self._begun_from = so_far
        self._had = so_far.ahead  # batches that are no jobs: the loop had them before it resumed
        # Now, before the last batch, and before the last two (None = there were none). It is
        # written by one assignment at the end of a step, so that Ctrl-C finds the step done or not.
        self._so_far: tuple[HandedOut, HandedOut | None, HandedOut | None] = so_far, None, None

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """The states of the workers' iterables; () = map-style."""
        return self._so_far[0].workers

    @property
    def next_worker(self) -> int:
        """The worker whose turn it is."""
        return self._so_far[0].next_worker

    def draw(self, indices: Iterator[Any], worker: int) -> Given | Told | None:
        """Return a job for this worker, with the next of the sampler's ``indices``, or the
        sampler's error; None = there is none left.

        The end is a value: StopIteration would not differ from one that user code lets escape.
        """
        start = self.start
        try:
            if start.begins_late and not self._num_drawn:
                self.sampler_epoch = epoch_of(start.sampler)
            while True:
                number, first = self._num_drawn, self._samples_drawn
                index = next_index(indices, start.sampler, number)
                if index is END:
                    return None
                kind = type(index) if start.in_batches else None
                if kind not in (list, None) and hasattr(index, "__next__"):
                    index, kind = list(index), list
                if kind is list:
                    # A copy: the dataset gets the list, and may change it.
                    tail, end = index[-NUM_LAST:], first + len(index)
                else:
                    tail, end = index, first + start.count(index)
                self._samples_drawn, self._num_drawn = end, number + 1
                if self.drawing is not None:
                    # Without a call in between, so that Ctrl-C finds it here or there.
                    self._drawn[number] = end, index, worker
                    self.drawing.given = ()
                else:
                    self._drawn[number] = end, tail, worker
                if number not in self._had:
                    self.num_jobs = 1 + (job := self.num_jobs)
                    return Given(job, index, first, self.is_wanted, worker)
        except unless_of_handler(Exception) as error:
            return Told(error)

    def ask(self, worker: int) -> Given:
        """Return a job to which a worker whose iterable has ended only answers with its state."""
        self._drawn[self.num_jobs] = self._samples_drawn, None, worker
        self.num_jobs = 1 + (job := self.num_jobs)
        return Given(job, [None], 0, True, worker)

    def _batch_of(self, job: int) -> int:
        """Return the number of a job's batch where the two differ."""
        for number in sorted(self._had):
            job += number <= job
        return job

    def worker_of(self, job: int) -> int:
        """Return the worker that a job was drawn for; the loop has not had it."""
        return self._drawn[self._batch_of(job) if self._had else job][2]

    def handed(self, job: int) -> None:
        """Record that the trainer received a map-style batch, or the error in its place."""
        drawn, number = self._drawn, self._batch_of(job) if self._had else job
        now, before, _ = self._so_far
        while (oldest := next(iter(drawn), number)) < now.num_in_order - NUM_LAST:
            del drawn[oldest]
        if number == now.num_in_order and not now.ahead:
            following = HandedOut(number + 1, drawn[number][0])
        else:
            following = self._settled(now._replace(ahead=now.ahead | {number}))
        self._so_far = following, now, before

    def _settled(self, so_far: HandedOut) -> HandedOut:
        """Return the same with the batches in order counted as such that are in order by now."""
        number, samples, ahead = so_far.num_in_order, so_far.local_samples, so_far.ahead
        while number in ahead and number in self._drawn:
            samples, number = self._drawn[number][0], number + 1
        if number == so_far.num_in_order:
            return so_far
        left = frozenset(each for each in ahead if each >= number)
        return so_far._replace(num_in_order=number, local_samples=samples, ahead=left)

    def handed_by(self, job: int, state: WorkerState | None, *, is_end: bool) -> None:
        """Record that the trainer received a batch of a worker's iterable, an error in its place,
        or its end. ``state``: where it then stood; None = that is not known."""
        worker = self._drawn.pop(job)[2]
        if state is None:
            return
        if is_end:
            self.reached(worker, state)
            return
        now, before, _ = self._so_far
        workers, following = _with(now.workers, worker, state), (worker + 1) % len(now.workers)
        self._so_far = now._replace(workers=workers, next_worker=following), now, before

    def reached(self, worker: int, state: WorkerState) -> None:
        """Record where this worker's iterable begins or ends, or what it says when it is asked."""
        now, before, before_two = self._so_far
        self._so_far = now._replace(workers=_with(now.workers, worker, state)), before, before_two

    def unknown_ends(self) -> list[int]:
        """Return the workers whose dataset outlives this finished epoch with a state that nobody
        has asked for."""
        if not (self.finished and self.start.keeps_datasets):
            return []
        return [
            number
            for number, worker in enumerate(self.workers)
            if worker.keeper == "dataset" and worker.state is None and worker.failure is None
        ]

    @property
    def is_vague(self) -> bool:
        """Whether a later epoch has just begun on lasting datasets whose states are unknown."""
        has_begun_alike = self.own is not None or self.start.base.num_epochs == 0 or self.finished
        return not has_begun_alike and any(
            each.keeper == "dataset" and each.state is None and not each.num_items
            for each in self.workers
        )

    @property
    def num_counted(self) -> int:
        """The number of items that resuming makes again, though their iterable keeps a state."""
        if self.own is not None or self.finished:
            return 0
        return sum(w.num_items for w in self.workers if w.keeper and w.state is None)

    def state(self, generators: list[torch.Tensor], *, num_back: int = 0) -> ResumeState:
        """Return the loader's state.

        ``generators``: their states now, for a finished epoch. ``num_back``: return the state
        before the last batch, or the last two, for a caller whose consumer has not had those.

        Raises: what a user's object raises when it is asked for its state.
        """
        from .saved_state import ResumeState

        start, before = self.start, self._so_far[num_back] if num_back else None
        if self.finished and before is None:
            return ResumeState(
                epoch=start.epoch,
                epoch_seed=start.epoch_seed,
                finished=True,
                sampler_epoch=self.sampler_epoch,
                drawn=SamplerState(None if self.drawing is None else self.drawing.at_end()),
                generators=tuple(map(encoded, generators)),
                base=start.base.following(is_new=not start.persistent),
                workers=self._at_end(),
            )
        so_far = self._settled(before or self._so_far[0])
        if before is None and self.own is not None:
            so_far = so_far._replace(workers=(self._asked_now(self.own),))
        _raise_failures(so_far.workers)
        number = so_far.num_in_order
        drawn = self._drawn_at(number)
        return ResumeState(
            epoch=start.epoch,
            epoch_seed=start.epoch_seed,
            finished=False,
            num_samples=start.first + so_far.local_samples * start.world,
            ahead=tuple(sorted(each - number for each in so_far.ahead)),
            sampler_epoch=self.sampler_epoch,
            drawn=drawn,
            order=self._checksum_at(number) if self.drawing is None else kinds_of(drawn.pending),
            generators=tuple(map(encoded, start.generators)),
            base=start.base,
            workers=so_far.workers,
            next_worker=so_far.next_worker,
        )

    def _drawn_at(self, number: int) -> SamplerState:
        """Return the sampler's state before batch ``number``: it is further, and the indices since
        then are pending."""
        if self.drawing is None:
            return SamplerState()
        sampler = self.drawing.now()
        drawn = (index for each, (_, index, _) in self._drawn.items() if each >= number)
        return sampler._replace(pending=(*drawn, *sampler.pending))

    def _checksum_at(self, number: int) -> int | None:
        """Return that of the last indices before batch ``number``; None if they say nothing."""
        if self.start.last is None or self.workers:
            return None
        drawn = [index for each, (_, index, _) in self._drawn.items() if each < number]
        last = last_of(drawn[-NUM_LAST:], in_batches=self.start.in_batches)
        return checksum_of((*self.start.last, *last)[-NUM_LAST:])

    @property
    def left_of_resumed(self) -> tuple[int, ...]:
        """The number of items that each worker made in an epoch that was resumed in its middle, and
        whose datasets stay; () = this is another one."""
        begun_from = [worker.num_items for worker in self._begun_from.workers]
        if not (self.finished and self.start.keeps_datasets and any(begun_from)):
            return ()
        pairs = zip(self.workers, begun_from, strict=True)
        return tuple(worker.num_items - num_before for worker, num_before in pairs)

    @property
    def is_short(self) -> bool:
        """Whether this whole epoch has just the items that the resumed one before it had left."""
        here = tuple(worker.num_items for worker in self.workers)
        return bool(here) and here == self.start.left_before

    def left_to_next(self) -> tuple[WorkerState, ...]:
        """Return the states that the workers' datasets keep for the next epoch, where known."""
        is_known = self.finished and self.start.keeps_datasets
        return tuple(
            each._replace(num_items=0, num_after=0, ended=False)
            if is_known and (each.of_dataset or each.keeper == "dataset")
            else WorkerState(keeper=each.keeper)  # an iterator's state ends with its epoch
            for each in self.workers
        )

    def _at_end(self) -> tuple[WorkerState, ...]:
        """Return the states that the datasets keep for the next epoch; () if their copies end with
        this one."""
        if not self.start.keeps_datasets:
            return ()
        if self.own is not None:
            self.reached(0, self._asked_now(self.own))
        left = self.left_to_next()
        _raise_failures(left)
        return left if any(worker.of_dataset for worker in left) else ()

    def _asked_now(self, own: OwnState) -> WorkerState:
        (worker,) = self.workers
        own.ask(worker.num_items, ended=worker.ended, now=True)
        own.warn_of_lost(worker.num_items)
        return own.reached(worker.num_items, ended=worker.ended)


def next_index(indices: Iterator[Any], sampler: Any, number: int) -> Any:
    """Return the next of a sampler's ``indices``, that of batch ``number``, which it cannot change;
    END = none is left. An error has a note that it came from the sampler."""
    try:
        return unshared(next(indices, END))
    except BaseException as error:
        add_thread_note(error, f"in the sampler ({names_of(sampler)})", f"asked for batch {number}")
        raise


def _with(
    workers: tuple[WorkerState, ...], worker: int, state: WorkerState
) -> tuple[WorkerState, ...]:
    return *workers[:worker], state, *workers[worker + 1 :]


def _raise_failures(workers: Sequence[WorkerState]) -> None:
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure.taken()
