"""The generators from which a thread draws while it runs user code: a stream for each sample.

Threads share the process's generators. If the dataset drew from them, augmentations would depend
on which thread came first, and so would the next epoch's shuffle, whose seed comes from torch's.
So a thread that runs user code has its own generators (torch's, Python's and numpy's), seeded anew
for every sample from the epoch's seed and the sample's position in the epoch. The results are the
same for any number of threads and processes, 0 included.

torch's default generator gives the same bits as another one with the same seed. On the main thread,
where torch's own loader draws from it too, it is therefore enough to seed the default generator for
a sample and to restore it after the batch: draws then run at torch's own speed. That is done only
while no other thread lives, apart from daemons, which could draw from that generator, too.

A dataset that makes whole batches gets the streams of its samples as contexts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import torch

from ...locks import in_forked_child
from ...objects.members import nested_datasets
from ...scopes import scope
from . import dispatch
from .keys import (
    COLLATE,
    ITERABLE,
    TORCH,
    WORKER,
    BatchSeeds,
    NumpyStream,
    Purpose,
    PythonStream,
    StreamKey,
    TorchStream,
)
from .owned import set_state, state_of
from .patches import can_see_draws, install, install_functions, of_thread, without_key

if TYPE_CHECKING:
    import random

    import numpy as np
    from torch import Generator

    from .owned import OwnedGenerators

    SampleContext = Callable[[int], AbstractContextManager[Generator | None]]


class SampleStreams:
    """A context in which the calling thread draws from the streams of the samples it makes.

    torch calls that name a generator, or that draw on an accelerator, are left alone. A stream
    starts at its first draw, so that samples which draw nothing cost nothing. Until a batch is
    begun it is the worker's, seeded as torch seeds its worker processes.

    There are two ways to seed torch's generator for a sample, with the same bits. *Watching*: the
    dispatch key sees each draw, which takes 2 µs, and asks here. *Borrowing*: every sample begins
    with the default generator seeded, which takes 2 µs too, and all draws are torch's own. That is
    for the main thread, while the program has no other (but daemons) and samples do draw. The key
    is installed when somebody first watches, so no first batch waits for it there. Where torch
    lacks it, the main thread goes on borrowing, and others cannot have streams.

    number: the worker's.
    """

    def __init__(self, base_seed: int, number: int = 0) -> None:
        install_functions()
        self._torch, self._python, self._numpy = TorchStream(), PythonStream(), NumpyStream()
        self._owned: OwnedGenerators | None = None
        self._left: dict[int, list[Any]] = {}  # states of streams that may be re-entered
        self._outer: SampleStreams | None = None
        self._outer_is_led = False
        self._process_state: torch.Tensor | None = None  # of the default generator, to put back
        self._borrowing = Borrowing(are_seen=can_see_draws())
        self._sees = False  # whether the dispatch key is known to be installed
        self._as_seeded: torch.Tensor | None = None  # the default generator, where somebody looks
        self._batch = BatchSeeds(StreamKey(base_seed), number)
        self._steps: Any = None  # an iterator over the batch's indices; its progress is the place
        self._place = WORKER

    # Python raises Ctrl-C where a function begins, and where a call of C's returns. So the thread
    # gets these streams last, loses them first, and what comes after that is done in any case.
    def __enter__(self) -> Self:
        outer = of_thread.streams
        self._outer_is_led = outer is not None and dispatch.is_led()
        try:
            if self._borrowing.enter():
                self._borrow()
            elif self._sees:
                dispatch.lead(True)
            else:
                self._watch()
        except BaseException:
            self._outer, of_thread.streams = outer, self
            self.__exit__(None, None, None)
            raise
        self._outer, of_thread.streams = outer, self
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        of_thread.streams, self._outer = self._outer, None
        state, self._process_state = self._process_state, None
        try:
            dispatch.lead(self._outer_is_led)
        finally:
            if state is not None:
                torch.default_generator.set_state(state)
                self._torch.leave_default()

    def seed_owned(self, owned: OwnedGenerators) -> None:
        """Seed these generators at the beginning of every sample from now on."""
        self._owned = owned if owned else None

    def begin_worker(self, base_seed: int) -> None:
        """Begin the worker's own stream."""
        self._batch.key = StreamKey(base_seed)
        self._go_to(WORKER)

    def begin_iterable(self, key: StreamKey) -> None:
        """Begin the stream of ``iter(dataset)``."""
        self._batch.key = key
        self._go_to(ITERABLE)

    def begin(self, key: StreamKey, first: int) -> None:
        """Begin a batch whose first sample is at position ``first`` of the epoch. Until another
        place is named, its samples share one stream."""
        batch = self._batch
        batch.key, batch.first, batch.num_samples = key, first, 0
        if batch.of_generators:
            batch.of_generators = {}
        borrowing = self._borrowing
        is_to_choose = borrowing.has_drawn or borrowing.is_on
        if is_to_choose and not borrowing.begin() and self._torch.is_default:
            self._torch.leave_default()
            self._watch()
        self._go_to(0)
        if self._left:
            self._left.clear()

    def at(self, place: int) -> None:
        """Begin the stream of the sample at ``place`` of the batch."""
        self._place, self._steps = place, None
        if self._borrowing.is_on:
            self._borrow()
        if self._owned is not None:
            self._seed_owned(self._owned)

    def over(self, steps: Iterator[Any], count: int) -> Iterator[Any]:
        """Return ``steps`` so that each sample has its own stream while it is made: the caller
        takes an index, makes its sample, and takes the next one.

        steps: an iterator over a list or tuple, the ``count`` indices of the batch.
        """
        self._batch.num_samples = count
        if self._borrowing.is_on:
            return self._seeded(steps)
        if self._owned is not None:
            return self._at_each(steps)
        self._steps = steps  # its progress is the place, so no code has to run per sample
        return steps

    @property
    def place(self) -> int:
        """The place in its batch of the sample that is being made."""
        steps = self._steps
        if steps is None:
            return self._place
        return self._batch.num_samples - 1 - int(steps.__length_hint__())

    def at_collate(self) -> None:
        """Begin the stream of the batch's collate function."""
        self._place, self._steps = COLLATE, None
        if self._borrowing.is_on:
            if self._borrowing.looks and self._as_seeded is not None:
                now = torch.default_generator.get_state()
                self._borrowing.note(has_drawn=not torch.equal(now, self._as_seeded))
            self._borrow()
        if self._owned is not None:
            self._seed_owned(self._owned)

    @scope
    def sample_context(self, place: int) -> Iterator[torch.Generator]:
        """Draw from the stream of one sample of the batch, and yield its torch generator.

        Entered again for the same sample, the stream continues where it was left.
        """
        self._go_to(place)
        self._go_on(place)
        try:
            yield self.generator()
        finally:
            self._leave(place)

    def torch_seeds(self, places: Sequence[int]) -> list[int] | None:
        """Return the seeds with which torch's streams of these places begin; None if one of them
        has begun already."""
        if not places or not self._left.keys().isdisjoint(places):
            return None
        seeds = self._batch.key.seeds(self._batch.first, max(places) + 1, TORCH)
        return [seeds[place] for place in places]

    def lead(self) -> torch.Generator:
        """Return torch's generator for an operator that is about to draw; see
        ``dispatch``."""
        self._borrowing.has_drawn = True
        return self.generator()

    def generator(self) -> torch.Generator:
        """Return torch's generator, seeded for the present stream."""
        stream, place = self._torch, self.place
        if stream.at != place:
            stream.seed(place, self._batch)
        return stream.generator

    def python(self) -> random.Random:
        """Return Python's generator, seeded for the present stream."""
        stream, place = self._python, self.place
        if stream.at != place:
            stream.seed(place, self._batch)
        return stream.generator

    def numpy(self) -> np.random.RandomState:
        """Return numpy's generator, seeded for the present stream."""
        stream, place = self._numpy, self.place
        if stream.at != place:
            stream.seed(place, self._batch)
        return stream.generator

    def _seeded(self, steps: Iterator[Any]) -> Iterator[Any]:
        seeds = self._batch.of_samples(TORCH)
        self._take_default()
        stream, owned = self._torch, self._owned
        manual_seed = stream.generator.manual_seed
        looked_at = self._batch.num_samples - 1 if self._borrowing.looks else None
        for place, index in enumerate(steps):
            self._place = stream.at = place
            manual_seed(seeds[place])
            if place == looked_at:
                self._as_seeded = stream.generator.get_state()
            if owned is not None:
                self._seed_owned(owned)
            yield index

    def _at_each(self, steps: Iterator[Any]) -> Iterator[Any]:
        for place, index in enumerate(steps):
            self.at(place)
            yield index

    def _take_default(self) -> None:
        """Draw from torch's default generator from here on, at torch's own speed."""
        if not self._torch.is_default:
            if self._process_state is None:
                self._process_state = torch.default_generator.get_state()
            self._torch.take_default()
            dispatch.lead(False)

    def _borrow(self) -> None:
        """Draw for the present place from torch's default generator."""
        self._take_default()
        self._torch.seed(self._place, self._batch)
        self._as_seeded = torch.default_generator.get_state() if self._borrowing.looks else None

    def _watch(self) -> None:
        """See every draw from here on, and redirect it to the generator of its stream."""
        self._sees = install()
        if self._sees:
            dispatch.lead(True)
            return
        if not self._borrowing.begin_for_good():
            name = threading.current_thread().name
            raise without_key(f"thread {name}, which is not the main one, makes samples")
        self._borrow()

    def _go_to(self, place: int) -> None:
        """Begin the stream at ``place``, even if it is the present one."""
        self._place, self._steps = place, None
        self._torch.at = self._python.at = self._numpy.at = None
        if self._borrowing.is_on:
            self._borrow()
        if self._owned is not None and place >= 0:
            self._seed_owned(self._owned)

    def _seed_owned(self, owned: OwnedGenerators) -> None:
        """Seed the owned generators for the present place; see ``owned``."""
        purpose = Purpose.COLLATE if self._place == COLLATE else Purpose.SAMPLE
        owned.seed(self._batch.key, self._batch.first + max(0, self._place), purpose)

    def _leave(self, place: int) -> None:
        own = self._own_generators()
        self._left[place] = [state_of(each.generator) if each.at == place else None for each in own]

    def _go_on(self, place: int) -> None:
        for each, state in zip(self._own_generators(), self._left.get(place, ()), strict=False):
            if state is not None:
                set_state(each.generator, state)
                each.at = place

    def _own_generators(self) -> tuple[TorchStream | PythonStream | NumpyStream, ...]:
        return self._torch, self._python, self._numpy


