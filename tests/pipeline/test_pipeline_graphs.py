"""Pipelines that branch: path variants, and pipelines that are merged."""

import asyncio
import functools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from _gates import (
    PATIENCE_SECONDS,
    BlockedSource,
    Boom,
    CountingSource,
    GatedOp,
    eager_switching,
    in_thread,
    multiset,
    no_leak,
    result_of,
    until,
)
from _inside import check_balance, last_queue_of, run_of
from _stages import OPS, Plan, evaluate, plans
from hypothesis import given, settings
from hypothesis import strategies as st

from spdl_torch import PipelineDataset
from spdl_torch.pipeline import (
    Aggregate,
    Disaggregate,
    Merge,
    PathVariants,
    Pipe,
    PipelineBuilder,
    PipelineFailure,
    PipelineSpec,
    PipelineStopped,
    SinkSpec,
    SourceSpec,
    StageInfo,
    TaskHook,
    build_pipeline,
    is_eof,
    is_epoch_end,
)
from spdl_torch.spdl.pipeline.defs import Collate

UNBOUNDED = 10_000


pytestmark = pytest.mark.usefixtures("quiet")


def same(item):
    return item


async def asame(item):
    await asyncio.sleep(0)
    return item


def fail(item):
    raise Boom(item)


def modulo(count, item):
    return item % count


async def amodulo(count, item):
    await asyncio.sleep(0)
    return item % count


def variants_of(source, *paths, router=None, sink=3, build=None, **options):
    """A pipeline of path variants; items go by their remainder."""
    router = router or functools.partial(modulo, len(paths))
    builder = PipelineBuilder().add_source(source).path_variants(router, paths, **options)
    return builder.add_sink(sink).build(**(build or {}))


def config_of(source, *pipes, sink=3, continuous=False):
    """Source, stages, sink."""
    return PipelineSpec(SourceSpec(source, continuous), list(pipes), SinkSpec(sink))


def merged(*configs, op=None, pipes=(), sink=3, **build):
    """A pipeline of pipelines."""
    return build_pipeline(PipelineSpec(Merge(configs, op), list(pipes), SinkSpec(sink)), **build)


# -- path variants


def as_pipes(plan, pool):
    """The stages of a plan."""
    options = {
        "concurrency": plan.concurrency,
        "output_order": plan.output_order,
        "buffer_size": plan.buffer_size,
    }
    if plan.kind.startswith("aggregate"):
        stages = [Aggregate(plan.group, drop_last="dropping" in plan.kind)]
        if "function" in plan.kind:
            stages.append(Pipe(OPS_ON_LISTS["aggregate"], **options))
        return [*stages, Disaggregate()]
    executor = pool if plan.kind.startswith("executor") else None
    return [Pipe(OPS[plan.kind], executor=executor, **options)]


OPS_ON_LISTS = {"aggregate": lambda items: [item * 7 + 1 for item in items]}


def tagged(tag, item):
    return tag, item


