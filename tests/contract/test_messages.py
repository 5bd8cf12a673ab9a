"""What errors in collating name: what was collated, and the odd sample. And a remark of reports."""

import math
import re

import numpy as np
import pytest
import torch
from _datasets import Rows
from _seats import in_every_seat
from torch.utils.data import IterableDataset

from spdl_torch import DataLoader
from spdl_torch.loader.fetching.collating import odd_sample
from spdl_torch.loader.stats import figures


class RaggedRows(Rows):
    """One row is longer."""

    def __getitem__(self, index):
        return {"x": torch.zeros(3 + (index == 6)), "y": index}


class RaggedStream(RaggedRows, IterableDataset):
    """The same one after another."""

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (RaggedRows, "batch 1, indices [4, 5, 6, 7]"),
        (RaggedStream, "batch 1, items 4 to 7 of the iterator of RaggedStream"),
    ],
)
@in_every_seat
def test_error_of_collating_names_the_odd_sample(seat, kind, where):
    """Not the first one of its batch: torch's own text, with a note that finds the row."""
    batches = iter(seat.loader(kind(8), 4, num_workers=min(1, seat.num_workers)))
    next(batches)
    with pytest.raises(RuntimeError, match="stack expects each tensor") as caught:
        next(batches)
    note = next(each for each in caught.value.__notes__ if "in collate_fn" in each)
    assert f"{where}, given list of 4: dict" in note
    said = "sample 2 of it is unlike most: sample['x'] is Tensor of shape (4,) and type"
    assert said in note
    assert "elsewhere Tensor of shape (3,)" in note


class Rude:
    """Its attributes raise."""

    def __getattr__(self, name):
        raise RuntimeError(name)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([1, 2, "3", 4], "sample 2 of it is unlike most: sample is str, elsewhere int"),
        ([{"a": 1}, {"a": 1}, {"b": 1}], "sample['a'] is nothing, elsewhere int"),
        ([(1, 2), (1, 2), (1,)], "sample is tuple of 1, elsewhere tuple of 2"),
        ([1, 1, None], "sample is NoneType, elsewhere int"),
        ([1, 2, 3], ""),
        ([1, "2", None, 2.0], ""),
        ([1, "2"], ""),
        ([Rude(), 1, 1], ""),
        (7, ""),
    ],
)
def test_odd_sample_is_named_where_most_are_alike(samples, said):
    """And none where there is no most of them, or where asking fails."""
    found = odd_sample(samples)
    assert (found == "") if not said else (said in found), found


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (None, "sample['b'] of sample 1 of it is NoneType, which"),
        ([1, {"c": complex}], "sample['b'][1]['c'] of sample 1 of it is type, which"),
        (np.zeros(2, "M8[ns]"), "sample['b'] of sample 1 of it is ndarray of shape (2,) and"),
        (np.array(["a"]), "sample['b'] of sample 1 of it is ndarray of shape (1,) and"),
    ],
)
def test_error_of_collating_names_the_part_that_torch_does_not_take(part, said):
    """Where no sample is the odd one; what torch takes is never named."""
    fine = {"n": 1.0, "s": "x", "t": torch.zeros(2), "a": np.zeros(2), "i": np.int64(1), "b": [1]}
    with pytest.raises((TypeError, RuntimeError)) as caught:
        list(DataLoader([fine, {**fine, "b": part}] * 2, batch_size=4))
    assert said in next(each for each in caught.value.__notes__ if "in collate_fn" in each)


def test_error_of_collating_without_batches_names_the_sample():
    """There collate_fn converts one sample."""
    loader = DataLoader(["0", "1", "two"], batch_size=None, collate_fn=int)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(loader)
    assert caught.value.__notes__ == ["in collate_fn, batch 2, sample index 2, given 'two'"]


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
    monkeypatch.setattr(figures, "_VISIBLE_START", -math.inf)  # however long it takes
    loader = DataLoader(range(12), batch_size=4, num_workers=1, **options)
    for expected in (False, is_recommended):
        assert len(list(loader)) == 3
        said = " ".join(loader.report().verdict.remarks)
        assert ("persistent_workers=True keeps them" in said) is expected
    numbers = re.search(r"anew: ([0-9.e-]+) s of the ([0-9.e-]+) s of the last one", said)
    assert (numbers is not None) is is_recommended
    assert numbers is None or float(numbers[1]) <= float(numbers[2])
