"""Builder, validation, kinds of ops, the printable and picklable definition."""

import functools
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import pytest
from support.gates import asame, pipeline_of, same

from spdl_torch import PipelineDataset
from spdl_torch.autotune import PerfParams
from spdl_torch.pipeline import (
    Aggregate,
    Disaggregate,
    Pipe,
    Pipeline,
    PipelineBuilder,
    PipelineSpec,
    SinkSpec,
    SourceSpec,
    build_pipeline,
)
from spdl_torch.spdl.pipeline.defs import Collate


def add(number, item):
    return item + number


def spread(item):
    yield item
    yield -item


async def aspread(item):
    yield item
    yield -item


class Called:
    """A callable object."""

    def __call__(self, item):
        return item + 1

    def method(self, item):
        return item + 2


class CalledGenerator:
    def __call__(self, item):
        yield item
        yield item * 10


class CalledAsync:
    async def __call__(self, item):
        return item + 1


class Mapped:
    """A map-style dataset: indexed, not called."""

    def __init__(self, length=9):
        self.length = length

    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError
        return f"sample {index}"


@pytest.mark.parametrize(
    ("op", "outputs"),
    [
        *((same, [1, 2]), (str, ["1", "2"]), (asame, [1, 2])),
        (functools.partial(functools.partial(add), 5), [6, 7]),
        *((Called(), [2, 3]), (functools.partial(Called()), [2, 3]), (CalledAsync(), [2, 3])),
        (Called().method, [3, 4]),
        *((spread, [1, -1, 2, -2]), (functools.partial(spread), [1, -1, 2, -2])),
        *((aspread, [1, -1, 2, -2]), (functools.partial(asame), [1, 2])),
        (functools.partial(CalledGenerator()), [1, 10, 2, 20]),
        *((["a", "b", "c"], ["b", "c"]), ({1: "x", 2: "y"}, ["x", "y"])),
        (Mapped(), ["sample 1", "sample 2"]),
    ],
)
def test_every_kind_of_op_runs(op, outputs):
    """Functions, generators, async ones, callable objects, methods, partials, containers."""
    assert list(pipeline_of([1, 2], op)) == outputs


@pytest.mark.parametrize("op", [add, lambda a, *, b: None, Called.method])
def test_op_with_a_wrong_signature_is_refused_by_pipe(op):
    """Before anything runs, with the place of the function and its signature."""
    match = r"pipe: \S+ at test_pipeline_definition.py:\d+ must take exactly one arg"
    with pytest.raises(TypeError, match=match):
        PipelineBuilder().pipe(op)


def whole(builder):
    return builder.add_source([]).pipe(same).add_sink()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda b: b.pipe(3), TypeError, "op must be a function, .*got int"),
        (lambda b: b.pipe(same, concurrency=0), ValueError, "stage 'same': concurrency must be"),
        (lambda b: b.pipe(same, concurrency=True), TypeError, "concurrency must be an int"),
        (lambda b: b.pipe(same, output_order="x"), ValueError, "must be 'completion' or 'input'"),
        (lambda b: b.pipe(same, max_failures=-2), ValueError, "max_failures must be >= 0, or -1"),
        (lambda b: b.pipe(same, max_failures=1.5), ValueError, "share .* between 0 and 1, got 1.5"),
        (lambda b: b.pipe(same, max_failures=True), TypeError, "must be a number or None"),
        (lambda b: b.pipe(aspread, output_order="input"), ValueError, "does not go with an async"),
        (lambda b: b.pipe(asame, executor=ThreadPoolExecutor()), ValueError, "must be None"),
        (lambda b: b.aggregate(0), ValueError, "aggregate: n must be >= 1, got 0"),
        (lambda b: b.add_source(3), TypeError, "add_source: expected an iterable .* got int"),
        (lambda b: b.add_source([]).add_source([]), ValueError, "has a source already"),
        (lambda b: b.add_sink("3"), TypeError, "add_sink: buffer_size must be an int"),
        (lambda b: b.add_sink().add_sink(), ValueError, "has a sink already"),
        (lambda b: b.add_sink().build(), RuntimeError, "no source; call add_source"),
        (lambda b: b.add_source([]).build(), RuntimeError, "no sink; call add_sink"),
        (lambda b: whole(b).build(num_threads=0), ValueError, "num_threads must be >= 1 or None"),
        (lambda b: whole(b).build(report_stats_interval=0), ValueError, "interval must be > 0"),
        (
            lambda b: whole(b).build(stats=False, **PerfParams.auto().build_options()),
            *(ValueError, r"tuner needs figures.*stats=False"),
        ),
        (
            lambda b: b.add_source(map(str, range(3)), continuous=True),
            *(ValueError, "a map can be iterated only once"),
        ),
        (
            lambda b: PipelineDataset(b.add_source([1], continuous=True).add_sink()),
            *(ValueError, "the source must not be continuous"),
        ),
        (lambda b: replace(Aggregate(3), concurrency=2), ValueError, "must be 1 for an aggregate"),
    ],
)
def test_builder_refuses_what_cannot_be_meant(make, error, match):
    """Each mistake raises where it is made, with what was given."""
    with pytest.raises(error, match=match):
        make(PipelineBuilder())


