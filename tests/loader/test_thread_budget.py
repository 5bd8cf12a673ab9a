"""One budget of threads for all loaders of a process: how many run, how many exist, and that no
batch, order or loop's end depends on it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import Counter

import pytest
import torch
import torch.utils.data
from _forks import found_in_fork
from _inside import limit_of, lock_of, running_and_waiting, seats_of, threads_of, workers_of
from hypothesis import given
from hypothesis import strategies as st

from spdl_torch import DataLoader
from spdl_torch.data.workers import budget as module
from spdl_torch.data.workers.activity import Activity, Permits
from spdl_torch.data.workers.budget import ThreadBudget, budget
from spdl_torch.engine.channel.waits import ChannelClosed

NEVER = 1e6
PATIENCE_SECONDS = 30

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def two_cores(monkeypatch):
    """A machine of two cores, where nothing but an end of a job lets another one begin."""
    monkeypatch.setattr(budget, "_num_cores", 2)
    monkeypatch.setattr(budget, "_raised", 0)
    monkeypatch.setattr(module, "_LOOK_SECONDS", NEVER / 1e3)
    monkeypatch.setattr(module, "_STUCK_SECONDS", NEVER)


class SafeDraws(torch.utils.data.Dataset):
    """A number and a draw for each index; safe on threads."""

    thread_safe = True

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, torch.rand(())


class Gated(SafeDraws):
    """Samples that wait for a gate, and count how many of all loaders wait or work at once."""

    patience = PATIENCE_SECONDS

    def __init__(self, gate, count):
        self.gate = gate
        self.count = count

    def __getitem__(self, index):
        with self.count:
            assert self.gate.wait(self.patience)
            return super().__getitem__(index)


Gated.thread_safe = True  # a class says so of itself alone


class Count:
    """The number of threads inside a block, and the largest there was."""

    def __init__(self):
        self.changed = threading.Condition()
        self.now = self.most = 0

    def __enter__(self):
        with self.changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()

    def __exit__(self, *_):
        with self.changed:
            self.now -= 1

    def wait_for(self, number):
        with self.changed:
            assert self.changed.wait_for(lambda: self.now >= number, PATIENCE_SECONDS)


def await_end_of_threads(source):
    """Wait until the threads of a loader have ended, which were let go."""
    for thread in threads_of(source):
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads_of(source))


def num_workers_of(source):
    """How many workers a loader keeps."""
    return len(workers_of(source))


def loader(dataset=None, **options):
    """Of six batches, on four threads."""
    options = {"batch_size": 4, "num_workers": 4, "seed": 0, "isolation": "thread", **options}
    return DataLoader(dataset or SafeDraws(), **options)


def worker_threads():
    """Those of all loaders that are alive."""
    return [t for t in threading.enumerate() if t.name.startswith("spdl-loader-")]


def plain(batches):
    """Batches as comparable values."""
    return [(indices.tolist(), draws.tolist()) for indices, draws in batches]


EXPECTED = plain(loader(num_workers=0))


# -- how many run ----------------------------------------------------------------------------------


def test_jobs_of_a_loader_that_began_alone_are_all_that_run_beyond_the_cores(two_cores):
    """Ten loaders of four workers, whose jobs all stand at a gate: the first one's four have begun,
    no more come once it opens, and all batches are right."""
    gate, count = threading.Event(), Count()
    iterators = [iter(loader(Gated(gate, count)))]
    count.wait_for(4)
    iterators += [iter(loader(Gated(gate, count))) for _ in range(9)]
    gate.set()
    batches = list(zip(*iterators, strict=True))
    assert [plain(each) for each in zip(*batches, strict=True)] == [EXPECTED] * 10
    assert count.most == 4


def test_all_would_run_at_once_without_the_budget(two_cores, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(budget, "_num_cores", 40)
    gate, count = threading.Event(), Count()
    iterators = [iter(loader(Gated(gate, count))) for _ in range(10)]
    count.wait_for(40)
    gate.set()
    assert [plain(each) for each in iterators] == [EXPECTED] * 10


def test_loader_alone_has_all_of_its_workers(two_cores):
    """More than cores, as it was asked for; nothing needs permits."""
    gate, count = threading.Event(), Count()
    batches = iter(loader(Gated(gate, count), num_workers=12))
    count.wait_for(12)
    assert not budget.is_scarce
    gate.set()
    assert len(list(batches)) == 6


def test_loader_has_all_of_its_workers_while_no_other_has_a_job(two_cores):
    """As where training waits for validation: its loader is in an epoch, and has nothing to do."""
    training = iter(loader())
    expected = [next(training) for _ in range(5)]  # the last one may take its time
    gate, count = threading.Event(), Count()
    validation = iter(loader(Gated(gate, count), num_workers=12, batch_size=1))
    count.wait_for(12)
    assert budget.is_scarce
    gate.set()
    assert len(list(validation)) == 24
    assert plain([*expected, *training]) == EXPECTED


class Many(Gated):
    """As many as each of many loaders has workers, which thousands of threads start before."""

    patience = 5 * PATIENCE_SECONDS

    def __len__(self):
        return 32


Many.thread_safe = True
MANY = {"num_workers": 32, "batch_size": 1, "persistent_workers": True}
EXPECTED_OF_MANY = [[index] for index in range(32)]


def first_of_many(gate, count):
    """A loader whose only job stands at the gate, so that none of the others is ever alone."""
    return iter(loader(Many(gate, count), num_workers=1, batch_size=32))


def indices(batches):
    return [batch[0].tolist() for batch in batches]


@pytest.mark.parametrize("number", [20, pytest.param(100, marks=pytest.mark.long)])
def test_many_loaders_of_32_workers_stay_within_the_cores(two_cores, number):
    """All in an epoch at once: up to 3,200 threads, of which two have a job at any time. Everything
    is delivered, and everybody who waits is woken."""
    gate, own_gate, count = threading.Event(), threading.Event(), Count()
    first = first_of_many(own_gate, count)
    count.wait_for(1)
    iterators = [iter(loader(Many(gate, count), **MANY)) for _ in range(number)]
    count.wait_for(2)
    assert len(worker_threads()) == 32 * number + 1
    gate.set()
    batches = list(zip(*iterators, strict=True))
    own_gate.set()
    assert len(list(first)) == 1
    assert count.most == 2
    assert [indices(each) for each in zip(*batches, strict=True)] == [EXPECTED_OF_MANY] * number


def test_all_160_would_run_without_the_budget(two_cores, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(budget, "_num_cores", 1000)
    gate, count = threading.Event(), Count()
    iterators = [iter(loader(Many(gate, count), **MANY)) for _ in range(5)]
    count.wait_for(160)
    gate.set()
    assert [indices(each) for each in iterators] == [EXPECTED_OF_MANY] * 5


@pytest.mark.parametrize("number", [10, pytest.param(100, marks=pytest.mark.long)])
def test_many_loaders_one_after_another_have_their_32_workers(two_cores, number):
    """Each of them is alone: its own number stands. Of those that rest, two keep their threads."""
    gate, count = threading.Event(), Count()
    loaders = [loader(Many(gate, count), **MANY) for _ in range(number)]
    for each in loaders:
        batches = iter(each)
        count.wait_for(32)
        assert not budget.is_scarce
        gate.set()
        assert indices(batches) == EXPECTED_OF_MANY
        gate.clear()
    assert count.most == 32
    for each in loaders[:-2]:
        await_end_of_threads(each)
    assert len(worker_threads()) == 64


def barrier_loaders(parties):
    """Four loaders of two workers, whose samples all wait until ``parties`` of them have begun."""
    barrier = threading.Barrier(parties)

    class Together(SafeDraws):
        def __getitem__(self, index):
            barrier.wait(PATIENCE_SECONDS)
            return super().__getitem__(index)

    Together.thread_safe = True
    return [loader(Together(), num_workers=2, batch_size=24) for _ in range(4)]


def test_more_run_while_cores_and_gil_have_room(two_cores, monkeypatch):
    """Samples that wait for each other use neither: in the end all eight run."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)
    for batches in zip(*barrier_loaders(8), strict=True):
        assert [batch[0].tolist() for batch in batches] == [[*range(24)]] * 4


