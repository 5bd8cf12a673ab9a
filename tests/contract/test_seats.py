"""What a loader promises, it promises wherever its workers are: order, bits, figures, ends.

torch's own loader is the oracle where torch has the promise.
"""

import functools
import itertools
import multiprocessing
import random
import threading
import uuid
from collections import Counter

import pytest
import torch
from support.datasets import KINDS, MAP_STYLE, Drawing, Drawn, DrawnStream, Indices, Made
from support.gates import PATIENCE_SECONDS, in_thread, result_of, until
from support.loaders import assert_threads_end, batches_of, loader_threads
from support.seats import (
    FORKED,
    NONE,
    SERVED,
    THREADS,
    in_every_seat,
    in_every_seat_by_pairs,
    in_seats,
    with_workers,
)
from torch.utils.data import get_worker_info

from spdl_torch.errors import PipelineStopped
from spdl_torch.observe import tracing

LENGTH, BATCH = 21, 2

LIVES = [pytest.param(False, id="anew"), pytest.param(True, id="persistent")]
both_lives = pytest.mark.parametrize("persistent", LIVES)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@functools.cache
def epochs_of(seat, kind, persistent, of_torch=False):
    """Three epochs of our loader, or torch's, shuffled where the kind has an order."""
    order = {"shuffle": True, "generator": seeded(7)} if kind in MAP_STYLE else {}
    options = {"persistent_workers": persistent, **order, **({} if of_torch else {"seed": 3})}
    loader = (seat.peer if of_torch else seat.loader)(kind(LENGTH), size_of(kind), **options)
    return [batches_of(loader) for _ in range(3)]


def size_of(kind):
    """Of batches, which are large where samples are made one by one."""
    return 8 if kind is Drawn else BATCH


@in_every_seat_by_pairs(kind=KINDS, persistent=LIVES)
def test_order_batches_and_lengths_are_torchs_and_bits_the_same_everywhere(seat, kind, persistent):
    """Three epochs have torch's batches in torch's order. Samples draw from streams of their own,
    by their position in the epoch: the workers' seat is in no bit. Without workers there is another
    order (of a stream, or where workers persist and take no seed from the generator)."""
    epochs, peer = epochs_of(seat, kind, persistent), NONE if seat is NONE else THREADS
    for got, expected in zip(epochs, epochs_of(peer, kind, persistent, of_torch=True), strict=True):
        assert indices_of(got) == indices_of(expected)
    if seat is not NONE or (kind in MAP_STYLE and not persistent):
        assert epochs == epochs_of(THREADS, kind, persistent)
    assert kind not in MAP_STYLE or len(seat.loader(kind(LENGTH), size_of(kind))) == len(epochs[0])


def indices_of(batches):
    """Of batches of such samples."""
    return [[index for index, _ in batch] for batch in batches]


class Opening(Drawn):
    """Opens something at its first sample; each names it, and how its worker has begun."""

    begun = opened = None

    def __getitem__(self, index):
        self.opened = self.opened or uuid.uuid4().hex
        return self.begun, self.opened


def begin(number):
    """A ``worker_init_fn``."""
    info = get_worker_info()
    info.dataset.begun = info.id, number, uuid.uuid4().hex


@with_workers
@both_lives
def test_what_a_worker_opens_stays_open_as_long_as_it(seat, persistent):
    """From epoch to epoch, if it persists; then it opens nothing again. ``worker_init_fn`` is
    called once for each."""
    options = {"worker_init_fn": begin, "persistent_workers": persistent}
    loader = seat.loader(Opening(LENGTH), BATCH, collate_fn=list, **options)
    epochs = [set(itertools.chain(*loader)) for _ in range(3)]
    for part in (0, 1):
        first, second, third = ({sample[part] for sample in epoch} for epoch in epochs)
        if persistent:
            assert len(first | second | third) <= seat.num_workers
        else:
            assert not second & third
    assert {number - own for epoch in epochs for (own, number, _), _ in epoch} == {0}


class Informed(Drawn):
    """Its samples are what ``get_worker_info()`` says where they are made."""

    def __getitem__(self, index):
        info = get_worker_info()
        return info and (info.id, info.num_workers, info.seed, info.dataset is self)


@in_every_seat
@pytest.mark.parametrize("rng", ["sample", "worker"])
def test_workers_are_told_what_torch_tells_them(seat, rng):
    """Number, seed, and their own dataset. Which worker makes which batch is torch's turn where
    the streams belong to workers."""
    torchs = list(seat.peer(Informed(LENGTH), collate_fn=list, generator=seeded(9)))
    ours = list(seat.loader(Informed(LENGTH), collate_fn=list, generator=seeded(9), rng=rng))
    assert get_worker_info() is None
    if rng == "worker":
        assert ours == torchs
    assert {*map(tuple, ours)} <= {*map(tuple, torchs)}
    assert len(ours) == len(torchs)


def found_elsewhere():
    """What a thread draws from the process's own generator of Python, and whose thread it is."""
    return result_of(in_thread(lambda: (random.random(), get_worker_info().id)))