_MOST_QUIET = 8
"""The first batches without a draw after which samples are taken to draw nothing; one is enough
where draws can be seen already. The means of that takes 7 to 15 ms, for which no first batch waits.
"""

_main_thread = threading.main_thread().ident  # cached: the lookup would dominate the cost


@in_forked_child
def _after_fork() -> None:
    global _main_thread
    _main_thread = threading.get_ident()


class Borrowing:
    """The choice, batch by batch, whether user code draws from the default generator itself.

    That is for the main thread, while the program has no other (but daemons), and where samples
    draw: they are taken to, until looks at the generator after the last sample of some batches have
    shown otherwise. From then on draws are seen.
    """

    def __init__(self, *, are_seen: bool) -> None:
        """``are_seen``: whether draws can be seen without delay."""
        self.is_on = False
        """Whether it is borrowed: whatever may draw begins with it seeded."""
        self.has_drawn = True
        """Whether samples draw, as far as is known. Whoever sees a draw says so. Where they do not,
        and it is not borrowed, there is nothing to choose for a batch."""
        self.looks = True
        """Whether somebody is to look."""
        self._num_quiet = _MOST_QUIET - 1 if are_seen else 0  # batches in which nothing was drawn
        self._is_main = self._is_for_good = False

    def enter(self) -> bool:
        """Begin on the calling thread; return ``is_on``."""
        self._is_main = threading.get_ident() == _main_thread
        if not self._is_main:  # as on all workers
            self.has_drawn = False
        self.is_on = self.has_drawn and self.begin()
        return self.is_on

    def begin(self) -> bool:
        """Choose for a batch that begins; return ``is_on``."""
        may_draw = self._is_main and self.has_drawn
        self.is_on = may_draw and (self._is_for_good or not _others_may_draw())
        return self.is_on

    def note(self, *, has_drawn: bool) -> None:
        """Note what a look at a batch has shown."""
        self._num_quiet += 1
        if has_drawn or self._num_quiet == _MOST_QUIET:
            self.has_drawn, self.looks = has_drawn, False

    def begin_for_good(self) -> bool:
        """Borrow it from now on, as nobody will ever see draws. Return False if this is not the
        main thread, which may not."""
        self.is_on = self.has_drawn = self._is_for_good = self._is_main
        self.looks = False
        return self._is_main


def _others_may_draw() -> bool:
    """Return whether another thread of the program lives that is not a daemon.

    Daemons (progress bars' and loggers' threads, our own) are taken for helpers that draw nothing:
    checking each of their calls would cost every program that has one.
    """
    if threading.active_count() == 1:  # 0.1 µs; going through the threads takes ten times that
        return False
    own = threading.get_ident()
    return any(not each.daemon and each.ident != own for each in threading.enumerate())


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


def to_give_back(datasets: list[Any], owned: OwnedGenerators | None) -> Callable[[], None]:
    """Return a function that restores the contexts and generators of the trainer's own objects as
    they are now; any number of times.

    For datasets to which a thread is about to lend its streams, and generators that it will seed.
    """
    contexts = [vars(dataset).get("sample_context") for dataset in datasets]
    states = [] if owned is None else owned.states()

    def give_back() -> None:
        for dataset, context in zip(datasets, contexts, strict=True):
            dataset.sample_context = context
        if owned is not None:
            owned.restore(states)

    return give_back
