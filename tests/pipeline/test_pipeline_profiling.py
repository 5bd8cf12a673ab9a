"""``profile_pipeline`` and ``cache_iterator``: SPDL's tools for finding out what limits loading."""

import contextlib
import gc
import logging
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
from _gates import Boom, no_leak, quiet_log

from spdl_torch.pipeline import (
    Aggregate,
    Disaggregate,
    Merge,
    PathVariants,
    Pipe,
    PipelineBuilder,
    PipelineSpec,
    SinkSpec,
    SourceSpec,
    cache_iterator,
    profile_pipeline,
    profiling,
)
from spdl_torch.pipeline.profiling import ProfileHook


@pytest.fixture(autouse=True)
def _quiet():
    with quiet_log():
        yield


def config_of(source, *pipes, continuous=False):
    return PipelineSpec(SourceSpec(source, continuous), list(pipes), SinkSpec(2))


def plus(item):
    return item + 1


def minus(item):
    return -item


def fail(item):
    raise Boom(item)


class Recording(ProfileHook):
    """Writes down what was entered and left."""

    def __init__(self):
        self.log = []

    @contextlib.contextmanager
    def stage_profile_hook(self, stage, concurrency):
        self.log.append((stage, concurrency))
        yield

    @contextlib.contextmanager
    def pipeline_profile_hook(self):
        self.log.append("begin")
        yield
        self.log.append("end")


ALL = [32, 16, 8, 4, 1]


def test_every_stage_is_run_alone_at_every_concurrency():
    """With the items that the stages before it make; grouping stages at 1 alone."""
    seen, hook, results = [], Recording(), []

    def look(item):
        seen.append(item)
        return item

    config = config_of(
        range(100), Pipe(plus), Aggregate(4), Disaggregate(), Pipe(look, name="look")
    )
    with no_leak():
        found = profile_pipeline(config, 20, callback=results.append, hook=hook)
    assert found == results
    assert {r.name: [s.concurrency for s in r.stats] for r in found} == {
        "plus": ALL,
        "aggregate(4)": [1],
        "disaggregate": [1],
        "look": ALL,
    }
    assert all(s.qps > 0 and 0 <= s.occupancy_rate <= 1 for r in found for s in r.stats)
    assert sorted(seen) == sorted([*range(1, 21)] * 5)
    stages = [("plus", n) for n in ALL] + [("aggregate(4)", 1), ("disaggregate", 1)]
    assert hook.log == ["begin", *stages, *(("look", n) for n in ALL), "end"]


def test_kept_inputs_are_bounded_and_given_repeatedly(monkeypatch):
    """SPDL keeps all of them, of every stage."""
    monkeypatch.setattr(profiling, "_KEPT_BYTES", 10_000)
    sizes = []

    def make(item):
        return {"image": [np.zeros(2_000, np.uint8)]}

    def look(item):
        sizes.append(id(item))
        return None

    profile_pipeline(config_of(range(100), Pipe(make), Pipe(look, concurrency=1)), 50)
    assert len(sizes) == 5 * 50
    assert len(set(sizes)) == 5


def test_merges_and_path_variants_are_profiled_too():
    """Each stage of each path with what the router sends there; SPDL leaves them out."""

    async def router(items):
        return [item % 2 for item in items]

    merge = Merge(
        [config_of(range(6), Pipe(plus, name="a")), config_of([10], Pipe(plus, name="b"))]
    )
    paths = PathVariants(
        lambda item: item % 2,
        [[Pipe(minus, name="even")], [Pipe(minus, name="odd")], [Pipe(fail, name="never taken")]],
    )
    batched = PathVariants(
        router, [[Pipe(len, name="evens")], [Pipe(sorted, name="odds")]], batched=True
    )
    config = PipelineSpec(merge, [paths, Aggregate(3), batched], SinkSpec(2))
    names = [result.name for result in profile_pipeline(config, 6)]
    assert names == ["a", "b", "even", "odd", "aggregate(3)", "evens", "odds"]


