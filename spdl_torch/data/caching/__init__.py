"""Samples that are made once on a machine, and read by all its processes."""
