"""Errors of everything of the user's that a loader calls, of every kind, in every seat.

Each arrives as the user's own type, says where it was raised, and takes the place of its own batch:
the epoch goes on, and never ends early. Two kinds would end something in silence, and are the cause
of a RuntimeError: StopIteration, and on a worker SystemExit.
"""

import multiprocessing
import random
import threading

import pytest
import torch
from support import hooks, warm
from support.datasets import Made
from support.gates import until
from support.hooks import (
    KINDS,
    Failing,
    FailingBatches,
    FailingBegin,
    FailingInit,
    FailingParts,
    FailingStates,
    FailingStream,
    Locked,
    Plain,
    error_of,
)
from support.loaders import assert_threads_end, batches_of, loader_threads
from support.seats import FORKED, NONE, SERVED, THREADS, in_every_seat, in_seats, with_workers

from spdl_torch.pipeline import PipelineStopped

ALL = tuple(KINDS)
FEW = ("ordinary", "stop", "exit", "locked", "frozen")
EXCEPTIONS = tuple(each for each in ALL if isinstance(error_of(each, ""), Exception))
NO_EXCEPTIONS = tuple(each for each in ALL if each not in EXCEPTIONS)
near = in_seats(NONE, THREADS, FORKED)


def outcomes_of(batches, most=99):
    """What each ``next()`` gives until the end, or until the iterator is over: a batch, or the
    error that it raises."""
    found = []
    while len(found) <= most:
        try:
            batch = next(batches)
            found.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
        except StopIteration:
            return found
        except PipelineStopped as error:
            return [*found, error.with_traceback(None)]
        except BaseException as error:
            found.append(error.with_traceback(None))  # its frames are a cycle with ``found``
    raise AssertionError(f"there is no end to {found}")


def error_by(call):
    """What a call raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return caught.value


def assert_kind(error, kind, seat=NONE):
    """An error is what the loop gets for this kind where the hook runs on a worker of a seat; of
    what the loop's own thread calls, without one."""
    wanted = type(error_of(kind, ""))
    if wanted is StopIteration or (wanted is SystemExit and seat is not NONE):
        assert type(error) is RuntimeError, (kind, error)
        error = error.__cause__
    # ``except`` finds it by its type; that of a function is another with each call.
    same_name = type(error).__qualname__ == wanted.__qualname__
    is_local = same_name and "<locals>" in wanted.__qualname__
    assert type(error) is wanted or is_local, (kind, error)


def notes_of(error):
    return "\n".join(error.__notes__)


HOOKS = {
    "__getitem__": (Failing, "in the dataset"),
    "__getitems__": (FailingBatches, "in FailingBatches.__getitems__"),
    "__next__": (FailingStream, "in the iterator of FailingStream"),
    "collate_fn": (Failing, "in collate_fn"),
    "pin_memory": (Failing, "pin_memory"),
    "to": (Failing, "in the transfer to"),
    "__reduce__": (Failing, "has to be pickled on its way"),
    "load": (Failing, "in receiving what a worker process has sent"),
}


@in_every_seat
@pytest.mark.parametrize("hook", HOOKS)
def test_error_takes_the_place_of_its_batch(seat, hook, monkeypatch, backends):
    """One epoch with an error of every kind, one after another: each has its type, its text and a
    note that says where, and all other batches come. Without workers an Exception alone does so:
    others end the program, as with torch, and so where the loop unpickles what a process sent."""
    is_pickled = hook in ("__reduce__", "load")
    if is_pickled and not seat.are_processes:
        pytest.skip("batches are pickled on their way from a process")
    make, where = HOOKS[hook]
    kinds = [*EXCEPTIONS] if seat is NONE or hook == "load" else [*ALL]
    if hook == "__next__":
        kinds.remove("stop")  # that is an iterator's end
    dataset = make(kinds, hook)
    options = {"batch_size": None} if is_pickled else {}
    if hook in ("collate_fn", "pin_memory", "to"):
        options["collate_fn"] = dataset.collate
    if hook == "to":
        options["device"] = "cuda"
    if hook == "pin_memory":
        options["pin_memory"] = True
        told = {"is_available": True, "current_accelerator": torch.device("cuda")}
        told |= {"current_device_index": 0, "set_device_index": None}
        for name, value in told.items():
            monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    found = outcomes_of(iter(seat.loader(dataset, **options)), 2 * len(dataset))
    assert len(found) == len(dataset)
    for number, outcome in enumerate(found):
        kind = dataset.kind_at(number)
        if kind is None:
            assert outcome in (number, [number])
            continue
        assert_kind(outcome, kind, seat)
        assert where in notes_of(outcome)
        assert hook in f"{outcome} {outcome.__cause__}", (kind, outcome)
        assert hook != "to" or f"batch {number}" in notes_of(outcome)
        assert hook != "__getitem__" or f"sample index {number}" in notes_of(outcome)


