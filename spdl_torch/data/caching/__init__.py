"""Samples that are made once per machine and read by all its processes."""
