"""The figures of an epoch are what the workers' datasets have counted in it, each once."""

import copy
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from spdl_torch.data.workers.counts import DatasetCounts


class Counting:
    """Counts in itself, and in what its copies may share."""

    def __init__(self, shared=None):
        self.made = 0
        self.dataset = shared

    def loading_counts(self):
        """Return the count so far."""
        return {"made": self.made}


STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "begin", "count", "share"]), st.integers(0, 5)),
    max_size=40,
)


@given(STEPS)
def test_figures_are_what_each_copy_counted_since_the_epoch_began(steps):
    """Whoever joins or leaves meanwhile: copies count what they made, what they share counts once,
    and a worker that has left counts until the epoch is over."""
    shared = Counting()
    own = Counting(shared)
    own.made, shared.made = 7, 3  # before this loader
    counts, expected, workers = DatasetCounts(own), Counter(), []
    for step, number in steps:
        worker = workers[number % len(workers)] if workers else None
        if step == "join":
            workers.append(copy.copy(own))
            counts.join(workers[-1])
        elif step == "begin":
            counts.begin()
            expected.clear()
        elif step == "share":
            shared.made += number
            expected["made"] += number
        elif worker is not None and step == "count":
            worker.made += number
            expected["made"] += number
        elif worker is not None:
            workers.remove(worker)
            counts.leave(worker)
        assert counts.now()["made"] == expected["made"]
