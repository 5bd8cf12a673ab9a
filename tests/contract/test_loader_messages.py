"""The loader's messages on wrong arguments, too many workers and a batch that fails."""

from __future__ import annotations

import linecache
import math
import re
import warnings

import pytest
from _isolation_data import RaggedStream
from torch.utils.data import RandomSampler

from spdl_torch import DataLoader
from spdl_torch.errors import UnsupportedOptionError
from spdl_torch.loader import user_warnings
from spdl_torch.loader.stats import remarks

SAMPLES = range(12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": "many"}, r'num_workers must be an integer >= 0 or "auto", got \'many\''),
        ({"num_workers": None}, "num_workers must be an integer .* got None"),
        ({"num_workers": 2.0}, r"num_workers must be an integer .* got 2\.0"),
        ({"timeout": None}, "timeout must be a number of seconds >= 0, got None. 0 waits for ever"),
        ({"num_workers": 1, "prefetch_factor": "2"}, "prefetch_factor must be an integer >= 1"),
        ({"sampler": 5}, "sampler must be iterable, got 5"),
        ({"batch_sampler": 5}, "batch_sampler must be iterable, got 5"),
        ({"sampler": RandomSampler}, "sampler must be iterable, got <class"),
        ({"collate_fn": 5}, "collate_fn must be a function or None, got 5"),
        ({"generator": 3}, r"generator must be a torch\.Generator or None, got 3\. .* as seed=\."),
        ({"stats": "no"}, "stats must be True or False, got 'no'"),
        ({"worker_init_fn": "seed"}, "worker_init_fn must be a function or None, got 'seed'"),
        ({"dataset": None}, "dataset must have __getitem__ .* got NoneType"),
        (
            {"dataset": iter(SAMPLES)},
            "dataset must .* got range_iterator. Put an iterator into an Iter",
        ),
    ],
)
def test_argument_of_a_wrong_type_is_refused_when_the_loader_is_made(options, message):
    """A TypeError, as torch's, that says what was expected and what was given."""
    with pytest.raises(TypeError, match=rf"^DataLoader: {message}"):
        DataLoader(**{"dataset": SAMPLES, **options})


@pytest.mark.parametrize("device", ["gpu", 1.5])
def test_device_that_is_none_is_refused_in_our_words(device):
    """torch's own answer lists twenty kinds of devices."""
    with pytest.raises(UnsupportedOptionError, match="device must be None, the CPU or a CUDA"):
        DataLoader(SAMPLES, device=device)


def test_torchdatas_argument_is_taken_at_its_default_and_refused_otherwise():
    """Who changes only the import learns what to do."""
    assert len(DataLoader(SAMPLES, snapshot_every_n_steps=1)) == 12
    with pytest.raises(UnsupportedOptionError, match=r"snapshot_every_n_steps=10 .* Leave it out"):
        DataLoader(SAMPLES, snapshot_every_n_steps=10)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_state_of_torchdatas_loader_is_refused_by_name(num_workers):
    """Its layout is another; the error says whose it is and what to do."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    theirs = stateful.StatefulDataLoader(SAMPLES, batch_size=4, num_workers=num_workers)
    next(iter(theirs))
    with pytest.raises(ValueError, match=r"a state of torchdata's StatefulDataLoader. Finish"):
        DataLoader(SAMPLES, batch_size=4).load_state_dict(theirs.state_dict())


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


def test_error_of_collating_names_the_items_of_an_iterable():
    """They have no indices."""
    batches = iter(DataLoader(RaggedStream(), batch_size=4, num_workers=1))
    assert len(next(batches)) == len(next(batches)) == 4
    with pytest.raises(RuntimeError, match="equal size") as caught:
        next(batches)
    assert "batch 2, items 8 to 11 of the iterator of RaggedStream" in caught.value.__notes__[0]


def test_error_of_collating_without_batches_names_the_sample():
    """There collate_fn converts one sample."""

    def convert(sample):
        if sample == 3:
            raise ValueError("not this one")
        return sample

    loader = DataLoader(SAMPLES, batch_size=None, collate_fn=convert)
    with pytest.raises(ValueError, match="not this one") as caught:
        list(loader)
    assert caught.value.__notes__ == ["in collate_fn, batch 3, sample index 3, given 3"]


@pytest.mark.parametrize(
    ("options", "is_recommended"),
    [
        ({"isolation": "process"}, True),
        ({"isolation": "process", "persistent_workers": True}, False),
        ({"isolation": "thread"}, False),
    ],
)
def test_report_recommends_to_keep_processes_that_epochs_start_anew(
    options, is_recommended, monkeypatch
):
    """From the second epoch on, and only where there is something to keep."""
    monkeypatch.setattr(remarks, "_VISIBLE_START", -math.inf)  # however long it takes
    loader = DataLoader(SAMPLES, batch_size=4, num_workers=1, **options)
    for expected in (False, is_recommended):
        assert len(list(loader)) == 3
        said = " ".join(loader.report().verdict.remarks)
        assert ("persistent_workers=True keeps them" in said) is expected
    numbers = re.search(r"anew: ([0-9.e-]+) s of the ([0-9.e-]+) s of the last one", said)
    assert (numbers is not None) is is_recommended
    assert numbers is None or float(numbers[1]) <= float(numbers[2])


def test_loader_shows_its_dataset_and_its_settings():
    """In a debugger also before it is made."""
    shown = repr(DataLoader(SAMPLES, batch_size=4, num_workers=2))
    assert shown == "DataLoader(range, batch_size=4, num_workers=2, isolation='auto')"
    assert repr(DataLoader.__new__(DataLoader)).startswith("DataLoader(NoneType")
