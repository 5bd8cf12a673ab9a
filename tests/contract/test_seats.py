"""What a loader promises, it promises wherever its workers are: order, batches, bits, resume, ends.

torch's own loader is the oracle where torch has the promise.
"""

import functools
import gc
import multiprocessing

import pytest
import torch
from _datasets import (
    ITERABLE,
    KINDS,
    MAP_STYLE,
    BadRows,
    Broken,
    OwnPlaceStream,
    Rows,
    Stream,
)
from _gates import until
from _loader_helpers import (
    assert_threads_end,
    loader_threads,
    no_thread_left,  # noqa: F401
)
from _seats import MOVING, NONE, THREADS, in_every_seat, in_seats, with_workers
from torch.utils.data import default_collate

from spdl_torch.errors import PipelineStopped

pytestmark = [
    pytest.mark.usefixtures("forks_by_default"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded:DeprecationWarning"),
]
LENGTH, BATCH = 21, 2

of_every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
both_lives = pytest.mark.parametrize("persistent", [False, True], ids=["anew", "persistent"])


def indices_of(batches):
    return [batch["index"].tolist() for batch in batches]


def bits_of(batches):
    return [(batch["index"].tolist(), batch["draws"].tolist(), batch["name"]) for batch in batches]


def options_of(kind):
    """A shuffled order, where a kind has one."""
    if kind not in MAP_STYLE:
        return {}
    return {"shuffle": True, "generator": torch.Generator().manual_seed(7)}


@functools.cache
def epochs_of_torch(num_workers, kind, persistent):
    """The indices of three epochs of torch's loader, the same for all seats."""
    seat = THREADS if num_workers else NONE
    assert seat.num_workers == num_workers
    loader = seat.peer(kind(LENGTH), BATCH, persistent_workers=persistent, **options_of(kind))
    return [indices_of(loader) for _ in range(3)]


@in_every_seat
@of_every_kind
@both_lives
def test_order_and_batches_are_torchs(seat, kind, persistent):
    """Three epochs have torch's batches in torch's order."""
    ours = seat.loader(kind(LENGTH), BATCH, persistent_workers=persistent, **options_of(kind))
    for expected in epochs_of_torch(seat.num_workers, kind, persistent):
        assert indices_of(ours) == expected


@in_every_seat
@of_every_kind
@both_lives
def test_random_bits_are_the_same_in_every_seat(seat, kind, persistent):
    """Samples draw from streams of their own, by their position in the epoch: the workers' seat is
    in no bit. Without workers there is another order (of a stream, or where workers persist and
    take no seed from the generator), and nothing to compare."""
    if seat is NONE and (persistent or kind in ITERABLE):
        pytest.skip("compared with itself")
    base = NONE if kind in MAP_STYLE and not persistent else THREADS
    options = {"seed": 3, "persistent_workers": persistent}
    expected = base.loader(kind(LENGTH), BATCH, **options, **options_of(kind))
    loader = seat.loader(kind(LENGTH), BATCH, **options, **options_of(kind))
    for _ in range(2):
        assert bits_of(loader) == bits_of(expected)


@in_every_seat
@of_every_kind
@both_lives
def test_resumed_epochs_go_on_where_the_state_was_taken(seat, kind, persistent):
    """A new loader with the state gives what the first one would have: batches, bits, and the
    next epoch."""

    def loader():
        return seat.loader(
            kind(LENGTH), BATCH, seed=3, persistent_workers=persistent, **options_of(kind)
        )

    first = loader()
    first.state_dict()  # an iterable's own state is kept from here on
    assert len(list(first)) == 11
    batches, states = [], {}
    for batch in first:
        batches.append(batch)
        if len(batches) in (1, 5):
            states[len(batches)] = first.state_dict()
    later = bits_of(first)
    for taken_at, state in states.items():
        second = loader()
        second.load_state_dict(state)
        assert bits_of(second) == bits_of(batches[taken_at:])
        assert bits_of(second) == later


@in_every_seat
def test_error_of_a_sample_is_the_users_and_costs_its_batch_alone(seat):
    """It comes in its batch's place, as itself, with the sample's index; the epoch goes on."""
    batches, indices, errors = iter(seat.loader(BadRows(LENGTH), BATCH)), [], []
    while True:
        try:
            indices.append(next(batches)["index"].tolist())
        except StopIteration:
            break
        except Broken as error:
            errors.append(error)
            assert len(indices) == 4
    assert indices == [[*range(n, min(n + 2, LENGTH))] for n in range(0, LENGTH, 2) if n != 8]
    (error,) = errors
    assert (error.args, error.index) == ((9, "here"), 9)
    assert any("sample index 9" in note for note in error.__notes__)


@in_every_seat
@pytest.mark.parametrize("replace", [False, True])
def test_bad_sample_is_left_out_or_replaced(seat, replace):
    """With on_error="skip": the same batches, skipped samples, failures and length everywhere."""
    loader = seat.loader(BadRows(LENGTH), BATCH, on_error="skip", replace=replace)
    expected = [[*range(n, min(n + 2, LENGTH))] for n in range(0, LENGTH, 2)]
    expected[4] = [8, 10] if replace else [8]
    assert indices_of(loader) == expected
    assert [(sample.key, sample.stage) for sample in loader.skipped] == [(9, "fetch")]
    assert len(loader) == len(expected)


@in_every_seat
@pytest.mark.parametrize("kind", [Rows, Stream])
def test_statistics_have_every_sample(seat, kind):
    """snapshot() has the stages of the epoch, and the samples of all workers; of workers that
    move, those made since."""
    loader = seat.loader(kind(LENGTH), BATCH)
    for _ in range(2):  # workers of a stream move between epochs
        list(loader)
    fetch, collate = loader.snapshot().stages
    assert (fetch.name, collate.name) == ("fetch", "collate")
    if seat is not MOVING:
        assert fetch.tasks.num_tasks == LENGTH
        assert collate.tasks.num_tasks == len(list(loader))


@with_workers
@both_lives
def test_broken_off_epoch_leaves_nothing_for_the_next(seat, persistent):
    """After break the next epoch is whole."""
    loader = seat.loader(Rows(LENGTH), BATCH, persistent_workers=persistent)
    for number, _ in enumerate(loader):
        if number == 3:
            break
    assert [index for batch in indices_of(loader) for index in batch] == list(range(LENGTH))


@in_every_seat
@pytest.mark.parametrize("kind", [Rows, Stream])
@both_lives
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
    batches = iter(loader)
    indices = [index for batch in batches for index in batch["index"].tolist()]
    assert sorted(indices) == list(range(LENGTH))
    for _ in range(2):
        loader.close()
        assert next(batches, None) is None
    until(lambda: set(multiprocessing.active_children()) <= processes)


@in_seats(MOVING)
@pytest.mark.parametrize("kind", [Rows, Stream, OwnPlaceStream])
def test_seat_that_moves_does(seat, kind):
    """Batches are from threads first and from processes later: else the seat tests nothing."""
    loader = seat.loader(kind(LENGTH), BATCH, collate_fn=with_process)
    batches = [*loader, *loader, *loader]
    assert len({process for _, process in batches}) > 1
    gc.collect()


def with_process(samples):
    """Collate, and say in which process."""
    import os

    return default_collate(samples), os.getpid()
