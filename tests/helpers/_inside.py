"""What tests look into to wait for a moment, and where it is kept: here alone."""


def run_of(pipeline):
    """The threads and queues of a pipeline."""
    return pipeline._run


def lock_of(part):
    """The lock of a channel, of a run or of its limit of tasks, for a test that holds it."""
    return part._lock


def kept_by(dataset):
    """Where a cached dataset keeps its samples."""
    return dataset._store
