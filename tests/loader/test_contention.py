"""Workers that only contend for the GIL run one at a time; nothing else changes."""

import itertools
import threading
from contextlib import contextmanager

import pytest
import torch
from _datasets import MapData
from _gates import until
from _inside import crew_of, seats_of, shift_of
from _loader_helpers import (
    PATIENCE_SECONDS,
    assert_threads_end,
    frozen,
    torch_loader,
)
from _loader_helpers import ThreadLoader as DataLoader
from _readings import shown
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from spdl_torch.data.workers import contention as contention_module
from spdl_torch.data.workers import counts as counts_module
from spdl_torch.data.workers.activity import Activity
from spdl_torch.data.workers.contention import Contention, Spell
from spdl_torch.machine.probes import probe_counters

MS = 1_000_000
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.skipif(not contention_module.CAN_COUNT, reason="threads' switches are not counted"),
]


class Machine:
    """Clocks and counters of threads, to be set."""

    def __init__(self):
        self.now = 0
        self.cpu_s = self.switches = 0

    def getrusage(self, _):
        return self

    @property
    def ru_utime(self):
        return self.cpu_s

    ru_stime = 0.0

    @property
    def ru_nvcsw(self):
        return self.switches


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(contention_module, "getrusage", made.getrusage)
    monkeypatch.setattr(contention_module, "perf_counter_ns", lambda: made.now)
    return made


def new_contention(num_workers=2):
    activities = [Activity() for _ in range(num_workers)]
    return Contention(activities, shares_jobs=True), activities


def work(contention, machine, workers, *, ms, switches=100, cpu=0.55, samples=100):
    """Each of ``workers`` does a job of ``samples``, all in the same ``ms`` milliseconds."""
    spells = [contention.enter() for _ in workers]
    machine.now += int(ms * MS)
    for worker, spell in zip(workers, spells, strict=True):
        # The one fake thread has done what each of them has.
        machine.cpu_s, machine.switches = spell.cpu_s, spell.switches
        machine.cpu_s += cpu * ms / 1e3
        machine.switches += switches
        contention.leave(worker, spell, samples, samples)


def contention_until_alone(machine):
    contention, activities = new_contention()
    for _ in range(30):
        if contention.alone is not None:
            return contention, activities
        work(contention, machine, [0, 1], ms=10)
    raise AssertionError("they go on together")


def test_one_is_tried_alone_where_threads_give_up_the_processor_all_the_time(machine):
    """10 switches in a millisecond: whoever ends the window goes on alone."""
    contention, _ = contention_until_alone(machine)
    assert contention.alone in (0, 1)
    assert contention.hands(list(range(100)), 2) == 1


@pytest.mark.parametrize(
    ("workers", "usage"),
    [
        ([0, 1], {"switches": 30}),
        ([0, 1], {"cpu": 0.3}),
        ([0, 1], {"cpu": 0.9}),
        ([0], {"cpu": 1.0}),
        ([0, 1], {"ms": 100, "switches": 1000}),
    ],
    ids=["few switches", "they wait", "side by side", "no other works", "long batches"],
)
def test_others_work_together(machine, workers, usage):
    """Few switches, storage that is waited for, real gain, one worker, batches that take long."""
    contention, _ = new_contention()
    for _ in range(100):
        work(contention, machine, workers, **{"ms": 10, **usage})
    assert contention.alone is None


def test_one_stays_alone_while_it_makes_more_and_is_tried_again_later(machine):
    """Ever more rarely."""
    contention, _ = contention_until_alone(machine)
    held = []
    for _ in range(3):
        start, (alone,) = machine.now, {contention.alone}
        while contention.alone is not None:
            work(contention, machine, [alone], ms=2, switches=0, cpu=1.0)
        held.append(machine.now - start)
        while contention.alone is None:
            work(contention, machine, [0, 1], ms=10)
    first, second, third = held
    assert 1000 * MS <= first < 1.5 * second < 3 * third