def test_threads_of_a_dataset_draw_in_a_process_as_in_torchs():
    """No stream of a sample is theirs; the process is seeded as torch seeds its workers'. They find
    torch's worker info."""
    options = {"collate_fn": list, "num_workers": 1}
    torchs, ours = (
        list(make(Drawing(found_elsewhere, 3), generator=seeded(9), **options))
        for make in (FORKED.peer, FORKED.loader)
    )
    assert ours == torchs


class EvenBatches(Indices):
    """A batch in two has no good sample."""

    def __init__(self, length):
        super().__init__(length, bad=[n for n in range(length) if n // BATCH % 2])


@in_every_seat
@pytest.mark.parametrize("kind", [Drawn, DrawnStream, EvenBatches])
def test_statistics_have_every_sample(seat, kind):
    """snapshot() has the stages of the epoch, and the samples of all workers. Figures of the queue
    count batches alone: the end of a worker's iterable passes through it, too, and so does what is
    left of a batch without a good sample."""
    loader = seat.loader(kind(LENGTH), BATCH, on_error="skip", error_budget=LENGTH)
    for _ in range(2):
        num_batches = len(list(loader))
    fetch, collate = loader.snapshot().stages
    assert (fetch.name, collate.name) == ("fetch", "collate")
    assert fetch.tasks.num_tasks == LENGTH
    assert kind is EvenBatches or collate.tasks.num_tasks == num_batches
    assert fetch.queue == collate.queue
    assert seat is NONE or fetch.queue.num_items == num_batches


@in_every_seat
def test_report_and_trace_are_of_the_whole_epoch(seat, tmp_path):
    """The report has the figures of snapshot() and says where the workers were; a trace has the
    loop's turn for every batch, and the work of the workers wherever they are."""
    loader = seat.loader(Drawn(LENGTH), BATCH, persistent_workers=True)
    with tracing(tmp_path / "trace.json"):
        num_batches = len(list(loader))
        profile = loader.profile()
    report = profile.report()
    assert report.stats.stages == loader.snapshot().stages
    places = {"none": None, "threads": 0}
    found = None if report.placement is None else report.placement.num_processes
    assert found == places.get(seat.name, seat.num_workers)
    turns = Counter()
    (timeline,) = profile.timelines
    for row in timeline.rows:
        turns[row.stage] += len(row.turns)
    assert turns.pop("training") == num_batches
    kinds = {"worker": seat.are_threads, "worker process": seat.are_processes}
    assert set(turns) == {kind for kind, are in kinds.items() if are}
    # A worker notes a turn once the batch is on its way: its last one may still be missing.
    assert turns.total() >= num_batches - seat.num_workers or seat is NONE


class Counting(Drawn):
    """Counts the samples that it made, in what copies share where a dataset is vouched for, and in
    what they have of their own elsewhere."""

    def __init__(self, length):
        super().__init__(length)
        self.made = []

    def __getitem__(self, index):
        self.made.append(index)  # one step, which += is not without a GIL
        return super().__getitem__(index)

    def loading_counts(self):
        return {"made": len(self.made)}


@in_seats(NONE, THREADS, FORKED, SERVED)
@both_lives
def test_figures_of_a_dataset_are_the_sums_of_all_workers(seat, persistent):
    """Those of the epoch, whoever counted them."""
    loader = seat.loader(Counting(LENGTH), BATCH, persistent_workers=persistent)
    for _ in range(2):
        list(loader)
        assert loader.snapshot().data["made"] == LENGTH
    assert loader.report().stats.data["made"] == LENGTH


@in_every_seat_by_pairs(kind=[Drawn, DrawnStream], persistent=LIVES)
def test_closed_loader_has_no_workers_and_begins_anew(seat, kind, persistent):
    """close() ends threads and processes at once, in mid-epoch and between epochs, twice as well;
    the iterator says so, an ended one goes on being at its end, and the next epoch is whole."""
    loader = seat.loader(kind(LENGTH), BATCH, persistent_workers=persistent)
    loader.close()
    before, processes = loader_threads(), set(multiprocessing.active_children())
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    loader.close()
    # close() has waited for them, unless the machine was too busy; the iterator is still here.
    assert_threads_end([each for each in loader_threads() if each not in before])
    until(lambda: set(multiprocessing.active_children()) <= processes)
    with pytest.raises(PipelineStopped, match="closed"):
        next(batches)
    for _ in loader:  # after break the next epoch is whole, too
        break
    batches = iter(loader)
    indices = itertools.chain(*indices_of(batches_of(batches)))
    assert sorted(indices) == list(range(LENGTH))
    for _ in range(2):
        loader.close()
        assert next(batches, None) is None
    until(lambda: set(multiprocessing.active_children()) <= processes)


def test_close_waits_for_the_samples_under_way_on_threads():
    """Nobody uses the dataset any more when it returns."""
    begun, closing, done = (threading.Event() for _ in range(3))

    def sample(index):
        begun.set()
        assert closing.wait(PATIENCE_SECONDS)
        sum(range(1 << 20))  # a while
        done.set()
        return index

    loader = THREADS.loader(Made(sample, 1))
    batches = iter(loader)
    assert begun.wait(PATIENCE_SECONDS)
    closing.set()
    loader.close()
    assert done.is_set()
    with pytest.raises(PipelineStopped, match="closed"):
        next(batches)