@settings(deadline=None, max_examples=80)
@given(
    count=st.integers(0, 40),
    paths=st.lists(st.lists(plans, max_size=2), min_size=1, max_size=3),
    is_async=st.booleans(),
    is_nested=st.booleans(),
    num_threads=st.none() | st.integers(1, 4),
    taken=st.none() | st.integers(0, 10),
)
def test_paths_deliver_what_plain_loops_make(
    pool, count, paths, is_async, is_nested, num_threads, taken
):
    """Nothing lost, nothing twice, each path in its order; also when stopped in the middle."""
    expected, ordered, chains = [], [], []
    for tag, path in enumerate(paths):
        items, in_order, chain = list(range(count))[tag :: len(paths)], True, []
        for stage in path:
            if "dropping the last" in stage.kind and not in_order:
                stage = replace(stage, kind="aggregate, disaggregate")  # which items were last?
            chain += as_pipes(stage, pool)
            items, _ = evaluate(stage, items)
            in_order = in_order and stage.keeps_order
        chain.append(Pipe(functools.partial(tagged, tag)))
        if is_nested:
            chain = [PathVariants(lambda item: 0, [chain, [Pipe(same)]])]
        expected.append([(tag, item) for item in items])
        ordered.append(in_order)
        chains.append(chain)
    router = functools.partial(amodulo if is_async else modulo, len(paths))
    build = {"num_threads": num_threads, "max_failures": UNBOUNDED}
    pipeline = variants_of(range(count), *chains, router=router, build=build)
    with eager_switching(), pipeline.auto_stop():
        got = [item for item, _ in zip(pipeline, range(taken or 10**6), strict=False)]
    every = [item for items in expected for item in items]
    assert not multiset(got) - multiset(every)
    if taken is None:
        assert multiset(got) == multiset(every)
    for tag, in_order in enumerate(ordered):
        if in_order:
            of_path = [item for item in got if item[0] == tag]
            assert of_path == expected[tag][: len(of_path)]
    check_balance(pipeline)


def keep_even(items):
    return [item for item in items if item % 2 == 0]


def drop_list(items):
    return None if items[0] % 3 == 0 else items


def fail_list(items):
    if items[0] % 3 == 1:
        raise Boom(items)
    return [-item for item in items]


async def aplus_list(items):
    await asyncio.sleep(0)
    return [item + 1000 for item in items]


LIST_OPS = (keep_even, drop_list, fail_list, aplus_list)


def part_of(ops, items):
    """What a path makes of its part of a list."""
    for op in ops:
        if not items:
            return []
        try:
            made = op(items) if op is not aplus_list else [item + 1000 for item in items]
        except Boom:
            return []
        items = made or []
    return items


@settings(deadline=None, max_examples=80)
@given(
    count=st.integers(0, 40),
    size=st.integers(1, 7),
    paths=st.lists(
        st.lists(st.tuples(st.sampled_from(LIST_OPS), st.integers(1, 3)), min_size=1, max_size=2),
        min_size=1,
        max_size=3,
    ),
    is_nested=st.booleans(),
    continuous=st.booleans(),
)
def test_batched_paths_put_each_list_together_again(count, size, paths, is_nested, continuous):
    """Lists keep their order; what a path drops or fails is left out, and nothing is mixed up."""
    chains = [
        [Pipe(op, concurrency=n, output_order="completion") for op, n in path] for path in paths
    ]
    if is_nested:
        chains = [[PathVariants(lambda items: [0] * len(items), [c], batched=True)] for c in chains]
    source = list(range(count))
    builder = PipelineBuilder().add_source(source, continuous=continuous).aggregate(size)
    builder.path_variants(lambda items: [item % len(paths) for item in items], chains, batched=True)
    pipeline = builder.add_sink().build(max_failures=UNBOUNDED)
    expected = []
    for start in range(0, count, size):
        whole = source[start : start + size]
        parts = [[i for i in whole if i % len(paths) == n] for n in range(len(paths))]
        whole = [
            item
            for path, part in zip(paths, parts, strict=True)
            for item in part_of([op for op, _ in path], part)
        ]
        expected += [whole] if whole else []
    with eager_switching(), pipeline.auto_stop():
        for _ in range(3 if continuous else 1):
            assert list(pipeline) == expected


def test_slow_path_does_not_let_the_source_run_away():
    """Bounded: what waits is what fits into the queues, and a hand full."""
    source, op = CountingSource(), GatedOp()
    with variants_of(source, [Pipe(op)], [Pipe(same)], sink=1).auto_stop() as pipeline:
        op.wait_started(1)
        queues = run_of(pipeline).queues()
        until(lambda: queues[1].counters().put_wait[1] == 1)  # path 0
        until(lambda: queues[0].counters().put_wait[1] == 1)  # the source
        assert source.num_taken <= sum(each.capacity for each in queues) + 5
        assert op.max_running == 1
        op.open()


