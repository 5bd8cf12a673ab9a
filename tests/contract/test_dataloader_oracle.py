"""torch's DataLoader is the oracle: batches, order, errors, lengths, sampler pulls, RNG use."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from _datasets import BulkData, MapData, RecordingSampler, StreamData
from _fuzz import in_both_forms
from _loader_helpers import (
    PATIENCE_SECONDS,
    DataLoader,
    ModelLoader,
    ThreadLoader,
    epoch_of,
    frozen,
)
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
TorchLoader = torch.utils.data.DataLoader
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to build a loader; ``build`` gives the same loader for any class."""

    data: str = "map"
    length: int = 10
    bad: dict[int, type[Exception]] = field(default_factory=dict)
    order: str = "none"
    indices: Any = None
    batch_size: int | None = 3
    drop_last: bool = False
    num_workers: int = 2
    prefetch_factor: int = 2
    persistent_workers: bool = False
    in_order: bool = True
    own_generator: bool = True
    seed: int = 0
    picky: int | None = None
    """The sample that the collate function does not like."""

    def build(self, loader_class, generator):
        """Returns the loader, and the sampler that counts pulls (None: torch's own)."""
        options: dict[str, Any] = {"num_workers": self.num_workers, "generator": generator}
        if self.picky is not None:
            options["collate_fn"] = partial(picky, self.picky)
        if self.num_workers:
            options["prefetch_factor"] = self.prefetch_factor
            options["persistent_workers"] = self.persistent_workers
            options["in_order"] = self.in_order
        if self.order != "batch_sampler":
            options["batch_size"] = self.batch_size
            options["drop_last"] = self.drop_last and self.batch_size is not None
        sampler = None
        if self.order == "shuffle":
            options["shuffle"] = True
        elif self.order != "none":
            sampler = options[self.order] = RecordingSampler(self.indices)
        return loader_class(self.dataset(), **options), sampler

    def dataset(self):
        kinds = {"map": MapData, "bulk": BulkData, "stream": StreamData}
        if self.data == "mortal":
            return MortalStream(self.length, self.bad)
        if self.data == "split":
            return StreamData(self.length, self.bad, split=True)
        return kinds[self.data](self.length, self.bad)

    def play(self, loader_class, epochs=2):
        """Everything a training loop and the random generators can tell about the loader."""
        torch.manual_seed(self.seed)
        generator = torch.Generator().manual_seed(self.seed + 1) if self.own_generator else None
        loader, sampler = self.build(loader_class, generator)
        story = []
        for _ in range(epochs):
            story += [
                len(loader),
                epoch_of(loader) if sampler is None else _epoch_with_pulls(loader, sampler),
                torch.get_rng_state().tolist(),
                generator.get_state().tolist() if generator else None,
            ]
        return story


class MortalStream(StreamData):
    """A generator: its error is its end, as Python has it."""

    def __iter__(self):
        yield from super().__iter__()


def picky(number, batch):
    """A collate function of samples or of one."""
    if any(sample["y"] == number for sample in (batch if isinstance(batch, list) else [batch])):
        raise ZeroDivisionError("picky")
    return default_collate(batch) if isinstance(batch, list) else default_convert(batch)


def _epoch_with_pulls(loader, sampler):
    """As epoch_of, and after each step how many indices had been taken from the sampler."""
    sampler.pulled = 0
    batches = iter(loader)
    events: list[Any] = [sampler.pulled]
    while True:
        assert len(events) < 1000, "the epoch does not end"
        try:
            events.append((frozen(next(batches)), sampler.pulled))
        except StopIteration:
            return [*events, sampler.pulled]
        except Exception as error:
            events.append((type(error), sampler.pulled))


errors = st.dictionaries(
    st.integers(0, 40), st.sampled_from([ValueError, KeyError, OSError, ZeroDivisionError])
)
workers = st.sampled_from([0, 1, 2, 4])
pickies = st.none() | st.none() | st.integers(0, 20)


@st.composite
def map_cases(draw):
    length = draw(st.integers(0, 40))
    order = draw(st.sampled_from(["none", "shuffle", "sampler", "batch_sampler"]))
    # One index past the end: a sampler's mistake must give the dataset's own error.
    index = st.integers(0, length)
    lists = {"sampler": st.lists(index, max_size=40)}
    lists["batch_sampler"] = st.lists(st.lists(index, max_size=6), max_size=12)
    return Case(
        data=draw(st.sampled_from(["map", "bulk"])),
        length=max(1, length) if order == "shuffle" else length,
        bad=draw(st.one_of(st.just({}), errors)),
        order=order,
        indices=draw(lists[order]) if order in lists else None,
        batch_size=draw(st.one_of(st.none(), st.integers(1, 7))),
        drop_last=draw(st.booleans()),
        num_workers=draw(workers),
        prefetch_factor=draw(st.integers(1, 3)),
        persistent_workers=draw(st.booleans()),
        own_generator=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        picky=draw(pickies),
    )