def test_log_has_one_line_for_each_run(caplog):
    """The figures of each stage's and queue's own would drown them."""
    with caplog.at_level(logging.INFO, "spdl_torch.pipeline"):
        profile_pipeline(config_of(range(9), Pipe(plus), Aggregate(4)), 5)
    logged = [
        re.match(r"profile_pipeline: (\S+): \d", record.getMessage()) for record in caplog.records
    ]
    assert [each and each[1] for each in logged] == [
        *(f"plus[{n}]" for n in ALL),
        "aggregate(4)[1]",
    ]


def test_continuous_source_is_iterated_once():
    """One epoch is enough."""
    (result,) = profile_pipeline(config_of([1, 2], Pipe(plus), continuous=True), 100)
    assert result.name == "plus"


def test_stage_without_input_is_reported():
    """An empty source, or a stage before it that fails all; one rank of a machine is enough."""
    with pytest.raises(RuntimeError, match="no input for stage 'plus': the source is empty"):
        profile_pipeline(config_of([], Pipe(plus)))
    with pytest.raises(RuntimeError, match="no input for stage 'plus'"):
        profile_pipeline(config_of([1], Pipe(fail), Pipe(plus)))
    with pytest.raises(ValueError, match="num_inputs must be >= 1, got 0"):
        profile_pipeline(config_of([1], Pipe(plus)), 0)


def test_other_ranks_of_a_machine_do_nothing(monkeypatch):
    """They would disturb the first one's measurement."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert profile_pipeline(config_of([1], Pipe(fail))) == []


def test_executor_of_a_stage_is_used():
    """SPDL measures it on threads."""
    names = set()

    def look(item):
        names.add(threading.current_thread().name)
        return item

    with ThreadPoolExecutor(1, "mine") as executor:
        profile_pipeline(config_of([1, 2], Pipe(look, executor=executor)), 4)
    assert names == {"mine_0"}


# -- cache_iterator


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (9, {"num_caches": 2}, [0, 1, 0, 1, 0, 1, 0]),
        (9, {"num_caches": 2, "return_caches_after": 4}, [0, 1, 2, 3, 0, 1, 0]),
        (9, {"num_caches": 2, "stop_after": 3}, [0, 1, 0]),
        (9, {"num_caches": 1, "return_caches_after": 3, "stop_after": 3}, [0, 1, 2]),
        (3, {"num_caches": 5}, [0, 1, 2, 0, 1, 2, 0]),
        (0, {"num_caches": 5}, []),
    ],
)
def test_cache_iterator_gives_the_first_items_again(count, options, expected):
    """After as many from the source as was said; a short source is repeated whole."""
    assert list(islice(cache_iterator(range(count), **options), 7)) == expected


@pytest.mark.parametrize("delete_src", [True, False])
def test_cache_iterator_lets_go_of_its_source(delete_src):
    """So that a pipeline's threads end while only kept items are given."""
    pipeline = PipelineBuilder().add_source(range(100)).pipe(plus).add_sink().build()
    gone = weakref.ref(pipeline)
    items = cache_iterator(pipeline, 2, delete_src=delete_src)
    del pipeline
    assert list(islice(items, 3)) == [1, 2, 1]
    gc.collect()
    assert (gone() is None) is delete_src
    items.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_caches": 0}, "num_caches must be >= 1, got 0"),
        ({"num_caches": 3, "return_caches_after": 2}, "return_caches_after must be >= num_caches"),
        ({"num_caches": 3, "stop_after": 2}, "stop_after must be >= 3, .* got 2"),
        (
            {"num_caches": 1, "return_caches_after": 4, "stop_after": 3},
            "stop_after must be >= 4, .* got 3",
        ),
    ],
)
def test_cache_iterator_refuses_what_would_cache_nothing(options, match):
    """At the call, not at the first item."""
    with pytest.raises(ValueError, match=match):
        cache_iterator(range(9), **options)
