"""What tests look into to wait for a moment, and where it is kept: here alone."""

from operator import attrgetter, methodcaller

from torch.utils.data import DataLoader

from spdl_torch.loader import placing

placement_of = placing.placement_of
"""Where a loader's workers would be now, and why."""
run_of = attrgetter("_run")
"""The threads and queues of a pipeline."""
lock_of = attrgetter("_lock")
"""The lock of a channel, for a test that holds it."""
kept_by = attrgetter("_store")
"""Where a cached dataset keeps its samples."""
state_of = attrgetter("_state")
"""What a loader remembers from epoch to epoch; where an iterator is in its epoch."""
is_asked = attrgetter("_is_asked")
"""Whether a next() is under way, in the middle of an iterator's epoch: it waits."""
give_out = methodcaller("_fill")
"""Give out the jobs that an iterator may give out now, as it does with each batch."""
doing_in = methodcaller("_at_work")
"""What an iterator's workers do now, as a loop that waits too long is told."""
is_tuned = attrgetter("_is_tuned")
"""Whether the number of a loader's workers is found by trying."""
tuning_of = methodcaller("_tuning_state")
"""What a loader's tuning has found out, from epoch to epoch."""


def check_balance(pipeline):
    """Assert, on a closed run, that every item is accounted for at every 1:1 stage."""
    for stage in run_of(pipeline).stages:
        if stage.spec.kind.value.endswith("function"):
            taken = stage.inlet.counters().num_got
            # Items that wait for their turn in an ordered outlet are not counted as put yet.
            delivered = stage.outlet.counters().num_got + len(stage.outlet)
            dropped, failed = stage.num_dropped, stage.budget.num_failures
            lost = taken - delivered - dropped - failed
            cut_short = stage.cut_short or stage.outlet.closed
            discarding = len(stage._workers) if cut_short else 0
            assert 0 <= lost <= discarding, f"{taken=} {delivered=} {dropped=} {failed=}"


def backend_of(source):
    """The workers of an iterator, or of a loader that keeps its iterator."""
    return (source._iterator if isinstance(source, DataLoader) else source)._backend


def num_ready(iterator):
    """How many batches wait for a loop."""
    return len(backend_of(iterator)._epoch.outlet)


def children_of(source):
    """The worker processes, by number."""
    return backend_of(source).hearing.children


def are_up(source):
    """Whether all of them are ready for jobs, by what the loop's thread reads now."""
    backend_of(source)._hear()
    return all(child.page.is_up for child in children_of(source).values())


def pids_of(source):
    """Their ids, in the order of their numbers."""
    return [child.pid for child in children_of(source).values()]


def resize(batches, number):
    """Have so many workers of an iterator from now on; nothing is tuned by itself."""
    tuner = batches._tuner
    tuner._due = float("inf")
    tuner.set_count("num_workers", number)


def forget_iterator(loader):
    """Have it keep none, as Lightning does when a loop has ended."""
    loader._iterator = None
