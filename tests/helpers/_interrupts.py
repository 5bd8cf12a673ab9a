"""A program that is interrupted at random moments while it loads, and looks for what is left.

``python tests/helpers/_interrupts.py COUNT SEED [ISOLATION]``: prints JSON. An interrupt is
a timer's signal whose handler is that of Ctrl-C, so that nothing has to sleep until its moment.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from time import monotonic

from _datasets import BulkIndices, IndexStream, Indices

from spdl_torch import DataLoader
from spdl_torch.pipeline import PipelineStopped

PATIENCE_SECONDS = 30
"""For what is to end."""

LONGEST_SECONDS = 60
"""Of one round; longer is a hang, whose stacks are written to stderr."""


LENGTH = 40


KINDS = {
    "thread": [Indices, BulkIndices, IndexStream],
    "process": [Indices, BulkIndices, IndexStream],
}


def set_up(number):
    """A worker_init_fn that takes its time."""
    sum(range(2_000 * (1 + number % 3)))


class Rounds:
    """Loaders under Ctrl-C, one after the other."""

    def __init__(self, seed, isolation):
        self.random = random.Random(seed)
        self.isolation = isolation
        self.num_interrupted = self.num_finished = self.num_cut_short = 0
        self.longest = 0.02 if isolation == "thread" else 0.3
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        # What a finalizer was doing when Ctrl-C came is printed and ends: no reason to stop.
        sys.unraisablehook = lambda _: None

    def loader(self):
        """One of many kinds."""
        pick = self.random.choice
        options = {"num_workers": pick([1, 2, 4]), "isolation": self.isolation}
        if self.random.random() < 0.3:
            options["worker_init_fn"] = set_up
        if self.random.random() < 0.3:
            options["persistent_workers"] = True
        if self.random.random() < 0.3:
            options["stats"] = False
        return DataLoader(pick(KINDS[self.isolation])(LENGTH), 4, **options)

    def run(self):
        """One round."""
        faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True)
        loader, epochs, goes_on = self.loader(), [], self.random.random() < 0.5
        iterator = None
        delay = self.random.uniform(1e-6, self.longest)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            for _ in range(2):
                epochs.append([])
                iterator = iter(loader)
                for batch in iterator:
                    epochs[-1] += batch.tolist()
                iterator = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.num_finished += 1
        except KeyboardInterrupt:
            self.num_interrupted += 1
        if goes_on:
            self.go_on(loader, iterator)
        del loader, iterator

    def go_on(self, loader, iterator):
        """Whoever goes on after Ctrl-C: what is left of the epoch comes, then a whole one."""
        state = loader.state_dict()
        rest = []
        try:
            for batch in () if iterator is None else iterator:
                rest += batch.tolist()
        except PipelineStopped as error:
            if "Ctrl-C" not in str(error):
                raise
            self.num_cut_short += 1
            loader.load_state_dict(loader.state_dict())
            rest += [n for batch in loader for n in batch.tolist()]
        assert len(set(rest)) == len(rest), "no sample twice"
        options = {"num_workers": loader.num_workers, "isolation": self.isolation}
        again = DataLoader(loader.dataset, 4, **options)
        again.load_state_dict(state)
        resumed = [n for batch in again for n in batch.tolist()]
        assert set(resumed) <= set(range(LENGTH)), resumed
        assert iterator is None or sorted(rest) == sorted(resumed), (rest, resumed)
        assert sorted(n for batch in loader for n in batch.tolist()) == list(range(LENGTH))


def threads():
    """Those of loaders that run. One that Ctrl-C has met in its ``start`` is in Python's list for
    ever: it has never run, or has ended without Python noticing."""
    return [
        each
        for each in threading.enumerate()
        if each.name.startswith("spdl-") and each.ident is not None and each.is_alive()
    ]


def left_over():
    """Threads and children of loaders that are still there when all had the time to end.

    A thread that Ctrl-C has met in its ``start`` may begin, and end, later than it is looked for.
    """
    gc.collect()
    end = monotonic() + PATIENCE_SECONDS
    while True:
        children = [child for child in multiprocessing.active_children() if "spdl" in child.name]
        left = [each.name for each in (*threads(), *children)]
        if not left or monotonic() > end:
            return left
        threading.Event().wait(0.005)


def num_descriptors():
    """Open ones, where the system tells."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def descriptors_left(before, isolation):
    """How many more are open than before, when all had the time to be closed: a thread that Ctrl-C
    has met in its ``start`` is not seen by :func:`threads`, and may open and close one yet; those
    of processes that have ended are closed by the next loader."""
    end = monotonic() + PATIENCE_SECONDS
    while (left := num_descriptors() - before) > 0 and monotonic() < end:
        list(DataLoader(Indices(), num_workers=1, isolation=isolation))
    return left


def main(count, seed, isolation="thread"):
    warnings.simplefilter("ignore")
    rounds = Rounds(seed, isolation)
    list(DataLoader(Indices(), num_workers=1, isolation=isolation))  # a fork server's descriptors
    before, found, lost = num_descriptors(), [], 0
    while rounds.num_interrupted < count:
        rounds.run()
        # Half of the rounds begin while the threads of the one before may still be ending.
        if rounds.random.random() < 0.5:
            found += left_over()
        # Often enough in the middle: as many delays are too long as too short.
        lost = rounds.num_finished - rounds.num_interrupted
        rounds.longest *= 0.98 if lost > 0 else 1.02
    found += left_over()
    faulthandler.cancel_dump_traceback_later()
    report = {"interrupted": rounds.num_interrupted, "finished": rounds.num_finished}
    report["cut short"] = rounds.num_cut_short
    print(json.dumps({**report, "left": found, "descriptors": descriptors_left(before, isolation)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