def test_they_work_together_again_where_one_alone_makes_less(machine):
    """And the next trial comes later than the one before."""
    contention, _ = contention_until_alone(machine)
    waited = []
    for _ in range(3):
        alone = contention.alone
        while contention.alone is not None:
            work(contention, machine, [alone], ms=9, switches=0, cpu=1.0)  # two made 200 in 10
        start = machine.now
        while contention.alone is None:
            work(contention, machine, [0, 1], ms=10)
        waited.append(machine.now - start)
    first, second, third = waited
    assert 900 * MS <= first < 0.6 * second
    assert second < 0.6 * third


def test_hopeless_trial_ends_with_its_first_batch(machine):
    """If one alone is twice as slow, it does not go on for a whole window."""
    contention, _ = contention_until_alone(machine)
    alone = contention.alone
    for _ in range(2):  # others may still have been at work in the first one
        work(contention, machine, [alone], ms=10, switches=0)
    assert contention.alone is None


def test_who_is_alone_is_not_measured_before_the_others_have_ended(machine):
    """Their last jobs do not count in the trial."""
    contention, _ = new_contention()
    for _ in range(3):
        work(contention, machine, [0, 1], ms=10)
    late = contention.enter()  # of worker 1, with a job that takes long
    while contention.alone is None:
        work(contention, machine, [0, 1], ms=10)
    alone = contention.alone
    for _ in range(100):
        work(contention, machine, [alone], ms=9, switches=0)  # which would end the trial
    assert contention.alone == alone
    contention.leave(1, late, 100, 100)
    for _ in range(20):
        work(contention, machine, [alone], ms=9, switches=0)
    assert contention.alone is None


def test_who_leaves_does_not_stay_alone(machine):
    """The others go on."""
    contention, _ = contention_until_alone(machine)
    contention.gone(1 - contention.alone)
    assert contention.alone is not None
    contention.gone(contention.alone)
    assert contention.alone is None


def test_who_was_stuck_alone_is_never_left_alone_again(machine, monkeypatch):
    """Nor by jobs that began before."""
    contention, activities = new_contention()
    late = contention.enter()  # of worker 1; while it lasts, no trial begins
    while contention.alone is None:
        work(contention, machine, [0, 0], ms=10)
    for _ in range(8):
        work(contention, machine, [0], ms=10, cpu=1.1, switches=200)
    monkeypatch.setattr(contention_module, "_LOOK_SECONDS", 0.001)
    activities[0].since_ns, activities[0].job = machine.now, object()
    machine.now += 10 * MS
    contention.wait(1)  # until it has looked after the one that is alone
    machine.cpu_s, machine.switches = late.cpu_s, late.switches
    contention.leave(1, late, 100, 100)
    assert contention.alone is None


