"""The first items of an iterable, again and again."""

import gc
import weakref
from itertools import islice

import pytest

from spdl_torch.pipeline import PipelineBuilder, cache_iterator


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
    pipeline = (
        PipelineBuilder().add_source(range(100)).pipe(lambda item: item + 1).add_sink().build()
    )
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