@pytest.mark.parametrize("kind", NO_EXCEPTIONS)
def test_what_is_no_exception_ends_an_iterator_without_workers(kind):
    """It may be Ctrl-C. The state goes on with the batch that it has met."""
    loader = NONE.loader(Failing([kind], "__getitem__"))
    found = outcomes_of(iter(loader))
    assert found[:2] == [[0], [1]]
    assert_kind(found[2], kind)
    assert type(found[3]) is PipelineStopped
    again = NONE.loader(Failing([kind], ""))
    again.load_state_dict(loader.state_dict())
    assert batches_of(again) == [[2], [3], [4]]


class Begun:
    """A sampler that is begun by a function, which may raise."""

    def __init__(self, begin, length=8):
        self.begin, self.length = begin, length

    def __iter__(self):
        return self.begin()

    def __len__(self):
        return self.length


class Draws:
    """The batches of a sampler that raises at its third draw, and every second from then on."""

    def __init__(self, kinds, num_batches):
        self.kinds, self.num_draws, self.left = list(kinds), 0, list(range(num_batches))

    def __iter__(self):
        return self

    def __next__(self):
        self.num_draws += 1
        if self.kinds and self.num_draws >= 3 and self.num_draws % 2:
            raise error_of(self.kinds.pop(0), "__next__")
        if not self.left:
            raise StopIteration
        return [self.left.pop(0)]


def drawing(seat, kinds, length):
    """A loader of numbers in batches of one, whose sampler raises these."""
    sampler = Begun(lambda: Draws(kinds, length), length)
    return seat.loader(range(length), batch_sampler=sampler, prefetch_factor=1)


@in_every_seat
def test_error_of_the_sampler_loses_no_batch(seat):
    """A sampler that raises and goes on: every batch comes, in order, whatever was raised between.

    With workers, torch loses the batch that it has in hand.
    """
    kinds = [each for each in EXCEPTIONS if each != "stop"]
    found = outcomes_of(iter(drawing(seat, kinds, 12)))
    errors = [each for each in found if isinstance(each, BaseException)]
    assert [each for each in found if each not in errors] == [[number] for number in range(12)]
    for error, kind in zip(errors, kinds, strict=True):
        assert_kind(error, kind)
        assert "in the sampler (Begun), asked for batch" in notes_of(error)


@near
@pytest.mark.parametrize("kind", NO_EXCEPTIONS)
def test_whatever_a_sampler_raises_is_no_end(seat, kind):
    """What is no Exception may be Ctrl-C in the middle of a request: the iterator is over, the loop
    hears of it, and the state stays in the middle of the epoch."""
    loader = drawing(seat, [kind], 8)
    *batches, first, last = outcomes_of(iter(loader))
    assert_kind(first, kind)
    assert "in the sampler (Begun)" in notes_of(first)
    assert batches == [[number] for number in range(len(batches))]
    assert type(last) is PipelineStopped
    state = loader.state_dict()
    assert (state["finished"], state["num_samples"]) == (False, len(batches))


