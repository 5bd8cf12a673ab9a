"""Resuming a PipelineDataset: the items that would have come, in every place where it is used."""

import itertools
import json
import logging
from contextlib import suppress

import pytest
from support.at_call import AtCall
from support.covering import by_pairs
from support.datasets import Position, ShuffledSource
from support.gates import Boom, asame, same

import spdl_torch
from spdl_torch import PipelineDataset
from spdl_torch.data.sources import ListSource
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing import assert_resume_exact

LENGTH = 9  # the runs from every item are as many as it has: their time is its square


def drops_some(item):
    return None if item % 5 == 3 else item


def fails_some(item):
    if item % 7 == 2:
        raise Boom(item)
    return item


def twice(item):
    yield item
    yield -item


def dataset_of(source, *ops, group=None, **options):
    builder = PipelineBuilder().add_source(source)
    for op in ops:
        builder.pipe(op, concurrency=1 if op is twice else 3, output_order="input")
    if group is not None:
        builder.aggregate(group)
    return PipelineDataset(builder.add_sink(2), max_failures=1.0, **options)


def state_after(number, dataset):
    """Its state when so many items were taken, of a pass that is left then."""
    dataset.state_dict()  # from now on somebody wants states
    iterator = iter(dataset)
    assert len([*itertools.islice(iterator, number)]) == number
    state = json.loads(json.dumps(dataset.state_dict()))
    iterator.close()
    return state


SOURCES = {
    "list": lambda: list(range(LENGTH)),
    "shuffled": lambda: ShuffledSource(LENGTH),
    "seekable": lambda: ListSource(range(LENGTH)),
    "stateful": lambda: Position(LENGTH),
}
OPS = {
    "none": (),
    "ones": (same,),
    "coroutine": (same, asame),
    "drops some": (drops_some,),
    "fails some": (fails_some,),
    "twice": (twice,),
}


@by_pairs(source=SOURCES, ops=OPS, group=[None, 4])
def test_tail_is_exact_from_every_item(source, ops, group):
    """Whatever the source is, and whatever the ops do with its items."""
    assert_resume_exact(lambda: dataset_of(SOURCES[source](), *OPS[ops], group=group))


@pytest.mark.parametrize(
    ("source", "ops", "num_made"),
    [(range, (), 20), (range, (drops_some,), 40), (Position, (), 20)],
)
def test_items_are_not_made_again_where_nothing_was_lost(source, ops, num_made):
    """The source begins after what was handed out, by its own state if it keeps one; with a loss
    the pass begins anew."""
    made = []

    def op(item):
        made.append(item)
        return item

    dataset, again = (dataset_of(source(40), op, *ops) for _ in range(2))
    again.load_state_dict(state_after(20, dataset))
    made.clear()
    list(again)
    assert len(made) == num_made


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("source", ["list", "stateful"])
def test_ctrl_c_before_the_loop_has_seen_the_end_ends_no_pass(source):
    """Wherever it comes after the last item: a state from then has nothing left of that pass, and
    only then the next one."""
    first, second = ([*each] for each in [dataset_of(SOURCES[source]())] * 2)
    outcomes = set()
    for place in itertools.count(1, 11):
        dataset = dataset_of(SOURCES[source]())
        dataset.state_dict()
        iterator, came = iter(dataset), None
        assert [*itertools.islice(iterator, len(first))] == first
        with suppress(KeyboardInterrupt), AtCall(place) as ctrl_c:
            for _ in iterator:
                break
            came = "the end"
        resumed = dataset_of(SOURCES[source]())
        resumed.load_state_dict(dataset.state_dict())
        passes = [[*resumed], [*resumed]]
        outcomes.add(came)
        assert passes[0] == (second if came else []), ctrl_c.where
        assert came or passes[1] == second, ctrl_c.where
        if ctrl_c.where is None:
            break
    assert outcomes == {None, "the end"}


