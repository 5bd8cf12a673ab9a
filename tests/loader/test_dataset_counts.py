"""The figures of an epoch are what the workers' datasets have counted in it, each once."""

import copy
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from spdl_torch.data.workers.counts import DatasetCounts


class Counting:
    """Counts in itself, in a list that its copies share, and in a dataset that they share, too."""

    def __init__(self, shared=None):
        self.made, self.read = 0, [0]
        self.datasets = [shared, shared]  # mixed twice, and counted once

    def loading_counts(self):
        """Return the counts so far."""
        return {"made": self.made, "read": self.read[0]}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "begin", "make", "read", "share"]), st.integers(0, 5)
    ),
    max_size=40,
)


@given(STEPS)
def test_figures_are_what_each_copy_counted_since_the_epoch_began(steps):
    """Whoever joins or leaves meanwhile: copies count what they made, what they share counts once,
    and a worker that has left counts until the epoch is over."""
    shared = Counting()
    own = Counting(shared)
    own.made, shared.made, own.read[0] = 7, 3, 5  # before this loader
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
        elif worker is not None and step == "make":
            worker.made += number
            expected["made"] += number
        elif worker is not None and step == "read":
            worker.read[0] += number
            expected["read"] += number
        elif worker is not None:
            workers.remove(worker)
            counts.leave(worker)
        assert counts.now() == {"made": expected["made"], "read": expected["read"]}
