"""Ctrl-C at the places of a batch's way to the loop while workers move: the loop goes on, each
sample comes once, each place of the workers is reported once, and nothing is left."""

import itertools
import math
import os
import re
import signal
import sys
import threading
from time import monotonic

import pytest
from _at_call import AtCall
from _ctrl_c import assert_nothing_is_left, belongings
from _datasets import SafeIndices
from _inside import crew_of, mover_of
from _loader_helpers import PATIENCE_SECONDS, assert_threads_end
from _seats import start_children
from test_moving import HoldsUpForks

from spdl_torch import DataLoader
from spdl_torch.data.child_process import process_seats, roster
from spdl_torch.data.loader import crew, held_up, hiring, mover, trial
from spdl_torch.data.loader.mover import State
from spdl_torch.observe.verdict.verdict import Cause

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="workers move where they can be forked"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

LENGTH, BATCH = 40, 4


class Life:
    """An epoch whose workers stand before a step of moving."""

    def __init__(self):
        self.loader = DataLoader(
            SafeIndices(LENGTH),
            BATCH,
            num_workers=2,
            multiprocessing_context="fork",
            prefetch_factor=2,
        )
        self.iterator = iter(self.loader)
        self.crew, self.mover = crew_of(self.iterator), mover_of(self.iterator)
        self.mover.due_seconds = math.inf  # nothing by itself
        self.seen = []
        self.kept = threading.local()
        self.take()

    def take(self):
        """Receive a batch."""
        self.seen += next(self.iterator).tolist()

    def watching(self):
        """Threads that the GIL holds up: the loop is about to have children started."""
        self.mover.due_seconds = 0.0

    def starting(self):
        """Children that are ready: the loop is about to let them have the work."""
        start_children(self.mover)

    def never_ready(self):
        """Children that never begin: the loop is about to fork others."""
        self.kept.held = HoldsUpForks()
        self.mover.go(State.STARTING)
        opening = threading.Thread(target=self.mover.hiring.open, args=(self.mover.key,))
        opening.start()
        opening.join()
        self.mover.due_seconds = 0.0

    def on_trial(self):
        """Children have the work, and the loop still gets the threads' batches."""
        start_children(self.mover)
        self.take()
        self.mover.due_seconds = math.inf

    def handed_over(self):
        """Children whose first batch is the next one."""
        self.on_trial()
        while self.mover.num_threads_left:
            self.take()

    def decided(self):
        """Children whose trial is about to end."""
        self.handed_over()
        self.mover.memory.is_on_trial = True
        self.mover.due_seconds = 0.0


class AtStep(AtCall):
    """Interrupts where the crew and its parts begin or end a call, and not further inside."""

    FILES = tuple(each.__file__ for each in (mover, hiring, process_seats, roster, crew))

    def _look(self, frame, event, argument):
        caller = frame if event == "c_return" else frame.f_back
        if caller is not None and caller.f_code.co_filename in self.FILES:
            super()._look(frame, event, argument)


STATES = {
    "watching": (Life.watching, 1.0),
    "starting": (Life.starting, 1.0),
    "never ready": (Life.never_ready, 1.0),
    "on trial": (Life.on_trial, 1.0),
    "handed over": (Life.handed_over, 1.0),
    "moves for good": (Life.decided, 0.0),
    "returns": (Life.decided, math.inf),
}
"""What precedes the interrupted step, and the gain from which children keep the work."""


@pytest.fixture
def moves(monkeypatch):
    """Every verdict leads to a trial, which ends with the first look at it."""
    monkeypatch.setattr(held_up, "HOLDS_UP", tuple(Cause))
    for name in ("LEAST_WAIT", "LOOK_SECONDS", "LEAST_BATCHES", "LONGEST_START_SECONDS"):
        monkeypatch.setattr(trial, name, 0)
    for name in ("TRIAL_SECONDS", "TRIAL_BATCHES", "TRIAL_EPOCHS", "LONG_TRIAL_SECONDS"):
        monkeypatch.setattr(trial, name, 0)
    # Ctrl-C in a finalizer is printed and dropped; pytest would keep it, and all it refers to.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)