@pytest.mark.parametrize("is_async", [False, True])
def test_router_that_fails_or_names_no_path_fails_its_item(is_async):
    """Counted and named as any stage's failure; the other items go on."""

    def plain(item):
        if item == 3:
            raise Boom(item)
        return {5: 2, 7: "x", 9: -1}.get(item, item % 2)

    async def asynchronous(item):
        return plain(item)

    router = asynchronous if is_async else plain
    pipeline = variants_of(
        range(12),
        [Pipe(same)],
        [Pipe(same)],
        router=router,
        name="choose",
        build={"max_failures": -1},
    )
    with pipeline.auto_stop():
        assert sorted(pipeline) == [0, 1, 2, 4, 6, 8, 10, 11]
    stage = pipeline.snapshot().stages[0]
    assert (stage.name, stage.tasks.num_tasks, stage.tasks.num_failures) == ("choose", 12, 4)
    strict = variants_of(
        range(12),
        [Pipe(same)],
        [Pipe(same)],
        router=router,
        name="choose",
        build={"max_failures": 3},
    )
    with pytest.raises(PipelineFailure, match=r"stage 'choose': 4 of .* failed") as failure:
        list(strict)
    errors = {type(e): str(e) for e in failure.value.exceptions}
    assert set(errors) == {Boom, IndexError, TypeError}
    assert errors[IndexError] == "the router returned path -1, and there are 2: 0 to 1."
    assert errors[TypeError] == "the router must return the index of a path, got 'x'."


def test_batched_router_must_give_an_index_for_each_member():
    """Or its list fails."""
    builder = PipelineBuilder().add_source(range(4)).aggregate(2)
    builder.path_variants(lambda items: [0], [[Pipe(same)]], batched=True)
    with pytest.raises(PipelineFailure, match="max_failures is 0") as failure:
        list(builder.add_sink().build(max_failures=0))
    with pytest.raises(ValueError, match="gave 1 indices for a list of 2; it must give one for"):
        raise failure.value.exceptions[0]


def test_path_of_lists_must_give_lists():
    """Or the pipeline fails, with the path named."""
    builder = PipelineBuilder().add_source(range(4)).aggregate(2)
    builder.path_variants(lambda items: [0, 1], [[Pipe(same)], [Pipe(sum)]], batched=True)
    with (
        no_leak(),
        pytest.raises(PipelineFailure, match="'path_variants_merge' raised") as failure,
        builder.add_sink().build().auto_stop() as pipeline,
    ):
        list(pipeline)
    assert "path 1 must return a list, got int" in failure.value.exceptions[0].__notes__


def test_failures_on_a_path_have_the_name_of_their_stage():
    """In the figures, in the failure and in its members' notes."""
    pipeline = variants_of(
        range(300), [Pipe(same)], [Pipe(fail, name="decode", max_failures=3)], build={}
    )
    with (
        no_leak(),
        pipeline.auto_stop(),
        pytest.raises(PipelineFailure, match="stage 'decode': 4 of") as failure,
    ):
        list(pipeline)
    assert all("in stage 'decode'" in e.__notes__[0] for e in failure.value.exceptions)
    assert {s.name: s.tasks.num_failures for s in pipeline.snapshot().stages}["decode"] >= 4


def test_stage_that_breaks_on_a_path_ends_the_others():
    """An executor that has been shut down: the good items, then the failure, no thread left."""
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    pipeline = variants_of(CountingSource(), [Pipe(same)], [Pipe(same, executor=executor)])
    with (
        no_leak(),
        pipeline.auto_stop(),
        pytest.raises(PipelineFailure, match="stage 'same' broke"),
    ):
        list(pipeline)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("op", [same, asame])
