"""mix over streams: the plan's order, pass after pass, and any state resumes exactly there."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch.utils.data as torch_data
from support.covering import by_pairs
from support.datasets import Stateful
from support.seats import FORKED, NONE, THREADS

import spdl_torch
from spdl_torch.data import MixedSource, mix
from spdl_torch.data.sources import as_source
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing import assert_resume_exact


class Plain(torch_data.IterableDataset):
    """An iterable dataset without a state; ``length`` None = without an end."""

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __iter__(self):
        numbers = itertools.count() if self.length is None else range(self.length)
        yield from ((self.name, number) for number in numbers)


class Kept(Plain):
    """Its iterators keep their place."""

    num_read = 0

    def __iter__(self):
        return _KeptItems(self)


class _KeptItems(Stateful):
    kept = ("place",)

    def __init__(self, dataset):
        self.dataset, self.place = dataset, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == self.dataset.length:
            raise StopIteration
        self.place += 1
        self.dataset.num_read += 1
        return self.dataset.name, self.place - 1


class Resuming(Plain):
    """Keeps its place itself, for the epoch of the state alone, as Hugging Face's streams do."""

    def __init__(self, name, length):
        super().__init__(name, length)
        self.epoch = self.number = 0
        self.starting = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def first(self):
        is_resumed = self.starting is not None and self.starting["epoch"] == self.epoch
        return self.starting["number"] if is_resumed else 0

    def __iter__(self):
        self.number = self.first()
        while self.number != self.length:
            self.number += 1
            yield self.name, self.number - 1

    def state_dict(self):
        return {"number": self.number, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.starting = state


class Once(Resuming):
    """A place that it is given counts for its next iteration, whenever that begins."""

    def first(self):
        starting, self.starting = self.starting, None
        return 0 if starting is None else starting["number"]


def listed(name, length):
    """A list, any place of which is reached at once."""
    return [(name, number) for number in range(length)]


KINDS = {
    "kept": {"a": (Kept, 3), "b": (Kept, 7)},
    "plain": {"a": (Plain, 3), "b": (Plain, 7)},
    "once": {"a": (Once, 3), "b": (Once, 7)},
    "one endless": {"a": (Kept, None), "b": (Plain, 7)},
    "all": {"a": (Kept, 3), "b": (Plain, 7), "c": (Resuming, 4), "d": (listed, 5)},
}


def sources_of(kind, wrap=lambda dataset: dataset):
    """A mixture's datasets, which only one worker may read unless they are wrapped as sources."""
    return {name: wrap(make(name, length)) for name, (make, length) in KINDS[kind].items()}


def piped(sources, **options):
    """A pipeline over the mixture of these, each in its own order."""
    stop = options.pop("stop", "first")
    source = mix(sources, seed=5, stop=stop, shuffle=False)
    assert isinstance(source, MixedSource)
    return spdl_torch.PipelineDataset(PipelineBuilder().add_source(source).add_sink(), **options)


PLACES = {"none": (NONE, 0), "threads": (THREADS, 2), "a process": (FORKED, 1)}


@pytest.mark.filterwarnings("ignore:DataLoader. this epoch of .* just as many as were left")
@by_pairs(kind=[*KINDS], stop=["first", "all"], place=[*PLACES])
def test_any_state_resumes_exactly(kind, stop, place):
    """Before each batch of an epoch and after the last, in the middle of any pass."""
    if (kind, stop) == ("one endless", "all"):
        stop = "first"
    if (kind, place) in {("all", "threads"), ("once", "threads")}:
        kind = "kept"  # threads share a dataset, and with it the place that it keeps itself
    seat, num_workers = PLACES[place]

    def make():
        options = {"num_workers": num_workers} if num_workers else {}
        dataset = piped(sources_of(kind, as_source), stop=stop)
        return seat.loader(dataset, 3, collate_fn=list, **options)

    assert_resume_exact(make, num_epochs=1 if num_workers else 2)


@pytest.mark.parametrize(("kind", "stop"), [("kept", "first"), ("all", "all")])
def test_any_item_of_later_passes_resumes_exactly(kind, stop):
    """Alone, in each pass of the pipeline, which differ."""
    dataset = piped(sources_of(kind), stop=stop)
    assert list(dataset) != list(dataset)
    assert_resume_exact(lambda: piped(sources_of(kind), stop=stop), num_epochs=2)


def test_mixture_without_states_is_a_number():
    """Its pipeline counts items, and has no state of its own to ask for. One that was iterated can
    be pickled, as its pipeline is on its way to a worker that is spawned."""
    source = mix({"a": Plain("a", 3)})
    next(iter(source))
    assert list(pickle.loads(pickle.dumps(source))) == list(source)
    assert mix({"a": as_source(lambda: iter(range(5))), "b": range(3)}).state_dict is None
    assert mix({"a": as_source(Resuming("a", 3))}).state_dict is None  # shuffled here
    assert mix({"a": as_source(Resuming("a", 3))}, shuffle=False).state_dict is not None


def test_mixture_that_cannot_be_right_is_refused():
    """A dataset that may divide itself, on several ranks or workers: some of its items would belong
    to nobody. A pipeline's sources are what to mix; a source is no dataset."""
    refused = spdl_torch.UnsupportedOptionError
    ranks = piped(sources_of("plain"), num_replicas=2, rank=0, tail="uneven")
    for iterate, error, message in (
        (ranks, refused, r"'a' is an iterable dataset, and 2"),
        (THREADS.loader(piped(sources_of("plain")), None), refused, r"pass as_source\(dataset\)"),
        (
            spdl_torch.DataLoader(mix({"a": Plain("a", 3)})),
            *(TypeError, r"A loader takes PipelineDataset\(PipelineBuilder"),
        ),
    ):
        with pytest.raises(error, match=message):
            next(iter(iterate))
    with pytest.raises(TypeError, match=r"'a' is a PipelineDataset.*Mix the sources, and make one"):
        mix({"a": ranks})


def test_state_of_another_mixture_is_refused():
    """Names must be those of then; what is not a state is named."""
    source = mix({"a": Kept("a", 3)})
    next(iter(source))
    state = source.state_dict()
    other = mix({"b": Kept("b", 3)})
    with pytest.raises(ValueError, match=r"of \['a'\], this mixture has \['b'\]"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="more is unknown, so this is not a state of a mixture"):
        source.load_state_dict({**state, "more": 1})


def test_state_after_resuming_knows_streams_that_were_not_drawn_from_again():
    """Each item's state of a resumed pass resumes the rest of it."""

    def make(state=None):
        sources = {"often": Resuming("often", 30), "seldom": Resuming("seldom", 30)}
        source = mix(sources, {"often": 6, "seldom": 1}, shuffle=False)
        made = spdl_torch.PipelineDataset(PipelineBuilder().add_source(source).add_sink())
        if state is not None:
            made.load_state_dict(state)
        return made

    run = make()
    run.state_dict()
    next(None for name, _ in run if name == "seldom")
    state = run.state_dict()
    assert_resume_exact(lambda: make(state), make_resumed=make, num_epochs=1)


def test_streams_with_a_state_are_not_read_again():
    """Resuming takes their states, and begins there."""

    def make():
        return {"a": Kept("a", None), "b": Kept("b", None)}

    run, sources = piped(make()), make()
    run.state_dict()
    items = list(itertools.islice(run, 1000))
    state, again = run.state_dict(), piped(sources)
    again.load_state_dict(state)
    items += itertools.islice(again, 3)
    assert items == list(itertools.islice(piped(make()), 1003))
    # A state that takes long to take, as where others have the cores, is taken less often.
    assert sum(each.num_read for each in sources.values()) < state["num_after"] + 100
