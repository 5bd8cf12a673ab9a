"""A loader's state has the pass of the pipeline dataset that it loads from, whose order is another
one in each epoch, and only it knows which comes next. And epochs after a resumed one, of a dataset
that applies the state it was given again and again."""

import multiprocessing
import warnings
from itertools import islice

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.covering import by_pairs
from support.datasets import GoingOn
from support.loaders import batches_of, library
from support.seats import FORKED, NONE, THREADS, in_seats
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.data.sources import ListSource
from spdl_torch.pipeline import PipelineBuilder


def shuffled(first):
    """Eight numbers, in another order in each pass."""
    source = ListSource(range(first, first + 8)).shuffle(1)
    return PipelineDataset(PipelineBuilder().add_source(source).add_sink())


class Wrapped(IterableDataset):
    """Hands out what is inside, as a user's own class would."""

    def __init__(self, dataset):
        self.datasets = [dataset]

    def __iter__(self):
        yield from self.datasets[0]


INSIDE = {
    "chain": lambda: ChainDataset([shuffled(0), shuffled(100)]),
    "wrapped": lambda: Wrapped(shuffled(0)),
    "twice the same": lambda: ChainDataset([same := shuffled(0), same]),
}


@by_pairs(kind=INSIDE, seat=[NONE, THREADS, FORKED])
def test_pipeline_inside_a_dataset_resumes_what_is_known(kind, seat):
    """Items are counted: exact within the first epoch. Of a later one's items only a pass that was
    named is known, unless each epoch has new workers, which begin with the first pass."""

    def make():
        return seat.loader(INSIDE[kind](), 3, persistent_workers=seat.are_processes)

    run = make()
    epochs = [batches_of(run) for _ in range(2)]
    for epoch in range(2):
        run, again = make(), make()
        for _ in range(epoch):
            batches_of(run)
        next(iter(run))
        again.load_state_dict(run.state_dict())
        if epoch and seat is not THREADS:
            for _ in range(2):
                with pytest.raises(ValueError, match=r"of epoch 1, within which \w+ has given"):
                    iter(again)
            if kind == "twice the same":  # its epochs have two passes
                return
            for each in again.dataset.datasets:
                each.set_epoch(epoch)
        assert batches_of(again) == epochs[epoch][1:]


@in_seats(NONE, THREADS)
def test_first_state_within_a_later_pass_says_once_that_it_counts(seat, caplog):
    """And that each pass may be another one."""
    builder = PipelineBuilder().add_source(GoingOn()).add_sink()
    dataset = PipelineDataset(builder, num_replicas=2, rank=1)
    loader = seat.loader(dataset, None, persistent_workers=True)
    list(loader)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
        loader.state_dict()
    (told,) = [each for each in caplog.messages if "nobody had asked" in each]
    assert "is exact only if all its" in told


class Numbered:
    """A source whose items say of which pass they are; some keep a state of their own."""

    epoch = 0

    def __iter__(self):
        return iter([(self.epoch, number) for number in range(5)])

    def set_epoch(self, epoch):
        self.epoch = epoch


STEPS = st.one_of(
    st.sampled_from(["epoch", "left", "begun", "saved", "saved at the start", "saved at the end"]),
    st.integers(0, 9),
)