def interrupted(state, place):
    """Go on after Ctrl-C at that place of the way from the state to the next batch; return the
    interrupt, and whether it came."""
    life, came, interrupt = Life(), False, AtStep(place)
    STATES[state][0](life)
    try:
        with interrupt:
            batch = next(life.iterator)
        life.seen += batch.tolist()
    except KeyboardInterrupt:
        came = True
    where, seen = f"{state}, {interrupt.where}", life.seen
    has_begun_again = False
    try:
        for batch in life.iterator:
            seen += batch.tolist()
    except RuntimeError as error:
        if not re.search(r"Ctrl-C came .*state_dict\(\) says", str(error), re.DOTALL):
            raise
        has_begun_again = True
        life.loader.load_state_dict(life.loader.state_dict())
        seen += [number for batch in life.loader for number in batch.tolist()]
    assert len(set(seen)) == len(seen), f"twice, {where}: {sorted(seen)}"
    assert len(seen) >= LENGTH - BATCH, f"missing, {where}: {sorted(seen)}"
    if not has_begun_again:
        moments = [each.since for each in life.loader.report().placements]
        assert moments == sorted(set(moments)), f"reported twice, {where}"
        before = life.crew.stats.reports_before()
        assert len({report.placement.since for report in before}) == len(before), where
    return interrupt, came


def belongings_at_rest():
    """Belongings once the children that a mover was just starting have ended, too."""
    end = monotonic() + PATIENCE_SECONDS
    while (found := belongings())["threads"] or found["processes"]:
        assert monotonic() < end, f"still there: {found}"
        threading.Event().wait(0.005)
    return found


def interrupt_everywhere(state, step):
    """At the calls that they make: only the batch that was awaited may be missing, and where
    more would be, an error says so."""
    interrupted(state, 0)
    assert_threads_end()
    before = belongings_at_rest()
    for place in itertools.count(1, step):
        interrupt, came = interrupted(state, place)
        assert_nothing_is_left(before, f"{state}, {interrupt.where}")
        if not came:
            break
    assert place > step, "there are places where it can come"


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("state", STATES)
def test_loop_goes_on_after_ctrl_c_while_workers_move(monkeypatch, state):
    """At some of the places, the same in every run."""
    monkeypatch.setattr(trial, "GAIN", STATES[state][1])
    interrupt_everywhere(state, 8)


@pytest.mark.long
@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("state", STATES)
def test_loop_goes_on_after_ctrl_c_at_every_place_while_workers_move(monkeypatch, state):
    """At all of them."""
    monkeypatch.setattr(trial, "GAIN", STATES[state][1])
    interrupt_everywhere(state, 1)


@pytest.mark.parametrize("name", ["starting", "returns"])
@pytest.mark.usefixtures("moves")
def test_work_is_handed_over_as_a_whole_or_not_at_all(monkeypatch, name):
    """Ctrl-C at every line of the hand-over itself leaves no job without a worker, and nobody at
    work of whom the report does not know."""
    monkeypatch.setattr(trial, "GAIN", STATES[name][1])
    steps = mover.Mover.hand_over, mover.Mover.return_to_threads, crew.Crew.hand_over
    codes = {step.__code__ for step in steps}
    for number in itertools.count(1):
        came = []

        def at_line(frame, event, argument, number=number, came=came):
            if frame.f_code not in codes:
                return None
            if event == "line":
                came.append(frame.f_lineno)
                if len(came) == number:
                    signal.raise_signal(signal.SIGINT)
            return at_line

        life = Life()
        STATES[name][0](life)
        before = sys.gettrace()
        try:
            sys.settrace(at_line)
            batch = next(life.iterator)
            life.seen += batch.tolist()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        for batch in life.iterator:
            life.seen += batch.tolist()
        assert len(set(life.seen)) == len(life.seen) >= LENGTH - BATCH, f"line {came[-1]}"
        moments = [each.since for each in life.loader.report().placements]
        assert moments == sorted(set(moments)), f"line {came[-1]}"
        if len(came) < number:
            break
    assert number > 5
