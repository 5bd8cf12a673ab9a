"""The threads that make a loader's batches."""
