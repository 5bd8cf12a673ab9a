"""What tests look into to wait for a moment, and where it is kept: here alone."""

from torch.utils.data import DataLoader

from spdl_torch.loader import placing


def run_of(pipeline):
    """The threads and queues of a pipeline."""
    return pipeline._run


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


def lock_of(part):
    """The lock of a channel, for a test that holds it."""
    return part._lock


def kept_by(dataset):
    """Where a cached dataset keeps its samples."""
    return dataset._store


def state_of(source):
    """What a loader remembers from epoch to epoch; where an iterator is in its epoch."""
    return source._state


def backend_of(source):
    """The workers of an iterator, or of a loader that keeps its iterator."""
    return (source._iterator if isinstance(source, DataLoader) else source)._backend


def is_asked(iterator):
    """Whether a next() is under way, in the middle of an epoch: it waits."""
    return iterator._is_asked


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


def give_out(batches):
    """Give out the jobs that an iterator may give out now, as it does with each batch."""
    batches._fill()


def doing_in(batches):
    """What an iterator's workers do now, as a loop that waits too long is told."""
    return batches._at_work()


def forget_iterator(loader):
    """Have it keep none, as Lightning does when a loop has ended."""
    loader._iterator = None


def placement_of(loader):
    """Where a loader's workers would be now, and why."""
    return placing.placement_of(loader)


def is_tuned(loader):
    """Whether the number of its workers is found by trying."""
    return loader._is_tuned


def tuning_of(loader):
    """What tuning has found out, from epoch to epoch."""
    return loader._tuning_state()