@in_every_seat
@pytest.mark.parametrize("draw", [0, 3])
def test_loop_has_as_many_batches_before_a_samplers_error_as_with_torch(seat, draw):
    """torch's loader is the oracle, which asks for batches ahead."""

    def sampler():
        yield from ([number] for number in range(draw))
        raise OSError("the sampler broke")

    def batches(make):
        yield from make(range(9), batch_sampler=Begun(sampler))

    ours, theirs = (outcomes_of(batches(make)) for make in (seat.loader, seat.peer))
    assert repr(ours) == repr(theirs)
    assert repr(ours[-1]) == "OSError('the sampler broke')"


@near
def test_error_of_a_samplers_beginning_is_raised_by_iter(seat):
    """Or, where a generator begins at its first draw, by that: never an epoch without batches."""
    for kind in FEW if seat.are_processes else ALL:

        def fail(kind=kind):
            raise error_of(kind, "__iter__")

        for name in ("sampler", "batch_sampler"):
            with pytest.raises(BaseException) as caught:  # noqa: PT011
                list(seat.loader(range(8), **{name: Begun(fail)}))
            assert_kind(caught.value, kind)


@near
def test_error_of_a_length_is_raised(seat):
    """The sampler asks for it; of a dataset without one, or a class in place of an object, torch
    says so at the first batch, or at ``iter()``."""
    for dataset in (torch.utils.data.Dataset(), Failing):
        with pytest.raises(TypeError, match=r"has no len\(\)(.|\n)*in the sampler"):
            list(seat.loader(dataset))


@near
def test_batch_sampler_that_gives_no_lists_is_named(seat):
    """As where ``sampler=`` was meant; torch has the same error, without a word of it. Nor has
    torch's collate an answer to a batch without samples."""
    found = outcomes_of(iter(seat.loader(range(8), batch_sampler=[0, 1])))
    theirs = outcomes_of(iter(seat.peer(range(8), batch_sampler=[0, 1])))
    assert [type(each) for each in found] == [type(each) for each in theirs] == [TypeError] * 2
    for number, error in enumerate(found):
        assert "in the indices of a batch" in notes_of(error)
        assert f"for which the batch sampler gave {number}" in notes_of(error)
    with pytest.raises(IndexError, match=r"batch 0, indices \[\], given empty list"):
        list(seat.loader(range(8), batch_sampler=[[]]))


@in_seats(FORKED, SERVED)
def test_index_that_cannot_be_sent_names_its_sampler(seat):
    """And its batch."""
    loader = seat.loader([0, 1], sampler=Begun(lambda: iter([0, threading.Lock()])))
    with pytest.raises(TypeError, match=r"pickle(.|\n)*sampler \(BatchSampler of Begun\).*batch 1"):
        list(loader)


@near
def test_error_of_a_generator_is_raised_by_iter(seat):
    """Which asks for its state, again at the next ``iter()``; and what is no generator is refused
    with torch's words."""

    class FailingGenerator(torch.Generator):
        def get_state(self):
            raise error_of(kind, "get_state")

    loader = seat.loader(range(8), shuffle=True, generator=FailingGenerator())
    for kind in ALL:
        assert_kind(error_by(lambda: iter(loader)), kind)
    wrong = {"shuffle": True, "generator": random.Random(1)}
    ours, theirs = (
        error_by(lambda make=make: next(iter(make(range(8), **wrong))))
        for make in (seat.loader, NONE.peer)
    )
    assert repr(ours) == repr(theirs)


def changed_lists():
    """The batches of a sampler that changes the list it has given: its entries, and theirs."""
    flat, deep, tensor = [0, 0], [[0, 0], [0, 0]], torch.tensor([0, 0])
    for number in range(4):
        flat[:] = tensor[0], tensor[1] = 2 * number, 2 * number + 1
        deep[0][0], deep[1][1] = number, 10 * number
        yield from (flat, deep, tensor)


