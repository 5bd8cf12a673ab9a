"""Where an epoch stands, as a state for a checkpoint, and how a loader gets there again.

A state says what the trainer was handed, whatever was prefetched behind that. It holds numbers and
text alone, so it goes through JSON and through ``torch.load(weights_only=True)``.

Map-style datasets: the order is drawn again, from the generators as they were when the epoch began,
and the samples that were handed out are passed over without being loaded. That does not depend on
the number of threads, nor on the batch size, nor, with a sampler that deals samples out to ranks in
turn, on the number of ranks. Iterable datasets: every worker goes on where it was.
"""

from __future__ import annotations

import base64
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .sampler_chain import epoch_of, nested_samplers, shard_of
from .states import check_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "Progress",
    "ResumeState",
    "WorkerState",
    "before_first_epoch",
    "draw_again_from",
    "drawn_base_seed",
    "generators_of",
    "order_drawn_again",
    "skipped",
    "tell_epoch",
]

_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """How far one worker's iterable has got."""

    num_items: int = 0
    ended: bool = False
    state: Any = None
    """Of the iterator or the dataset, if it has ``state_dict()``; otherwise items are passed over
    by loading them again."""
    of_dataset: bool = False
    """The state is the dataset's, which outlives an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """What a state says, checked."""

    epoch: int
    """How many epochs were begun before this one."""
    epoch_seed: int
    """Of the random streams."""
    finished: bool
    """The loop saw the end: the next epoch begins at its beginning."""
    num_samples: int = 0
    """Handed out, on all ranks together."""
    ahead: tuple[int, ...] = ()
    """Batches behind those samples that were handed out before their turn (``in_order=False``)."""
    sampler_epoch: int | None = None
    sampler: Any = None
    """Of a sampler that has ``state_dict()`` of its own."""
    generators: tuple[str, ...] = ()
    """As they were when the epoch began, or at its end; the first is torch's global one."""
    drew_base_seed: bool = True
    """Whether the epoch to begin draws a base seed before its order: not the second one and later
    ones of a loader with ``persistent_workers``, for which follow"""
    base_seed: int = 0
    num_epochs: int = 0
    """that it drew, and the epochs begun since."""
    workers: tuple[WorkerState, ...] = ()
    next_worker: int = 0
    dataset: Any = None
    """Of a map-style dataset that has ``state_dict()``, with ``num_workers=0``."""
    version: int = _VERSION

    @classmethod
    def checked(cls, state: Mapping[str, Any]) -> ResumeState:
        """Raises: ValueError: not such a state, or of a newer release."""
        check_version(state, _VERSION, "DataLoader")
        values = {**state}
        values.pop("_iterator_finished", None)  # Accelerate puts it into every loader's state
        try:
            for name in ("ahead", "generators"):
                values[name] = tuple(values.get(name, ()))
            values["workers"] = tuple(WorkerState(**each) for each in values.get("workers", ()))
            return cls(**values)
        except TypeError as error:
            raise ValueError(
                f"load_state_dict: this is no state of a DataLoader: {error}"
            ) from None

    def as_dict(self) -> dict[str, Any]:
        """Numbers, text, lists and dicts alone, but for what samplers and datasets put in."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["ahead"], values["generators"] = list(self.ahead), list(self.generators)
        values["workers"] = [
            {**asdict(replace(worker, state=None)), "state": worker.state}
            for worker in self.workers
        ]
        return values


@dataclass(kw_only=True)
class Progress:
    """Of one epoch. The iterator writes, on the trainer's thread; the loader reads. It does not
    refer to the iterator, so that dropping that one ends its threads.
    """

    epoch: int
    epoch_seed: int
    samplers: list[Any]
    """From the outside in."""
    start: int
    """Samples on all ranks before this iterator's first."""
    world: int
    generators: list[torch.Tensor]
    workers: list[WorkerState]
    """Of an iterable dataset; [] = map-style."""
    sampler_epoch: int | None = None
    next_worker: int = 0
    base_seed: int
    num_epochs: int
    """Of this iterator, before this one."""
    drew_base_seed: bool
    persistent: bool
    keeps_datasets: bool
    """Later epochs go on with the same dataset objects."""
    local_samples: int = 0
    """Handed out on this rank, up to the first batch that was not."""
    nothing_left: bool = False
    """It began behind its last batch, from a state of a loop that had not seen the end."""
    finished: bool = False
    _num_in_order: int = 0
    """Batches of this iterator in those."""
    _ends: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """Of batches that were asked for: the samples up to their end, the sampler's state then."""
    _ahead: set[int] = field(default_factory=set)
    _sampler_state: Any = None
    _before: tuple[Any, ...] = ()
    """What ``_place`` was before the last batch was handed out."""

    def __post_init__(self) -> None:
        self._sampler = stateful_sampler(self.samplers)

    def asked(self, number: int, local_samples: int) -> None:
        """Batch ``number`` was drawn from the sampler; up to its end that has given so many."""
        if self.workers:
            return  # iterables have no sampler; their workers tell how far they are
        state = None if self._sampler is None else self._sampler.state_dict()
        self._ends[number] = local_samples, state

    def handed(self, number: int) -> None:
        """The trainer was given a batch of a map-style dataset, or the error in its place."""
        self._before = self._place()
        self._ahead.add(number)
        while self._num_in_order in self._ahead:
            self._ahead.discard(self._num_in_order)
            self.local_samples, self._sampler_state = self._ends.pop(self._num_in_order)
            self._num_in_order += 1

    def handed_by(self, worker: int, state: WorkerState) -> None:
        """The trainer was given what came from this worker's iterable."""
        self._before = self._place()
        self.workers[worker] = state
        self.next_worker = (worker + 1) % len(self.workers)

    def ended(self, worker: int, state: WorkerState) -> None:
        """This worker's iterable gave no more."""
        self.workers[worker] = state

    def state(self, generators: list[torch.Tensor], *, behind: bool = False) -> ResumeState:
        """``generators``: as they are now, for an epoch that is over. ``behind``: the state before
        the last batch was handed out, for who holds it back from its own consumer.
        """
        if self.finished and not (behind and self._before):
            return ResumeState(
                epoch=self.epoch,
                epoch_seed=self.epoch_seed,
                finished=True,
                drew_base_seed=not self.persistent,
                base_seed=self.base_seed,
                num_epochs=self.num_epochs + 1,
                sampler_epoch=self.sampler_epoch,
                sampler=None if self._sampler is None else self._sampler.state_dict(),
                generators=tuple(map(_encoded, generators)),
                workers=self._at_end(),
            )
        place = self._before if behind and self._before else self._place()
        num_in_order, local_samples, sampler_state, ahead, workers, next_worker = place
        return ResumeState(
            epoch=self.epoch,
            epoch_seed=self.epoch_seed,
            finished=False,
            num_samples=self.start + local_samples * self.world,
            ahead=tuple(sorted(number - num_in_order for number in ahead)),
            sampler_epoch=self.sampler_epoch,
            sampler=sampler_state,
            generators=tuple(map(_encoded, self.generators)),
            drew_base_seed=self.drew_base_seed,
            base_seed=self.base_seed,
            num_epochs=self.num_epochs,
            workers=workers,
            next_worker=next_worker,
        )

    def _place(self) -> tuple[Any, ...]:
        """What changes with every batch."""
        return (
            *(self._num_in_order, self.local_samples, self._sampler_state, tuple(self._ahead)),
            *(tuple(self.workers), self.next_worker),
        )

    def _at_end(self) -> tuple[WorkerState, ...]:
        """What the datasets keep for the next epoch; not those whose copies end with the epoch."""
        if not self.keeps_datasets or not any(worker.of_dataset for worker in self.workers):
            return ()
        return tuple(replace(worker, num_items=0, ended=False) for worker in self.workers)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Those from which the order of an epoch may be drawn; torch's global one is the first."""
    found = [torch.default_generator]
    samplers = nested_samplers(loader._index_sampler)
    for holder in (loader, *samplers):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in found):
            found.append(generator)
    return found