def test_stop_ends_every_thread_of_every_path(op, batched):
    """Wherever they wait, at a router, in a path, at a merge."""

    def router(item):
        return [i % 2 for i in item] if batched else item % 2

    for num_taken in (0, 1, 7):
        builder = PipelineBuilder().add_source(CountingSource())
        if batched:
            builder.aggregate(4)
        builder.path_variants(
            router, [[Pipe(op, concurrency=2)], [Pipe(op), Pipe(op)]], batched=batched
        )
        pipeline = builder.add_sink(1).build()
        with no_leak(), eager_switching(), pipeline.auto_stop():
            for _ in range(num_taken):
                pipeline.get_item(PATIENCE_SECONDS)
        with pytest.raises(PipelineStopped, match="runs only once"):
            iter(pipeline)


def test_names_and_numbers_of_a_branching_pipeline():
    """Upstream first; hooks are made for routers and stages, queues for everything."""
    infos = []

    def hooks(info):
        infos.append(str(info))
        return [TaskHook()]

    pipeline = variants_of(
        [],
        [Pipe(same, name="a", concurrency=2)],
        [Pipe(same, name="b")],
        build={"task_hook_factory": hooks},
    )
    assert infos == ["0:1:path_variants", "0:2:a[2]", "0:3:b"]
    assert [q.name for q in run_of(pipeline).queues()] == [
        "0:0:src_queue",
        "0:1:path_variants_path0_queue",
        "0:1:path_variants_path1_queue",
        "0:2:a[2]_queue",
        "0:3:b_queue",
        "0:4:path_variants_merge_queue",
        "0:5:sink_queue",
    ]
    line = same.__code__.co_firstlineno
    assert repr(pipeline).splitlines()[3:5] == [
        f"    path 0: a(concurrency=2, op=same at test_pipeline_graphs.py:{line})",
        f"    path 1: b(concurrency=1, op=same at test_pipeline_graphs.py:{line})",
    ]


def test_trace_of_a_branching_pipeline_has_its_threads_and_no_arrows(tmp_path):
    """Positions do not say who takes from whom, so nothing is drawn between them."""
    pipeline = variants_of(range(9), [Pipe(same, name="a")], [Pipe(same, name="b")])
    with pipeline.auto_stop():
        list(pipeline)
    timeline = pipeline.timeline()
    names = {row.stage for row in timeline.rows}
    assert names >= {"src", "path_variants", "a", "b", "path_variants_merge", "sink", "training"}
    assert timeline.queues == ()
    assert all(turn.output == -1 for row in timeline.rows for turn in row.turns)
    pipeline.profile().write_trace(tmp_path / "t.json")


# -- merges


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(0, 15), min_size=1, max_size=3),
    stages=st.lists(plans, min_size=3, max_size=3),
    continuous=st.booleans(),
    taken=st.none() | st.integers(0, 10),
)
def test_merge_delivers_what_its_pipelines_make(pool, counts, stages, continuous, taken):
    """Each in its own order; an epoch ends when it has ended in all of them."""
    configs, expected, ordered = [], [], []
    for tag, (count, plan) in enumerate(zip(counts, stages, strict=False)):
        pipes = [*as_pipes(plan, pool), Pipe(functools.partial(tagged, tag))]
        configs.append(config_of(list(range(count)), *pipes, continuous=continuous))
        expected.append([(tag, item) for item in evaluate(plan, list(range(count)))[0]])
        ordered.append(plan.keeps_order)
    pipeline = merged(
        *configs, pipes=[Pipe(same, concurrency=2, output_order="input")], max_failures=UNBOUNDED
    )
    every = [item for items in expected for item in items]
    with eager_switching(), pipeline.auto_stop():
        for _ in range(3 if continuous else 1):
            got = list(pipeline)
            assert multiset(got) == multiset(every)
            for tag, in_order in enumerate(ordered):
                of_tag = [item for item in got if item[0] == tag]
                assert of_tag == expected[tag] or not in_order
        if continuous and taken is not None:
            for _ in zip(pipeline, range(taken), strict=False):
                pass
    check_balance(pipeline)