@in_every_seat
def test_batch_has_the_indices_that_it_was_given_with(seat):
    """Whatever the sampler does to the list afterwards; torch's loader without workers is the
    oracle."""
    data, options = Made(torch.as_tensor, 8), {"batch_sampler": Begun(changed_lists)}
    assert batches_of(seat.loader(data, **options)) == batches_of(NONE.peer(data, **options))


@in_every_seat
def test_every_beginning_of_an_iterable_may_fail(seat):
    """``iter()`` or the first ``next()`` raises it; without workers the next epoch is whole."""
    for kind in FEW if seat.are_processes else ALL:
        loader = seat.loader(FailingBegin([kind]), prefetch_factor=1)
        error = error_by(lambda loader=loader: next(iter(loader)))
        assert_kind(error, kind, seat)
        assert "in iter(FailingBegin)" in notes_of(error)
        if seat is NONE:
            assert batches_of(loader) == [[n] for n in range(4)]


@with_workers
@pytest.mark.parametrize(
    ("kinds", "is_init"),
    [
        (("ordinary", "ordinary"), True),
        (("locked", None), True),
        ((None, "exit"), True),
        ((None, "stop"), True),
        (("ordinary", None), False),
        (("odd", "locked"), False),
    ],
)
def test_worker_that_could_not_begin_ends_the_epoch(seat, kinds, is_init):
    """By its ``worker_init_fn`` or the ``iter()`` of its iterable. The loop has one error, in each
    epoch, and nobody takes it for a whole one; the batches before it are whole. The workers end,
    though somebody keeps the iterator."""
    loader, where = seat.loader(FailingParts(kinds), persistent_workers=True), "in iter(FailingPart"
    if is_init:
        options = {"worker_init_fn": FailingInit(*kinds), "persistent_workers": True}
        loader, where = seat.loader(range(32), 4, **options), "in worker_init_fn("
    before, processes = loader_threads(), set(multiprocessing.active_children())
    for _ in range(2):
        iterator = iter(loader)
        *batches, error = outcomes_of(iterator)
        assert_threads_end([each for each in loader_threads() if each not in before])
        until(lambda: set(multiprocessing.active_children()) <= processes)
        assert next(iterator, None) is None
        assert where in notes_of(error)
        assert not any(isinstance(each, BaseException) for each in batches)
        if is_init:
            assert_kind(error, kinds[0] or kinds[1], seat)
            assert batches == [[*range(4 * n, 4 * n + 4)] for n in range(len(batches))]
            assert len(batches) < 8
        else:
            assert type(error) in [type(error_of(kind, "")) for kind in kinds if kind]


@in_every_seat
def test_error_of_load_state_dict_is_the_users(seat):
    """At ``iter()``, or on workers at the first batch, with the field of the state in a note."""
    loader = seat.loader(FailingStates())
    loader.state_dict()
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(BaseException, match=r"load_state_dict: workers\[0\]") as caught:
        list(loader)
    assert_kind(caught.value, "stop", seat)


@near
@pytest.mark.parametrize("hook", ["__getitem__", "__next__", "collate_fn"])
def test_exception_that_is_raised_again_and_again_keeps_one_note_of_where(seat, hook, monkeypatch):
    """Where it was raised last; it grows neither by notes nor, in a process, by frames."""
    kept = Plain("kept")
    monkeypatch.setattr(hooks, "error_of", lambda *_: kept)
    dataset = (FailingStream if hook == "__next__" else Failing)(["ordinary"] * 4, hook)
    notes, batches = [], iter(seat.loader(dataset, collate_fn=dataset.collate))
    for _ in range(len(dataset)):
        try:
            next(batches)
        except Plain as error:
            notes.append([*error.__notes__])
            error.with_traceback(None)  # whose frames the dataset would keep, and the loader
    assert [len(each) for each in notes] == [len(notes[0])] * 4
    assert all(sum(note.startswith("in the ") for note in each) <= 1 for each in notes)
    frames = {"\n".join(each).count("raise error_of(kind, where)") for each in notes}
    assert frames == ({1} if seat.are_processes else {0})


