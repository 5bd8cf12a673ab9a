"""Pipelines and other iterables in a child process, which imports this file, too."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import threading
from functools import partial
from itertools import count, islice

import numpy as np
import psutil
import pytest
import torch
from support import warm
from support.at_call import AtCall, TooLate
from support.datasets import Coded
from support.gates import PATIENCE_SECONDS, same, until
from support.isolated import nothing_left, num_mapped_slabs

from spdl_torch.data import iterate_in_subprocess, run_pipeline_in_subprocess
from spdl_torch.errors import PipelineFailure, PipelineStopped, UnsupportedOptionError
from spdl_torch.observe import Report
from spdl_torch.pipeline import PipelineBuilder, StatsQueue

__all__ = ["nothing_left"]

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="counts children and descriptors"),
    pytest.mark.usefixtures("quiet"),
]


class Epochs:
    """``size`` items, distinct from those of all other epochs; ``bad``: the epoch that fails."""

    def __init__(self, size, bad=None):
        self.size, self.bad = size, bad
        self.epoch = -1

    def items(self, epoch):
        return list(range(epoch * 1000, epoch * 1000 + self.size))

    def __iter__(self):
        self.epoch += 1
        for number, item in enumerate(self.items(self.epoch)):
            if self.epoch == self.bad and number == 1:
                raise Coded(7, "source")
            yield item


def in_child(source, *ops, continuous=False, name=None, **options):
    """A pipeline in a child."""
    builder = PipelineBuilder().add_source(source, continuous=continuous)
    for op in ops:
        builder.pipe(op, name=name)
    config = builder.add_sink(2).get_config()
    return run_pipeline_in_subprocess(config, num_threads=2, **options)


def pids():
    return [p.pid for p in multiprocessing.active_children() if p.name == "spdl-loader"]


def where(item):
    """Process and thread of the op."""
    return item, os.getpid(), threading.get_ident()


@pytest.mark.parametrize("continuous", [False, True])
def test_one_child_serves_all_epochs(continuous):
    """No item crosses from one to the next. A continuous pipeline goes on where a loop was left
    early, on the same threads; another one is built anew for each pass."""
    source = Epochs(8)
    items = in_child(source, where, continuous=continuous)
    passes = [[*islice(items, 2)], *(list(items) for _ in range(3))]
    first, second, *others = [[item for item, _, _ in one] for one in passes]
    if continuous:
        assert [first + second, *others] == [source.items(n) for n in range(3)]
        assert len({(pid, thread) for one in passes for _, pid, thread in one}) == 1
    else:
        assert first == source.items(0)[:2]
        assert [second, *others] == [source.items(n) for n in range(1, 4)]
    assert {pid for one in passes for _, pid, _ in one} == set(pids()) != {os.getpid()}


def test_second_loop_ends_the_first():
    """A pipeline that is not continuous has one pass at a time."""
    items = in_child(range(9), same)
    first = iter(items)
    assert next(first) == 0
    assert list(items) == list(range(9))
    with pytest.raises(RuntimeError, match="run_pipeline_in_subprocess: another loop has begun"):
        next(first)


@pytest.mark.parametrize("continuous", [False, True])
def test_source_of_another_pipeline(continuous):
    """The pattern of SPDL's training programs: loading there, the rest of the stages here."""
    source = Epochs(5)
    inner = in_child(source, same, continuous=True)
    outer = PipelineBuilder().add_source(inner, continuous=continuous).pipe(same).aggregate(2)
    outer.add_sink(2)
    if continuous:
        with outer.build().auto_stop() as pipeline:
            epochs = [list(pipeline) for _ in range(3)]
            next(iter(pipeline))
    else:
        epochs = [list(outer.build()) for _ in range(3)]
    flat = [[item for group in epoch for item in group] for epoch in epochs]
    assert flat == [source.items(n) for n in range(3)]


def make_arrays(item):
    """Large and small ones: through shared memory and beside it."""
    return {
        "large": torch.full((300, 300), float(item)),
        "array": np.full((300, 300), item),
        "small": np.arange(3),
    }


def test_tensors_and_arrays_come_through_shared_memory():
    """As what they were; the loop may keep them, and write into them."""
    items = list(in_child(range(3), make_arrays))
    assert num_mapped_slabs() >= 3
    for number, item in enumerate(items):
        assert torch.equal(item["large"], torch.full((300, 300), float(number)))
        assert isinstance(item["array"], np.ndarray)
        assert (item["array"] == number).all()
        assert item["small"].tolist() == [0, 1, 2]
        item["array"][0, 0] = 7


def draw(_):
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def draws():
    for _ in range(3):
        yield draw(None)


