"""spdl_torch.spdl.dataloader: SPDL's loaders, with SPDL's results."""

import asyncio
import itertools
import threading

import pytest
from hypothesis import given, strategies as st
from support.gates import Boom, until

from spdl_torch import PipelineFailure
from spdl_torch.spdl.dataloader import CacheDataLoader, DataLoader


def double(item):
    """Of one; drops every fifth."""
    return None if item % 5 == 4 else 2 * item


def twice(item):
    """Two of one."""
    yield from (item, -item)


async def plus_one(item):
    """As a coroutine."""
    return item + 1


def total(items):
    """Of a list, or of one item."""
    return sum(items) if isinstance(items, list) else items


@given(
    num_items=st.integers(0, 13),
    preprocessor=st.sampled_from([None, double, twice, plus_one]),
    batch_size=st.none() | st.integers(1, 5),
    drop_last=st.booleans(),
    aggregator=st.sampled_from([None, total]),
    transfer_fn=st.sampled_from([None, repr]),
    num_threads=st.integers(1, 3),
)
def test_batches_are_as_the_functions_make_them(
    num_items, preprocessor, batch_size, drop_last, aggregator, transfer_fn, num_threads
):
    """In the order of the source where that is asked for, in every pass."""
    items = list(range(num_items))
    if preprocessor is twice:
        items = [each for item in items for each in twice(item)]
    elif preprocessor is not None:
        make = double if preprocessor is double else (lambda item: item + 1)
        items = [made for item in items if (made := make(item)) is not None]
    if batch_size is not None:
        lists = [items[k : k + batch_size] for k in range(0, len(items), batch_size)]
        items = [each for each in lists if len(each) == batch_size or not drop_last]
    for function in (aggregator, transfer_fn):
        items = items if function is None else list(map(function, items))
    loader = DataLoader(
        range(num_items),
        preprocessor=preprocessor,
        batch_size=batch_size,
        drop_last=drop_last,
        aggregator=aggregator,
        transfer_fn=transfer_fn,
        num_threads=num_threads,
        output_order="input",
    )
    assert list(loader) == items == list(loader)


def test_source_may_be_asynchronous_or_iterable_once():
    """An iterator that is used up is an error, where SPDL has an epoch without a batch."""

    async def numbers():
        for number in range(5):
            yield number

    assert list(DataLoader(numbers(), preprocessor=plus_one)) == [1, 2, 3, 4, 5]
    loader = DataLoader(iter(range(3)))
    assert list(loader) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="src, a range_iterator, can be iterated only once"):
        list(loader)


def test_errors_reach_the_loop():
    """The function's own, and those of arguments when the loader is made."""

    def fail(item):
        raise Boom(item)

    with pytest.raises(PipelineFailure, match="fail") as failure:
        list(DataLoader(range(3), preprocessor=fail))
    assert {type(error) for error in failure.value.exceptions} == {Boom}
    with pytest.raises(ValueError, match="output_order must be 'completion' or 'input'"):
        DataLoader([1], preprocessor=str, output_order="any")
    with pytest.raises(ValueError, match="concurrency must be >= 1, got 0"):
        DataLoader([1], preprocessor=str, num_threads=0)
    with pytest.raises(ValueError, match="n must be >= 1, got 0"):
        DataLoader([1], batch_size=0)


def test_timeout_and_break_end_the_loop():
    """The first with an error; neither leaves a thread."""
    before = set(threading.enumerate())

    async def wait_forever(item):
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="no item"):
        list(DataLoader([1], preprocessor=wait_forever, timeout=0.01))
    for item in DataLoader(itertools.count(), preprocessor=str):
        assert item == "0"
        break
    until(lambda: set(threading.enumerate()) <= before)


def test_cached_batches_need_the_loader_no_more():
    """Its threads have ended before the first kept batch comes; its attributes can be read."""
    before = set(threading.enumerate())
    loader = CacheDataLoader(DataLoader(itertools.count(), preprocessor=str), 2, 3)
    batches = iter(loader)
    assert [next(batches) for _ in range(3)] == ["0", "1", "2"]
    assert set(threading.enumerate()) > before
    assert [next(batches) for _ in range(3)] == ["0", "1", "0"]
    assert set(threading.enumerate()) <= before
    assert loader._num_threads == 8
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = loader.nonesuch