@pytest.mark.parametrize(
    ("source", "op", "expected"),
    [
        (Mapped(2), same, ["sample 0", "sample 1"]),  # the old sequence protocol
        ([None, 1], lambda item: item is None, [True, False]),
        ([None, 1], None, [None, 1]),
        (range(50), lambda item: None, []),
    ],
)
def test_items_of_any_source_are_passed_on(source, op, expected):
    """Only the result of an op drops an item; no output is an empty pass."""
    ops = () if op is None else (op,)
    assert list(pipeline_of(source, *ops, output_order="input", concurrency=3)) == expected


def test_names_come_from_the_op():
    """The function's name, the object's class, the partial's function, or what the user says."""
    ops = [same, Called(), functools.partial(add, 1), Called().method, [1], Called().__call__]
    builder = PipelineBuilder()
    for op in ops:
        builder.pipe(op)
    builder.pipe(same, name="mine")
    names = [stage.name for stage in builder.add_source([]).add_sink().get_config().pipes]
    assert names == ["same", "Called", "add", "method", "list", "Called", "mine"]


def test_definition_prints_one_line_a_stage_and_can_be_sent():
    """Names, bounds and where each op is written. It is frozen, can be sent to another process, and
    be run there as often as one likes."""
    builder, options = PipelineBuilder(), {"concurrency": 4, "output_order": "input"}
    builder.add_source([1, 2, 3]).pipe(functools.partial(add, 1), name="add one", **options)
    builder.pipe(spread, max_failures=Fraction(1, 5), buffer_size=7)
    spec = builder.aggregate(2, drop_last=True).disaggregate().add_sink(5).get_config()
    lines = str(spec).splitlines()
    places = [f"test_pipeline_definition.py:{op.__code__.co_firstlineno}" for op in (add, spread)]
    assert lines[:4] == [
        "PipelineSpec:",
        "  src(list)",
        f"  add one(concurrency=4, op=add at {places[0]}, output_order='input')",
        f"  spread(concurrency=1, op=spread at {places[1]})",
    ]
    assert lines[4].endswith("(n=2, drop_last=True)")
    assert lines[5].startswith("  disaggregate(")
    assert lines[6] == "  sink(buffer_size=5)"
    with pytest.raises(FrozenInstanceError, match="cannot assign"):
        spec.sink = None
    copy = pickle.loads(pickle.dumps(spec))
    assert isinstance(copy, PipelineSpec)
    assert str(copy) == str(spec)
    with Pipeline(spec).auto_stop() as p, Pipeline(copy).auto_stop() as other:
        assert list(p) == list(other) == list(Pipeline(copy)) == [2, -2, 3, -3, 4, -4]


def config_of(source, *pipes, sink=3, continuous=False):
    """Source, stages, sink."""
    return PipelineSpec(SourceSpec(source, continuous), list(pipes), SinkSpec(sink))


def test_definitions_are_what_a_builder_collects():
    """The same stages, so either can be built, changed and printed."""
    stages = Pipe(abs, concurrency=2, output_order="input"), Aggregate(2), Disaggregate()
    config = config_of(range(7), *stages, sink=5)
    builder = PipelineBuilder().add_source(range(7)).pipe(abs, concurrency=2, output_order="input")
    built = builder.aggregate(2).disaggregate().add_sink(5).get_config()
    assert config == built
    assert (config.src.source, len(config.pipes), config.sink.buffer_size) == (range(7), 3, 5)
    other = replace(config, src=SourceSpec([3]), pipes=[Pipe(abs)])
    assert list(PipelineBuilder.from_config(other).build()) == [3]
    assert list(build_pipeline(config, num_threads=1)) == list(range(7))
    nested = config_of([[1, 2], [], (3,), [4]], Disaggregate())
    assert list(build_pipeline(nested)) == [1, 2, 3, 4]


class Summed(Collate):
    def flush(self):
        items = super().flush()
        return items and sum(items)


def test_collate_is_aggregate():
    """SPDL's class for it, also as an aggregator of its own."""
    assert Aggregate(Collate(3)) == Aggregate(3)
    collate = Collate(2)
    assert [collate.accumulate(n) for n in range(3)] == [None, [0, 1], None]
    assert (collate.flush(), collate.flush()) == ([2], None)
    assert list(build_pipeline(config_of(range(5), Aggregate(Summed(2))))) == [1, 5, 4]
