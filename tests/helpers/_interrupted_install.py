"""A program whose first loader is interrupted while it begins and patches the random functions.

Prints as JSON the places of a signal at which something else came than what its handler raises, or
a later loader or the program's own generators were not as without it. Each place is tried in a
process of its own.
"""

import json
import random
import signal

import numpy as np
import torch
from _at_call import AtCall
from _forks import found_in_fork

from spdl_torch import DataLoader

STEP = 211
"""Between two places that are tried: a prime, so that loops are not met at one place alone."""


class Deadline(Exception):
    """What a handler of the program raises."""


def at_deadline(*_):
    """Handle SIGALRM."""
    raise Deadline


RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGALRM: Deadline}


class Draws:
    """Samples of numbers from the three global generators."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(()).item(), random.random(), np.random.rand(), np.random.ranf()


def seen():
    """What loaders and the program draw."""
    batches = []
    for options in ({}, {"num_workers": 2, "isolation": "thread"}):
        loader = DataLoader(Draws(), 4, seed=3, **options)
        batches += [torch.stack(batch).tolist() for batch in loader]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    return batches, torch.rand(1).item(), random.random(), np.random.rand()


def place_of(number, signal_number=signal.SIGINT):
    """The place at which the first loader was interrupted, or None if it was over before, and what
    was drawn afterwards; an error, and None."""

    def interrupted():
        with AtCall(number, signal_number) as at_call:
            try:
                # Held: what a handler raises in a finalizer is only printed.
                iterator = iter(DataLoader(Draws(), 4, num_workers=1, isolation="thread"))
                next(iterator)
            except RAISED[signal_number]:
                pass
        return at_call.where, seen()

    found = found_in_fork(interrupted)
    return found if isinstance(found, tuple) else (found, None)


def main():
    signal.signal(signal.SIGALRM, at_deadline)
    _, expected = place_of(10**9)
    tried, bad = {}, []
    for signal_number in RAISED:
        number = 1
        while (found := place_of(number, signal_number))[0] is not None:
            if found[1] != expected:
                bad.append((signal_number, number, found[0]))
            number += STEP
        tried[signal_number] = number // STEP
    print(json.dumps({"tried": min(tried.values()), "bad": bad}))


if __name__ == "__main__":
    main()
