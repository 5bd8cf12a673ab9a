"""How fuzzers run: a small number of fixed examples, or other ones for a time."""

import gc
from time import monotonic

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

QUICK = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    # Explaining a failure runs it under a tracer, which threads and their locks do not bear well.
    phases=[phase for phase in Phase if phase is not Phase.explain],
)


def run_short(machine, *, examples, steps):
    """The same examples in every run."""
    gc.collect()
    gc.freeze()  # examples collect garbage; what earlier tests have left is not theirs
    settled = settings(QUICK, max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(machine, settings=settled)


def run_long(machine, *, steps, seconds):
    """Other examples in every run, until the time is over."""
    wild = settings(
        QUICK, derandomize=False, database=None, max_examples=100, stateful_step_count=steps
    )
    end, rounds = monotonic() + seconds, 0
    while monotonic() < end:
        run_state_machine_as_test(machine, settings=wild)
        rounds += 1
    print(f"{machine.__name__}: {rounds * 100} examples of up to {steps} steps")