# A chain of stages, or chains among which a router chooses; how many items a source gives, or
# sources and chains that are merged.
chains = st.recursive(
    st.lists(plans, max_size=2), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=4
)
sources = st.recursive(
    st.integers(0, 3),
    lambda inner: st.lists(st.tuples(inner, chains), min_size=1, max_size=3),
    max_leaves=4,
)


def chain_of(tree, pool):
    """The stages of a tree of ``chains``."""
    if all(isinstance(each, Plan) for each in tree):
        return [stage for plan in tree for stage in as_pipes(plan, pool)]
    paths = [chain_of(each, pool) or [Pipe(same)] for each in tree]
    return [PathVariants(functools.partial(modulo, len(paths)), paths)]


def graph_of(source, chain, pool, *, continuous):
    """The pipeline of a tree of ``sources``."""
    stages = chain_of(chain, pool)
    if isinstance(source, int):
        return config_of(range(source), *stages, sink=1, continuous=continuous)
    parts = [graph_of(*each, pool, continuous=continuous) for each in source]
    return PipelineSpec(Merge(parts), stages, SinkSpec(1))


@settings(deadline=None, max_examples=100)
@given(
    source=sources,
    chain=chains,
    continuous=st.booleans(),
    taken=st.lists(st.none() | st.integers(0, 3), max_size=3),
)
def test_any_graph_ends_whenever_it_is_stopped(pool, source, chain, continuous, taken):
    """In any epoch, of merges of merges and paths in paths; every item is accounted for."""
    config = graph_of(source, chain, pool, continuous=continuous)
    pipeline = build_pipeline(config, max_failures=-1)
    with eager_switching():
        pipeline.start()
        for count in taken[: None if continuous else 1]:
            for _ in zip(range(10**6 if count is None else count), pipeline, strict=False):
                pass
        pipeline.stop(PATIENCE_SECONDS)
    check_balance(pipeline)


def test_epoch_of_a_merge_waits_for_the_slowest(monkeypatch):
    """Items of the next epoch of a quick pipeline stay behind. The control: without the meeting
    the epoch would end without the slow pipeline's.
    """

    def run(op):
        slow = config_of([1], Pipe(op), continuous=True)
        return merged(slow, config_of([2], continuous=True))

    op = GatedOp()
    with run(op).auto_stop() as pipeline:
        loop = in_thread(lambda: list(pipeline))
        op.wait_started(1)
        until(lambda: run_of(pipeline).sink_queue.counters().num_got == 1)
        op.open()
        assert sorted(result_of(loop)) == [1, 2]
        assert sorted(pipeline) == [1, 2]
    arrive = "spdl_torch.engine.graph.merge._EpochBarrier.arrive"
    monkeypatch.setattr(arrive, lambda self: self._when_all_are_there())
    op = GatedOp()
    with run(op).auto_stop() as pipeline:
        assert list(pipeline) == [2]
        op.open()


def test_stop_ends_a_merge_that_waits_for_room_for_the_end_of_an_epoch():
    """The waits of the other threads, too: epochs without items are nothing but ends."""
    pipeline = merged(*(config_of([], continuous=True) for _ in range(3)))
    with no_leak():
        pipeline.start()
        until(lambda: last_queue_of(pipeline).counters().put_wait[1] == 1)
        pipeline.stop(PATIENCE_SECONDS)


def test_mixed_continuous_mode_is_refused():
    """SPDL's word for it."""
    configs = [config_of([1], continuous=True), config_of([1])]
    with pytest.raises(ValueError, match="Mixed continuous mode"):
        merged(*configs)


