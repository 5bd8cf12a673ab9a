"""A program whose first loader is interrupted while it patches the random functions.

Prints as JSON the places of Ctrl-C at which a later loader, or the program's own generators, were
not as without it. Each place is tried in a process of its own.
"""

import json
import random
from contextlib import suppress

import numpy as np
import torch
from _at_call import AtCall
from _forks import found_in_fork

from spdl_torch import DataLoader
from spdl_torch.loader.rng.patches import install

STEP = 211
"""Between two places that are tried: a prime, so that loops are not met at one place alone."""


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


def place_of(number):
    """The place at which the install was interrupted, or None if it was over before, and what was
    drawn afterwards; an error, and None."""

    def interrupted():
        with suppress(KeyboardInterrupt), AtCall(number) as ctrl_c:
            install()
        return ctrl_c.where, seen()

    found = found_in_fork(interrupted)
    return found if isinstance(found, tuple) else (found, None)


def main():
    _, expected = place_of(10**9)
    number, bad = 1, []
    while (found := place_of(number))[0] is not None:
        if found[1] != expected:
            bad.append((number, found[0]))
        number += STEP
    print(json.dumps({"tried": number // STEP, "bad": bad}))


if __name__ == "__main__":
    main()
