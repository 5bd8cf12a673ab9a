"""Objects that threads share hold when they meet at any step, as they do without a GIL."""

import contextlib
import gc
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from _datasets import Indices
from _gates import in_thread, pipeline_of, result_of
from _inside import backend_of, children_of, run_of, tuning_of
from _readings import reading, stage
from _seats import in_every_seat

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.autotune.tuner import Decision
from spdl_torch.data import mix
from spdl_torch.data.mixing import plan
from spdl_torch.engine.rings import Ring
from spdl_torch.engine.shared import LiveObjects, SharedCounter
from spdl_torch.io._cache.store import Store
from spdl_torch.loader import user_warnings
from spdl_torch.loader.backends.jobs import SharedJob
from spdl_torch.loader.checkpoint.epoch import Given
from spdl_torch.loader.stats.stats import EpochStats
from spdl_torch.machine import readings
from spdl_torch.observe import Cause, Probes, judge, make_report
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing.thread_safety import threads_interleaved

NUM_THREADS = 4
EACH = 200


def run_together(work):
    """Run ``work(number)`` on each of some threads, which change places between lines."""
    with threads_interleaved(), ThreadPoolExecutor(NUM_THREADS) as pool:
        together = threading.Barrier(NUM_THREADS)
        list(pool.map(lambda number: (together.wait(), work(number)), range(NUM_THREADS)))


@contextlib.contextmanager
def beside(work):
    """While the block runs, another thread does ``work`` again and again."""
    is_over, has_begun = threading.Event(), threading.Event()

    def run():
        while not is_over.is_set():
            work()
            has_begun.set()

    running = in_thread(run)
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        result_of(running)


def test_no_two_threads_get_the_same_number():
    """From a counter with a lock."""
    counter, taken = SharedCounter(), []
    run_together(lambda _: taken.extend(next(counter) for _ in range(EACH)))
    assert sorted(taken) == list(range(NUM_THREADS * EACH))


def test_each_sample_of_a_job_is_taken_once_and_one_worker_is_last():
    """Also where workers take and finish samples between any two lines of each other."""
    size = NUM_THREADS * EACH
    job = SharedJob(Given(0, list(range(size)), 0, False, 0))
    taken, finished, lasts = [], [], []

    def work(worker):
        number = job.take()
        while number is not None:
            taken.append(number)
            finished.append(number)
            number = job.take_after(worker)
        if job.last_worker == worker:
            lasts.append(list(finished))

    run_together(work)
    assert sorted(taken) == list(range(size))
    assert [len(each) for each in lasts] == [size]  # the last one finds all samples finished
    assert job.take() is None


class Thing:
    """Something that can be held weakly."""


class Counted:
    """A source of numbers that keeps its position."""

    def __init__(self, length):
        self.length, self.position = length, 0

    def __iter__(self):
        while self.position < self.length:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_live_objects_are_listed_while_others_come_and_go():
    """At each step of a reader, which is what another thread does; none is kept alive, and one that
    took the number of another that is gone is listed all the same."""
    things, kept = LiveObjects(), []

    def add():
        kept.append(Thing())
        things.add(kept[-1])

    for _ in range(10):
        add()
    for thing in things.now():
        add()
        del thing, kept[0]
    assert things.now()[-len(kept) :] == kept
    for _ in range(500):  # each is soon where the last one was
        kept.clear()
        gc.collect(0)
        add()
        assert things.now() == kept
    things.clear()
    assert things.now() == []


def test_ring_grows_while_somebody_reads_it():
    """Without a GIL a reader holds the bytes while the thread writes on: a bytearray that is held
    cannot grow."""
    ring = Ring(1 << 12, 0)
    with memoryview(ring._buffer) as held:
        for number in range(1_000):
            ring.add((0, number, number, number, 0), number, number, None, None)
        with pytest.raises(BufferError, match="cannot be re-sized"):
            held.obj.extend(b"0")  # so does the one that is held now
    turns, _, lost = ring.read()
    assert [turn.number for turn in turns] == list(range(1_000))
    assert lost == 0


HELD_UP = reading(0.5, stage("fetch", busy=0.98, cpu=0.25))
"""Training waits for threads that wait themselves, as for a GIL."""


@pytest.mark.parametrize("has_gil", [True, False])
def test_verdict_names_the_switch_of_a_python_that_can_do_without_its_gil(has_gil, monkeypatch):
    """An interpreter of the free-threaded build whose GIL is on; others have no such switch."""
    monkeypatch.setattr(readings.sysconfig, "get_config_var", lambda name: 1)
    monkeypatch.setattr(readings.sys, "_is_gil_enabled", lambda: has_gil, raising=False)
    assert readings.has_gil() is readings.could_go_without_gil() is has_gil
    verdict = judge(HELD_UP, probes=Probes(gil_seconds=6e-3, could_go_without_gil=has_gil))
    assert verdict.cause is Cause.GIL
    assert ("PYTHON_GIL=0" in verdict.action) is has_gil


LOOKS = (  # when the loop gets a batch, and what the report says then
    (1.0, HELD_UP, Probes(gil_seconds=6e-3)),
    (10.9, HELD_UP, Probes(gil_seconds=6e-3)),
    (11.0, HELD_UP, Probes(gil_seconds=1e-5, own_gil=True)),  # it is something else
    (21.0, replace(HELD_UP, elapsed_ns=10**9), Probes(gil_seconds=6e-3)),  # too young to say
    (23.5, HELD_UP, Probes(gil_seconds=6e-3, num_cores=4)),
    (99.0, HELD_UP, Probes(gil_seconds=6e-3)),
)


