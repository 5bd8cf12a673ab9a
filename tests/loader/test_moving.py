"""Workers move from threads to processes in the middle of an epoch, and rest while it is forked.

Where the loader moves, and back, is forced at a batch here; that it decides so by itself where the
GIL holds the threads up, and not where it does not, is shown on real datasets at the end.
"""

import contextlib
import functools
import gc
import itertools
import json
import multiprocessing
import os
import random
import threading
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _forks import end_at_once
from _gates import PATIENCE_SECONDS, spdl_threads, until
from _inside import crew_of, mover_of, placement_of, state_of
from _lazy_device import backends, machine
from _readings import shown
from _seats import start_children
from _trace_check import check_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from spdl_torch import DataLoader
from spdl_torch.__main__ import main
from spdl_torch.data.child_process import connection, process_seats
from spdl_torch.data.child_process import process as child_process
from spdl_torch.data.loader import held_up, trial
from spdl_torch.data.loader.mover import FOLLOWING, State
from spdl_torch.data.workers import fork_rest
from spdl_torch.data.workers.activity import Activity
from spdl_torch.data.workers.figures import Figures
from spdl_torch.data.workers.moving import Moving
from spdl_torch.observe import (
    Probes,
    SQLiteStatsWriter,
    entries_of,
    make_report,
    query_event_stats,
    query_task_stats,
    recording,
    report_of_file,
    tracing,
)
from spdl_torch.observe.verdict.causes import Cause

__all__ = ["backends"]