def test_a_loaders_state_that_counts_another_ranks_items_is_doubted():
    """The workers' datasets were not asked, and cannot know that their parts are others."""

    def make(num_replicas):
        data = dataset_of(range(60), same, num_replicas=num_replicas, rank=0)
        return spdl_torch.DataLoader(data, batch_size=None, num_workers=2, isolation="thread")

    loader, again = make(2), make(3)
    items = iter(loader)
    next(items)
    again.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="3 rank.s. load here, 2 when"):
        list(again)


def test_error_of_a_source_that_begins_is_its_own_on_a_resume_too():
    """It does not say that the state does not fit."""

    class Refusing:
        def __iter__(self):
            raise UnicodeError("no such file")

    again = dataset_of(Refusing())
    again.load_state_dict(state_after(1, dataset_of(range(9))))
    with pytest.raises(spdl_torch.PipelineFailure, match="the source raised") as raised:
        next(iter(again))
    assert raised.group_contains(UnicodeError, match="no such file")


def part_of(num_replicas, source=range(12)):
    return dataset_of(source, num_replicas=num_replicas, rank=0)


LIST = ListSource(range(20))  # which makes the parts
MISFITS = {
    "ranks": (lambda: part_of(2), lambda: part_of(5)),
    "parts": (lambda: part_of(2, LIST), lambda: part_of(4, LIST)),
    "source": (lambda: dataset_of(range(12)), lambda: dataset_of(range(2))),
    "items": (lambda: dataset_of(range(12), twice), lambda: dataset_of(range(1), twice)),
    "keeper": (lambda: dataset_of(Position(12)), lambda: dataset_of(range(12))),
}


@pytest.mark.parametrize("which", MISFITS)
def test_a_state_that_does_not_fit_stays_until_a_pass_begins(which):
    """Each try raises, none begins another pass, and the state is still there."""
    make, make_other = MISFITS[which]
    other = make_other()
    other.load_state_dict(state_after(3, make()))
    for _ in range(3):
        told = r"of 2 rank\(s\), this run has 4.*The source makes" if which == "parts" else ""
        with pytest.raises(ValueError, match=f"load_state_dict: .*{told}"):
            list(other)
        assert other.state_dict()["epoch"] == 0
        assert other.state_dict()["num_items"] == 3


def test_items_out_of_order_are_reported(caplog):
    """Once: a state cannot be exact where items overtake each other."""
    builder = PipelineBuilder().add_source(range(20)).pipe(same, concurrency=3).add_sink()
    dataset = PipelineDataset(builder)
    iterator = iter(dataset)
    next(iterator)
    with caplog.at_level(logging.WARNING, "spdl_torch.data"):
        dataset.state_dict()
        dataset.state_dict()
    iterator.close()
    assert caplog.text.count('Give it output_order="input"') == 1


def test_naming_another_pass_begins_it():
    """set_epoch() after a load means that pass, from its beginning."""
    state = state_after(1, dataset_of(ShuffledSource(10), same))
    again = dataset_of(ShuffledSource(10), same)
    again.load_state_dict(state)
    again.set_epoch(2)
    assert len(list(again)) == 10
    again.load_state_dict(state)
    again.set_epoch(0)
    assert len(list(again)) == 9
    again.set_epoch(2)  # after a whole pass, a state is of the one that was named
    resumed = dataset_of(ShuffledSource(10), same)
    resumed.load_state_dict(again.state_dict())
    assert list(resumed) == list(again)


def test_a_state_is_not_taken_from_what_is_no_state():
    """Nor from another release, nor without a field: the pass might begin again in silence."""
    dataset = dataset_of(range(3))
    state = dataset.state_dict()
    for damaged, message in (
        ({**state, "version": 9}, r"version 9, .* PipelineDataset knows version 4 alone\. Upgrade"),
        ({**state, "version": 3}, r"version 3, .* PipelineDataset knows version 4 alone"),
        ({name: state[name] for name in state if name != "epoch"}, "epoch is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.load_state_dict(damaged)
