"""Runs of an idiom: its epochs, with what is wrong of them and what reached the trainer."""

from collections import Counter
from contextlib import contextmanager

import _idioms_compositions  # noqa: F401  # registers its idioms
import _idioms_objects  # noqa: F401  # registers its idioms
import _idioms_process
from _idioms import IDIOMS

from spdl_torch.objects.generator_states import generators_kept
from spdl_torch.testing._process_state import ProcessState

NUM_WORKERS = 2


@contextmanager
def own_process():
    """Put back what the block did to this process; what that is stands in the given list."""
    leaks = []
    _idioms_process.reset()
    with generators_kept(), ProcessState.kept() as state:
        try:
            yield leaks
        finally:
            leaks += state.changed().values()
            _idioms_process.reset()


def load(loader_type, name, folder, **options):
    """Load an idiom, and return the batches of its epochs, and what is wrong."""
    folder.mkdir(parents=True)
    with own_process() as leaks:
        idiom = IDIOMS[name](folder)
        options = {"batch_size": 8, "num_workers": NUM_WORKERS, **options, **idiom.options}
        loader = loader_type(idiom.dataset, **options)
        epochs, faults = [], []
        for number, expected in enumerate(idiom.epochs):
            idiom.before_epoch(number)
            epochs.append([])
            for batch in loader:
                epochs[-1].append(idiom.samples(batch))
                idiom.use(batch)
            faults += differences(expected, [s for batch in epochs[-1] for s in batch])
        del loader
    return epochs, faults + [f"{leak} reached the trainer" for leak in leaks]


def differences(expected, got):
    """Say how many samples are not as they should be, and which."""
    missing, surplus = Counter(expected) - Counter(got), Counter(got) - Counter(expected)
    if not missing and not surplus:
        return []
    few = list(surplus)[:3] or list(missing)[:3]
    return [
        f"{missing.total()} of {len(expected)} samples missing, {surplus.total()} others: {few}"
    ]
