"""Nothing lost, nothing twice: random stage graphs against a plain sequential evaluation."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
from _gates import Boom, eager_switching, multiset, no_leak, quiet_log
from hypothesis import given, settings
from hypothesis import strategies as st

from spdl_torch.pipeline import PipelineBuilder

KINDS = (
    "function",
    "dropping",
    "failing",
    "generator",
    "failing generator",
    "async function",
    "async failing",
    "async generator",
    "executor function",
    "executor failing",
    "executor generator",
    "aggregate, disaggregate",
    "aggregate, function, disaggregate",
    "aggregate dropping the last, disaggregate",
)


@dataclass(frozen=True)
class Plan:
    """One random stage (or an aggregate with its disaggregate)."""

    kind: str
    concurrency: int
    input_order: bool
    buffer_size: int | None
    group: int

    @property
    def output_order(self):
        in_order = self.input_order and self.kind != "async generator"
        return "input" if in_order else "completion"

    @property
    def keeps_order(self):
        return self.concurrency == 1 or self.output_order == "input"


# Every op is a pure function of its item; items are ints. What an op does with an item:


def plus(item):
    return item * 7 + 1


def drop_some(item):
    return None if item % 3 == 0 else item + 1


def fail_some(item):
    if item % 4 == 1:
        raise Boom(item)
    return item * 2


def spread(item):
    for n in range(item % 4):
        yield item * 5 + n if n != 1 else None


def spread_then_fail(item):
    yield item + 3
    if item % 3 == 1:
        raise Boom(item)
    yield item + 4


def plus_list(items):
    return [plus(item) for item in items]


def as_async(function):
    async def op(item):
        return function(item)

    return op


async def aspread(item):
    for output in spread(item):
        yield output


def evaluate(plan, items):
    """What one stage makes of ``items``, in order, and how many calls fail."""
    outputs, num_failures = [], 0
    if plan.kind.startswith("aggregate dropping"):
        return items[: len(items) // plan.group * plan.group], 0
    if plan.kind.startswith("aggregate"):
        return (plus_list(items) if "function" in plan.kind else list(items)), 0
    for item in items:
        made = []
        try:
            if plan.kind == "failing generator":
                made = outputs  # what came before the failure has left already
                made.extend(x for x in _until_failure(spread_then_fail, item, made))
            elif plan.kind == "executor generator":
                made = list(spread_then_fail(item))  # all or nothing
            elif "generator" in plan.kind:
                made = [x for x in spread(item) if x is not None]
            elif "dropping" in plan.kind:
                made = [x for x in [drop_some(item)] if x is not None]
            elif "failing" in plan.kind:
                made = [fail_some(item)]
            else:
                made = [plus(item)]
        except Boom:
            num_failures += 1
            continue
        if made is not outputs:
            outputs.extend(made)
    return outputs, num_failures


def _until_failure(generator, item, sink):
    for output in generator(item):
        sink.append(output)
    return ()


OPS = {
    "function": plus,
    "dropping": drop_some,
    "failing": fail_some,
    "generator": spread,
    "failing generator": spread_then_fail,
    "async function": as_async(plus),
    "async failing": as_async(fail_some),
    "async generator": aspread,
    "executor function": plus,
    "executor failing": fail_some,
    "executor generator": spread_then_fail,
}


def add(builder, plan, pool):
    """Pipe the stages of ``plan``; returns how many they are."""
    options = {
        "concurrency": plan.concurrency,
        "output_order": plan.output_order,
        "buffer_size": plan.buffer_size,
    }
    if plan.kind.startswith("aggregate"):
        builder.aggregate(plan.group, drop_last="dropping" in plan.kind)
        if "function" in plan.kind:
            builder.pipe(plus_list, **options)
        builder.disaggregate()
        return
    executor = pool if plan.kind.startswith("executor") else None
    builder.pipe(OPS[plan.kind], executor=executor, **options)


plans = st.builds(
    Plan,
    kind=st.sampled_from(KINDS),
    concurrency=st.integers(1, 4),
    input_order=st.booleans(),
    buffer_size=st.none() | st.integers(1, 4),
    group=st.integers(1, 5),
)


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(3) as executor:
        yield executor


@settings(deadline=None, max_examples=150)
@given(
    count=st.integers(0, 40),
    stages=st.lists(plans, max_size=4),
    sink=st.integers(1, 4),
    num_threads=st.none() | st.integers(1, 8),
    tail=st.none() | st.integers(1, 5),
)
def test_random_pipelines_deliver_what_a_plain_loop_makes(
    pool, count, stages, sink, num_threads, tail
):
    """Same items, same counts; the same order too where every stage keeps it."""
    builder, expected = PipelineBuilder().add_source(range(count)), list(range(count))
    ordered, failures = True, []
    for stage in stages:
        plan = stage
        if "dropping the last" in plan.kind and not ordered:
            plan = replace(plan, kind="aggregate, disaggregate")  # which items were last?
        if plan.kind.startswith("aggregate") and "function" not in plan.kind:
            plan = replace(plan, concurrency=1)
        add(builder, plan, pool)
        expected, num_failures = evaluate(plan, expected)
        failures.append(num_failures)
        ordered = ordered and plan.keeps_order
    if tail is not None:
        builder.aggregate(tail)
    pipeline = builder.add_sink(sink).build(num_threads=num_threads, max_failures=10_000)
    with eager_switching(), quiet_log(), pipeline.auto_stop():
        got = list(pipeline)
    if tail is not None:
        assert [len(group) for group in got[:-1]] == [tail] * (len(got) - 1)
        got = [item for group in got for item in group]
    assert multiset(got) == multiset(expected)
    if ordered:
        assert got == expected
    pipeline._run.check_balance()
    assert sum(stage.tasks.num_failures for stage in pipeline.stats().stages) == sum(failures)


@settings(deadline=None, max_examples=40)
@given(
    stages=st.lists(plans, min_size=1, max_size=3),
    taken=st.integers(0, 10),
    num_threads=st.none() | st.integers(1, 4),
)
def test_stop_in_the_middle_accounts_for_every_item(pool, stages, taken, num_threads):
    """Stopped anywhere: what came is right and comes once; the rest is discarded, not stuck."""
    builder, expected = PipelineBuilder().add_source(range(60)), list(range(60))
    for plan in stages:
        if "dropping the last" in plan.kind:
            plan = replace(plan, kind="aggregate, disaggregate")
        add(builder, plan, pool)
        expected, _ = evaluate(plan, expected)
    pipeline = builder.add_sink(1).build(num_threads=num_threads, max_failures=10_000)
    with eager_switching(), quiet_log(), pipeline.auto_stop():
        got = [item for item, _ in zip(pipeline, range(taken), strict=False)]
    assert not multiset(got) - multiset(expected)
    pipeline._run.check_balance()
    assert "[closed]" in repr(pipeline)


@pytest.mark.parametrize("concurrency", [2, 4, 8])
def test_ordered_generators_keep_their_runs_together_under_stress(concurrency):
    """Many outputs an item, many threads, a buffer smaller than one run."""
    pipeline = (
        PipelineBuilder()
        .add_source(range(40))
        .pipe(_nine, concurrency=concurrency, output_order="input", buffer_size=4)
        .add_sink(1)
        .build()
    )
    with eager_switching(), pipeline.auto_stop():
        assert list(pipeline) == [(item, n) for item in range(40) for n in range(item % 10)]


def _nine(item):
    for n in range(item % 10):
        yield item, n


def test_pipelines_leave_no_thread_and_no_file_behind_when_run_to_the_end():
    """A stage of every kind, several times: threads and descriptors are back."""
    with no_leak(), ThreadPoolExecutor(2) as pool, quiet_log():
        for _ in range(3):
            builder = PipelineBuilder().add_source(range(20))
            for kind in KINDS:
                add(builder, Plan(kind, 2, False, 2, 2), pool)
            list(builder.add_sink().build(max_failures=10_000))