@in_every_seat
def test_threads_that_the_gil_holds_up_are_warned_of_once(seat, monkeypatch, caplog):
    """After ten seconds of loading, over several epochs, with what helps and how much. The loop
    that makes the batches itself, and processes, share no GIL with other workers."""
    caplog.set_level("WARNING", "spdl_torch.data")
    now = iter(LOOKS)
    look = next(now)
    monkeypatch.setattr(user_warnings, "perf_counter", lambda: look[0])
    monkeypatch.setattr(EpochStats, "report", lambda _: make_report(*look[1:], pooled=("fetch",)))
    loader, messages = seat.loader([0] * 6, batch_size=2), []
    for _ in range(2):
        for _ in loader:
            messages.append(len(caplog.messages))
            look = next(now, look)
    assert messages == ([0, 0, 0, 0, 1, 1] if seat.are_threads else [0] * 6)
    for message in caplog.messages:
        assert message.startswith("DataLoader: Training waits for data 50 % of the time")
        assert 'in processes (isolation="process"). At most 2.0x as fast; then' in message


MANY = 2_000
HALF_BAD = Indices(MANY, range(1, MANY, 2))


def test_skipped_samples_are_read_while_the_loop_goes_on():
    """By a recording, on a thread of its own; what is read is a beginning of what there is."""
    loader = DataLoader(HALF_BAD, batch_size=8, on_error="skip", error_budget=1.0)
    loop = in_thread(list, loader)
    while not loop.done():
        keys = [each.key for each in loader.skipped]
        assert keys == list(range(1, MANY, 2))[: len(keys)]
    assert len(result_of(loop)) == MANY // 8
    assert len(loader.skipped) == MANY // 2


def test_decisions_are_read_while_others_are_made():
    """Of tuning, on whichever thread asks: at most the last thousand, without one twice."""
    loader = DataLoader(HALF_BAD, num_workers="auto")
    tuning, numbers = tuning_of(loader), SharedCounter()

    def decide():
        tuning._report(Decision("workers", 1, next(numbers), 0.0, 0.0, "gained"), None)

    with beside(decide):
        for _ in range(MANY):
            found = [each.to_count for each in loader.decisions]
            assert found == list(range(found[0], found[0] + len(found)))
            assert len(found) <= 1000


def test_cache_is_described_while_others_fill_it(tmp_path):
    """By a report, on the loop's thread."""
    store, numbers = Store(str(tmp_path)), SharedCounter()

    def add():
        store.put(next(numbers), b"content")
        store.get(-1)  # which reads what was added
        for _ in range(100):
            store.get(0)

    with beside(add):
        for _ in range(500):
            remark = store.remark()
            found, calls = map(int, re.search(r"found (\d+) of (\d+) there", remark).groups())
            assert found < calls


def test_moments_of_note_are_read_while_others_come():
    """Such as failures, which several threads may note."""
    recorder = run_of(pipeline_of(range(3), str)).recorder
    with beside(lambda: recorder.note("moment", {})):
        for _ in range(100):
            assert {each.name for each in recorder.timeline().instants} == {"moment"}


def test_source_is_asked_for_its_state_while_it_goes_on():
    """On a thread of its own; a state is that of the loop's position."""
    dataset = PipelineDataset(PipelineBuilder().add_source(Counted(MANY)).add_sink(100))
    states = [dataset.state_dict() for _ in dataset]
    assert len(states) == MANY
    again = PipelineDataset(PipelineBuilder().add_source(Counted(MANY)).add_sink())
    again.load_state_dict(states[MANY - 10])
    assert list(again) == list(range(MANY - 9, MANY))


def test_first_pass_has_figures_while_it_ends():
    """Whatever has been noted of its end."""

    class Read(PipelineDataset):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if has_begun:
                assert self.snapshot().stages == ()

    has_begun = []
    dataset = Read(PipelineBuilder().add_source(range(3)).add_sink())
    has_begun.extend(dataset)
    assert has_begun == [0, 1, 2]


def test_rows_of_processes_are_read_while_they_are_kept():
    """At the end of an epoch: each once."""
    loader = DataLoader(Indices(4), num_workers=1, isolation="process")
    batches, found = iter(loader), []
    next(batches)
    stats, child = backend_of(batches).stats, children_of(batches)[0]
    copied = child.page.ring.copied

    def num_rows():
        return [each.stage for each in stats.timeline().rows].count("worker process")

    def reading():
        if not found:
            found.append(None)
            found.append(num_rows())
        return copied()

    child.page.ring.copied = reading
    assert len(list(batches)) == 3
    batches.close()
    assert [*found, num_rows()] == [None, 1, 1]


def test_mixture_is_pickled_while_threads_read_it(monkeypatch):
    """Far apart, so that places are noted."""
    monkeypatch.setattr(plan, "_MOST_BLOCKS", 0)
    sources, numbers = {"a": range(1 << 22), "b": range(1 << 22)}, SharedCounter()
    mixture = mix(sources)
    with beside(lambda: mixture[next(numbers) % 512 * plan.BLOCK_LENGTH]):
        for _ in range(MANY):
            pickle.dumps(mixture)
