"""The flight recorder: what threads did is kept, linked from queue to queue, and cheap to have."""

import threading
from itertools import pairwise
from time import perf_counter_ns

import pytest
from hypothesis import given, settings, strategies as st
from support.gates import Boom, GatedOp, asame, pipeline_of, same, until
from support.inside import run_of

from spdl_torch.engine.recorder import RecordingSession
from spdl_torch.engine.rings import Ring
from spdl_torch.engine.timeline import Outcome
from spdl_torch.errors import PipelineStopped
from spdl_torch.pipeline import PipelineBuilder


@pytest.fixture
def item_level():
    """Every turn is kept, however short."""
    session = RecordingSession("item")
    yield
    session.end()


def twice(item):
    yield item
    yield item


def rows_of(timeline, stage):
    return [row for row in timeline.rows if row.stage == stage]


def turns_of(timeline, stage):
    return [turn for row in rows_of(timeline, stage) for turn in row.turns]


@given(capacity=st.integers(2, 20) | st.integers(60, 300), count=st.integers(0, 700))
def test_a_ring_keeps_the_latest_and_counts_the_rest(capacity, count):
    """It reads the last turns, in order, and the number of those missing."""
    ring = Ring(capacity, 0)
    for number in range(count):
        times = number, number + 1, number + 2, number + 3, 4
        ring.add(times, number, 5, None, [0] * 7)
    turns, parts, num_lost = ring.read()
    assert [turn.number for turn in turns] == list(range(num_lost, count))
    assert parts == []
    # A full ring may be in the middle of overwriting its oldest turn: that one is not shown.
    assert num_lost == (0 if count < capacity else count - capacity + 1)
    for turn in turns:
        assert turn.since_ns + 3 == turn.started_ns + 2 == turn.ended_ns + 1 == turn.done_ns
        assert (turn.cpu_ns, turn.output, turn.num_before, turn.num_after) == (4, 5, -1, 7)


