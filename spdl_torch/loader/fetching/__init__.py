"""From an index to a batch: the calls of the dataset and of ``collate_fn``."""
