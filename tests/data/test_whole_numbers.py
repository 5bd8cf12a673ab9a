"""Numbers of numpy's types mean what Python's mean: they are often the length of an array."""

import numpy as np
import pytest
import torch
from support.datasets import Indices
from support.tars import write_shards
from test_sources import KINDS

from spdl_torch import DataLoader
from spdl_torch.data import bucket, mix, pack
from spdl_torch.data.sources import ListSource, Parquet
from spdl_torch.pipeline import PipelineBuilder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = write_shards(tmp_path_factory.mktemp("numbers"))
    return [KINDS[kind](folder) for kind in ("list", "stream", "shards with an index", "rows")]


def of_sources(sources, number):
    """Items of parts: their starts, seeds, epochs and sizes are numbers."""
    found = [*Parquet(sources[3].urls, batch_size=number(9))]
    for source in sources:
        part = source.shuffle(number(3)).shard(number(1), number(4))
        part.set_epoch(number(2))
        found += part.iterate(number(2))
        if not isinstance(source, ListSource):
            found += source.shuffle(3, number(7))
    return found


def of_groups(sources, number):
    """Samples of a mixture, packs and buckets."""
    two = {"a": [*range(50)], "b": [*range(100, 150)]}
    found = [*mix(two, seed=number(3), stop="never", num_samples=number(80))]
    sizes = [n % 7 + 1 for n in range(40)]
    documents = [torch.arange(size) for size in sizes]
    for group in (pack, bucket):
        grouped = group(documents, number(20), size_of=sizes, seed=number(3))
        found += DataLoader(grouped, batch_size=None, sampler=grouped.sampler())
    return found


def of_loaders(sources, number):
    """Counts of a loader and a pipeline, for which numbers of workers and times are multiplied."""
    numbers = {"num_workers": number(2), "prefetch_factor": number(200), "seed": number(5)}
    options = {"batch_size": 4, "on_error": "skip", "isolation": "thread", **numbers}
    loader = DataLoader(Indices(12, bad={5}), error_budget=number(1), **options)
    found = [sum(map(len, loader)), loader.snapshot().stages[0].tasks.num_tasks]
    builder = PipelineBuilder().add_source(range(3)).pipe(int, concurrency=number(2))
    pipeline = builder.add_sink(number(2)).build(num_threads=number(2), max_failures=number(2))
    with pipeline.auto_stop() as items:
        return [*found, *sorted(items)]


@pytest.mark.parametrize("make", [of_sources, of_groups, of_loaders])
@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_numbers_of_any_type_mean_the_same(sources, make, kind):
    """As those of Python's."""
    found = make(sources, kind)
    assert len(found) >= 5
    assert str(found) == str(make(sources, int))
