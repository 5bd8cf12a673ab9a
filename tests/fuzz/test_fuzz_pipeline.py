"""Random pipelines under random use: nothing lost, nothing twice, no thread left, figures right."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support import gates
from support.fuzz import run_long, run_short
from support.inside import check_balance
from support.stages import Plan, add, evaluate, plans

from spdl_torch.errors import PipelineFailure, PipelineStopped
from spdl_torch.pipeline import PipelineBuilder

UNBOUNDED = 10_000
ADJUSTABLE = ("function", "dropping", "failing", "generator", "failing generator")
"""What has threads of its own, whose number may change while it runs."""


class PipelineMachine(RuleBasedStateMachine):
    """One definition, built and run again and again; a plain loop knows what must come out."""

    @initialize(
        count=st.integers(0, 60),
        stages=st.lists(plans, max_size=4),
        sink=st.integers(1, 4),
        gate_at=st.none() | st.integers(0, 4),
        budget=st.sampled_from([UNBOUNDED, UNBOUNDED, 2, 0]),
        options=st.fixed_dictionaries(
            {"num_threads": st.none() | st.integers(1, 8), "stats": st.booleans()}
        ),
    )
    def define(self, count, stages, sink, gate_at, budget, options):
        self.scope = gates.switching()
        self.scope.__enter__()
        self.pool = ThreadPoolExecutor(3)
        self.gate = threading.Event()
        self.gate.set()
        self.budget, self.options, self.adjustable = budget, options, []
        self.lock, self.num_running = threading.Lock(), 0
        self.hands = gates.Hands() if options["stats"] else None
        self.builder = PipelineBuilder().add_source(range(count))
        self.expected, self.is_ordered = list(range(count)), True
        self.num_stages, self.num_failures = 0, []
        for place, stage in enumerate(stages):
            if place == gate_at:
                self.pipe_gate()
            self.pipe(stage)
        if gate_at is not None and gate_at >= len(stages):
            self.pipe_gate()
        self.builder.add_sink(sink)
        self.build()

    def pipe(self, plan):
        if "dropping the last" in plan.kind and not self.is_ordered:
            # Which ones are last is not known.
            plan = Plan("function", plan.concurrency, plan.input_order, plan.buffer_size, 1)
        name = f"stage {self.num_stages}"
        self.num_stages += 1
        add(self.builder, plan, self.pool, name=name)
        if plan.kind in ADJUSTABLE and plan.output_order == "input":
            self.adjustable.append(name)
        self.expected, num_failures = evaluate(plan, self.expected)
        self.num_failures.append(num_failures)
        shuffles = not plan.kind.startswith("aggregate") or "function" in plan.kind
        self.is_ordered = self.is_ordered and (plan.keeps_order or not shuffles)

    def pipe_gate(self):
        """A stage that stalls on command, and counts its threads."""
        self.builder.pipe(self.pass_gate, name="gate", concurrency=2, output_order="input")
        self.adjustable.append("gate")

    def pass_gate(self, item):
        with self.lock:
            self.num_running += 1
            assert self.num_running <= self.most_running
        assert self.gate.wait(gates.PATIENCE_SECONDS), "the machine forgot to open the gate"
        with self.lock:
            self.num_running -= 1
        return item

    def build(self):
        options = {"max_failures": self.budget, "tuner": self.hands, **self.options}
        self.pipeline = self.builder.build(**options)
        self.got, self.most_running = [], 2
        self.state = "running"

    # What can be done depends on how fast the threads are, and hypothesis must not: a rule that
    # does not apply does nothing.
    @property
    def is_flowing(self):
        return self.state == "running" and self.gate.is_set()

    @property
    def must_fail(self):
        return any(n > self.budget for n in self.num_failures)

    def take_one(self, timeout):
        """Takes one item, or learns that there is none."""
        try:
            with gates.quiet_log():
                self.got.append(self.pipeline.get_item(timeout))
        except EOFError:
            self.state = "ended"
            assert not self.must_fail, "too many failures, and nobody said so"
            assert gates.multiset(self.got) == gates.multiset(self.expected)
        except PipelineFailure:
            self.state = "failed"
            assert self.must_fail

    @rule(count=st.integers(1, 20) | st.just(UNBOUNDED))
    def take(self, count):
        for _ in range(count):
            if self.is_flowing:
                self.take_one(gates.PATIENCE_SECONDS)

    @rule(timeout=st.sampled_from([0.0, 0.0002, 0.002]))
    def take_with_timeout(self, timeout):
        if self.state == "running":
            with suppress(TimeoutError):  # nothing is lost by it: who takes all finds everything
                self.take_one(timeout)

    @rule(turn=st.sampled_from(["set", "clear"]))
    def turn_gate(self, turn):
        getattr(self.gate, turn)()

    @rule(place=st.integers(0, 9), count=st.integers(1, 6))
    def change(self, place, count):
        """So many threads, where the order stays whatever their number."""
        if self.hands is not None and self.adjustable:
            name = self.adjustable[place % len(self.adjustable)]
            self.most_running = max(self.most_running, count if name == "gate" else 0)
            self.hands.run.set_concurrency(name, count)

    @rule()
    def stop(self):
        self.gate.set()
        self.pipeline.stop(gates.PATIENCE_SECONDS)
        # The thread of a source that is over is not waited for.
        gates.until(lambda: not gates.spdl_threads())
        if self.state == "running":
            self.state = "stopped"
            with pytest.raises((PipelineStopped, PipelineFailure), match=r"stopped|failed"):
                self.pipeline.get_item(0)
        self.check_figures()

    @rule(how=st.sampled_from(["stop", "drop"]))
    def start_over(self, how):
        if how == "stop":
            self.stop()
        self.gate.set()
        self.pipeline = None
        gates.join_spdl_threads()
        self.build()

    @rule()
    def look(self):
        """Figures and timeline can be read in every state, and make sense."""
        stats, timeline = self.pipeline.snapshot(), self.pipeline.timeline()
        assert 0 <= stats.consumer_wait_ratio <= 1
        for stage in stats.stages:
            assert 0 <= stage.tasks.num_failures <= stage.tasks.num_tasks
        for turn in (turn for row in timeline.rows for turn in row.turns):
            assert turn.since_ns <= turn.started_ns <= turn.ended_ns <= turn.done_ns
        assert repr(self.pipeline).startswith("Pipeline [")

    @invariant()
    def what_came_is_right(self):
        if not hasattr(self, "got"):
            return
        assert not gates.multiset(self.got) - gates.multiset(self.expected)
        if self.is_ordered and self.budget == UNBOUNDED:
            assert self.got == self.expected[: len(self.got)]

    def check_figures(self):
        """On a run that is over: the counters agree with what was delivered."""
        check_balance(self.pipeline)
        if self.state != "ended" or not self.options["stats"]:
            return
        stages = self.pipeline.snapshot().stages
        assert sum(stage.tasks.num_failures for stage in stages) == sum(self.num_failures)

    def teardown(self):
        if not hasattr(self, "pipeline"):
            return
        with ExitStack() as ends:  # whatever is wrong, no thread goes on beside the next tests
            ends.callback(self.scope.__exit__, None, None, None)
            ends.callback(self.pool.shutdown)
            ends.callback(self.gate.set)
            self.stop()


def test_random_use_of_random_pipelines():
    """The short form, the same in every run."""
    with gates.quiet_log():
        run_short(PipelineMachine, examples=40, steps=25)


@pytest.mark.long
def test_random_use_of_random_pipelines_for_long(long_seconds):
    """Other pipelines and uses in every run."""
    with gates.quiet_log():
        run_long(PipelineMachine, steps=40, seconds=long_seconds)