def no_text(self):
    raise RuntimeError("no text")


Mute = type("Mute", (Exception,), {"__str__": no_text})
Key = type("Key", (), {"__repr__": no_text, "shape": property(no_text)})


@in_seats(NONE, THREADS)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(Mute, {"batch_size": 3}), (KeyError, {"batch_size": None, "sampler": [Key()]})],
    ids=["error without a text", "index without a text"],
)
def test_note_never_replaces_the_error(seat, kind, options):
    """The user's own object arrives, as torch's loader without workers raises it."""
    error = kind()

    def fail(_):
        raise error

    for each in (NONE.peer, seat.loader):
        assert error_by(lambda each=each: next(iter(each(Made(fail), **options)))) is error
    skipping = seat.loader(Made(fail), **options, on_error="skip", error_budget=99)
    assert list(skipping) == []
    assert len(skipping.skipped) in (1, 12)
    # Its frames hold the loaders, which later tests would find among the live ones.
    error.with_traceback(None)


class Slotted(Exception):
    """Its pickle gives an exception of the same text, with another code."""

    __slots__ = ("__own", "code")

    def __init__(self, text, code=0):
        super().__init__(text)
        self.code, self.__own = code, threading.Lock()


class Level(ExceptionGroup):
    """A group of one's own."""


LEVELS = 200


def failing_in_kind(index):
    """Sample 0 has an error with slots, while another is handled; sample 1 one that cannot be sent;
    sample 2 a task group in a task group in ..., which fails at every level and with a cause."""
    if index == 0:
        try:
            raise KeyError("inner")
        except KeyError:
            raise Slotted("slotted", 7)  # noqa: B904  # as people write it
    error = Locked("innermost")
    for level in range(LEVELS if index == 2 else 0):
        error = Level(f"level {level}", [ValueError(level), error])
        error.__cause__ = KeyError(level)
    raise error


def leaves_of(error):
    """The errors in a group and in those inside it."""
    groups = [error]
    while groups:
        error = groups.pop()
        if isinstance(error, ExceptionGroup):
            groups += reversed(error.exceptions)
        else:
            yield error


@in_every_seat
def test_error_keeps_what_can_be_sent(seat):
    """Arguments, attributes and slots, and what was being handled; what cannot be sent from a
    process is named, and the text is the user's. Groups in groups come to some depth, and the
    errors of deeper ones all the same."""
    slotted, locked, group = outcomes_of(iter(seat.loader(Made(failing_in_kind, 3), 1)))
    assert (type(slotted), str(slotted), slotted.code) == (Slotted, "slotted", 7)
    assert (repr(slotted.__context__), slotted.__cause__) == ("KeyError('inner')", None)
    assert not slotted.__suppress_context__
    assert (type(locked), locked.args, locked.detail) == (Locked, ("innermost",), 17)
    if seat.are_processes:
        assert "without its attribute _Slotted__own, which" in notes_of(slotted)
        assert "without its attribute lock, which cannot be pickled" in notes_of(locked)
    assert (type(group), group.message) == (Level, "level 199")
    assert isinstance(group.__cause__, KeyError)
    assert group.exceptions[1].message == "level 198"
    *others, innermost = leaves_of(group)
    assert (type(innermost), innermost.detail) == (Locked, 17)
    assert [error.args for error in others] == [(n,) for n in reversed(range(LEVELS))]


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
    done = warm.run(["-W", "ignore", script])
    assert done.stdout == "True 3\n", done.stderr


class FailingPickle(Failing):
    """A dataset whose pickling raises."""

    def __reduce__(self):
        raise error_of(self.kinds[0], "__reduce__")


@in_seats(SERVED)
def test_error_of_pickling_the_dataset_is_the_users(seat):
    """``iter()`` raises it, with a note."""
    for kind in ("ordinary", "odd", "locked"):
        with pytest.raises(Exception, match="in pickling what a worker") as caught:
            iter(seat.loader(FailingPickle([kind], "")))
        assert_kind(caught.value, kind)