def test_generators_begin_in_the_child_as_they_are_here():
    """For what iterates there, too. Those here are left alone."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    got, iterated = list(in_child(range(3), draw)), list(iterate_in_subprocess(draws))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert got == iterated == [draw(None) for _ in range(3)]


class Drawn:
    """Draws as it is made, and as it is iterated over."""

    def __init__(self):
        self.first = draw(None)

    def __iter__(self):
        yield self.first
        yield draw(None)


def seed_all():
    random.seed(4)
    np.random.seed(5)
    torch.manual_seed(6)


def test_what_an_initializer_seeds_is_what_is_drawn_from():
    """And nothing twice: what iterates goes on where ``fn`` has come to."""
    got = list(iterate_in_subprocess(Drawn, initializer=seed_all))
    seed_all()
    assert got == list(Drawn())


def settings(_):
    return os.environ.get("SPDL_T"), torch.get_num_threads()


def set_up(value):
    os.environ["SPDL_T"] = os.environ.get("SPDL_T", "") + value
    torch.set_num_threads(3)


def test_initializers_run_once_in_the_child_before_anything_else():
    """One or several; without one, stages do not start teams of threads."""
    assert list(in_child([0], settings)) == [(None, 1)]
    assert list(in_child([0], settings, initializer=partial(set_up, "a"))) == [("a", 3)]
    items = in_child([0], settings, initializer=[partial(set_up, value) for value in "ab"])
    assert [list(items), list(items)] == [[("ab", 3)]] * 2
    assert "SPDL_T" not in os.environ


def fail_on_odd(item):
    if item % 2:
        raise Coded(item, "op")
    return item


class NamedQueue(StatsQueue):
    """A queue class that can be sent."""


def test_options_and_figures_are_those_of_the_childs_pipeline():
    """Complete at the end of a pass; the report has the child's stages and this loop's wait."""
    options = {"queue_class": NamedQueue, "max_failures": -1, "report_stats_interval": -1}
    items = in_child(range(4), fail_on_odd, name="decode", **options)
    assert list(items) == [0, 2]
    (stage,) = items.snapshot().stages
    assert (stage.name, stage.tasks.num_tasks, stage.tasks.num_failures) == ("decode", 4, 2)
    assert isinstance(items.report(), Report)
    assert "decode" in str(items.report())


def test_failure_arrives_with_its_members():
    """They are the user's own, after the good items; the next pass is another one."""
    items = in_child(range(4), fail_on_odd, name="decode", max_failures=0)
    for _ in range(2):
        got = []
        with pytest.raises(PipelineFailure, match="stage 'decode': 1 of 2 tasks") as failure:
            got.extend(iter(items))
        assert got in ([0], [0, 2])  # with what was under way
        error = failure.value.exceptions[0]
        assert (type(error), error.code) == (Coded, 1)
        assert any("in stage 'decode'" in note for note in error.__notes__)
    assert len(pids()) == 1


def test_source_that_fails_in_an_epoch_fails_that_epoch_and_begins_anew():
    """A continuous pipeline that has failed is followed by another one."""
    source = Epochs(3, bad=1)
    items = in_child(source, same, continuous=True)
    assert list(items) == source.items(0)
    with pytest.raises(PipelineFailure, match="the source raised") as failure:
        list(items)
    assert failure.value.exceptions[0].args == (7, "source")
    assert list(items) == source.items(2)


@pytest.mark.usefixtures("_too_late")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_signal_that_cuts_off_a_wait_ends_an_epoch_with_the_process(number):
    """The next loop says so in words of the pipeline, whatever the handler has raised, and the one
    after it begins anew in another process."""
    source = Epochs(5)
    items = in_child(source, same, continuous=True)
    assert [*items, *islice(items, 1)] == source.items(0) + source.items(1)[:1]
    first = pids()
    for place in count(1):
        with pytest.raises((KeyboardInterrupt, TooLate)), AtCall(place, number) as at_call:
            next(iter(items))
        if "rings.py" in at_call.where:  # the first that the loader does for an item
            break
    with pytest.raises(PipelineStopped, match=r"^run_pipeline_in_subprocess: Ctrl-C") as stopped:
        list(items)
    assert "oader" not in str(stopped.value)
    assert list(items) == source.items(0)
    assert set(pids()).isdisjoint(first)


def fail_to_begin():
    raise Coded(3, "initializer")


def kill_on_two(item):
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


