"""The loader's arguments and attributes: torch's, those of its own, and what is refused."""

import copy
import inspect
import linecache
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.covering import by_pairs
from support.datasets import MapData, StreamData
from support.fuzz import QUICK
from support.gates import named
from support.loaders import DataLoader, epoch_of, torch_loader
from torch.utils.data import Dataset, SequentialSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from spdl_torch.errors import UnsupportedOptionError
from spdl_torch.loader import user_warnings

TorchLoader = torch.utils.data.DataLoader
SAMPLES = range(12)
data8 = MapData(8)
READ_ONLY = "batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"
READ_BY_FRAMEWORKS = [
    *("dataset", "batch_size", "num_workers", "drop_last", "collate_fn", "pin_memory"),
    *("pin_memory_device", "timeout", "worker_init_fn", "generator", "prefetch_factor"),
    *("persistent_workers", "in_order", "multiprocessing_context", "_dataset_kind"),
    *("_auto_collation", "_IterableDataset_len_called", "_iterator", "_DataLoader__initialized"),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4, "shuffle": True, "drop_last": True, "generator": torch.Generator()},
        {"batch_size": None, "sampler": SequentialSampler(data8)},
        {"batch_sampler": [[0, 1], [2]], "num_workers": 2},
        {"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True, "timeout": 9},
        {"num_workers": 1, "worker_init_fn": print, "in_order": False, "collate_fn": list},
    ],
    ids=named,
)
def test_attributes_equal_torchs_after_construction(options):
    """Frameworks read these to rebuild a loader; every one has torch's value."""
    ours, torchs = DataLoader(data8, **options), torch_loader(data8, **options)
    for name in READ_BY_FRAMEWORKS:
        assert getattr(ours, name) == getattr(torchs, name), name
    assert type(ours.sampler) is type(torchs.sampler)
    assert type(ours.batch_sampler) is type(torchs.batch_sampler)
    assert ours._index_sampler is (ours.batch_sampler or ours.sampler)


