"""Nothing lost, nothing twice: random stage graphs against a plain sequential evaluation."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from _gates import eager_switching, multiset, no_leak, quiet_log
from _inside import check_balance
from _stages import KINDS, Plan, add, evaluate, plans
from hypothesis import given, settings, strategies as st

from spdl_torch.pipeline import PipelineBuilder


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
    check_balance(pipeline)
    assert sum(stage.tasks.num_failures for stage in pipeline.snapshot().stages) == sum(failures)


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
    check_balance(pipeline)
    assert "[closed]" in repr(pipeline)


def test_pipelines_leave_no_thread_and_no_file_behind_when_run_to_the_end():
    """A stage of every kind, several times: threads and descriptors are back."""
    with no_leak(), ThreadPoolExecutor(2) as pool, quiet_log():
        for _ in range(3):
            builder = PipelineBuilder().add_source(range(20))
            for kind in KINDS:
                add(builder, Plan(kind, 2, False, 2, 2), pool)
            list(builder.add_sink().build(max_failures=10_000))