@pytest.mark.parametrize(
    ("op", "options", "error", "match"),
    [
        (same, {"initializer": fail_to_begin}, Coded, "3, 'initializer'"),
        (
            *(kill_on_two, {}, RuntimeError),
            r"run_pipeline_in_subprocess: the worker process \(pid \d+\) was killed by SIGKILL",
        ),
    ],
)
def test_what_ends_the_child_is_the_error_of_each_pass(op, options, error, match):
    """No pipeline runs in one that is not as it has to be; each pass has another one."""
    items = in_child(range(4), op, **options)
    for _ in range(2):
        with pytest.raises(error, match=match):
            list(items)


def pid_or_wait_for_ever(item):
    if item == 1:
        threading.Event().wait()
    return os.getpid()


def begun(items):
    """A pass with its first item, by a child that is up in time: while other programs have the
    cores, one may take longer than its timeout."""
    while True:
        a_pass = iter(items)
        try:
            return a_pass, next(a_pass)
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise


def test_timeout_ends_the_child_and_the_next_pass_has_another_one():
    """An op that never returns is in the message."""
    assert list(in_child([0], same)) == [0]  # the fork server runs: a child starts in no time
    items = in_child(range(3), pid_or_wait_for_ever, timeout=2)
    first_pass, first = begun(items)
    with pytest.raises(RuntimeError, match="run_pipeline_in_subprocess timed out after 2 seconds"):
        next(first_pass)
    second = begun(items)[1]
    assert first != second
    for pid in (first, second):  # they would give their ops 5 s
        os.kill(pid, signal.SIGKILL)


class Counter:
    """An iterable that knows how often it was iterated."""

    num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        return iter([self.num_passes] * 3)


NOT_PICKLED = (AttributeError, TypeError, pickle.PicklingError)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: in_child([1], lambda item: item), NOT_PICKLED, "lambda"),
        (lambda: in_child([threading.Lock()], same), NOT_PICKLED, "lock"),
        (lambda: iterate_in_subprocess(lambda: [1]), NOT_PICKLED, "lambda"),
        (
            lambda: in_child([1], same, mp_context="fork"),
            *(UnsupportedOptionError, 'run_pipeline_in_subprocess: mp_context must not be "fork"'),
        ),
        (lambda: iterate_in_subprocess(Counter, buffer_size=0), ValueError, "buffer_size must be"),
        (lambda: iterate_in_subprocess(Counter, timeout=0), ValueError, "timeout must be > 0"),
    ],
)
def test_what_cannot_be_run_there_is_refused_at_once(make, error, match):
    """With the part that is to be changed."""
    with pytest.raises(error, match=match):
        make()


def test_iterable_is_made_once_and_iterated_for_each_pass():
    """It may count; figures it has none, and the error says so."""
    items = iterate_in_subprocess(Counter, mp_context="forkserver", daemon=True)
    for ask, passes in ((items.snapshot, [[1] * 3, [2] * 3]), (items.report, [[3] * 3])):
        with pytest.raises(RuntimeError, match="iterate_in_subprocess: there are no figures"):
            ask()
        assert [list(items) for _ in passes] == passes


@pytest.mark.parametrize("take", [lambda items: None, lambda items: next(iter(items)), list])
def test_child_ends_when_the_iterable_is_dropped(take):
    """Before the first item, within an epoch and after it: nothing else ends it."""
    items = in_child(Epochs(50), same, continuous=True)
    (pid,) = pids()
    take(items)
    assert psutil.pid_exists(pid)
    del items
    until(lambda: not psutil.pid_exists(pid))


PROGRAM = """
import multiprocessing, os, signal, threading
from spdl_torch.data import run_pipeline_in_subprocess
from spdl_torch.pipeline import PipelineBuilder

def main():
    builder = PipelineBuilder().add_source(range(1000), continuous=True).pipe(abs)
    items = run_pipeline_in_subprocess(builder.add_sink().get_config(), num_threads=1)
    outer = PipelineBuilder().add_source(items, continuous=True).add_sink().build()
    first = outer.get_item()
    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    {end}

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("end", "expected", "last"),
    [
        ("globals().update(kept=(items, outer))", 0, ""),
        (
            "os.kill(0, signal.SIGINT); threading.Event().wait()",
            *(-signal.SIGINT, "KeyboardInterrupt"),
        ),
    ],
)
def test_nothing_is_left_when_the_program_ends(end, expected, last, tmp_path):
    """However it does, in the middle of an epoch, below another pipeline."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(end=end), encoding="utf-8")
    ends = {"start_new_session": True, "ends_whole": True}
    done = warm.run([file], timeout=2 * PATIENCE_SECONDS, **ends)
    assert done.returncode == expected, done.stderr
    assert done.stdout.split(), done.stderr
    until(lambda: not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split()))
    assert (done.stderr.splitlines() or [""])[-1].startswith(last)
    assert done.stderr.count("Traceback") == bool(last)