def test_signature_is_torchs_with_keyword_only_extras():
    """Positional calls written for torch mean the same; the extras need their names, under which
    they are kept: Lightning rebuilds a loader from its attributes."""
    theirs = inspect.signature(TorchLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    assert [name for name in ours if name in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    extras = {name: ours[name] for name in ours if name not in theirs}
    assert {extra.kind for extra in extras.values()} == {inspect.Parameter.KEYWORD_ONLY}
    given = {"device": "cpu", "isolation": "process", "seed": 5, "rng": "worker", "stats": False}
    given |= {"on_error": "raise", "error_budget": None, "replace": False}
    assert extras.keys() == given.keys()
    loader = DataLoader(data8, num_workers=1, **given)
    assert {name: getattr(loader, name) for name in given} == given


class Subscripted(DataLoader[int]):
    """A user's typed loader."""


@pytest.mark.parametrize("duplicate", [copy.copy, lambda it: pickle.loads(pickle.dumps(it))])
def test_loader_can_be_subscripted_copied_and_pickled(duplicate):
    """isinstance checks and annotations of user code hold; a copy is a loader of the same class
    with the same options and batches, and workers of its own, while the other one's go on; its
    iterator, of torch's base class, cannot be pickled."""
    options = {"num_workers": 2, "persistent_workers": True, "isolation": "thread"}
    loader = Subscripted(SAMPLES, batch_size=5, stats=False, **options)
    next(begun := iter(loader))
    other = duplicate(loader)
    assert type(other) is Subscripted
    assert isinstance(other, TorchLoader)
    assert other.stats is False
    batches = iter(other)
    assert isinstance(batches, torch.utils.data.dataloader._BaseDataLoaderIter)
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(batches)
    expected = epoch_of(TorchLoader(SAMPLES, batch_size=5))
    assert epoch_of(other) == expected
    assert epoch_of(begun) == expected[1:]


def test_attribute_cannot_be_set_when_torch_forbids_it():
    """Same six attributes, same message."""
    loader = DataLoader(data8, num_workers=1)
    for name in READ_ONLY:
        with pytest.raises(ValueError, match=f"^{name} attribute should not be set after Data"):
            setattr(loader, name, getattr(loader, name))


def test_attributes_set_after_construction_are_read_at_iter():
    """Lightning sets worker_init_fn and collate_fn on a finished loader; timm lowers the
    initialized flag to swap in an endless batch sampler."""
    started = []
    loader = DataLoader([1, 2, 3], num_workers=1, isolation="thread")
    loader.collate_fn, loader.worker_init_fn, loader.num_workers = list, started.append, 2
    assert list(loader) == [[1], [2], [3]]
    assert sorted(started) == [0, 1]
    loader._DataLoader__initialized = False
    loader.batch_sampler = [[2], [1, 0]]
    loader._DataLoader__initialized = True
    assert list(loader) == [[3], [2, 1]]


@by_pairs(kind=[range, StreamData], isolation=["thread", "process"], has_loaded=[False, True])
def test_number_of_workers_that_is_set_later_loads_as_torchs_does(kind, isolation, has_loaded):
    """Every sample."""
    for before, after in ((1, 0), (1, 2), (2, 0)):
        found = []
        for loader_class, own in ((TorchLoader, {}), (DataLoader, {"isolation": isolation})):
            loader = loader_class(kind(7), 2, num_workers=before, **own)
            assert not has_loaded or epoch_of(loader)
            loader.num_workers = after
            found.append([*epoch_of(loader), len(loader)])
        assert found[0] == found[1], (before, after)


@pytest.mark.parametrize(
    ("options", "later", "message"),
    [
        ({"timeout": 3}, None, "timeout must be 0"),
        ({"num_workers": 1, "prefetch_factor": 0}, None, "prefetch_factor must be"),
        ({"num_workers": 1}, -1, "num_workers must be >= 0, got -1"),
        ({}, 1, "prefetch_factor must be >= 1 for num_workers=1, got None. Set"),
    ],
)
def test_options_that_cannot_work_are_refused_when_the_epoch_begins(options, later, message):
    """Those that torch accepts at construction, and numbers of workers that are set later; an error
    of torch's type."""
    loader = DataLoader(data8, **options)
    if later is not None:
        loader.num_workers = later
    with pytest.raises(AssertionError, match=message):
        iter(loader)


def test_length_follows_the_sampler_when_it_grows():
    """len() is asked of the sampler each time."""
    grown = [1, 2, 3]
    loader = DataLoader(grown, batch_size=2, num_workers=1)
    assert len(loader) == 2
    grown += [4, 5]
    assert len(loader) == len(iter(loader)) == 3


def test_iterable_longer_than_its_length_warns():
    """Two unsplit workers give twice what len(loader) said."""
    loader = DataLoader(StreamData(2), batch_size=None, num_workers=2, isolation="thread")
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="Length of IterableDataset") as caught:
        assert len(list(loader)) == 4
    assert sum("Length of" in str(warning.message) for warning in caught) == 2


@settings(QUICK, max_examples=300)
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


SKIP = {"on_error": "skip"}
NO_BUDGET = "error_budget must be a count"


WRONG_TYPES = [
    ({"num_workers": "many"}, r'num_workers must be an integer >= 0 or "auto", got \'many\''),
    ({"num_workers": 2.0}, r"num_workers must be an integer .* got 2\.0"),
]
MEANINGLESS = [
    ({"isolation": "fibre"}, "isolation.*fibre"),
    ({"isolation": "process"}, r"isolation=.*num_workers=0.*num_workers=1"),
    ({"rng": None}, "rng.*None"),
    ({"rng": "batch"}, "rng.*batch"),
    ({"seed": "7"}, "seed.*7"),
    ({"seed": True}, "seed.*True"),
    ({"seed": 3, "rng": "worker"}, "seed=3 has no effect"),
    ({"device": "gpu"}, "device must be None, the CPU or a CUDA"),
    ({"dataset": IterableWrapper([1, 2])}, "DataPipe"),
    ({"on_error": "ignore"}, "on_error must be"),
    ({"error_budget": 3}, r'error_budget=3 has no effect with on_error="raise"'),
    ({"replace": True}, "replace=True has no effect"),
    *(({**SKIP, "error_budget": budget}, NO_BUDGET) for budget in (-1, 1.5, True, "1%")),
    ({**SKIP, "dataset": Dataset(), "sampler": [1], "replace": True}, "needs a dataset with a len"),
]


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        *((TypeError, options, f"^DataLoader: {message}") for options, message in WRONG_TYPES),
        *((UnsupportedOptionError, *each) for each in MEANINGLESS),
    ],
)
def test_argument_that_cannot_be_meant_is_refused_when_the_loader_is_made(error, options, message):
    """A wrong type is a TypeError, as torch's, that says what was expected and what was given. A
    value that means nothing is not taken for the default; the words are ours, and say what to
    do."""
    with pytest.raises(error, match=message):
        DataLoader(**{"dataset": SAMPLES, **options})


@pytest.mark.parametrize("workers", [0, 1])
def test_replace_is_refused_when_the_sampler_gives_no_numbers(workers):
    """Said when a replacement is needed, and named."""
    loader = DataLoader([1], sampler=["a"], num_workers=workers, replace=True, **SKIP)
    with pytest.raises(UnsupportedOptionError, match=r"integers.*'a'"):
        list(loader)


def test_warning_of_too_many_workers_comes_once_and_names_the_users_line(monkeypatch):
    """However often the loader is made and iterated, also by a trainer from its attributes."""
    monkeypatch.setattr(user_warnings, "_warned", set())
    trainer = {"__name__": "lightning.pytorch.trainer"}
    exec("def rebuilt(kind, **options): return kind(range(8), **options)", trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer["rebuilt"](DataLoader, num_workers=99)
        for _ in range(2):
            next(iter(DataLoader(range(8), num_workers=99)))
    (warning,) = caught
    assert "will create 99 workers in total" in str(warning.message)
    assert warning.filename == __file__
    line = linecache.getline(__file__, warning.lineno).strip()
    assert line == 'trainer["rebuilt"](DataLoader, num_workers=99)'


def test_loader_shows_its_dataset_and_its_settings():
    """In a debugger also before it is made."""
    shown = repr(DataLoader(SAMPLES, batch_size=4, num_workers=2))
    assert shown == "DataLoader(range, batch_size=4, num_workers=2, isolation='auto')"
    assert repr(DataLoader.__new__(DataLoader)).startswith("DataLoader(NoneType")
