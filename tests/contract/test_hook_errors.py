"""Errors of everything of the user's that a loader calls, of every kind, in every seat.

Each arrives as the user's own type, says where it was raised, and takes the place of its own batch:
the epoch goes on, and never ends early. Two kinds would end something in silence, and are the cause
of a RuntimeError: StopIteration, and on a worker SystemExit.
"""

import functools
import random
import threading

import _warm
import pytest
import torch
from _hooks import (
    KINDS,
    Doubled,
    Ending,
    Endless,
    Failing,
    FailingBatches,
    FailingBegin,
    FailingGenerator,
    FailingInit,
    FailingParts,
    FailingPickle,
    FailingStates,
    FailingStream,
    Leaving,
    Locked,
    NoLength,
    Pinned,
    Plain,
    Sent,
    Sums,
    error_of,
)
from _lazy_device import backends
from _loader_helpers import no_thread_left
from _seats import (
    FORKED,
    NONE,
    SERVED,
    THREADS,
    in_every_seat,
    in_seats,
    with_workers,
)

from spdl_torch.pipeline import PipelineStopped

__all__ = ["backends", "no_thread_left"]

pytestmark = [
    pytest.mark.usefixtures("forks_by_default"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded:DeprecationWarning"),
]
ALL = tuple(KINDS)
FEW = ("ordinary", "stop", "exit", "locked", "frozen")
EXCEPTIONS = tuple(each for each in ALL if isinstance(error_of(each, ""), Exception))

some_kinds = pytest.mark.parametrize(
    "kinds", [FEW, pytest.param(ALL, marks=pytest.mark.long)], ids=["few", "all"]
)


def outcomes_of(batches, most):
    """What each ``next()`` gives until the end, or until the iterator is over: a batch, or the
    error that it raises."""
    found = []
    while len(found) <= most:
        try:
            found.append(next(batches))
        except StopIteration:
            return found
        except PipelineStopped as error:
            return [*found, error.with_traceback(None)]
        except BaseException as error:
            found.append(error.with_traceback(None))  # its frames are a cycle with ``found``
    raise AssertionError(f"there is no end to {found}")


def error_by(call):
    """What a call raises."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def split(outcomes):
    """The errors, and the batches."""
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    return errors, [plain(each) for each in outcomes if not isinstance(each, BaseException)]


def error_or_batch(batches):
    """What a ``next()`` gives."""
    try:
        return next(batches)
    except Exception as error:
        return error.with_traceback(None)


def plain(outcome):
    """An outcome that can be compared."""
    return outcome.tolist() if isinstance(outcome, torch.Tensor) else outcome


def is_kind(error, kind, *, on_worker):
    """Whether an error is what the loop gets for this kind."""
    wanted = type(error_of(kind, ""))
    if wanted is StopIteration or (wanted is SystemExit and on_worker):
        return type(error) is RuntimeError and has_type(error.__cause__, wanted)
    return has_type(error, wanted)


def has_type(error, wanted):
    """Whether ``except`` finds it by its type; that of a function is another with each call."""
    same_name = type(error).__qualname__ == wanted.__qualname__
    return type(error) is wanted or (same_name and "<locals>" in wanted.__qualname__)


def notes_of(error):
    return "\n".join(error.__notes__)


def full(text):
    """The text of an error, and of the one that it stands for."""
    return f"{text} {text.__cause__}"


HOOKS = {
    "__getitem__": (Failing, "in the dataset", ALL),
    "__getitems__": (FailingBatches, "in FailingBatches.__getitems__", ALL),
    "__next__": (
        FailingStream,
        "in the iterator of FailingStream",
        [each for each in ALL if each != "stop"],  # that is an iterator's end
    ),
    "collate_fn": (Failing, "in collate_fn", ALL),
}


def kinds_for(seat, kinds):
    """Those that come in place of a batch. Without workers that is an Exception alone: others end
    the program, as with torch."""
    return [each for each in kinds if each in EXCEPTIONS or seat is not NONE]


@pytest.mark.parametrize("kind", [each for each in ALL if each not in EXCEPTIONS])
def test_what_is_no_exception_ends_an_iterator_without_workers(kind):
    """It may be Ctrl-C. The state goes on with the batch that it has met."""
    loader = NONE.loader(Failing([kind], "__getitem__"))
    found = outcomes_of(iter(loader), 9)
    assert [plain(each) for each in found[:2]] == [[0], [1]]
    assert is_kind(found[2], kind, on_worker=False)
    assert type(found[3]) is PipelineStopped
    again = NONE.loader(Failing([kind], ""))
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[2], [3], [4]]


@in_every_seat
@pytest.mark.parametrize("hook", HOOKS)
def test_error_takes_the_place_of_its_batch(seat, hook):
    """One epoch with an error of every kind, one after another: each has its type, its text and a
    note that says where, and all other batches come."""
    kind_of_dataset, where, kinds = HOOKS[hook]
    dataset = kind_of_dataset(kinds_for(seat, kinds), hook)
    options = {"collate_fn": dataset.collate} if hook == "collate_fn" else {}
    found = outcomes_of(iter(seat.loader(dataset, **options)), 2 * len(dataset))
    assert len(found) == len(dataset)
    for number, outcome in enumerate(found):
        kind = dataset.kind_at(number)
        if kind is None:
            assert plain(outcome) == [number]
            continue
        assert is_kind(outcome, kind, on_worker=seat is not NONE), (kind, outcome)
        assert where in notes_of(outcome)
        assert hook in full(outcome), (kind, outcome)


@in_every_seat
@pytest.mark.parametrize("hook", HOOKS)
def test_ordinary_errors_are_where_torchs_are(seat, hook):
    """torch's loader is the oracle: the same outcomes, in the same order."""

    assert ordinary_outcomes(seat.loader, hook) == outcomes_with_torch(seat.num_workers, hook)


def ordinary_outcomes(make, hook):
    """Of an epoch, with the types of errors in their places."""
    dataset = HOOKS[hook][0](["ordinary"] * 3, hook)
    given = {"collate_fn": dataset.collate} if hook == "collate_fn" else {}
    found = outcomes_of(iter(make(dataset, **given)), 99)
    return [type(each) if isinstance(each, Exception) else plain(each) for each in found]


@functools.cache
def outcomes_with_torch(num_workers, hook):
    """The same for all seats."""
    seat = THREADS if num_workers else NONE
    assert seat.num_workers == num_workers
    return ordinary_outcomes(seat.peer, hook)


class Draws:
    """A sampler of batches that raises at its third draw, and every second from then on."""

    def __init__(self, kinds, num_batches):
        self.kinds, self.num_batches = list(kinds), num_batches

    def __iter__(self):
        self.number, self.left, self.draws = 0, list(self.kinds), 0
        return self

    def __len__(self):
        return self.num_batches

    def __next__(self):
        self.draws += 1
        if self.left and self.draws >= 3 and self.draws % 2:
            raise error_of(self.left.pop(0), "__next__")
        if self.number == self.num_batches:
            raise StopIteration
        self.number += 1
        return [self.number - 1]


@in_every_seat
def test_error_of_the_sampler_loses_no_batch(seat):
    """A sampler that raises and goes on: every batch comes, in order, whatever was raised between.

    With workers, torch loses the batch that it has in hand.
    """
    kinds = [each for each in EXCEPTIONS if each != "stop"]
    loader = seat.loader(range(12), batch_sampler=Draws(kinds, 12), prefetch_factor=1)
    found = outcomes_of(iter(loader), 40)
    assert [plain(each) for each in found if not isinstance(each, Exception)] == [
        [number] for number in range(12)
    ]
    errors = [each for each in found if isinstance(each, Exception)]
    assert all(is_kind(e, k, on_worker=False) for e, k in zip(errors, kinds, strict=True))
    assert all("in the sampler (Draws), asked for batch" in notes_of(each) for each in errors)


@in_every_seat
@pytest.mark.parametrize("kind", [each for each in ALL if each not in EXCEPTIONS])
def test_whatever_a_sampler_raises_is_no_end(seat, kind):
    """What is no Exception may be Ctrl-C in the middle of a request: the iterator is over, and the
    loop hears of it."""
    loader = seat.loader(range(8), batch_sampler=Draws([kind], 8), prefetch_factor=1)
    found = outcomes_of(iter(loader), 40)
    batches = [plain(each) for each in found if not isinstance(each, BaseException)]
    first, last = [each for each in found if isinstance(each, BaseException)]
    assert is_kind(first, kind, on_worker=False)
    assert "in the sampler (Draws)" in notes_of(first)
    assert batches == [[number] for number in range(len(batches))]
    assert type(last) is PipelineStopped


@in_every_seat
@pytest.mark.parametrize("draw", [0, 3])
def test_loop_has_as_many_batches_before_a_samplers_error_as_with_torch(seat, draw):
    """torch's loader is the oracle, which asks for batches ahead."""

    def sampler():
        yield from ([number] for number in range(draw))
        raise OSError("the sampler broke")

    def num_before(make):
        batches, count = make(range(9), batch_sampler=Begun(sampler)), 0
        try:
            for _ in batches:
                count += 1
        except OSError as error:
            return count, str(error)
        return count, "no error"

    assert num_before(seat.loader) == num_before(seat.peer)


class Begun:
    """An iterable that begins anew."""

    def __init__(self, begin):
        self.begin = begin

    def __iter__(self):
        return self.begin()


@in_every_seat
@pytest.mark.parametrize("kind", ALL)
def test_error_of_a_samplers_beginning_is_raised_by_iter(seat, kind):
    """Or, where a generator begins at its first draw, by that: never an epoch without batches."""

    class Fails:
        def __iter__(self):
            raise error_of(kind, "__iter__")

        def __len__(self):
            return 8

    for options in ({"sampler": Fails()}, {"batch_sampler": Fails()}):
        with pytest.raises(BaseException, match=r"in iter\(\) of|in the sampler") as caught:
            list(seat.loader(range(8), **options))
        assert is_kind(caught.value, kind, on_worker=False)


@in_every_seat
def test_dataset_without_a_length_is_an_error(seat):
    """As is a class in place of an object: torch says so at the first batch, or at ``iter()``."""
    for dataset in (Endless(), Failing):
        with pytest.raises(TypeError, match=r"has no len\(\)(.|\n)*in the sampler"):
            list(seat.loader(dataset))


@in_every_seat
def test_error_of_a_length_is_raised(seat):
    """The sampler asks for it."""
    with pytest.raises(Plain, match=r"no length(.|\n)*in the sampler"):
        next(iter(seat.loader(NoLength([], ""))))


@in_every_seat
def test_every_beginning_of_an_iterable_may_fail(seat):
    """``iter()`` or the first ``next()`` raises it; without workers the next epoch is whole."""
    for kind in ALL:
        loader = seat.loader(FailingBegin([kind]), prefetch_factor=1)
        error = error_by(lambda loader=loader: next(iter(loader)))
        assert is_kind(error, kind, on_worker=seat is not NONE), (kind, error)
        assert "in iter(FailingBegin)" in notes_of(error)
        if seat is NONE:
            assert [batch.tolist() for batch in loader] == [[n] for n in range(4)]


@with_workers
@some_kinds
def test_worker_that_could_not_start_ends_the_epoch(seat, kinds):
    """The loop has its error once, in each epoch, and nobody takes the epoch for a whole one."""
    for kind in kinds:
        for init in (FailingInit([kind, kind]), FailingInit([None, kind])):
            loader = seat.loader(range(8), worker_init_fn=init, persistent_workers=True)
            for _ in range(2):
                *batches, error = outcomes_of(iter(loader), 9)
                assert is_kind(error, kind, on_worker=True), (kind, error)
                assert "in worker_init_fn(" in notes_of(error)
                assert [plain(each) for each in batches] == [[n] for n in range(len(batches))]
                assert len(batches) < 8


@with_workers
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_whose_iterable_cannot_begin_ends_the_epoch(seat, persistent):
    """In each epoch, with one error."""
    for kinds in ({0: "ordinary"}, {1: "locked"}, {0: "odd", 1: "ordinary"}):
        loader = seat.loader(FailingParts(kinds), persistent_workers=persistent)
        for _ in range(2):
            *batches, error = outcomes_of(iter(loader), 9)
            assert type(error) in [type(error_of(kind, "")) for kind in kinds.values()]
            assert "in iter(FailingParts)" in notes_of(error)
            assert not any(isinstance(each, BaseException) for each in batches)


class Kept(Failing):
    """Raises one exception object again and again."""

    def __init__(self):
        super().__init__(["ordinary"] * 4, "")
        self.error = Plain("kept")

    def raise_at(self, index, where):
        if where == self.where and self.kind_at(index) is not None:
            raise self.error

    def at(self, where):
        self.where = where
        return self


class KeptStream(Kept, FailingStream):
    """The same of an iterable."""


@in_every_seat
@pytest.mark.parametrize("hook", ["__getitem__", "__next__", "collate_fn"])
def test_exception_that_is_raised_again_and_again_keeps_one_note_of_where(seat, hook):
    """Where it was raised last; it grows neither by notes nor, in a process, by frames."""
    dataset = (KeptStream if hook == "__next__" else Kept)().at(hook)
    options = {"collate_fn": dataset.collate} if hook == "collate_fn" else {}
    batches, notes = iter(seat.loader(dataset, **options)), []
    for _ in range(len(dataset)):
        error = error_or_batch(batches)
        if isinstance(error, Plain):
            notes.append([*error.__notes__])
    assert len(notes) == 4
    assert {len(each) for each in notes} == {len(notes[0])}
    assert {sum(note.startswith("in the ") for note in each) for each in notes} <= {0, 1}
    frames = {"\n".join(each).count("raise self.error") for each in notes}
    assert frames == {0} if seat.are_threads or seat is NONE else {1}


@in_every_seat
def test_batch_sampler_that_gives_no_lists_is_named(seat):
    """As where ``sampler=`` was meant; torch has the same error, without a word of it."""
    found = outcomes_of(iter(seat.loader(range(8), batch_sampler=[0, 1])), 5)
    theirs = outcomes_of(iter(seat.peer(range(8), batch_sampler=[0, 1])), 5)
    assert [type(each) for each in found] == [type(each) for each in theirs] == [TypeError] * 2
    for number, error in enumerate(found):
        assert "in the indices of a batch" in notes_of(error)
        assert f"for which the batch sampler gave {number}" in notes_of(error)


@in_seats(NONE, THREADS, FORKED)
def test_batch_without_samples_is_named_as_one(seat):
    """torch's collate has no answer to it."""
    error = error_by(lambda: list(seat.loader(range(8), batch_sampler=[[]])))
    assert type(error) is IndexError
    assert "batch 0, indices [], given empty list" in notes_of(error)


@in_seats(FORKED)
@pytest.mark.parametrize("persistent", [False, True])
def test_loop_that_goes_on_after_a_death_comes_to_an_end(seat, persistent, caplog):
    """It has the error once, as with torch; nobody takes the epoch for a whole one."""
    loader = seat.loader(Ending(["ordinary"] * 4, ""), persistent_workers=persistent)
    batches = iter(loader)
    found = outcomes_of(batches, 20)
    assert [type(each) for each in found[:-1]] == [torch.Tensor] * (len(found) - 1)
    assert type(found[-1]) is RuntimeError
    assert "ended by itself with exit code 3" in str(found[-1])
    assert error_by(lambda: next(batches)).__class__ is StopIteration
    state = loader.state_dict()
    assert not state["finished"]
    assert state["num_samples"] == len(found) - 1


@in_every_seat
@pytest.mark.parametrize("kind", ["stop", "locked", pytest.param("bare", marks=pytest.mark.long)])
def test_error_of_state_dict_is_the_callers_and_costs_no_batch(seat, kind):
    """``loader.state_dict()`` raises it; the loop gets its epoch."""
    loader = seat.loader(FailingStates(kind, "state_dict"))
    loader.state_dict()  # asks for states from now on
    batches = iter(loader)
    found = [next(batches).tolist()]
    with pytest.raises(BaseException, match=r"in FailingStates\.state_dict") as caught:
        loader.state_dict()
    assert has_type(caught.value, type(error_of(kind, "")))
    found += [batch.tolist() for batch in batches]
    assert found == [[n] for n in range(4) for _ in range(max(1, seat.num_workers))]


@in_every_seat
@pytest.mark.parametrize("kind", ["stop", "locked", pytest.param("bare", marks=pytest.mark.long)])
def test_error_of_load_state_dict_is_the_users(seat, kind):
    """At ``iter()``, or on workers at the first batch, with the field of the state in a note."""
    loader = seat.loader(FailingStates(kind, "load_state_dict"))
    loader.state_dict()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    del batches
    loader.load_state_dict(state)
    with pytest.raises(BaseException, match=r"load_state_dict: workers\[0\]") as caught:
        list(loader)
    assert is_kind(caught.value, kind, on_worker=seat is not NONE)


@in_seats(FORKED, SERVED)
def test_batch_that_cannot_be_sent_is_an_error_in_its_place(seat):
    """Whatever its ``__reduce__`` raises; on its way from a process batches are pickled."""
    dataset = Failing(ALL, "__reduce__")
    found = outcomes_of(iter(seat.loader(dataset, batch_size=None)), 2 * len(dataset))
    assert len(found) == len(dataset)
    for number, outcome in enumerate(found):
        kind = dataset.kind_at(number)
        if kind is None:
            assert outcome == number
        else:
            assert is_kind(outcome, kind, on_worker=True), (kind, outcome)
            assert "has to be pickled on its way" in notes_of(outcome)


class Locks:
    """A sampler of indices that cannot be sent to a process."""

    def __iter__(self):
        yield 0
        yield threading.Lock()


@in_seats(FORKED, SERVED)
def test_index_that_cannot_be_sent_names_its_sampler(seat):
    """And its batch."""
    loader = seat.loader([0, 1], sampler=Locks(), batch_size=1)
    with pytest.raises(TypeError, match=r"pickle(.|\n)*sampler \(BatchSampler of Locks\).*batch 1"):
        list(loader)


@in_seats(SERVED)
@pytest.mark.parametrize("kind", ["ordinary", "odd", "locked"])
def test_error_of_pickling_the_dataset_is_the_users(seat, kind):
    """``iter()`` raises it, with a note."""
    with pytest.raises(Exception, match="in pickling the dataset") as caught:
        iter(seat.loader(FailingPickle([kind], "")))
    assert is_kind(caught.value, kind, on_worker=False)


@in_every_seat
def test_error_of_pin_memory_takes_the_place_of_its_batch(seat, monkeypatch):
    """As one of ``collate_fn``: torch calls the method of an object of the user's."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    dataset = Failing(kinds_for(seat, ALL), "pin_memory")
    collate = functools.partial(Pinned, dataset=dataset)
    found = outcomes_of(
        iter(seat.loader(dataset, collate_fn=collate, pin_memory=True)), 2 * len(dataset)
    )
    assert len(found) == len(dataset)
    for number, outcome in enumerate(found):
        kind = dataset.kind_at(number)
        if kind is None:
            assert outcome == number
        else:
            assert is_kind(outcome, kind, on_worker=seat is not NONE), (kind, outcome)
            assert "pin_memory" in notes_of(outcome)


@in_every_seat
def test_error_of_a_batch_that_moves_itself_takes_its_place(seat, backends):
    """The others arrive, whatever raises in ``batch.to(device)``."""
    dataset = Failing(kinds_for(seat, ALL), "to")
    collate = functools.partial(Sent, dataset=dataset)
    batches = iter(seat.loader(dataset, collate_fn=collate, device="cuda"))
    found = outcomes_of(batches, 2 * len(dataset))
    assert len(found) == len(dataset)
    for number, outcome in enumerate(found):
        kind = dataset.kind_at(number)
        if kind is None:
            assert outcome == number
        else:
            assert is_kind(outcome, kind, on_worker=seat is not NONE), (kind, outcome)
            assert "in the transfer to" in notes_of(outcome)
            assert f"batch {number}" in notes_of(outcome)


@in_every_seat
@some_kinds
def test_error_of_a_generator_is_raised_by_iter(seat, kinds):
    """Again at the next ``iter()``; and what is no generator is refused with torch's words."""
    loader = seat.loader(range(8), shuffle=True, generator=FailingGenerator())
    for kind in kinds:
        loader.generator.kind = kind
        error = error_by(lambda: iter(loader))
        assert is_kind(error, kind, on_worker=False), (kind, error)
        assert "get_state" in full(error)
    wrong = {"shuffle": True, "generator": random.Random(1)}
    theirs = error_by(lambda: next(iter(NONE.peer(range(8), **wrong))))
    ours = error_by(lambda: next(iter(seat.loader(range(8), **wrong))))
    assert (type(ours), str(ours)) == (type(theirs), str(theirs))


@in_every_seat
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_error_of_del_costs_nothing(seat):
    """Python reports it; no batch is missing."""
    dataset = Leaving([each for each in ALL if each != "exit"], "__del__")
    found = [list(map(int, batch)) for batch in seat.loader(dataset, 2, collate_fn=list)]
    assert [index for batch in found for index in batch] == list(range(len(dataset)))


def test_error_of_a_process_keeps_what_can_be_sent():
    """Arguments and attributes; what cannot is named, and the text is the user's."""
    loader = FORKED.loader(Failing(["locked"], "__getitem__"))
    with pytest.raises(Locked, match="locked in __getitem__") as caught:
        list(loader)
    assert caught.value.args == ("locked in __getitem__",)
    assert caught.value.detail == 17
    assert "without its attribute lock, which cannot be pickled" in notes_of(caught.value)


class Slotted(Exception):
    """Its pickle gives an exception of the same text, with another code."""

    __slots__ = ("__own", "code")

    def __init__(self, text, code=0):
        super().__init__(text)
        self.code, self.__own = code, threading.Lock()


class FailingSlotted(torch.utils.data.Dataset):
    """Its errors have attributes in slots."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise Slotted("slotted", 7)


@in_every_seat
def test_error_keeps_what_is_in_its_slots(seat):
    """What cannot be sent is named."""
    with pytest.raises(Slotted, match="slotted") as caught:
        list(seat.loader(FailingSlotted()))
    assert caught.value.code == 7
    if seat.are_processes and not seat.are_threads:
        assert "without its attribute _Slotted__own, which" in notes_of(caught.value)


class Level(ExceptionGroup):
    """A group of one's own."""


class Deep(torch.utils.data.Dataset):
    """A task group in a task group in ... fails, at every level and with a cause."""

    LEVELS = 200

    def __len__(self):
        return 2

    def __getitem__(self, index):
        error = Locked("innermost")
        for level in range(self.LEVELS):
            error = Level(f"level {level}", [ValueError(level), error])
            error.__cause__ = KeyError(level)
        raise error


def leaves_of(group):
    """The errors in a group and in those inside it."""
    found, todo = [], [group]
    while todo:
        error = todo.pop()
        if isinstance(error, ExceptionGroup):
            todo += reversed(error.exceptions)
        else:
            found.append(error)
    return found


@in_every_seat
def test_groups_in_groups_keep_their_errors_at_any_depth(seat):
    """From a process the groups come to some depth, and the errors of deeper ones all the same."""
    batches = iter(seat.loader(Deep(), 1))
    for _ in range(2):
        with pytest.raises(Level, match="level 199") as caught:
            next(batches)
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.value.exceptions[1].message == "level 198"
        *others, innermost = leaves_of(caught.value)
        assert (type(innermost), innermost.detail) == (Locked, 17)
        assert [error.args for error in others] == [(n,) for n in reversed(range(Deep.LEVELS))]
    assert list(batches) == []


OF_A_SCRIPT = """
from spdl_torch import DataLoader

class Own(Exception):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code

class Rows:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise Own("no", 3)

if __name__ == "__main__":
    loader = DataLoader(Rows(), num_workers=1, multiprocessing_context="spawn")
    try:
        next(iter(loader))
    except Own as error:
        print(type(error) is Own, error.code)
"""


def test_error_class_of_the_script_is_itself_from_a_spawned_worker(tmp_path):
    """There the script is called ``__mp_main__``."""
    script = tmp_path / "script.py"
    script.write_text(OF_A_SCRIPT)
    done = _warm.run(["-W", "ignore", script], forks=True)
    assert done.stdout == "True 3\n", done.stderr


class Reused:
    """A sampler of batches that yields one list, array or tensor again and again."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        batch = self.make([0, 0])
        for number in range(0, 8, 2):
            batch[0], batch[1] = number, number + 1
            yield batch

    def __len__(self):
        return 4


@in_every_seat
@pytest.mark.parametrize("make", [list, torch.tensor, "nested"], ids=["list", "tensor", "nested"])
def test_batch_has_the_indices_that_it_was_given_with(seat, make):
    """Whatever the sampler does to the list afterwards; torch's loader without workers is the
    oracle."""
    if make == "nested":
        sampler, dataset = Nested(), Sums()
    else:
        sampler, dataset = Reused(make), Doubled()

    def batches_of(of):
        return [batch.tolist() for batch in of(dataset, batch_sampler=sampler)]

    assert batches_of(seat.loader) == batches_of(NONE.peer)


class Nested:
    """A sampler of batches of pairs, which are changed in between."""

    def __iter__(self):
        batch = [[0, 0], [0, 0]]
        for number in range(4):
            batch[0][0], batch[1][1] = number, 10 * number
            yield batch