@st.composite
def stream_cases(draw):
    return Case(
        data=draw(st.sampled_from(["stream", "split", "mortal"])),
        length=draw(st.integers(0, 40)),
        bad=draw(st.one_of(st.just({}), errors)),
        batch_size=draw(st.one_of(st.none(), st.integers(1, 7))),
        drop_last=draw(st.booleans()),
        num_workers=draw(workers),
        prefetch_factor=draw(st.integers(1, 3)),
        persistent_workers=draw(st.booleans()),
        own_generator=draw(st.booleans()),
        picky=draw(pickies),
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(order="shuffle"),
        Case(order="shuffle", own_generator=False, persistent_workers=True),
        Case(bad={1: ValueError, 4: KeyError, 5: ValueError}, drop_last=True),
        Case(data="bulk", order="batch_sampler", indices=[[3, 1], [], [11], [0, 0, 2]]),
        Case(order="sampler", indices=[4, 1, 9, 9], batch_size=None, num_workers=1),
        Case(data="stream", length=7, persistent_workers=True),
        Case(data="split", length=11, batch_size=2, prefetch_factor=3),
        Case(data="split", length=2, batch_size=2, num_workers=3, drop_last=True),
        Case(data="split", length=9, batch_size=None, bad={3: ValueError, 8: KeyError}),
        Case(data="split", length=1, batch_size=1, persistent_workers=True, prefetch_factor=1),
        Case(data="mortal", bad={4: OSError}, persistent_workers=True),
        Case(order="batch_sampler", indices=[[3, 1], [4], [2]], picky=4, num_workers=4),
    ],
    ids=repr,
)
def test_model_agrees_with_torch(case):
    """The oracle of the tests below tells the story torch's worker processes tell."""
    assert case.play(ModelLoader) == case.play(TorchLoader)


@in_both_forms(short=90, long=500)
def test_epochs_equal_torchs_for_a_map_dataset(num_examples):
    """Batches, order, errors, len, sampler pulls and generator states are torch's."""

    @settings(quick, max_examples=num_examples)
    @given(case=map_cases())
    @example(case=Case(length=0))
    @example(case=Case(length=7, num_workers=2, batch_size=3))
    @example(case=Case(length=7, num_workers=4, batch_size=7, bad={6: KeyError, 2: ValueError}))
    @example(case=Case(order="batch_sampler", indices=[[], [1], []], num_workers=4))
    def check(case):
        assert case.play(ThreadLoader) == case.play(ModelLoader)

    check()


@in_both_forms(short=60, long=300)
def test_epochs_equal_torchs_for_an_iterable_dataset(num_examples):
    """Round robin over the workers, ended workers skipped, batches and errors as torch's."""

    @settings(quick, max_examples=num_examples)
    @given(case=stream_cases())
    @example(case=Case(data="split", length=3, num_workers=4, batch_size=2, drop_last=True))
    @example(case=Case(data="stream", length=0, num_workers=2))
    def check(case):
        assert case.play(ThreadLoader) == case.play(ModelLoader)

    check()


@settings(quick, max_examples=10)
@given(case=st.one_of(map_cases(), stream_cases()))
@example(case=Case(length=7, num_workers=4, batch_size=7, bad={6: KeyError, 2: ValueError}))
@example(case=Case(data="split", length=3, num_workers=4, batch_size=2, drop_last=True))
def test_epochs_equal_torchs_when_workers_are_processes(case):
    """The same of the default, which starts processes for these datasets."""
    assert case.play(DataLoader) == case.play(ModelLoader)


@in_both_forms(short=40, long=200)
def test_epochs_hold_the_same_batches_when_out_of_order(num_examples):
    """in_order=False changes the order alone: nothing lost, nothing twice."""

    @settings(quick, max_examples=num_examples)
    @given(case=st.one_of(map_cases(), stream_cases()))
    def check(case):
        _assert_same_batches_out_of_order(case, ThreadLoader)

    check()


@settings(quick, max_examples=8)
@given(case=st.one_of(map_cases(), stream_cases()))
def test_processes_yield_the_same_batches_out_of_order(case):
    """Whichever child is the first."""
    _assert_same_batches_out_of_order(case, DataLoader)