@pytest.mark.parametrize("failing", [0, 1])
def test_source_of_a_merged_pipeline_that_raises_fails_it_after_the_good_items(failing):
    """And ends the other sources, endless ones too."""

    def broken():
        yield -1
        raise Boom("source")

    sources = [CountingSource(), CountingSource()]
    sources[failing] = broken()
    got = []
    with (
        no_leak(),
        merged(*map(config_of, sources)).auto_stop() as pipeline,
        pytest.raises(PipelineFailure, match="the source raised") as failure,
    ):
        got.extend(iter(pipeline))
    assert isinstance(failure.value.exceptions[0], Boom)
    assert -1 in got


def test_blocked_source_of_a_merge_does_not_hold_up_stop():
    """Its thread is left to end by itself."""
    blocked = BlockedSource(1)
    pipeline = merged(config_of(blocked), config_of([2]))
    with pipeline.auto_stop():
        assert sorted(pipeline.get_item(PATIENCE_SECONDS) for _ in range(2)) == [1, 2]
        assert blocked.blocked.wait(PATIENCE_SECONDS)
    assert "[closed]" in repr(pipeline)
    blocked.released.set()


# -- merge ops of the user's


async def round_robin(info, input_queues, output_queue):
    """As in SPDL's documentation."""
    active = list(input_queues)
    while active:
        for each in list(active):
            item = await each.get()
            if is_eof(item):
                active.remove(each)
            else:
                await output_queue.put(item)


def plain_round_robin(info, input_queues, output_queue):
    active = list(input_queues)
    while active:
        for each in list(active):
            item = each.get()
            if is_eof(item):
                active.remove(each)
            else:
                output_queue.put(item)


async def with_tasks(info, input_queues, output_queue):
    """As SPDL's tests have it: a task for each queue."""

    async def pass_on(number, each):
        while not is_eof(item := await each.get()):
            await output_queue.put((number, item))

    await asyncio.wait([asyncio.create_task(pass_on(*pair)) for pair in enumerate(input_queues)])


async def until_one_ends(info, input_queues, output_queue):
    """Returns while the others have more."""
    while True:
        for each in input_queues:
            item = await each.get()
            if is_eof(item):
                assert is_eof(await each.get())  # again, where SPDL's would wait for ever
                return
            await output_queue.put(item)


@pytest.mark.parametrize("op", [round_robin, plain_round_robin])
def test_merge_op_decides_the_order(op):
    """Asynchronous or plain."""
    pipeline = merged(config_of([1, 2, 3]), config_of([4]), config_of([7, 8]), op=op)
    with no_leak(), pipeline.auto_stop():
        assert list(pipeline) == [1, 4, 7, 2, 8, 3]


def test_merge_op_may_have_tasks():
    """And change items."""
    pipeline = merged(config_of([1, 2]), config_of([3]), op=with_tasks)
    with no_leak(), pipeline.auto_stop():
        assert sorted(pipeline) == [(0, 1), (0, 2), (1, 3)]


