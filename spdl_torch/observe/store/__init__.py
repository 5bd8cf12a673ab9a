"""The statistics file: what is logged, how it is written, read, and summed up."""