def _assert_same_batches_out_of_order(case, loader_class):
    unordered = Case(**{**vars(case), "in_order": False})
    for ours, torchs in zip(
        _batches_alone(unordered, loader_class), _batches_alone(case, ModelLoader), strict=True
    ):
        assert sorted(ours, key=repr) == sorted(torchs, key=repr)


@settings(quick, max_examples=300)
@given(
    is_stream=st.booleans(),
    length=st.sampled_from([5, 0]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "batch_size": st.sampled_from([1, 3, None, 0, -1]),
            "drop_last": st.booleans(),
            "shuffle": st.booleans(),
            "sampler": st.just([2, 1]),
            "batch_sampler": st.just([[2, 1]]),
            "in_order": st.booleans(),
            "num_workers": st.sampled_from([0, 1, -1]),
            "persistent_workers": st.booleans(),
            "prefetch_factor": st.sampled_from([None, 2, -1]),
            "timeout": st.sampled_from([0, 5, -1]),
            "multiprocessing_context": st.sampled_from([None, "spawn", "no such method", 3]),
        },
    ),
)
@example(is_stream=True, length=5, options={"sampler": [2, 1]})
@example(is_stream=True, length=5, options={"batch_sampler": [[2, 1]], "batch_size": None})
@example(is_stream=False, length=5, options={"persistent_workers": True})
@example(is_stream=False, length=0, options={"shuffle": True})
@example(is_stream=False, length=5, options={"batch_size": 0})
@example(is_stream=False, length=5, options={"batch_sampler": [[2, 1]], "drop_last": True})
@example(is_stream=False, length=5, options={"batch_size": None, "drop_last": True})
def test_refusal_equals_torchs(is_stream, length, options):
    """Of options that torch does not take together, or at all: the same exception and words."""
    found = []
    for loader_class in (TorchLoader, DataLoader):
        try:
            loader_class((StreamData if is_stream else MapData)(length), **options)
        except Exception as error:
            found.append((type(error), str(error)))
        else:
            found.append(None)
    assert found[0] == found[1]


def _batches_alone(case, loader_class):
    torch.manual_seed(case.seed)
    loader, _ = case.build(loader_class, torch.Generator().manual_seed(1))
    return [epoch_of(loader) for _ in range(2)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        ([5, 6, 7], {}),
        (range(9), {"shuffle": True}),
        ({0: "a", 1: "b"}, {"sampler": [1, 0, 1]}),
        (TensorDataset(torch.arange(8), torch.rand(8, 2)), {"shuffle": True}),
        (Subset(MapData(9), [8, 1, 4]), {}),
        (ConcatDataset([MapData(3), BulkData(4)]), {"shuffle": True}),
        (StackDataset(a=MapData(4), b=range(4)), {}),
        (ChainDataset([StreamData(3), StreamData(2)]), {}),
        (MapData(9), {"sampler": WeightedRandomSampler([0.1] * 9, 12)}),
        (MapData(9), {"sampler": [[0, 1], [5]], "batch_size": None, "collate_fn": str}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_epochs_equal_torchs_for_common_datasets(dataset, options, num_workers):
    """Plain sequences and torch's own datasets and samplers give what torch gives."""
    options = {"batch_size": 2, "num_workers": num_workers, **options}
    if options["batch_size"] is None:
        dataset = _Bulk()
    stories = []
    for loader_class in (DataLoader, ModelLoader):
        torch.manual_seed(3)
        loader = loader_class(dataset, **options)
        stories.append([epoch_of(loader) for _ in range(2)])
    assert stories[0] == stories[1]


class _Bulk(Dataset):
    """Takes a whole list as its index, torch's documented way to load in bulk."""

    def __getitem__(self, indices):
        return [index * 10 for index in indices]


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_come_in_order_when_completed_out_of_order(in_order):
    """A slow first sample delays everyone in order, and nobody out of order."""

    class FirstIsLast(Dataset):
        """Sample 0 is ready only when ``gate`` opens, by the loader or by the loop."""

        def __init__(self):
            self.gate = threading.Event()

        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 0:
                assert self.gate.wait(PATIENCE_SECONDS), "sample 1 never came"
            elif in_order:
                self.gate.set()
            return index

    dataset = FirstIsLast()
    loader = ThreadLoader(dataset, num_workers=2, batch_size=None, in_order=in_order)
    seen = []
    for batch in loader:
        dataset.gate.set()
        seen.append(batch)
    assert sorted(seen) == [0, 1, 2, 3]
    assert (seen[0] == 0) is in_order
    if in_order:
        assert seen == [0, 1, 2, 3]