def stateful_sampler(samplers: list[Any]) -> Any:
    """The outermost one that keeps its own state, if any does. One that can begin anywhere is not
    asked for its state: it is told where to begin.
    """
    for sampler in samplers:
        if callable(getattr(sampler, "start_at", None)):
            return None
        if all(callable(getattr(sampler, n, None)) for n in ("state_dict", "load_state_dict")):
            return sampler
    return None


@contextmanager
def order_drawn_again(loader: Any, resume: ResumeState | None) -> Iterator[list[torch.Tensor]]:
    """While an epoch begins: its order is drawn as it was, if there is a state to resume from.
    Yields the generators' states from which it is drawn.

    torch's global generator is left as it was before: what else draws from it is the trainer's. A
    generator that the user gave goes on from here as it did then.
    """
    generators = generators_of(loader)
    if resume is None or resume.finished:
        if resume is not None:
            _set_states(generators[1:], resume.generators[1:])
            _tell_samplers(loader, resume)
        yield [generator.get_state() for generator in generators]
        return
    before = generators[0].get_state()
    _set_states(generators, resume.generators)
    _tell_samplers(loader, resume)
    try:
        yield [generator.get_state() for generator in generators]
    finally:
        generators[0].set_state(before)


def draw_again_from(loader: Any, states: list[torch.Tensor]) -> None:
    """Undo a draw from the generators."""
    for generator, state in zip(generators_of(loader), states, strict=True):
        generator.set_state(state)


