"""A program whose first loader is interrupted while it begins and patches the random functions.

Prints as JSON how many places of a signal were tried, and those at which something else came than
what its handler raises, or a later loader or the program's own generators were not as without it.
Each place is tried in a process of its own.
"""

import itertools
import json
import random
import signal

import numpy as np
import torch

from spdl_torch import DataLoader
from support.at_call import AtCall
from support.datasets import Drawing
from support.forks import found_in_fork

STEP = 1409
"""Between two places that are tried: a prime, so that loops are not met at one place alone."""


class TooLate(Exception):
    """No OSError: Python's imports take any of those for a file that is not there."""


def at_deadline(*_):
    """A handler of the program."""
    raise TooLate


def drawn():
    """Numbers from the three global generators."""
    numbers = torch.rand(()).item(), random.random(), np.random.rand(), np.random.ranf()
    return torch.tensor(numbers, dtype=torch.float64)


def loader(**options):
    return DataLoader(Drawing(drawn, 8), 4, isolation="thread", **options)


def seen_after(place, signal_number, error):
    """The place of the signal, or None if the first loader had begun before, and what loaders and
    the program draw then."""
    with AtCall(place, signal_number) as at_call:
        try:
            # Held: what a handler raises in a finalizer is only printed.
            iterator = iter(loader(num_workers=1))
            next(iterator)
        except error:
            pass
    batches = [batch for number in (0, 2) for batch in loader(num_workers=number, seed=3)]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    return at_call.where, torch.cat([*batches, drawn()[None]]).tolist()


def main():
    signal.signal(signal.SIGALRM, at_deadline)
    numbers, bad = [], []
    for raised in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, TooLate)):
        _, expected = found_in_fork(lambda raised=raised: seen_after(10**9, *raised))
        for place in itertools.count(1, STEP):
            found = found_in_fork(lambda: seen_after(place, *raised))  # noqa: B023
            where, seen = (found, None) if isinstance(found, str) else found  # an error's text
            if where is None:
                break
            if seen != expected:
                bad.append((place, where))
        numbers.append(place // STEP)
    print(json.dumps({"tried": min(numbers), "bad": bad}))


if __name__ == "__main__":
    main()