def test_nothing_waits_for_ever_where_there_is_no_room(two_cores, monkeypatch):
    """One more runs when nothing has ended for a while, until those that wait have what they wait
    for."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(module, "_STUCK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_has_room", lambda *_: False)
    for batches in zip(*barrier_loaders(8), strict=True):
        assert [batch[0].tolist() for batch in batches] == [[*range(24)]] * 4


class Nested(SafeDraws):
    """Samples that are sums over another loader's batches."""

    def __getitem__(self, index):
        inner = loader(num_workers=1, batch_size=8)
        return torch.tensor([sum(part.sum().item() for part, _ in inner), index])


Nested.thread_safe = True
SUM = sum(range(24))


def test_worker_gives_its_permit_away_while_it_waits_for_another_loader(two_cores):
    """Else the outer workers would hold all permits while the inner ones wait for one: here nobody
    comes to help."""
    rows = torch.cat(list(loader(Nested(), num_workers=2)))
    assert rows.tolist() == [[SUM, index] for index in range(24)]


def test_worker_that_kept_its_permit_would_be_helped_by_the_clock_alone(two_cores, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(module, "_STUCK_SECONDS", 0.01)
    monkeypatch.setattr(module, "_has_room", lambda *_: False)
    monkeypatch.setattr(budget, "lend", lambda: None)
    helped = []
    give = budget.give_permits
    monkeypatch.setattr(budget, "give_permits", lambda more=0: (helped.append(more), give(more)))
    rows = torch.cat(list(loader(Nested(), num_workers=2)))
    assert rows.tolist() == [[SUM, index] for index in range(24)]
    assert max(helped) > 0


def test_dropped_loaders_end_their_waiting_workers(two_cores):
    """Those that wait for a permit end by notification, while the jobs that run go on."""
    gate, count = threading.Event(), Count()
    first = iter(loader(Gated(gate, count)))
    count.wait_for(4)
    others = [iter(loader(Gated(gate, count))) for _ in range(3)]
    waiting = [t for t in worker_threads() if t not in threads_of(first)]
    assert len(waiting) == 12
    del others
    gc.collect()
    for thread in waiting:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    gate.set()
    assert plain(first) == EXPECTED
    assert (count.most, *running_and_waiting(budget)) == (4, 0, [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_child_has_a_budget_of_its_own(two_cores):
    """None of the parent's loaders count there, whatever the parent's locks were doing."""
    gate, count = threading.Event(), Count()
    iterators = [iter(loader(Gated(gate, count))) for _ in range(3)]
    count.wait_for(2)
    with lock_of(budget):
        found = found_in_fork(lambda: (budget.is_scarce, plain(loader(num_workers=2))))
    assert found == (False, EXPECTED)
    gate.set()
    assert [plain(each) for each in iterators] == [EXPECTED] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers start another way")
def test_loaders_in_processes_beside_them_are_right(two_cores):
    """Workers that wait for a permit do not keep the process from being forked."""
    gate, count = threading.Event(), Count()
    gate.set()
    iterators = [iter(loader(Gated(gate, count))) for _ in range(3)]
    apart = loader(isolation="process", num_workers=2)
    assert plain(apart) == EXPECTED
    assert [plain(each) for each in iterators] == [EXPECTED] * 3


class Pool:
    """What the budget knows of a pool."""

    def __init__(self, size):
        permits = Permits()
        self.activities = [Activity(permits) for _ in range(size)]


class Looks:
    """A budget of two cores whose clock and findings are the test's: two loaders of 32 workers, all
    of whose jobs want to run."""

    def __init__(self, monkeypatch):
        self.now, self.has_room = 1000.0, True
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "probe_counters", lambda **_: object())
        monkeypatch.setattr(module, "_has_room", lambda *_: self.has_room)
        self.budget = ThreadBudget(2)
        self.pools = [Pool(32), Pool(32)]
        for pool in self.pools:
            self.budget.begin(pool, 32)
        self.worker = self.pools[0].activities[0]

    def limit_after(self, seconds):
        """A job begins so much later: the limit, as it is then."""
        self.now += seconds
        self.budget.enter(self.worker, Open())
        self.budget.leave(self.worker)
        return limit_of(self.budget)


class Lookout(ThreadBudget):
    """A budget of one core that counts who looks after it, and never gives a permit for that."""

    def __init__(self):
        super().__init__(1)
        self.has_looked = threading.Condition()
        self.looks = Counter()

    def _look(self):
        with self.has_looked:
            self.looks[threading.current_thread().name] += 1
            self.has_looked.notify_all()

    def others_until(self, name):
        """How often others look until this thread has looked twenty times."""
        with self.has_looked:
            self.looks.clear()
            assert self.has_looked.wait_for(lambda: self.looks[name] >= 20, PATIENCE_SECONDS)
            return self.looks.total() - self.looks[name]


def test_one_of_those_that_wait_looks_for_all(monkeypatch):
    """The one that will wait longest and, where its loader ends, the one before it. Others may have
    been about to look, and look once more."""
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.001)
    lookout, pools = Lookout(), [Pool(1), Pool(3)]
    for pool in pools:
        lookout.begin(pool, len(pool.activities))
    (running,), waiting = pools[0].activities, pools[1].activities
    lookout.enter(running, Open())
    channels, ways = [Open(), Open(), Open()], {}

    def wait_for_permit(number):
        try:
            lookout.enter(waiting[number], channels[number])
            ways[number] = "permit"
            lookout.leave(waiting[number])
        except ChannelClosed:
            ways[number] = "closed"

    threads = []
    for number in range(3):
        threads.append(
            threading.Thread(target=wait_for_permit, args=(number,), name=str(number), daemon=True)
        )
        threads[number].start()
        assert lookout.others_until(str(number)) <= number
    channels[2].closed = True
    lookout.close(channels[2])
    assert lookout.others_until("1") == 0
    lookout.leave(running)
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert ways == {0: "permit", 1: "permit", 2: "closed"}
    assert running_and_waiting(lookout) == (0, [])


def test_limit_follows_what_cores_and_gil_have_room_for(monkeypatch):
    """It doubles up to all workers, and is halved down to the cores, though nobody ever waits."""
    looks = Looks(monkeypatch)
    assert [looks.limit_after(0.7) for _ in range(7)] == [2, 4, 8, 16, 32, 64, 64]
    looks.has_room = False
    assert [looks.limit_after(0.7) for _ in range(6)] == [32, 16, 8, 4, 2, 2]


def test_cores_that_were_idle_because_nobody_loaded_do_not_raise_the_limit(monkeypatch):
    """Short validations with long pauses: a look that spans a pause decides nothing."""
    looks = Looks(monkeypatch)
    assert [looks.limit_after(30.0) for _ in range(5)] == [2] * 5
    assert looks.limit_after(0.7) == 4


def test_what_storage_had_room_for_is_remembered(monkeypatch):
    """The next validation does not begin at the cores again."""
    looks = Looks(monkeypatch)
    assert [looks.limit_after(0.7) for _ in range(4)][-1] == 16
    looks.budget.end(looks.pools[1])
    assert not looks.budget.is_scarce
    looks.budget.begin(looks.pools[1], 32)
    assert (looks.budget.is_scarce, limit_of(looks.budget)) == (True, 16)


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    steps=st.lists(st.tuples(st.sampled_from("bex<>"), st.integers(0, 29)), max_size=60),
    num_cores=st.integers(1, 4),
)
def test_permits_are_counted_exactly(sizes, steps, num_cores):
    """Whatever begins, ends, runs and stops: those with a permit are those counted, never more than
    the cores once jobs need permits, unless they had begun before or are all of one pool."""
    counted = ThreadBudget(num_cores)
    pools = [Pool(size) for size in sizes]
    workers = [activity for pool in pools for activity in pool.activities]
    mates_of = {activity: pool.activities for pool in pools for activity in pool.activities}
    active = {}
    for step, number in steps:
        pool, worker = pools[number % len(pools)], workers[number % len(workers)]
        if step == "b":
            active[pool] = len(pool.activities)
            counted.begin(pool, len(pool.activities))
        elif step == "e":
            active.pop(pool, None)
            counted.end(pool)
        elif step == "<" and worker.job is None:
            others = {other for other in workers if other.has_permit} - set(mates_of[worker])
            if counted.is_scarce and running_and_waiting(counted)[0] >= num_cores and others:
                continue  # it would wait
            if counted.is_scarce:
                counted.enter(worker, Open())
            worker.job = object()
        elif step == ">" and worker.job is not None:
            worker.job = None
            if worker.has_permit:
                counted.leave(worker)
        assert counted.is_scarce == (len(active) > 1 and sum(active.values()) > num_cores)
        assert running_and_waiting(counted)[0] == sum(each.has_permit for each in workers)
        assert not counted.is_scarce or limit_of(counted) == num_cores
        for each in pools:
            permits = each.activities[0].permits
            assert permits.num_running == sum(worker.has_permit for worker in each.activities)
            assert permits.num_waiting == 0
    for worker in workers:
        if worker.has_permit:
            counted.leave(worker)
    assert running_and_waiting(counted)[0] == 0