pytestmark = [
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(),
        reason="workers move where they can be forked",
    ),
    pytest.mark.usefixtures("forks_by_default"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

LENGTH, BATCH = 48, 4


class Draws(Dataset):
    """Samples with draws from each library's functions, safe on threads."""

    thread_safe = True

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        large = torch.full((70, 70), float(index))  # batches lie in shared memory
        return index, torch.rand(2), random.random(), np.random.rand(), large


def loader_of(dataset=None, **options):
    options = {"batch_size": BATCH, "num_workers": 2, "seed": 5} | options
    return DataLoader(Draws() if dataset is None else dataset, **options)


def rows_of(batches):
    """Return what can be compared and printed: of large parts the first column."""
    return [
        [part.reshape(len(batch[0]), -1)[:, :2].tolist() for part in batch] for batch in batches
    ]


def loop(iterator, moves_at, returns_at=None, length=None):
    """Return the batches of an epoch, or ``length`` of them, whose workers move before a batch, and
    perhaps return.
    """
    mover, batches = mover_of(iterator), []
    mover.due_seconds = float("inf")  # nothing by itself
    while True:
        number = len(batches)
        if number == length:
            return batches
        if number == moves_at:
            start_children(mover)
        is_tried = mover.state is State.TRIAL and not mover.num_threads_left
        if returns_at is not None and number >= returns_at and is_tried:
            mover.return_to_threads(crew_of(iterator))
        try:
            batches.append(next(iterator))
        except StopIteration:
            return batches
        mover.due_seconds = float("inf")


class HoldsUpForks:
    """Is deleted in a process that another thread forks, and then waits for ever."""

    def __init__(self):
        self.pid = os.getpid()

    def __del__(self):
        if os.getpid() != self.pid:
            threading.Event().wait()


def test_threads_keep_the_work_if_children_are_never_ready(monkeypatch):
    """The mover forks them, and what this thread keeps for itself is deleted in them. They are
    killed at once when they are not needed any more."""
    monkeypatch.setattr(connection, "_END_SECONDS", 10 * PATIENCE_SECONDS)
    local = threading.local()
    local.kept = HoldsUpForks()
    iterator = iter(loader_of(isolation="auto"))
    mover = mover_of(iterator)
    mover.go(State.STARTING)
    opening = threading.Thread(target=mover.hiring.open, args=(mover.key,))
    opening.start()
    opening.join()
    mover.due_seconds = 0.0
    pids = [child.connection.pid for child in mover.hiring.children.children.values()]
    assert all(pids)
    assert rows_of(iterator) == expected()
    assert mover.state is State.STARTING
    del local.kept, iterator, mover
    gc.collect()
    end = monotonic() + PATIENCE_SECONDS
    while any(child.pid in pids for child in multiprocessing.active_children()):
        assert monotonic() < end, "children that were never ready live on"
        threading.Event().wait(0.005)


@pytest.mark.parametrize("can_loop", [True, False])
@pytest.mark.parametrize("traced", [False, True])
def test_loop_forks_the_children_if_those_beside_it_are_never_ready(
    monkeypatch, tmp_path, traced, can_loop
):
    """They are copies of its thread, and keep what is its own. If they are not ready either, the
    threads keep the work."""
    monkeypatch.setattr(trial, "LONGEST_START_SECONDS", 0.0)
    locals_of = {"loop": threading.local(), "another": threading.local()}
    locals_of["loop"].kept = HoldsUpForks()
    done = threading.Event()
    if not can_loop:
        another = threading.Thread(target=keep_until, args=(locals_of["another"], done))
        another.start()
    with tracing(tmp_path / "trace.json") if traced else contextlib.nullcontext():
        iterator = iter(loader_of(isolation="auto"))
        mover = mover_of(iterator)
        mover.memory.is_on_trial = True
        mover.go(State.STARTING)
        opening = threading.Thread(target=mover.hiring.open, args=(mover.key,))
        opening.start()
        opening.join()
        mover.due_seconds = 0.0
        first = pids_of(mover.hiring.children)
        batches = [next(iterator)]
        assert not first & pids_of_all()
        if can_loop:
            monkeypatch.setattr(trial, "LONGEST_START_SECONDS", PATIENCE_SECONDS)
            end = monotonic() + PATIENCE_SECONDS
            while not mover.hiring.children.is_up:
                assert monotonic() < end, "children that are never ready"
                threading.Event().wait(0.001)
        else:
            second = pids_of(mover.hiring.children)
            batches.append(next(iterator))
            assert not second & pids_of_all()
        batches += iterator
    assert rows_of(batches) == expected()
    assert mover.state is (State.TRIAL if can_loop else State.STAYED)
    if not can_loop:
        assert "never began" in mover.memory.reason
        done.set()
        another.join()


def keep_until(local, done):
    local.kept = HoldsUpForks()
    done.wait()


def pids_of(children):
    return {child.connection.pid for child in children.children.values()}


def pids_of_all():
    return {child.pid for child in multiprocessing.active_children()}


@functools.cache
def expected(*, shuffle=False):
    generator = torch.Generator().manual_seed(4)
    return rows_of(loader_of(num_workers=0, shuffle=shuffle, generator=generator))


@pytest.mark.parametrize("moves_at", range(LENGTH // BATCH + 1))
def test_bits_and_order_stay_when_workers_move_at_any_batch(moves_at):
    """A move before every batch of the epoch changes neither bits nor order."""
    assert rows_of(loop(iter(loader_of()), moves_at)) == expected()


@pytest.mark.parametrize("returns_at", [None, 3, 7])
@pytest.mark.parametrize("moves_at", [0, 1, 5, LENGTH // BATCH])
def test_bits_and_order_stay_when_workers_move_beside_a_device(backends, moves_at, returns_at):
    """Threads and children have a stage each, for one transfer: what the children make is on the
    device, too, in its place, and all memory that was locked is the loader's in the end."""
    loader, threads = loader_of(device="cuda"), loader_of(isolation="thread")
    for number in (moves_at, None):
        batches = loop(iter(loader), number, returns_at)
        assert rows_of(batches) == rows_of(threads)
    assert sum(len(each.handed_over) for each in backends) == 2 * LENGTH // BATCH
    assert machine().violations == []
    del loader, batches
    backends.clear()
    gc.collect()
    until(lambda: machine().locked == {})


@settings(max_examples=8, deadline=None)
@given(
    moves_at=st.integers(0, 9),
    stay=st.integers(1, 9),
    num_workers=st.integers(1, 3),
    in_order=st.booleans(),
)
def test_bits_stay_when_workers_return(moves_at, stay, num_workers, in_order):
    """Nor does a trial that ends with the work back on the threads."""
    loader = loader_of(num_workers=num_workers, in_order=in_order)
    rows = rows_of(loop(iter(loader), moves_at, moves_at + stay))
    assert rows == expected() if in_order else sorted(rows) == sorted(expected())


def test_persistent_workers_stay_in_processes_in_the_next_epochs():
    """The epochs of persistent workers that moved equal those of threads."""
    options = {"persistent_workers": True, "shuffle": True}
    moving, threads = loader_of(**options), loader_of(**options, isolation="thread")
    for moves_at in (3, None, None):
        torch.manual_seed(1)
        rows = rows_of(loop(iter(moving), moves_at))
        torch.manual_seed(1)
        assert rows == rows_of(threads)
    assert mover_of(moving).state is State.TRIAL
    assert "process" in str(moving.report())


@pytest.mark.parametrize("returns_at", [None, 6])
def test_recording_has_every_sample_once(tmp_path, returns_at):
    """Those of the threads before the move, of the children, and of the threads again."""
    loader, path = loader_of(), tmp_path / "run.db"
    with recording(loader, path, interval_seconds=1e6):
        for _ in range(2):
            loop(iter(loader), 3, returns_at)
    rows = query_task_stats(path, "fetch")
    assert sum(row["num_tasks"] for row in rows) == 2 * LENGTH


@pytest.mark.parametrize("returns_at", [None, 6])
def test_recording_has_every_place_once(tmp_path, returns_at):
    """Where the workers lived, one after the other, in each epoch."""
    loader, path = loader_of(), tmp_path / "run.db"
    with recording(loader, path, interval_seconds=1e6):
        for _ in range(2):
            loop(iter(loader), 3, returns_at)
    events = query_event_stats(path, "placement")
    places = [0, 2] if returns_at is None else [0, 2, 0]
    assert [event.details["num_processes"] for event in events] == 2 * places
    moments = [event.timestamp for event in events]
    assert moments == sorted(set(moments))


def test_profile_after_the_epoch_has_the_rows_of_children_that_ended(tmp_path):
    """They ended with the epoch, and what they did was kept."""
    loader = loader_of(Slow())
    loop(iter(loader), 2)
    (timeline,) = loader.profile().timelines
    turns = {row.name: len(row.turns) for row in timeline.rows if row.role == "stage"}
    assert turns.keys() == {f"worker{each}[{n}]" for each in ("", " process") for n in range(2)}
    assert all(turns.values())


class Slow(Draws):
    """So that a batch takes long enough to be recorded at any time."""

    thread_safe = True

    def __getitem__(self, index):
        threading.Event().wait(0.001)
        return super().__getitem__(index)


ARRANGEMENTS = {
    "no workers": {"num_workers": 0},
    **{f"{n} threads": {"num_workers": n, "isolation": "thread"} for n in (1, 2, 7)},
    **{f"{n} processes": {"num_workers": n, "isolation": "process"} for n in (1, 2, 4)},
    "moves": {},
}


@settings(max_examples=15, deadline=None)
@given(
    history=st.lists(
        st.tuples(st.sampled_from(list(ARRANGEMENTS)), st.integers(0, 5), st.integers(0, 5)),
        min_size=1,
        max_size=5,
    ),
    last=st.sampled_from(list(ARRANGEMENTS)),
)
def test_an_epoch_goes_on_wherever_the_workers_are(history, last):
    """Without workers, on threads, in processes, before a move, after it: a state taken in one
    arrangement is taken up by any other one, with the same batches.
    """
    rows, state = [], None
    for arrangement, length, moves_at in (*history, (last, LENGTH // BATCH, 1)):
        generator = torch.Generator().manual_seed(4)
        loader = loader_of(shuffle=True, generator=generator, **ARRANGEMENTS[arrangement])
        if state is not None:
            loader.load_state_dict(state)
        if arrangement == "moves":
            batches = loop(iter(loader), moves_at, length=length)
        else:
            batches = list(itertools.islice(loader, length))
        rows += rows_of(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        if len(rows) == LENGTH // BATCH:
            break
    assert rows == expected(shuffle=True)


def test_user_error_arrives_from_where_the_workers_are():
    """The user's own exception, with the note that names the sample."""

    class Fails(Draws):
        thread_safe = True

        def __getitem__(self, index):
            if index == 30:
                raise KeyError("thirty")
            return super().__getitem__(index)

    iterator = iter(loader_of(Fails()))
    start_children(mover_of(iterator))
    with pytest.raises(KeyError, match="thirty") as caught:
        for _ in iterator:
            pass
    assert "sample index 30" in " ".join(caught.value.__notes__)


def fail_in(iterator):
    for _ in iterator:
        raise ZeroDivisionError("the loop's own")


@pytest.mark.parametrize("moment", ["starting", "trial", "returned"])
@pytest.mark.parametrize("way", ["drop", "error"])
def test_nothing_is_left_in_any_state_of_moving(moment, way):
    """No child, and no thread, however the loop ends."""
    before = {thread for thread in threading.enumerate() if thread.name != "spdl-probe"}
    iterator = iter(loader_of(Draws(400)))
    mover = mover_of(iterator)
    start_children(mover)
    if moment != "starting":
        next(iterator)
    while moment == "returned" and mover.num_threads_left:
        next(iterator)
    if moment == "returned":
        mover.return_to_threads(crew_of(iterator))
        next(iterator)
    children = [child.connection for child in mover.hiring.children.children.values()]
    threads = {thread for thread in spdl_threads() if thread.name != "spdl-probe"} - before
    assert any(thread.name.startswith("spdl-loader-") for thread in threads)
    if way == "error":
        with pytest.raises(ZeroDivisionError, match="the loop's own"):
            fail_in(iterator)
    del iterator, mover
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert all(child.is_over for child in children)
    left = {thread for thread in threading.enumerate() if thread.name != "spdl-probe"} - before
    assert not [thread for thread in left if thread.name.startswith("spdl-")]


def test_children_that_cannot_be_started_leave_the_work_to_the_threads(monkeypatch):
    """The threads go on, and the reason is kept."""

    def refuse(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(child_process, "_start", refuse)
    loader = loader_of()
    assert rows_of(loop(iter(loader), 3)) == expected()
    assert "no more processes" in state_of(loader).moving.reason


def test_moves_of_the_states_lead_from_the_first_to_an_end():
    """Every state is reached, and two are final."""
    assert set(FOLLOWING) == set(State)
    reached, new = set(), {State.THREADS}
    while new - reached:
        reached |= new
        new = {after for state in reached for after in FOLLOWING[state]}
    assert reached == set(State)
    assert {state for state, after in FOLLOWING.items() if not after} == {
        State.CHILDREN,
        State.STAYED,
    }


class Python(Dataset):
    """Pure Python, which holds the GIL all the time."""

    thread_safe = True

    def __init__(self, length=1_000_000):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return sum(i * i for i in range(3_000))


@pytest.fixture
def moves(monkeypatch):
    """Any verdict leads to a trial, whose gain is accepted: on a busy machine they are its own."""
    monkeypatch.setattr(held_up, "HOLDS_UP", tuple(Cause))
    monkeypatch.setattr(trial, "LEAST_WAIT", 0.0)
    monkeypatch.setattr(trial, "GAIN", 0.0)


def settle(loader):
    """Loop until the trial of processes is over, and a little more; return the iterator."""
    iterator = iter(loader)
    while not state_of(loader).moving.is_settled:
        next(iterator)
    for _ in range(20):
        next(iterator)
    return iterator


THREADS = "on 2 threads of the training process: Python says thread_safe = True."
TRIAL = "in 2 processes: the GIL held the threads up, and processes are on trial."
MOVED = "in 2 processes: the GIL held the threads up, and with processes the loop was"


@pytest.mark.usefixtures("moves")
def test_report_store_and_trace_show_the_move(tmp_path, capsys):
    """Where the workers lived, from when on and why, and what would bring them back to threads; the
    next epoch begins in processes."""
    loader, path = DataLoader(Python(), batch_size=4, num_workers=2), tmp_path / "run.db"
    iterator = settle(loader)
    live, profile = loader.report(), loader.profile()
    crew_of(iterator).stop()
    stopped = loader.profile()
    next(iter(loader))
    second = loader.report()

    assert [each.num_processes for each in live.placements] == [0, 2, 2]
    moments = [each.since for each in live.placements]
    assert moments == sorted(moments)
    assert live.placement.is_as(second.placement)
    assert len(second.placements) == 1

    with SQLiteStatsWriter(path) as writer:
        for report in (live, second):
            for entry in entries_of(report, name="train"):
                writer.log(entry)
    events = query_event_stats(path, "placement")
    assert [event.timestamp for event in events] == [*moments, second.placement.since]
    assert report_of_file(path).placements == live.placements
    assert main(["report", str(path)]) == 0
    for text in (str(live), capsys.readouterr().out):
        unwrapped = text.replace("\n" + " " * 9, " ")
        lines = [line for line in unwrapped.splitlines() if line.startswith("workers")]
        for line, place in zip(lines, (THREADS, TRIAL, MOVED), strict=True):
            assert place in line
        assert ["Threads would be as fast if" in line for line in lines] == [False, False, True]

    for each in (profile, stopped):  # their processes have ended since
        rows = {row.name: row for row in each.timelines[0].rows}
        kinds = [f"{kind}[{n}]" for kind in ("worker", "worker process") for n in range(2)]
        assert set(rows) == {*kinds, "training"}
        moves = [i for i in each.timelines[0].instants if i.name == "placement"]
        assert [i.details["num_processes"] for i in moves] == [0, 2, 2]
        assert moves[-1].details["reason"] == live.placement.reason
        for name in kinds[2:]:
            assert rows[name].turns[0].started_ns > moves[1].time_ns
        numbers = [turn.number for turn in rows["training"].turns if turn.number >= 0]
        assert numbers == sorted(set(numbers))
    assert check_trace(profile.write_trace(tmp_path / "t.json")).num_instants >= 3


def test_report_says_why_the_workers_stayed():
    """After a trial that gained nothing, in this epoch and in the next ones."""
    loader = loader_of(Draws(400), prefetch_factor=4)
    iterator = iter(loader)
    mover = mover_of(iterator)
    start_children(mover)
    while mover.num_threads_left:
        next(iterator)
    mover.memory.stays("the loop was 0.61 times as fast with processes")
    mover.return_to_threads(crew_of(iterator))
    next(iterator)
    for report in (loader.report(), (next(iter(loader)), loader.report())[1]):
        assert "and the loop was 0.61 times as fast with processes." in shown(report)
        assert report.placement.num_processes == 0


def test_threads_that_the_gil_does_not_hold_up_stay():
    """A dataset that waits for storage has nothing to gain."""

    class Waits(Python):
        thread_safe = True

        def __getitem__(self, index):
            threading.Event().wait(0.01)
            return index

    iterator = iter(DataLoader(Waits(), batch_size=4, num_workers=2))
    mover = mover_of(iterator)
    looks = []
    look = mover.look_at_threads
    mover.look_at_threads = lambda crew: (looks.append(crew), look(crew))
    while len(looks) < 2:
        next(iterator)
    assert mover.state is State.THREADS


@pytest.mark.parametrize(
    ("cpu", "gil_seconds", "is_held_up", "is_said"),
    [
        (0.3, 2e-4, True, True),  # CIFAR through Pillow on a busy machine
        (0.3, 1e-4, False, False),  # sleeps, and C code without the GIL
        (0.5, 2e-4, True, True),
        (0.61, 1e-4, True, False),  # CIFAR through Pillow on a quiet machine
        (0.75, 2e-4, False, False),  # more than one core: they run at the same time
        (0.1, 2e-4, False, False),  # they wait for storage
    ],
)
def test_threads_that_may_wait_for_the_gil_get_a_trial(
    monkeypatch, cpu, gil_seconds, is_held_up, is_said
):
    """Where the verdict names no cause: they use no more than a core together, and a thread that
    wakes up has to wait for the GIL a little longer than without any; or they use about a core and
    neither compute nor wait for storage, which a report cannot tell from a little of each. Readings
    as measured."""
    iterator = iter(DataLoader(Python(), batch_size=4, num_workers=2))
    next(iterator)
    figures = crew_of(iterator).stats
    report = figures.report()
    fetch, collate = report.stats.stages
    tasks = replace(fetch.tasks, ave_time=0.01, ave_cpu_time=0.01 * cpu)
    stages = (replace(fetch, busy_ratio=0.96, tasks=tasks), replace(collate, busy_ratio=0.01))
    stats = replace(report.stats, elapsed=2.0, consumer_wait_ratio=0.9, stages=stages)
    probes = Probes(gil_seconds=gil_seconds, run_delay_ratio=0.02, num_cores=2)
    made = make_report(stats, probes, pooled=report.pooled)
    assert made.verdict.cause in (Cause.UNKNOWN, Cause.IO)
    monkeypatch.setattr(figures, "figures", lambda: Figures(stats, probes))
    assert held_up.are_held_up(figures, mover_of(iterator).memory) == is_held_up
    assert ("turns" in made.verdict.action) == is_said
    assert ("Raise" in made.verdict.action) != is_said


class Lines(IterableDataset):
    thread_safe = True

    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("waits", "busy", "gil_seconds", "one_at_a_time", "is_held_up"),
    [
        (0.02, 0.9, 6e-3, False, True),  # the loop waits for the GIL in its own steps
        (0.02, 0.9, 1e-4, False, False),  # nobody waits for it
        (0.02, 0.3, 6e-3, False, False),  # the threads seldom want it
        (0.02, 0.9, 1e-4, True, False),  # one of them is enough
        (0.30, 0.9, 1e-4, True, True),  # and is not
    ],
)
def test_threads_that_keep_the_loop_from_the_gil_get_a_trial(
    monkeypatch, waits, busy, gil_seconds, one_at_a_time, is_held_up
):
    """It never waits for data then: batches are ready whenever it comes to ask for one."""
    iterator = iter(DataLoader(Python(), batch_size=4, num_workers=2))
    next(iterator)
    figures = crew_of(iterator).stats
    report = figures.report()
    fetch, collate = report.stats.stages
    stages = (replace(fetch, busy_ratio=busy), replace(collate, busy_ratio=0.01))
    stats = replace(report.stats, elapsed=2.0, consumer_wait_ratio=waits, stages=stages)
    probes = Probes(gil_seconds=gil_seconds, one_at_a_time=one_at_a_time, num_cores=2)
    monkeypatch.setattr(figures, "figures", lambda: Figures(stats, probes))
    assert held_up.are_held_up(figures, mover_of(iterator).memory) == is_held_up


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Draws(), {"isolation": "thread"}),
        (Draws(), {"rng": "worker"}),
        (Draws(), {"multiprocessing_context": "spawn"}),
        (Lines(), {"persistent_workers": True}),
    ],
)
def test_stays_on_threads_where_it_may_not_move(dataset, options):
    """Where the user or the kind of dataset forbids it."""
    options = {"batch_size": 4, "num_workers": 2} | options
    iterator = iter(DataLoader(dataset, **options))
    assert mover_of(iterator) is None
    next(iterator)


@pytest.mark.parametrize(
    ("dataset", "options", "why"),
    [
        (Draws(), {}, ""),
        (Draws(), {"isolation": "thread"}, ""),
        (Draws(), {"rng": "worker"}, "with rng='worker' each worker makes its own batches"),
        (Draws(), {"multiprocessing_context": "spawn"}, "processes would not be forked"),
        (Draws(), {"multiprocessing_context": "forkserver"}, "processes would not be forked"),
        (Draws(), {"device": "cuda:3"}, ""),
        (Lines(), {"persistent_workers": True}, "with persistent_workers=True each keeps its"),
    ],
)
def test_report_says_why_threads_that_the_gil_holds_up_may_not_move(dataset, options, why):
    """And which option loads in processes all the same."""
    loader = DataLoader(dataset, **{"batch_size": 4, "num_workers": 2} | options)
    for cause in Cause:
        report = SimpleNamespace(
            verdict=SimpleNamespace(cause=cause), placement=placement_of(loader)
        )
        remark = loader._remark_on_threads(report)
        is_said = bool(why) and cause is Cause.GIL
        assert is_said == bool(remark)
        assert is_said == ('isolation="process"' in remark)
        assert not is_said or why in remark


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("num_ranks", ["1", "1000"])
def test_stays_on_threads_where_there_are_no_cores(monkeypatch, num_ranks):
    """Children would take the one core from each other as threads do."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    monkeypatch.setattr(trial, "LOOK_SECONDS", 0.0)
    loader = loader_of(Draws(400))
    iterator = iter(loader)
    while not state_of(loader).moving.is_on_trial and not state_of(loader).moving.is_settled:
        next(iterator)
    assert ("only one core" in state_of(loader).moving.reason) == (num_ranks == "1000")


# -- over epochs -------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Items with draws; each worker has its share of them."""

    thread_safe = True

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for index in range(info.id, LENGTH, info.num_workers):
            yield index, torch.rand(2), random.random(), np.random.rand()


@settings(max_examples=25, deadline=None)
@given(
    is_iterable=st.booleans(),
    persistent=st.booleans(),
    num_workers=st.integers(1, 3),
    decisions=st.lists(st.sampled_from(["trial", "moves", "stays", None]), max_size=3),
    lengths=st.lists(st.integers(1, LENGTH), min_size=4, max_size=4),
)
def test_bits_stay_when_epochs_begin_elsewhere(
    is_iterable, persistent, num_workers, decisions, lengths
):
    """Before any epoch the loader may begin its trial, or decide; loops may end early."""
    options = {"num_workers": num_workers, "persistent_workers": persistent}
    data = Stream() if is_iterable else Draws()
    moving, threads = loader_of(data, **options), loader_of(data, **options, isolation="thread")
    memory = state_of(moving).moving
    for decision, length in zip([None, *decisions], lengths, strict=False):
        if decision == "trial" and not memory.is_settled:
            memory.is_on_trial = True
        elif decision == "moves" and memory.is_on_trial:
            memory.moved(2.0)
        elif decision == "stays" and memory.is_on_trial:
            memory.stays("the test wants it")
        rows = [rows_of(itertools.islice(loader, length)) for loader in (moving, threads)]
        assert rows[0] == rows[1]


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("persistent", [False, True])
def test_short_epochs_lead_to_a_trial_and_its_end(monkeypatch, persistent):
    """Each is too short to be judged by itself. Any outcome of the trial is a gain here: other
    programs may take the cores."""
    monkeypatch.setattr(trial, "GAIN", 0.0)
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.05)
    monkeypatch.setattr(trial, "LONG_TRIAL_SECONDS", 0.05)
    loader = DataLoader(
        Python(40), batch_size=4, num_workers=2, persistent_workers=persistent, seed=1
    )
    memory, placements = state_of(loader).moving, set()
    while not memory.is_settled:
        assert len(list(loader)) == 10
        placements.add(loader.report().placement.num_processes)
    assert memory.has_moved
    assert placements == {0, 2}
    assert len(list(loader)) == 10
    assert "with processes the loop was" in shown(loader.report())


@pytest.mark.usefixtures("moves")
def test_iterable_dataset_moves_between_epochs(monkeypatch):
    """Never within one, and not after the first, which warms up."""
    for name in ("LOOK_SECONDS", "TRIAL_SECONDS", "LONG_TRIAL_SECONDS"):
        monkeypatch.setattr(trial, name, 0.0)
    loader, seen = loader_of(Stream()), []
    while not state_of(loader).moving.is_settled:
        list(loader)
        assert len(loader.report().placements) == 1
        seen.append(loader.report().placement.num_processes)
    assert seen == sorted(seen)
    assert seen[:2] == [0, 0]
    assert seen[-1] == 2


SECONDS = st.floats(1e-3, 10.0)


@given(start=SECONDS, batch=SECONDS, warm=SECONDS, num_batches=st.integers(1, 50))
def test_gain_is_that_of_whole_epochs_without_the_first(start, batch, warm, num_batches):
    """Equal workers gain nothing, whatever warming up took; twice as slow ones gain half."""
    memory = Moving()
    for tally, factor in ((memory.threads, 1), (memory.children, 2)):
        for epoch_batch in (warm, batch, batch):
            tally.begin(factor * (start if epoch_batch is batch else start + warm))
            memory.begin_epoch()
            for number in range(num_batches):
                memory.count()
                if number:
                    tally.add(factor * epoch_batch)
    assert memory.gain == pytest.approx(0.5)


# -- rest while the process is forked ----------------------------------------------------------


LOCK = threading.Lock()


class Holds(Dataset):
    """Holds a lock of the process most of the time, as libraries do inside their calls."""

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        with LOCK:
            threading.Event().wait(0.002)
        return index


class Needs(Dataset):
    """Needs that lock in a child, where the thread that held it does not exist."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        is_free = LOCK.acquire(timeout=0.5)
        if is_free:
            LOCK.release()
        return is_free


def num_stuck(num_forks):
    """Return how many of the children found the lock held for ever."""
    holders = iter(DataLoader(Holds(), batch_size=2, num_workers=3, isolation="thread"))
    stuck = 0
    for _ in range(num_forks):
        next(holders)
        stuck += not all(next(iter(DataLoader(Needs(), batch_size=2, num_workers=1))))
    return stuck


def test_no_lock_of_a_worker_thread_stays_held_in_a_child():
    """Workers are between two jobs when the process is forked."""
    assert num_stuck(12) == 0


def test_without_the_rest_it_does(monkeypatch):
    """The control: the same forks beside workers that go on."""
    monkeypatch.setattr(child_process, "workers_at_rest", _Nothing)
    assert any(num_stuck(1) for _ in range(20))  # nearly always the first one


def test_a_fork_waits_for_a_long_sample_only_so_long(monkeypatch):
    """A worker that never finishes its job does not keep other loaders from starting."""
    monkeypatch.setattr(fork_rest, "_LONGEST_SECONDS", 0.05)
    entered, may_end = threading.Event(), threading.Event()

    class Blocks(Holds):
        def __getitem__(self, index):
            entered.set()
            assert may_end.wait(30)
            return index

    iterator = iter(DataLoader(Blocks(), batch_size=2, num_workers=1, isolation="thread"))
    assert entered.wait(30)
    assert [batch.tolist() for batch in DataLoader(Draws(4), num_workers=1, collate_fn=_first)]
    may_end.set()
    next(iterator)


def begins_between_two_forks():
    """Return whether a worker may begin a job when one of two forks at once has ended."""
    activity, begun = Activity(), threading.Event()

    def begin():
        fork_rest.begin_job(activity, "a job")
        begun.set()

    worker = threading.Thread(target=begin)
    with fork_rest.workers_at_rest():
        with fork_rest.workers_at_rest():
            worker.start()
        # It waits, or it has begun: what it will do is settled, and needs no wait.
        may_begin = fork_rest.may_work.is_set()
    assert begun.wait(30)
    worker.join()
    assert activity.job == "a job"
    return may_begin


def test_workers_rest_until_the_last_of_several_forks_has_ended():
    """Two loaders that start children on threads of their own fork at the same time."""
    assert not begins_between_two_forks()


def test_one_flag_for_all_forks_wakes_them_too_early(monkeypatch):
    """The control: the end of any fork counts as that of all."""

    class Forgets(set):
        def discard(self, _):
            self.clear()

    monkeypatch.setattr(fork_rest, "_forks", Forgets())
    assert begins_between_two_forks()


def _first(samples):
    return torch.tensor(samples[0][0])


class _Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


# -- what fails in children, and on no thread -----------------------------------------------------


class OfOneProcess(Draws):
    """Uses what a forked process does not have, as CUDA is; and has bad samples of its own."""

    thread_safe = True

    def __init__(self, fails_from=0, *, way="raise", bad=()):
        super().__init__()
        self.pid = os.getpid()
        self.fails_from, self.way, self.bad = fails_from, way, bad

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"{index} is bad")
        if os.getpid() != self.pid and index >= self.fails_from:
            if self.way == "die":
                end_at_once(3)
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return super().__getitem__(index)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("way", ["raise", "die"])
@pytest.mark.parametrize("fails_from", [0, 30])
def test_what_fails_in_children_alone_is_made_by_threads(fails_from, way, on_error):
    """No sample is lost or doubled, skipped or other, no error is seen, and they keep the work."""
    expected = rows_of(loader_of(isolation="thread"))
    loader = loader_of(OfOneProcess(fails_from, way=way), on_error=on_error)
    iterator = iter(loader)
    assert rows_of(loop(iterator, 2)) == expected
    assert mover_of(iterator).state is State.STAYED
    assert "a batch failed in a worker process alone" in loader.report().placement.reason
    assert not placement_of(loader).num_processes


@pytest.mark.parametrize("decision", ["stays", "moved"])
def test_children_may_die_just_before_the_trial_is_decided(monkeypatch, decision):
    """The threads make what they had, if they have the work back; if not, the death ends the epoch,
    as it does later."""
    monkeypatch.setattr(process_seats, "_MOST_REPLACED", 0)
    expected = rows_of(loader_of(isolation="thread"))
    loader = loader_of(OfOneProcess(20, way="die"))
    iterator = iter(loader)
    batches = loop(iterator, 1, length=4)
    mover = mover_of(iterator)
    children = mover.hiring.children
    until(lambda: children.loss is not None)
    if decision == "stays":
        mover.memory.stays("the loop was 0.61 times as fast with processes")
        mover.return_to_threads(crew_of(iterator))
        assert rows_of([*batches, *iterator]) == expected
        assert loader.report().placement.reason.count("0.61 times") == 1
    else:
        monkeypatch.setattr(trial, "GAIN", 0.0)
        monkeypatch.setattr(trial, "TRIAL_BATCHES", 0)
        monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.0)
        monkeypatch.setattr(trial, "LONG_TRIAL_SECONDS", 0.0)
        mover.memory.is_on_trial, mover.due_seconds = True, 0.0
        with pytest.raises(RuntimeError, match="ended by itself with exit code 3"):
            list(iterator)
        assert mover.state is State.CHILDREN


def test_what_fails_everywhere_leaves_the_trial_on():
    """A bad sample, which threads do not have either, says nothing about the children."""
    bad = (1, 17, 30)
    expected = rows_of(loader_of(OfOneProcess(bad=bad), isolation="thread", on_error="skip"))
    loader = loader_of(OfOneProcess(1000, bad=bad), on_error="skip")
    iterator = iter(loader)
    assert rows_of(loop(iterator, 2)) == expected
    assert mover_of(iterator).state is State.TRIAL
    assert loader.report().stats is not None


def test_error_of_a_batch_comes_from_the_threads_when_children_are_on_trial():
    """The user's own, with the lines that are the user's; what follows is as without it."""
    loader = loader_of(OfOneProcess(1000, bad=(17,)))
    iterator = iter(loader)
    assert len(loop(iterator, 2, length=4)) == 4
    with pytest.raises(ValueError, match="17 is bad") as caught:
        next(iterator)
    assert "raised in the worker process" not in "".join(caught.value.__notes__)
    assert [batch[0].tolist() for batch in iterator] == [
        list(range(start, start + BATCH)) for start in range(20, LENGTH, BATCH)
    ]


class FailsInChildren(Stream):
    """A stream of one process."""

    thread_safe = True

    def __init__(self, fails_at):
        super().__init__()
        self.pid, self.fails_at = os.getpid(), fails_at

    def __iter__(self):
        for number, item in enumerate(super().__iter__()):
            if os.getpid() != self.pid and number >= self.fails_at:
                raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
            yield item


@pytest.mark.parametrize("fails_at", [0, 9])
def test_stream_begins_again_on_threads_if_it_fails_in_children_at_once(fails_at):
    """Its workers divide it, so they can only begin again all together; later it is too late, and
    the next epoch is right.
    """
    whole = loader_of(Stream(), isolation="thread")
    loader = loader_of(FailsInChildren(fails_at))
    for epoch in range(3):
        expected = rows_of(whole)
        state_of(loader).moving.is_on_trial = epoch == 1
        if epoch == 1 and fails_at:
            with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA"):
                list(loader)
        else:
            assert rows_of(loader) == expected
    assert "in a worker process alone" in state_of(loader).moving.reason


class LateFailure(IterableDataset):
    """Two workers' items, of which the first worker's fail in its process, once the loop has had
    some of the second one's."""

    thread_safe = True

    def __init__(self):
        self.pid, self.may_fail = os.getpid(), multiprocessing.get_context("fork").Event()

    def __iter__(self):
        worker = get_worker_info().id
        if os.getpid() != self.pid and worker == 0:
            self.may_fail.wait(PATIENCE_SECONDS)
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return iter(range(100 * worker, 100 * worker + 16))


def take_all(iterator, seen):
    for batch in iterator:
        seen += batch.tolist()


def test_stream_out_of_order_does_not_begin_again_once_the_loop_has_had_a_batch():
    """No item comes twice: the error is the process's, and the next epoch is right."""
    dataset = LateFailure()
    loader = loader_of(dataset, in_order=False)
    state_of(loader).moving.is_on_trial = True
    iterator = iter(loader)
    seen = next(iterator).tolist()
    dataset.may_fail.set()
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA"):
        take_all(iterator, seen)
    assert len(set(seen)) == len(seen)
    assert min(seen) >= 100
    whole = [item for batch in loader for item in batch.tolist()]
    assert sorted(whole) == [*range(16), *range(100, 116)]


class OnDevice(Draws):
    """Its batches are on a device; there is none here, so on torch's own that is no memory."""

    thread_safe = True

    def __getitem__(self, index):
        return torch.empty(2, device="meta").as_subclass(Elsewhere)


class OnThisDevice(Draws):
    """Its batches are on the device that stands in for a GPU: that of the first of ``backends``."""

    thread_safe = True

    backends: list  # of the class: workers copy the dataset

    def __getitem__(self, index):
        (backend,) = self.backends
        with backend.on_copy_stream():
            return backend.empty(8).as_subclass(Elsewhere)


class Elsewhere(torch.Tensor):
    """A tensor on a GPU, as far as one can see."""

    is_cuda = True


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("is_on_device", [True, False])
def test_dataset_whose_batches_are_on_a_device_is_not_tried(monkeypatch, is_on_device):
    """In a forked process there is no device; a control shows that others are tried."""
    monkeypatch.setattr(trial, "LOOK_SECONDS", 0.0)
    loader = loader_of(OnDevice(400) if is_on_device else Draws(400), collate_fn=list)
    iterator = iter(loader)
    while not state_of(loader).moving.is_on_trial and not state_of(loader).moving.is_settled:
        next(iterator)
    assert state_of(loader).moving.is_settled is is_on_device
    assert ("batches are on a device" in state_of(loader).moving.reason) is is_on_device


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("is_on_device", [True, False])
def test_dataset_that_makes_its_batches_on_the_device_of_the_loader_is_not_tried(
    backends, monkeypatch, is_on_device
):
    """What the loader has copied there is no sign of it."""
    monkeypatch.setattr(trial, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(OnThisDevice, "backends", backends, raising=False)
    dataset = OnThisDevice(400) if is_on_device else Draws(400)
    loader = loader_of(dataset, collate_fn=list, device="cuda")
    iterator = iter(loader)
    while not state_of(loader).moving.is_on_trial and not state_of(loader).moving.is_settled:
        next(iterator)
    assert state_of(loader).moving.is_settled is is_on_device
    assert ("batches are on a device" in state_of(loader).moving.reason) is is_on_device