@pytest.mark.filterwarnings("ignore:.*persistent_workers")  # which changes where none are left
@settings(max_examples=12)
@given(steps=st.lists(STEPS, min_size=2, max_size=8), asked=st.booleans(), draw=st.data())
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("backend", ["none", "thread", "fork"])
def test_passes_are_counted_alike_in_every_backend(backend, persistent, steps, asked, draw):
    """Whatever was named, left, saved and resumed before, with one worker or none: a pass in each
    epoch, on from what was named; the rest of one first, unless another was named since."""

    def make(backend):
        dataset = PipelineDataset(PipelineBuilder().add_source(Numbered()).add_sink())
        if backend == "none":
            return DataLoader(dataset, 2)
        own = {"isolation": "thread" if backend == "thread" else "process"}
        return DataLoader(dataset, 2, num_workers=1, persistent_workers=persistent, **own)

    loader = make(backend)
    if asked:
        loader.state_dict()
    number, rest = 0, 0  # of the pass that comes next, and its first item
    left = None  # the same of one that was left
    resumed = {}  # the first item of the pass that was loaded since a loop
    for step in steps:
        if isinstance(step, int):
            loader.dataset.set_epoch(step)
            number, rest = step, resumed.get(step, 0)
            left = "unclear" if left is not None else None
            continue
        if step == "saved" and left is not None:
            if left == "unclear":  # whether what was left is meant, or what was named
                continue
            number, rest = left
        elif step != "saved":
            batches = iter(loader)
            whole = [[[number, item] for item in range(5)[n : n + 2]] for n in range(rest, 5, 2)]
            num_asked = {"epoch": 9, "left": 1, "begun": 0, "saved at the start": 0}
            most = num_asked.get(step, len(whole))
            got = [torch.stack(batch, 1).tolist() for batch in islice(batches, most)]
            assert got == whole[:most]
            is_over = step == "epoch" or (step == "left" and not got)  # it saw the end
            left = None if is_over else (number, rest + 2 * len(got))
            number, rest = left if step.startswith("saved") else (number + 1, 0)
            resumed = {}
        if step.startswith("saved"):
            state = loader.state_dict()
            loader.close()
            loader, left = make(draw.draw(st.sampled_from(["none", backend]))), None
            loader.dataset.set_epoch(7)  # loading undoes it
            loader.load_state_dict(state)
            resumed = {number: rest}


NUM_ITEMS = 16


class Reapplies(IterableDataset):
    """Begins at the state that it was given until another epoch is named, as Hugging Face's."""

    def __init__(self):
        self.epoch = self.position = 0
        self.begins_at = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        count = 1 if info is None else info.num_workers
        self.position = 0
        if self.begins_at is not None and self.begins_at["epoch"] == self.epoch:
            self.position = self.begins_at["position"]
        while self.position < NUM_ITEMS // count:
            self.position += 1
            yield self.position - 1

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.begins_at = state


def resumed(kind, seat):
    """A loader that resumes an epoch in its middle."""
    first, again = (seat.loader(kind(), 2, persistent_workers=True) for _ in range(2))
    first.state_dict()
    batches = iter(first)
    for _ in range(4):
        next(batches)
    again.load_state_dict(first.state_dict())
    del batches
    first.close()
    return again


def hugging_face():
    """A stream of the library's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets, table = library("datasets"), library("datasets.table")
    numbers = table.InMemoryTable.from_pydict({"x": list(range(NUM_ITEMS))})
    rows = datasets.Dataset(numbers, fingerprint="rows")  # else it pickles pyarrow's types
    return rows.to_iterable_dataset(num_shards=4)


OF_THE_LIBRARY = [
    pytest.mark.filterwarnings("ignore"),  # in this and in later versions
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="workers are forked"
    ),
]


@pytest.mark.parametrize(
    ("kind", "seat"),
    [
        *((Reapplies, seat) for seat in (NONE, THREADS, FORKED)),
        pytest.param(hugging_face, NONE, marks=OF_THE_LIBRARY),
    ],
)
def test_first_short_epoch_is_warned_of(kind, seat):
    """Once, with what to do: then epochs are whole, and nothing is said."""
    loader = resumed(kind, seat)
    assert len(list(loader)) == 4
    with pytest.warns(UserWarning, match=r" has 8 items, just as .*set_epoch\(number\)"):
        assert len(list(loader)) == 4
    assert len(list(loader)) == 4
    loader.close()
    if seat is NONE:
        named, lengths = resumed(kind, seat), []
        for epoch in range(3):
            named.dataset.set_epoch(epoch)
            lengths.append(len(list(named)))
        assert lengths == [4, 8, 8]