class Open:
    closed = False


# -- how many exist --------------------------------------------------------------------------------


class Opened(SafeDraws):
    """Opens a file, or what stands for one, in each worker when it is first asked."""

    num_opened = 0
    handle = None

    def __getitem__(self, index):
        if self.handle is None:
            Opened.num_opened += 1
            self.handle = object()
        return super().__getitem__(index)


Opened.thread_safe = True


def two_epochs_of_many(number):
    """Two epochs of each of so many persistent loaders; the loaders, and all that they loaded."""
    loaders = [loader(Opened(), persistent_workers=True) for _ in range(number)]
    first = [plain(each) for each in loaders]
    num_opened = Opened.num_opened
    second = [plain(each) for each in loaders]
    assert Opened.num_opened <= num_opened + 4 * number
    return loaders, first, second


def test_threads_of_resting_loaders_are_let_go(monkeypatch):
    """Those beyond a number, oldest first. Every epoch is right, as is that after it was resumed;
    what a worker has opened stays open."""
    monkeypatch.setattr(module, "_MOST_RESTING", 12)
    monkeypatch.setattr(Opened, "num_opened", 0)
    loaders, first, second = two_epochs_of_many(20)
    expected = plain(loader(persistent_workers=True))
    again = loader(persistent_workers=True)
    assert [plain(again), plain(again)] == [first[0], second[0]]
    assert (first, second[0] != expected) == ([expected] * 20, True)
    assert second == [second[0]] * 20
    for each in loaders[:18]:
        await_end_of_threads(each)
    assert len(worker_threads()) == 12
    kept = [num_workers_of(each) for each in loaders]
    assert kept == [4] * 20
    assert Opened.num_opened <= 20 * 4  # each worker at most once, in all epochs