def test_merge_op_may_end_early():
    """Items that it has not taken are discarded, and endless sources end."""
    pipeline = merged(config_of([1, 2, 3]), config_of(CountingSource()), op=until_one_ends)
    with no_leak(), pipeline.auto_stop():
        assert list(pipeline) == [1, 0, 2, 1, 3, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_merge_op_that_raises_fails_the_pipeline_after_the_good_items(is_async):
    """The user's exception, with a note that names the merge."""

    def plain(info, input_queues, output_queue):
        output_queue.put(input_queues[0].get())
        raise Boom(str(info))

    async def asynchronous(info, input_queues, output_queue):
        await output_queue.put(await input_queues[0].get())
        raise Boom(str(info))

    got = []
    op = asynchronous if is_async else plain
    with (
        no_leak(),
        merged(config_of(CountingSource()), op=op).auto_stop() as pipeline,
        pytest.raises(PipelineFailure, match="'merge' raised") as failure,
    ):
        got.extend(iter(pipeline))
    assert failure.value.exceptions[0].args == (str(StageInfo(0, 1, "merge")),)
    assert got == [0]


@pytest.mark.parametrize("op", [round_robin, plain_round_robin, with_tasks, until_one_ends])
def test_stop_ends_a_merge_op_wherever_it_waits(op, caplog):
    """For an item, or for room; without a word about tasks that nobody asked."""
    for build in (
        lambda: merged(config_of(CountingSource()), op=op, sink=1),
        lambda: merged(config_of(BlockedSource(1)), op=op),
    ):
        with no_leak():
            pipeline = build()
            with pipeline.auto_stop():
                pipeline.get_item(PATIENCE_SECONDS)
            for source in run_of(pipeline).sources:
                getattr(source.spec.source, "released", threading.Event()).set()
    assert caplog.text == ""


def test_merge_op_passes_the_ends_of_epochs_on():
    """As SPDL's ops do; returning is the end of the data."""

    async def op(info, input_queues, output_queue):
        while True:
            items = [await each.get() for each in input_queues]
            if is_epoch_end(items[0]):
                assert all(map(is_epoch_end, items))
                await output_queue.put(items[0])
            else:
                await output_queue.put(tuple(items))

    configs = [config_of([1, 2], continuous=True), config_of([3, 4], continuous=True)]
    with no_leak(), merged(*configs, op=op).auto_stop() as pipeline:
        assert [list(pipeline) for _ in range(3)] == [[(1, 3), (2, 4)]] * 3


def test_merge_op_must_not_put_marks_of_its_own():
    """An end of an epoch where there are none would be taken for an item further on."""

    def op(info, input_queues, output_queue):
        output_queue.put(input_queues[0].get())
        output_queue.put(input_queues[0].get())

    with pytest.raises(PipelineFailure, match="'merge' raised") as failure:
        list(merged(config_of([1]), op=op))
    with pytest.raises(ValueError, match="must not put <end of the data>: it ends the data by"):
        raise failure.value.exceptions[0]


def test_queues_of_a_merge_op_have_asyncios_other_methods():
    """``get_nowait``, ``qsize``, ``empty``, ``full``."""
    seen = {}

    async def op(info, input_queues, output_queue):
        with pytest.raises(asyncio.QueueEmpty, match=r"^$"):
            input_queues[1].get_nowait()
        seen.update(empty=input_queues[1].empty(), size=input_queues[1].qsize())
        await output_queue.put(1)
        seen.update(full=output_queue.full(), waits=output_queue.qsize())
        while not is_eof(item := await input_queues[0].get()):
            await output_queue.put(item)
        assert is_eof(input_queues[0].get_nowait())

    blocked = BlockedSource()
    pipeline = merged(config_of([2]), config_of(blocked), op=op)
    with pipeline.auto_stop():
        assert list(pipeline) == [1, 2]
    blocked.released.set()
    assert seen.pop("waits") <= 1
    assert seen == {"empty": True, "size": 0, "full": False}


# -- definitions


def test_definitions_are_what_a_builder_collects():
    """The same stages, so either can be built, changed, printed and pickled."""
    config = config_of(
        range(7),
        Pipe(abs, concurrency=2, output_order="input"),
        Aggregate(2),
        Disaggregate(),
        sink=5,
    )
    builder = PipelineBuilder().add_source(range(7)).pipe(abs, concurrency=2, output_order="input")
    built = builder.aggregate(2).disaggregate().add_sink(5).get_config()
    assert config == built
    assert (config.src.source, len(config.pipes), config.sink.buffer_size) == (range(7), 3, 5)
    copy = pickle.loads(pickle.dumps(replace(config, pipes=[Pipe(abs)])))
    assert type(copy) is PipelineSpec
    assert str(copy).splitlines()[1:] == [
        "  src(range)",
        "  abs(concurrency=1, op=abs)",
        "  sink(buffer_size=5)",
    ]
    again = PipelineBuilder.from_config(replace(copy, src=SourceSpec([3])))
    assert list(again.build()) == [3]
    assert list(build_pipeline(config, num_threads=1)) == list(range(7))


def test_merge_prints_its_pipelines():
    """Indented before it."""
    inner = config_of([1], Pipe(abs))
    assert str(PipelineSpec(Merge([inner, inner]), [], SinkSpec(3))).splitlines() == [
        "PipelineSpec:",
        *["    src(list)", "    abs(concurrency=1, op=abs)"] * 2,
        "  merge",
        "  sink(buffer_size=3)",
    ]


def test_collate_is_aggregate():
    """SPDL's class for it, also as an aggregator of its own."""
    assert Aggregate(Collate(3)) == Aggregate(3)
    collate = Collate(2)
    assert [collate.accumulate(n) for n in range(3)] == [None, [0, 1], None]
    assert (collate.flush(), collate.flush()) == ([2], None)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: PathVariants(same, []), ValueError, "at least one path"),
        (lambda: PathVariants(same, [[Pipe(same)], []]), ValueError, "path 1 is empty"),
        (lambda: PathVariants(42, [[Pipe(same)]]), ValueError, "router must be a function"),
        (lambda: PathVariants(same, [[SourceSpec([1])]]), ValueError, "got SourceSpec"),
        (lambda: PathVariants(same, [[SinkSpec(1)]]), ValueError, "got SinkSpec"),
        (
            lambda: PathVariants(same, [[Aggregate(2)]], batched=True),
            ValueError,
            r"path 0 must give one list for one list.*'aggregate\(2\)'",
        ),
        (lambda: variants_of([], [Pipe(same)], router=OPS["generator"]), TypeError, "got a gen"),
        (lambda: Merge([]), ValueError, "at least one upstream pipeline"),
        (lambda: Merge([[1]]), TypeError, "expected PipelineSpecs, got list"),
        (lambda: Merge([config_of([])], op=3), TypeError, "op must be a function or None"),
        (lambda: PipelineSpec([1], [], SinkSpec(1)), TypeError, "src must be a SourceSpec"),
        (lambda: config_of([], same), TypeError, "pipes must be what Pipe, .*, got function"),
        (
            lambda: PipelineSpec(SourceSpec([]), [], 3),
            TypeError,
            "sink must be a SinkSpec, got int",
        ),
        (lambda: SourceSpec(7), TypeError, "expected an iterable or an async iterable, got int"),
        (lambda: Aggregate("3"), TypeError, "n must be an int or an Aggregator, got '3'"),
        (lambda: replace(Aggregate(3), concurrency=2), ValueError, "must be 1 for an aggregate"),
    ],
)
def test_definition_that_cannot_be_meant_is_refused(make, error, match):
    """At the line that writes it."""
    with pytest.raises(error, match=match):
        make()


def test_dataset_refuses_what_it_cannot_share_out():
    """With what to do instead."""
    merge = PipelineSpec(Merge([config_of([1])]), [], SinkSpec(1))
    with pytest.raises(ValueError, match=r"got a Merge of pipelines\. Use build_pipeline"):
        PipelineDataset(PipelineBuilder.from_config(merge))
    builder = PipelineBuilder().add_source([1], continuous=True).add_sink()
    with pytest.raises(ValueError, match="the source must not be continuous"):
        PipelineDataset(builder)


def test_dataset_of_path_variants_has_no_length_and_no_order():
    """Items in the order of arrival cannot be resumed exactly, and the error says so."""
    builder = (
        PipelineBuilder()
        .add_source(range(4))
        .path_variants(functools.partial(modulo, 2), [[Pipe(same)], [Pipe(same)]])
    )
    dataset = PipelineDataset(builder.add_sink())
    assert sorted(dataset) == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="'path_variants' may pass on any number of items"):
        len(dataset)


def test_tuner_is_refused_where_stages_do_not_follow_one_another():
    """It goes by the queues before and after a stage."""
    with pytest.raises(ValueError, match="tuner must be None for a pipeline with path variants"):
        variants_of([1], [Pipe(same)], build={"tuner": object()})
