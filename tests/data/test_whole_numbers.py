"""Numbers of numpy's types mean what Python's mean: they are often the length of an array."""

import numpy as np
import pytest
import torch
from _datasets import Indices
from _tars import write_shards

from spdl_torch import DataLoader
from spdl_torch.data import bucket, mix, pack
from spdl_torch.data.sources import ListSource, Parquet, TarShards, as_source
from spdl_torch.pipeline import PipelineBuilder

TYPES = (int, np.int64, np.int32, np.uint64, np.uint8)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One source of each kind."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("numbers")
    tars = [*map(str, sorted(write_shards(folder).glob("*.tar")))]
    pq.write_table(pa.table({"n": range(60)}), folder / "rows.parquet", row_group_size=7)
    stream = as_source(lambda: iter(range(60)))
    return ListSource(range(60)), stream, TarShards(tars), Parquet(folder / "rows.parquet")


@pytest.mark.parametrize("kind", TYPES)
def test_source_takes_numbers_of_any_type(sources, kind):
    """Parts, starts, seeds, epochs and sizes are those of Python's numbers."""
    for source in sources:
        expected = source.shuffle(3, None).shard(1, 4)
        given = source.shuffle(kind(3)).shard(kind(1), kind(4))
        for each, number in ((expected, 2), (given, kind(2))):
            each.set_epoch(number)
        assert [*given.iterate(kind(5))] == [*expected.iterate(5)]
        if not isinstance(source, ListSource):
            assert [*source.shuffle(3, kind(7))] == [*source.shuffle(3, 7)]
    assert [*map(str, Parquet(sources[3].urls, batch_size=kind(9)))] == [
        *map(str, Parquet(sources[3].urls, batch_size=9))
    ]


@pytest.mark.parametrize("kind", TYPES)
def test_mixture_and_packs_take_numbers_of_any_type(kind):
    """The same samples in the same order."""
    two = {"a": [*range(50)], "b": [*range(100, 150)]}
    options = {"stop": "never", "num_samples": kind(80)}
    assert [*mix(two, seed=kind(3), **options)] == [*mix(two, seed=3, stop="never", num_samples=80)]
    sizes = [n % 7 + 1 for n in range(40)]
    documents = [torch.arange(size) for size in sizes]
    for group in (pack, bucket):
        own = group(documents, kind(20), size_of=sizes, seed=kind(3))
        other = group(documents, 20, size_of=sizes, seed=3)
        packs = [[*DataLoader(it, batch_size=None, sampler=it.sampler())] for it in (own, other)]
        assert str(packs[0]) == str(packs[1])


@pytest.mark.parametrize("kind", TYPES)
def test_loader_and_pipeline_take_numbers_of_any_type(kind):
    """Figures among them, for which numbers of workers and times are multiplied."""
    options = {"batch_size": 4, "on_error": "skip", "isolation": "thread"}
    dataset = Indices(12, bad={5})
    numbers = {"num_workers": kind(2), "prefetch_factor": kind(200), "seed": kind(5)}
    loader = DataLoader(dataset, error_budget=kind(1), **numbers, **options)
    assert sum(map(len, loader)) == 11
    assert loader.snapshot().stages[0].tasks.num_tasks == 12
    pipeline = (
        PipelineBuilder().add_source(range(3)).pipe(int, concurrency=kind(2)).add_sink(kind(2))
    )
    with pipeline.build(num_threads=kind(2), max_failures=kind(2)).auto_stop() as items:
        assert sorted(items) == [0, 1, 2]