def drawn_base_seed(loader: Any) -> int:
    """As torch draws it when an iterator is made."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())


def _tell_samplers(loader: Any, resume: ResumeState) -> None:
    samplers = list(nested_samplers(loader._index_sampler))
    sampler = stateful_sampler(samplers)
    if sampler is not None and resume.sampler is not None:
        sampler.load_state_dict(resume.sampler)
    for each in samplers:
        if callable(getattr(each, "start_at", None)) and not resume.finished:
            each.start_at(resume.num_samples)


def skipped(
    sampler_iter: Iterator[Any], resume: ResumeState, samplers: list[Any], count: Any
) -> tuple[Iterator[Any], int, int]:
    """Pass over what was handed out. Returns the rest of the sampler's iterator, the samples of all
    ranks before it, and the local ones that were passed over. ``count``: samples of an index.

    Raises: ValueError: the state's position is not between two batches here.
    """
    world, _ = shard_of(samplers[0])
    if stateful_sampler(samplers) is not None or any(hasattr(s, "start_at") for s in samplers):
        return sampler_iter, resume.num_samples, 0
    target, rest = divmod(resume.num_samples, world)
    passed = 0
    while passed < target and not rest:
        try:
            passed += count(next(sampler_iter))
        except StopIteration:
            break
    if passed != target or rest:
        raise ValueError(
            f"load_state_dict: the state stands behind {resume.num_samples} samples, which is not "
            f"between two batches of this loader with {world} rank(s). Keep the global batch, "
            "batch_size times ranks, as it was, and the dataset."
        )
    return sampler_iter, 0, target


def before_first_epoch(loader: Any, generators: list[torch.Tensor]) -> ResumeState:
    """The state of a loader that was not iterated over yet."""
    samplers = list(nested_samplers(loader._index_sampler))
    sampler = stateful_sampler(samplers)
    return ResumeState(
        epoch=-1,
        epoch_seed=0,
        finished=True,
        sampler_epoch=epoch_of(samplers[0]),
        sampler=None if sampler is None else sampler.state_dict(),
        generators=tuple(map(_encoded, generators)),
    )


def tell_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of the sampler that can be told one."""
    for sampler in nested_samplers(loader._index_sampler):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
            return


def _encoded(state: torch.Tensor) -> str:
    return base64.b85encode(state.numpy().tobytes()).decode()


def _set_states(generators: list[torch.Generator], states: tuple[str, ...]) -> None:
    if len(generators) != len(states):
        raise ValueError(
            f"load_state_dict: the state has {len(states)} generator(s), this loader and its "
            f"samplers have {len(generators)}. Give generator= where it was given then."
        )
    for generator, text in zip(generators, states, strict=True):
        content = bytearray(base64.b85decode(text))
        generator.set_state(torch.frombuffer(content, dtype=torch.uint8).clone())