def test_small_batches_are_not_shared(machine):
    """Below a millisecond; a first one is, as nothing is known of it."""
    contention, _ = new_contention()
    assert contention.hands([1, 2, 3], 2) == 2
    contention.leave(0, Spell(machine.now - 3 * MS), 3, 3)
    assert contention.hands([1, 2, 3], 2) == 2
    contention.leave(0, Spell(machine.now - MS // 2), 3, 3)
    assert contention.hands([1, 2, 3], 2) == 1
    assert contention.hands({1, 2, 3}, 2) == 1


# -- real threads ------------------------------------------------------------------------------


def _is_full(window):
    return window.jobs >= 2 and window.samples > 0


@contextmanager
def soon_alone(*, hold_ns=60_000 * MS):
    """Loaders with several workers leave one alone from the first jobs on; at least so long."""
    with pytest.MonkeyPatch.context() as patch:
        window = contention_module._Window
        patch.setattr(window, "is_full", property(_is_full))
        patch.setattr(window, "is_contended", True)
        patch.setattr(contention_module, "_GAIN", 0.0)
        patch.setattr(contention_module, "_FIRST_HOLD_NS", hold_ns)
        patch.setattr(contention_module, "_LONGEST_HOLD_NS", hold_ns)
        yield


def epochs(loader):
    """Two passes, with the errors that came in place of batches."""
    events = []
    for _ in range(2):
        batches = iter(loader)
        while True:
            try:
                events.append(frozen(next(batches)))
            except StopIteration:
                break
            except Exception as error:
                events.append((type(error), str(error)))
    return events


@settings(deadline=None, max_examples=30)
@given(
    hold_ns=st.sampled_from([0, MS, 60_000 * MS]),
    batch_size=st.none() | st.integers(1, 9),
    num_workers=st.sampled_from([2, 3, 8]),
    persistent=st.booleans(),
    bad=st.dictionaries(st.integers(0, 99), st.sampled_from([ValueError, KeyError]), max_size=3),
)
def test_batches_do_not_depend_on_it(hold_ns, batch_size, num_workers, persistent, bad):
    """Order, values and errors are torch's."""

    def loader(make, **options):
        order = RandomSampler(range(100), generator=torch.Generator().manual_seed(3))
        return make(MapData(100, dict(bad)), batch_size, sampler=order, **options)

    theirs = epochs(loader(torch_loader))
    ours = loader(DataLoader, num_workers=num_workers, persistent_workers=persistent)
    with soon_alone(hold_ns=hold_ns):
        assert epochs(ours) == theirs


class Meeting:
    """Samples that come in twos: the first one waits for the second."""

    def __init__(self, length, meeting):
        self.length = length
        self.barrier = threading.Barrier(2)
        self.meeting = meeting  # from this sample on

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index >= self.meeting:
            self.barrier.wait(4 * PATIENCE_SECONDS)
        return index


def test_workers_that_wait_for_each_other_are_not_kept_apart():
    """Who is stuck alone for a second gets company."""
    loader = DataLoader(Meeting(40, meeting=32), batch_size=1, num_workers=2)
    with soon_alone():
        assert [int(batch) for batch in loader] == list(range(40))


def test_threads_end_wherever_they_wait():
    """One at its queue, the others beside it: break, and the end of an epoch."""
    loader = DataLoader(MapData(100), batch_size=1, num_workers=4)
    with soon_alone():
        for number, _ in enumerate(loader):
            if number == 50:
                break
        assert_threads_end()
        assert len(list(loader)) == 100
        assert_threads_end()


def test_report_says_that_one_works_at_a_time():
    """One worker is busy; those that are parked do not count, nor would more of them help."""
    loader = DataLoader(MapData(40_000), batch_size=4, num_workers=4)
    with soon_alone():
        # In the mean: four threads were there at the beginning, which may have taken its time. A
        # worker that the system kept waiting for a second is not left alone again in that epoch.
        for number, _ in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
            if number % 300 != 299:
                continue
            report = loader.report()
            fetch = report.stats.stages[0]
            if fetch.concurrency == 1 and report.probes.one_at_a_time:
                break
    assert fetch.thread_time < 2 * report.stats.elapsed  # four threads were there
    assert "one worker at a time" in shown(report)


def test_figures_are_of_one_moment(monkeypatch):
    """Threads' time and the part of it for which they were parked, however long it takes to read
    the rest: one worker was there all the time."""
    batches = iter(DataLoader(MapData(40_000), batch_size=4, num_workers=4))

    def read_slowly(**_):
        counters = probe_counters()
        long_ns = 4 * (counters.wall_ns - began_ns)
        until(lambda: shift.parked_ns() > long_ns)
        return counters

    with soon_alone():
        shift = shift_of(batches)
        while shift.contention.alone is None:
            next(batches)
        began_ns = seats_of(batches).counts.readings().probes_before.wall_ns
        monkeypatch.setattr(counts_module, "probe_counters", read_slowly)
        stats = crew_of(batches).stats.snapshot()
        del batches
    assert stats.stages[0].thread_time > stats.elapsed