def test_they_would_all_stay_without_the_budget(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(module, "_MOST_RESTING", NEVER)
    loaders, _, _ = two_epochs_of_many(20)
    assert len(worker_threads()) >= 80
    del loaders


class Unvouched(SafeDraws):
    """Says nothing of itself: each worker has a private copy."""


@pytest.mark.parametrize("options", [{"rng": "worker"}, {"worker_init_fn": abs}])
def test_workers_whose_thread_may_matter_keep_it(monkeypatch, options):
    """Where workers have streams of their own or were set up by the program, and where each has a
    private copy: a handle may belong to its thread."""
    monkeypatch.setattr(module, "_MOST_RESTING", 0)
    loaders = [loader(persistent_workers=True, **options) for _ in range(3)]
    loaders += [loader(Unvouched(), persistent_workers=True) for _ in range(2)]
    for each in loaders:
        list(each)
    threads = [threads_of(each) for each in loaders]
    for each in loaders:
        list(each)
    assert [threads_of(each) for each in loaders] == threads
    assert all(thread.is_alive() for each in loaders for thread in threads_of(each))


def test_loader_with_retired_threads_is_freed_with_its_dataset(monkeypatch):
    """By reference counts alone, as others are."""
    monkeypatch.setattr(module, "_MOST_RESTING", 0)
    dataset = SafeDraws()
    alive = weakref.ref(dataset)
    source, other = loader(dataset, persistent_workers=True), loader(persistent_workers=True)
    list(source), list(other)
    threads = threads_of(source)
    seats_of(source).retire()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    gc.disable()
    try:
        del source, dataset, threads, thread
        assert alive() is None
    finally:
        gc.enable()


def test_retiring_races_with_the_next_epoch():
    """Another loader lets the threads go while this one's loop begins, again and again."""
    source, stop = loader(persistent_workers=True, seed=None), threading.Event()
    list(source)
    seats = seats_of(source)

    def retire():
        while not stop.is_set():
            seats.retire()

    rival = threading.Thread(target=retire)
    rival.start()
    try:
        for _ in range(60):
            assert [batch[0].tolist() for batch in source] == [each for each, _ in EXPECTED]
    finally:
        stop.set()
        rival.join()
    assert num_workers_of(source) == 4