@pytest.mark.usefixtures("item_level")
@settings(max_examples=25, deadline=None)
@given(
    num_items=st.integers(1, 60),
    order=st.sampled_from(["completion", "input"]),
    concurrency=st.integers(1, 4),
    group=st.integers(1, 5),
    fates=st.lists(st.sampled_from(["pass", "drop", "fail"]), min_size=1, max_size=7),
)
def test_every_item_can_be_followed(num_items, order, concurrency, group, fates):
    """Outputs of a stage are the numbers of the next one, for any order, with drops and failures;
    unknown where one came before its turn."""

    def fate_of(item):
        return fates[item % len(fates)]

    seen, received = {}, {}  # thread and time of each stage's call for each item

    def first(item):
        seen[item] = threading.get_native_id(), perf_counter_ns()
        if fate_of(item) == "fail":
            raise Boom(item)
        return None if fate_of(item) == "drop" else item

    def second(item):
        received[item] = threading.get_native_id(), perf_counter_ns()
        return item

    builder = PipelineBuilder().add_source(range(num_items))
    builder.pipe(first, concurrency=concurrency, output_order=order).pipe(second, concurrency=2)
    pipeline = builder.aggregate(group).add_sink().build(max_failures=num_items + 1)
    delivered = [item for items in pipeline for item in items]
    timeline = pipeline.timeline()

    def turn_at(stage, place):
        thread_id, time_ns = place
        row = next(r for r in rows_of(timeline, stage) if r.thread_id == thread_id)
        return next(t for t in row.turns if t.started_ns <= time_ns <= t.ended_ns)

    passed = [item for item in range(num_items) if fate_of(item) == "pass"]
    assert sorted(delivered) == passed
    may_be_early = order == "input" and concurrency > 1
    for item in passed:
        output = turn_at("first", seen[item]).output
        if output != -1 or not may_be_early:
            assert output == turn_at("second", received[item]).number
    outcomes = [turn_at("first", seen[item]).outcome for item in range(num_items)]
    assert outcomes == [Outcome[{"pass": "PASSED", "drop": "DROPPED", "fail": "FAILED"}[f]]
                        for f in map(fate_of, range(num_items))]  # fmt: skip
    for source, stage in (("src", "first"), ("second", f"aggregate({group})")):
        numbers = {turn.number for turn in turns_of(timeline, stage)}
        assert numbers <= {turn.output for turn in turns_of(timeline, source)}
    consumer = turns_of(timeline, "training")
    assert [turn.number for turn in consumer] == list(range(len(consumer)))
    assert len(consumer) == -(-len(passed) // group)


@pytest.mark.usefixtures("item_level")
def test_output_of_a_generator_in_order_is_its_last_one():
    """Or it is unknown, where it came before its turn; it is never another item's."""

    def thrice(item):
        yield from ((item, n) for n in range(3))

    pipeline = pipeline_of(range(50), thrice, concurrency=3, output_order="input", name="thrice")
    list(pipeline)
    outputs = {turn.number: turn.output for turn in turns_of(pipeline.timeline(), "thrice")}
    known = {number: output for number, output in outputs.items() if output >= 0}
    assert known
    assert known == {number: 3 * number + 2 for number in known}


@pytest.mark.parametrize("fails", [False, True])
def test_turn_of_a_generator_shows_all_of_its_work_first(fails):
    """Then its waits for room, in which it did nothing, also where it fails in the end."""

    def thrice(item):
        yield from range(3)
        if fails:
            raise Boom(item)

    options = {"buffer_size": 1, "name": "thrice"}
    pipeline = pipeline_of([0], thrice, sink=1, build={"max_failures": 1}, **options)
    with pipeline.auto_stop():
        until(lambda: pipeline.snapshot().stages[0].wait_out_ns > 50_000_000)
        assert list(pipeline) == [0, 1, 2]
    (turn,) = turns_of(pipeline.timeline(), "thrice")
    assert turn.ended_ns - turn.started_ns < 40_000_000 < turn.done_ns - turn.ended_ns


@pytest.mark.usefixtures("item_level")
@pytest.mark.parametrize("op", [same, twice, asame])
def test_turns_of_a_thread_follow_on_each_other(op):
    """A row has no gap and no overlap: wait, work and wait, then the next; nor is a turn of it torn
    or repeated that is read while threads write."""
    pipeline = pipeline_of(range(1000), op, concurrency=3, sink=64)
    with pipeline.auto_stop():
        for number, _ in enumerate(pipeline):
            if number % 100 == 0:
                assert_rows_are_whole(pipeline.timeline())
    assert number == (1999 if op is twice else 999)
    timeline, name = pipeline.timeline(), op.__name__
    assert_rows_are_whole(timeline)
    rows = ["src", f"{name}[0]", f"{name}[1]", f"{name}[2]", "training"]
    assert [row.name for row in timeline.rows] == rows
    assert sorted(turn.number for turn in turns_of(timeline, name)) == list(range(1000))


def assert_rows_are_whole(timeline):
    for row in timeline.rows:
        numbers = [turn.number for turn in row.turns if turn.number >= 0]
        assert len(set(numbers)) == len(numbers)
        for turn in row.turns:
            assert turn.since_ns <= turn.started_ns <= turn.ended_ns <= turn.done_ns
        for before, after in pairwise(row.turns):
            assert before.done_ns == after.since_ns


def test_only_long_turns_are_kept():
    """A turn below 0.1 ms is not kept, so that tiny items cost nothing to record."""

    def op(item):
        end = perf_counter_ns() + (200_000 if item == 30 else 0)
        while perf_counter_ns() < end:
            pass
        return item

    with pipeline_of(range(60), op, sink=60).auto_stop() as pipeline:
        list(pipeline)
    turns = turns_of(pipeline.timeline(), "op")
    assert 30 in [turn.number for turn in turns]
    assert all(turn.done_ns - turn.since_ns >= 100_000 for turn in turns)


def test_the_consumer_s_open_turn_is_shown():
    """Who waits for an item waits in the timeline, and works with one in it."""
    op = GatedOp()
    pipeline = pipeline_of(range(2), op)
    consumer = run_of(pipeline).recorder.consumer
    taker = threading.Thread(target=lambda: next(iter(pipeline)))
    with pipeline.auto_stop():
        assert consumer.waiting_since_ns is None
        taker.start()
        until(lambda: consumer.waiting_since_ns)
        waiting = turns_of(pipeline.timeline(), "training")[-1]
        assert waiting.since_ns == consumer.waiting_since_ns
        assert waiting.number == -1
        op.open()
        taker.join()
        assert consumer.waiting_since_ns is None
        working = turns_of(pipeline.timeline(), "training")[-1]
        assert working.number == 0
        assert working.started_ns < working.ended_ns
    ended = turns_of(pipeline.timeline(), "training")
    assert [turn.number for turn in ended] == [0]
    with pytest.raises(PipelineStopped, match="get: "):
        pipeline.get_item()
    assert consumer.waiting_since_ns is None, "who asks behind the end waits for nothing"
    assert ended == turns_of(pipeline.timeline(), "training"), "it goes on no more"


@pytest.mark.usefixtures("item_level")
def test_without_statistics_nothing_is_measured():
    """``stats=False``: the items come, and neither times nor turns are kept."""
    builder = PipelineBuilder().add_source(range(20)).pipe(abs).aggregate(3).add_sink()
    with builder.build(stats=False).auto_stop() as pipeline:
        assert list(pipeline) == [list(range(n, min(n + 3, 20))) for n in range(0, 20, 3)]
    assert not any(row.turns for row in pipeline.timeline().rows)
    assert [stage.tasks.num_tasks for stage in pipeline.snapshot().stages] == [0, 0]
