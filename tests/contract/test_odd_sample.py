"""An error in collating names the sample that is unlike the others."""

import pytest
import torch
from _datasets import Rows
from _seats import in_every_seat

from spdl_torch.loader.fetching.odd_sample import odd_sample

pytestmark = [
    pytest.mark.usefixtures("forks_by_default"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded:DeprecationWarning"),
]


class RaggedRows(Rows):
    """One row is longer."""

    def __getitem__(self, index):
        return {"x": torch.zeros(3 + (index == 6)), "y": index}


@in_every_seat
def test_error_of_collating_names_the_odd_sample(seat):
    """Not the first one of its batch: torch's own text, with a note that finds the row."""
    batches = iter(seat.loader(RaggedRows(8), 4))
    next(batches)
    with pytest.raises(RuntimeError, match="stack expects each tensor") as caught:
        next(batches)
    note = next(each for each in caught.value.__notes__ if "in collate_fn" in each)
    assert "batch 1, indices [4, 5, 6, 7], given list of 4: dict" in note
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
